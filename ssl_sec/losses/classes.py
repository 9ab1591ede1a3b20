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
        first: the first row of its class.
        second: the second, or the first where the class has one row.
        number: of its class among those of the batch, from 0, in the order of the labels.
    """

    size: Int64[Tensor, " batch"]
    occurrence: Int64[Tensor, " batch"]
    first: Int64[Tensor, " batch"]
    second: Int64[Tensor, " batch"]
    number: Int64[Tensor, " batch"]

    @property
    def num_positives(self) -> Int64[Tensor, " batch"]:
        """Other rows of the row's class."""
        return self.size - 1

    @property
    def num_negatives(self) -> Int64[Tensor, " batch"]:
        """Rows of other classes."""
        return len(self.size) - self.size

    def positive(self, anchors: slice) -> Int64[Tensor, " anchors"]:
        """The first other row of each anchor's class; the anchor itself where it is alone."""
        return torch.where(self.occurrence == 0, self.second, self.first)[anchors]


def classes_of(labels: Int64[Tensor, " batch"]) -> Classes:
    """The classes of a batch."""
    in_order, order = labels.sort(stable=True)
    start = torch.searchsorted(in_order, in_order)
    size = torch.searchsorted(in_order, in_order, right=True) - start
    occurrence = torch.arange(len(labels), device=labels.device) - start
    number = (occurrence == 0).cumsum(0) - 1
    second = start + (size > 1)
    # Sorted position -> row.
    rows = torch.empty_like(order).scatter(0, order, torch.arange(len(labels), device=labels.device))
    return Classes(
        size=size[rows],
        occurrence=occurrence[rows],
        first=order[start][rows],
        second=order[second][rows],
        number=number[rows],
    )


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
    same = labels[anchors].unsqueeze(1) == labels
    return same & (rows[anchors].unsqueeze(1) != rows), ~same


def can_look(labels: Tensor) -> bool:
    """Whether values may be looked at: on the CPU that waits for no device; a graph being captured has none."""
    return labels.device.type == "cpu" and not torch.compiler.is_compiling()
