"""Which rows of a batch belong together.

Everything here has a shape that the batch's alone determines, so that no device is waited for and a graph of the
whole objective can be captured.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Classes:
    """The classes of a batch, seen from each of its rows, in O(N log N).

    Attributes:
        size: rows of the row's class, itself counted.
        occurrence: how many rows of its class stand before it.
        start: where its class starts in `order`.
        order: the rows, class by class in the order of the labels, and within a class as they stand.
    """

    size: Int64[Tensor, " batch"]
    occurrence: Int64[Tensor, " batch"]
    start: Int64[Tensor, " batch"]
    order: Int64[Tensor, " batch"]

    @property
    def number(self) -> Int64[Tensor, " batch"]:
        """Of the row's class among those of the batch, from 0, in the order of the labels."""
        is_first = torch.zeros_like(self.start).scatter(0, self.start, 1)
        return (is_first.cumsum(0) - 1)[self.start]

    @property
    def num_positives(self) -> Int64[Tensor, " batch"]:
        """Other rows of the row's class."""
        return self.size - 1

    @property
    def num_negatives(self) -> Int64[Tensor, " batch"]:
        """Rows of other classes."""
        return len(self.size) - self.size

    @property
    def positive(self) -> Int64[Tensor, " batch"]:
        """The first other row of the row's class; the row itself where it is alone."""
        return self.order[self.start + ((self.occurrence == 0) & (self.size > 1))]

    def next(self, steps: int) -> Int64[Tensor, " batch"]:
        """The row that stands so many places after the row in its class, around its end; steps < size."""
        return self.order[self.start + (self.occurrence + steps) % self.size]


def classes_of(labels: Int64[Tensor, " batch"]) -> Classes:
    """The classes of a batch."""
    in_order, order = labels.sort(stable=True)
    start = torch.searchsorted(in_order, labels)
    size = torch.searchsorted(in_order, labels, right=True) - start
    # Where each row stands in the order.
    positions = torch.arange(len(labels), device=labels.device)
    occurrence = torch.empty_like(order).scatter(0, order, positions) - start
    return Classes(size=size, occurrence=occurrence, start=start, order=order)


def positive_pairs(
    labels: Int64[Tensor, " batch"], anchors: slice = slice(None)
) -> tuple[Bool[Tensor, "anchors batch"], Bool[Tensor, "anchors batch"]]:
    """Which rows are an anchor's positives, and which its negatives; it is neither itself (told by index).

    Args:
        labels: one label a row; rows of one label are positives of each other.
        anchors: the range of rows that are anchors.

    Returns:
        `positive` and `negative`, both [anchors, batch].
    """
    rows = torch.arange(len(labels), device=labels.device)
    negative = negative_pairs(labels, anchors)
    return ~negative & (rows[anchors].unsqueeze(1) != rows), negative


def negative_pairs(labels: Int64[Tensor, " batch"], anchors: slice = slice(None)) -> Bool[Tensor, "anchors batch"]:
    """Which rows are of another class than an anchor."""
    return labels[anchors].unsqueeze(1) != labels


def can_look(labels: Tensor) -> bool:
    """Whether values may be looked at: on the CPU that waits for no device; a graph being captured has none."""
    return labels.device.type == "cpu" and not torch.compiler.is_compiling()
