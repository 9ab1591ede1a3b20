"""Accuracy, confusion and calibration of a classifier, from its logits, which may be looked at in parts."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ssl_sec.evaluation.classification.calibration import Calibration, calibration_of, confidences
from ssl_sec.evaluation.feature_table import FeatureTable, rows_at_once

# Logits and labels of some of the images, one row and one label for each.
Part = tuple[Float[Tensor, "_ classes"], Int64[Tensor, " _"]]

# Number of classes up to which a confusion matrix is dense.
MOST_DENSE_CLASSES = 1000


def in_parts(logits_of: Callable[[Tensor], Tensor], rows: FeatureTable, num_classes: int) -> Iterator[Part]:
    """The logits of some images after the others, as those of many images for many classes need too much memory.

    Args:
        logits_of: function from features to their logits.
        rows: features and labels of the images.
        num_classes: number of logits of an image.
    """
    for features, labels in rows.parts(rows_at_once(max(num_classes, rows.dim))):
        logits = logits_of(features)
        yield logits, labels.to(logits.device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """The results of a classifier on images.

    Attributes:
        top1: accuracy in [0, 1].
        top5: the same for the five best classes; None with at most five classes.
        mean_per_class: the mean of the accuracies of the classes that have images.
        confusion: number of images by true class (row) and predicted class (column), on the CPU; a sparse tensor with
            more than 1,000 classes.
        calibration: confidence of the classifier, compared with how often it is right.
    """

    top1: float
    top5: float | None
    mean_per_class: float
    confusion: Int64[Tensor, "classes classes"]
    calibration: Calibration


def scores_of(parts: Iterable[Part]) -> Scores:
    """Measures logits.

    Args:
        parts: logits and labels, one image or more.
    """
    found: list[tuple[Tensor, ...]] = []
    num_classes = 0
    for logits, labels in parts:
        num_classes = logits.shape[1]
        hits = is_in_top_k(logits, labels, 1)
        among_five = is_in_top_k(logits, labels, 5) if num_classes > 5 else hits
        found.append((hits, among_five, labels, _predicted(logits, labels, hits), confidences(logits)))
    hits, among_five, labels, predicted, confidence = map(torch.cat, zip(*found, strict=True))
    return Scores(
        top1=top1(hits, labels),
        top5=among_five.double().mean().item() if num_classes > 5 else None,
        mean_per_class=mean_per_class(hits, labels),
        confusion=_counted(labels, predicted, num_classes),
        calibration=calibration_of(confidence, hits),
    )


def top_k_accuracy(logits: Float[Tensor, "images classes"], labels: Int64[Tensor, " images"], k: int) -> float:
    """Share of the images whose class is among the k with the highest logits, in [0, 1].

    A class that ties with the true one counts as higher, and a row with a logit that is not finite
    counts as wrong, so a collapsed encoder cannot score by the order of the classes.

    Args:
        logits: any scores, higher is likelier.
        labels: true classes.
        k: 1 to the number of classes; at that number every finite row is correct.
    """
    return is_in_top_k(logits, labels.to(logits.device), k).double().mean().item()


def hits_of(parts: Iterable[Part]) -> tuple[Bool[Tensor, " images"], Int64[Tensor, " images"]]:
    """Whether each image is classified correctly, as `top_k_accuracy` counts it, and its class."""
    hits, labels = zip(*((is_in_top_k(*part, 1), part[1]) for part in parts), strict=True)
    return torch.cat(hits), torch.cat(labels)


def top1(hits: Bool[Tensor, " images"], labels: Int64[Tensor, " images"]) -> float:
    """The share of the images that are classified correctly, in [0, 1]."""
    return hits.double().mean().item()


def mean_per_class(hits: Bool[Tensor, " images"], labels: Int64[Tensor, " images"]) -> float:
    """The mean of the classes' shares, in [0, 1]; classes without images do not count.

    The usual measure for sets whose classes differ in size, such as Oxford Pets, Caltech-101 and Flowers.
    """
    _, places, counts = labels.unique(return_inverse=True, return_counts=True)
    return (places.bincount(hits.double()) / counts).mean().item()


def is_in_top_k(
    logits: Float[Tensor, "images classes"], labels: Int64[Tensor, " images"], k: int
) -> Bool[Tensor, " images"]:
    """The images that `top_k_accuracy` counts."""
    assert 1 <= k <= logits.shape[1], f"k is {k} for {logits.shape[1]} classes"
    true = logits.gather(1, labels.unsqueeze(1))
    num_as_high = (logits >= true).sum(1) - 1
    return (num_as_high < k) & logits.isfinite().all(1)


def _predicted(logits: Tensor, labels: Tensor, hits: Tensor) -> Int64[Tensor, " images"]:
    """The predicted classes, with the hits of `top_k_accuracy`: that of a row that is not finite is a wrong one."""
    others = logits.nan_to_num().scatter(1, labels.unsqueeze(1), -torch.inf)
    return torch.where(hits, labels, others.argmax(1))


def _counted(labels: Tensor, predicted: Tensor, num_classes: int) -> Int64[Tensor, "classes classes"]:
    """The number of images by true and predicted class."""
    cells = labels * num_classes + predicted
    if num_classes <= MOST_DENSE_CLASSES:
        return cells.bincount(minlength=num_classes**2).view(num_classes, num_classes).cpu()
    cells, counts = cells.cpu().unique(return_counts=True)
    return _sparse(torch.stack([cells // num_classes, cells % num_classes]), counts, num_classes)


def _sparse(places: Tensor, counts: Tensor, num_classes: int) -> Int64[Tensor, "classes classes"]:
    return torch.sparse_coo_tensor(places, counts, (num_classes, num_classes), check_invariants=True).coalesce()


def confusion_values(confusion: Int64[Tensor, "classes classes"]) -> list[list[int]] | dict[str, list[int]]:
    """A confusion matrix in plain numbers for JSON: its rows, or, if it is sparse, the cells that are not 0."""
    if not confusion.is_sparse:
        return confusion.tolist()
    true, predicted = confusion.indices().tolist()
    return {"true": true, "predicted": predicted, "count": confusion.values().tolist()}


def confusion_from(
    values: list[list[int]] | dict[str, list[int]], num_classes: int
) -> Int64[Tensor, "classes classes"]:
    """The matrix of `confusion_values`."""
    if not isinstance(values, dict):
        return torch.tensor(values)
    places = torch.tensor([values["true"], values["predicted"]])
    return _sparse(places, torch.tensor(values["count"]), num_classes)
