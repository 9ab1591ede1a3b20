"""Few-shot classification of features: n labels of each class, drawn many times.

The classifier is SimpleShot's with L2 normalisation (Wang et al. 2019, "SimpleShot: Revisiting Nearest-Neighbor
Classification for Few-Shot Learning", CL2N without the centring): each feature is divided by its norm, each class is
represented by the mean of its n features, and an image belongs to the class of the nearest mean.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ssl_sec.collectives import sum_over_workers
from ssl_sec.errors import DataError, counted
from ssl_sec.evaluation.arrays import tiles, unit_rows
from ssl_sec.evaluation.feature_table import FeatureTable, rows_at_once
from ssl_sec.seeding import derived_seed

# 95 % of a normal distribution lie within this many standard deviations.
_NORMAL_95 = 1.959964


@dataclass(frozen=True, kw_only=True, slots=True)
class FewShot:
    """Accuracies over the draws of the labelled images.

    Attributes:
        labels_per_class: number n of labels of each class.
        top1: mean accuracy over the draws, in [0, 1].
        interval: half the width of the 95 % confidence interval of that mean, 1.96 s / √draws.
        draws: accuracy of each draw, in [0, 1].
    """

    labels_per_class: int
    top1: float
    interval: float
    draws: tuple[float, ...]


@torch.no_grad()
def few_shot(
    train: FeatureTable,
    test: FeatureTable,
    labels_per_class: int,
    seed: int,
    *,
    num_draws: int = 100,
    per_class: bool = False,
) -> FewShot:
    """Accuracy on all test images with few labelled training images, over many draws of the labelled ones.

    The workers divide the test images; all of them call this function. A tie between classes counts as wrong, and so
    does a test image that is not finite. Nor is an image assigned to a class in a draw that labels one of its images
    that are not finite.

    Args:
        train: features, of any norm, and labels of the images that labelled ones are drawn from, without replacement.
        test: features and labels of the test images.
        labels_per_class: n ≥ 1.
        seed: seed of the draws; a draw does not depend on their number.
        num_draws: number of draws, ≥ 1.
        per_class: whether the accuracy is averaged over the classes of the test images, not over the images.

    Raises:
        DataError: a class of the training images has fewer than n.
    """
    labels = train.labels.cpu()
    classes, numbers, counts = labels.unique(return_inverse=True, return_counts=True)
    if (least := int(counts.min())) < labels_per_class:
        scarce = int(classes[counts.argmin()])
        raise DataError(
            f"few-shot: class {scarce} has {counted(least, 'training image')}, must have {labels_per_class} or more"
        )
    chosen = torch.stack([_drawn(numbers, counts, labels_per_class, seed, draw) for draw in range(num_draws)])
    own, own_labels = test.share()
    queries, true = unit_rows(own.to(train.features)), own_labels.cpu()
    # Test images of classes without training images are wrong in every draw.
    places = torch.searchsorted(classes, true).clamp(max=len(classes) - 1)
    targets = places.masked_fill(classes[places] != true, -1).to(queries.device)
    weights = _weights(true, test.labels.cpu(), per_class).to(queries.device)
    accuracies: list[Tensor] = []
    # Similarities, and values of labelled features, as many as on the other workers.
    a_draw = len(classes) * (len(test) + labels_per_class * train.dim)
    for some in tiles(num_draws, rows_at_once(a_draw)):
        labelled = chosen[some]
        means = unit_rows(train.at(labelled.flatten())[0]).view(*labelled.shape, -1).mean(2)
        accuracies.append((_is_nearest(queries, targets, means).double() * weights).sum(1))
    each = sum_over_workers(torch.cat(accuracies)).cpu()
    spread = each.std().item() if num_draws > 1 else 0.0
    return FewShot(
        labels_per_class=labels_per_class,
        top1=each.mean().item(),
        interval=_NORMAL_95 * spread / math.sqrt(num_draws),
        draws=tuple(each.tolist()),
    )


def _drawn(
    numbers: Int64[Tensor, " train"], counts: Int64[Tensor, " classes"], labels_per_class: int, seed: int, draw: int
) -> Int64[Tensor, "classes labels"]:
    """The training images of each class that one draw labels."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "few-shot", draw))
    order = torch.randperm(len(numbers), generator=generator)
    by_class = order[numbers[order].argsort(stable=True)]
    firsts = counts.cumsum(0) - counts
    return by_class[firsts.unsqueeze(1) + torch.arange(labels_per_class)]


def _is_nearest(
    queries: Float[Tensor, "test dim"], targets: Int64[Tensor, " test"], means: Float[Tensor, "draws classes dim"]
) -> Tensor:
    """Whether, in each draw, the nearest mean to each query is only that of its own class."""
    # ‖q − m‖² = 1 + ‖m‖² − 2 q·m: the nearest has the highest q·m − ‖m‖² / 2.
    scores = torch.einsum("td,kcd->ktc", queries, means) - means.square().sum(2).unsqueeze(1) / 2
    own = scores.gather(2, targets.clamp(min=0).expand(len(means), -1).unsqueeze(2))
    # A tie counts as wrong, so that a collapsed encoder cannot score by the order of the classes.
    return ((scores >= own).sum(2) == 1) & (targets >= 0)


def _weights(labels: Int64[Tensor, " some"], of_all: Int64[Tensor, " test"], per_class: bool) -> Float[Tensor, " some"]:
    """The share of some of the test images in the accuracy."""
    if not per_class:
        return torch.full((len(labels),), 1 / len(of_all), dtype=torch.float64)
    classes, counts = of_all.unique(return_counts=True)
    return 1 / (counts[torch.searchsorted(classes, labels)] * len(counts)).double()
