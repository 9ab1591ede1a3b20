"""The interface of every loss, `loss(embeddings, labels) -> scalar`, in shares of the anchors, and common functions."""

from abc import ABC, abstractmethod
from inspect import signature
from typing import cast

import torch
from jaxtyping import Bool, Float, Int64, Integer
from torch import Tensor, nn

from ssl_sec.collectives import rank
from ssl_sec.losses.classes import Classes, classes_of, may_read_values
from ssl_sec.losses.geometry import in_full_precision
from ssl_sec.rules import Range, check

Embeddings = Float[Tensor, "batch dim"]
Labels = Int64[Tensor, " batch"]
Scalar = Float[Tensor, ""]


class Loss(nn.Module, ABC):
    """A loss on the raw embeddings of the global batch.

    It never communicates or waits for a device, and computes in float32 or better, also under autocast. A batch
    without pairs to compare is an error on the CPU, where the check is free; elsewhere, and when compiled, its
    loss is NaN. A loss that is summed in tiles has no second derivative and raises an error if one is asked for.
    """

    def forward(
        self, embeddings: Embeddings, labels: Integer[Tensor, " batch"], anchors: slice = slice(None)
    ) -> Scalar:
        """The loss, or the share of it that a range of anchors contributes.

        Args:
            embeddings: raw rows of the global batch; the loss normalises them itself.
            labels: the class of each row, or, in self-supervision, the image that it is a view of.
            anchors: the range of rows whose terms are summed, with step 1; the shares of a partition add up to the
                loss.

        Raises:
            TypeError: `embeddings` are not floating-point, `labels` are not one whole number for each row, or `anchors`
                is no such slice.
            ValueError: the batch has nothing to compare; the message names what is missing.
        """
        require_labels(type(self).__name__, embeddings, labels)
        require_range(type(self).__name__, anchors)
        labels = labels.long()
        with torch.autocast(embeddings.device.type, enabled=False):
            share = self._share(in_full_precision(embeddings), labels, anchors)
        return share if may_read_values(labels) else torch.where(self.compares(labels), share, torch.nan)

    def compares(self, labels: Labels) -> Bool[Tensor, ""]:
        """Whether a batch with these labels has something to compare; it does not wait for the device.

        By default: a row with a positive and a negative.
        """
        size = classes_of(labels).size
        return ((size > 1) & (size < len(labels))).any()

    def num_terms(self, classes: Classes) -> Int64[Tensor, " batch"]:
        """How many terms each row is the anchor of, if the loss is a mean over such terms; by default one."""
        return torch.ones_like(classes.size)

    def extra_repr(self) -> str:
        """The values that define the loss."""
        shown = {name: getattr(self, name, None) for name in signature(type(self)).parameters}
        plain = {name: value for name, value in shown.items() if isinstance(value, float | int | Tensor)}
        return ", ".join(f"{name}={'learned' if isinstance(value, Tensor) else value}" for name, value in plain.items())

    @abstractmethod
    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar: ...


class CombinedLoss(Loss):
    """first + weight · second, each with its own class templates or centres.

    Args:
        first: any loss.
        second: any other loss.
        weight: weight of the second loss, ≥ 0.
    """

    def __init__(self, first: Loss, second: Loss, weight: float) -> None:
        super().__init__()
        Range(ge=0).check("weight", weight)
        for key, loss in (("first", first), ("second", second)):
            check(isinstance(cast("object", loss), Loss), key, loss, "a Loss of ssl_sec")
        self.first = first
        self.second = second
        self.weight = weight

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        return self.first(embeddings, labels, anchors) + self.weight * self.second(embeddings, labels, anchors)

    def compares(self, labels: Labels) -> Bool[Tensor, ""]:
        """Whether both have something to compare."""
        return self.first.compares(labels) & self.second.compares(labels)


def from_views(*views: Float[Tensor, "images dim"]) -> tuple[Float[Tensor, "batch dim"], Int64[Tensor, " batch"]]:
    """The embeddings of several views of the same images as one batch: `loss(*from_views(z1, z2))`.

    Args:
        views: two or more, each with one row for each image, all in the same order.

    Returns:
        The rows of the views, one view after the other, and for each row the number of its image: views of one image
        are positives of each other. With a process group, the numbers of each worker continue after those of the worker
        before it, which has as many images, so that `Objective` takes no images of two workers for one.

    Raises:
        ValueError: there are fewer than two views, or their shapes differ.
    """
    if len(views) < 2:
        raise ValueError(f"from_views: found {len(views)} views, must be two or more: from_views(z1, z2)")
    shapes = [tuple(view.shape) for view in views]
    if len(shapes[0]) != 2 or len(set(shapes)) > 1:
        raise ValueError(f"from_views: found views of shapes {shapes}, must be [images, dim], the same for all")
    first = rank() * len(views[0])
    images = torch.arange(first, first + len(views[0]), device=views[0].device)
    return torch.cat(views), images.repeat(len(views))


def require_labels(name: str, embeddings: object, labels: object) -> None:
    """Checks by shapes and types that the arguments are a batch and its labels, not two views.

    Raises:
        TypeError: they are not; the message shows the right call.
    """
    if not (isinstance(embeddings, Tensor) and isinstance(labels, Tensor)):
        fits = False
    else:
        whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
        types_fit = embeddings.is_floating_point() and whole
        fits = types_fit and embeddings.ndim == 2 and labels.ndim == 1 and len(labels) == len(embeddings)
    if not fits:
        raise TypeError(
            f"{name}: found {described(embeddings)} and {described(labels)}, must be tensors, embeddings of "
            "shape [batch, dim], floats, and labels, one whole number a row; of two views of the same images: "
            "loss(*ssl_sec.from_views(z1, z2))"
        )


def require_classes(name: str, labels: Labels, num_classes: int) -> None:
    """Checks that labels are in [0, num_classes - 1], unless the check would wait for a device.

    Raises:
        ValueError: one is not.
    """
    if may_read_values(labels) and ((outside := (labels < 0) | (labels >= num_classes)).any()):
        found = f"found label {int(labels[outside][0])}, must be in [0, {num_classes - 1}]"
        raise ValueError(f"{name} has {num_classes} classes: {found}")


def require_range(name: str, anchors: object) -> None:
    """Checks that the third argument of a loss is a range of rows, not pairs that a miner has found.

    Raises:
        TypeError: it is not.
    """
    given = cast("slice[object, object, object]", anchors)
    if not isinstance(anchors, slice) or given.step not in (None, 1):
        found = given if isinstance(anchors, slice) else type(anchors).__name__
        raise TypeError(f"{name}: anchors: found {found}, must be a slice of rows with step 1; a loss mines by itself")


def described(value: object) -> str:
    """The type and shape of an argument, for messages."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def require_triplets(name: str, classes: Classes) -> None:
    """Refuses a batch in which no row has a positive, or none a negative, unless the check would wait for a device."""
    if not may_read_values(classes.size):
        return
    largest = int(classes.size.max()) if len(classes.size) else 0
    if largest < 2:
        raise ValueError(f"{name} needs a positive: no label occurs twice in the batch")
    if largest == len(classes.size):
        raise ValueError(f"{name} needs a negative: all rows of the batch have one label")


def log_one_plus_sum_exp(
    exponents: Float[Tensor, "anchors batch"], counted: Bool[Tensor, "anchors batch"]
) -> Float[Tensor, " anchors"]:
    """log(1 + Σ e^x) over the counted exponents x of each row."""
    one = exponents.new_zeros(len(exponents), 1)
    return torch.cat([one, exponents.masked_fill(~counted, -torch.inf)], 1).logsumexp(1)
