"""The classes of a batch: which of its rows are positives and negatives of each other.

The shapes of all results depend on the batch's shape alone, so that nothing waits for a device and a graph of the whole
objective can be captured.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Classes:
    """The classes of a batch, seen from each of its rows, in O(N log N).

    Attributes:
        size: rows of the row's class, including itself.
        occurrence: number of earlier rows of the row's class.
        start: index in `order` where the row's class starts.
        order: the rows, class by class in the order of the labels, and within a class in the batch's order.
    """

    size: Int64[Tensor, " batch"]
    occurrence: Int64[Tensor, " batch"]
    start: Int64[Tensor, " batch"]
    order: Int64[Tensor, " batch"]

    @property
    def number(self) -> Int64[Tensor, " batch"]:
        """The index of the row's class among those of the batch, from 0, in the order of the labels."""
        is_first = torch.zeros_like(self.start).scatter(0, self.start, 1)
        return (is_first.cumsum(0) - 1)[self.start]

    @property
    def num_positives(self) -> Int64[Tensor, " batch"]:
        """The number of other rows of the row's class."""
        return self.size - 1

    @property
    def num_negatives(self) -> Int64[Tensor, " batch"]:
        """The number of rows of other classes."""
        return len(self.size) - self.size

    @property
    def positive(self) -> Int64[Tensor, " batch"]:
        """The first other row of the row's class; the row itself if there is none."""
        return self.order[self.start + ((self.occurrence == 0) & (self.size > 1))]

    def next(self, steps: int) -> Int64[Tensor, " batch"]:
        """The row that follows `steps` places after the row in its class, cyclically; steps < size."""
        return self.order[self.start + (self.occurrence + steps) % self.size]


def classes_of(labels: Int64[Tensor, " batch"]) -> Classes:
    """The classes of a batch."""
    labels = labels.contiguous()  # as `searchsorted` warns of a column of others
    in_order, order = labels.sort(stable=True)
    start = torch.searchsorted(in_order, labels)
    size = torch.searchsorted(in_order, labels, right=True) - start
    positions = torch.arange(len(labels), device=labels.device)
    occurrence = torch.empty_like(order).scatter(0, order, positions) - start
    return Classes(size=size, occurrence=occurrence, start=start, order=order)


def positive_pairs(
    labels: Int64[Tensor, " batch"], anchors: slice = slice(None)
) -> tuple[Bool[Tensor, "anchors batch"], Bool[Tensor, "anchors batch"]]:
    """Masks of each anchor's positives and negatives; the anchor itself, recognised by its index, is neither.

    Args:
        labels: one label for each row; rows of one label are positives of each other.
        anchors: the range of rows that are anchors.

    Returns:
        `positive` and `negative`, both [anchors, batch].
    """
    rows = torch.arange(len(labels), device=labels.device)
    negative = negative_pairs(labels, anchors)
    return ~negative & (rows[anchors].unsqueeze(1) != rows), negative


def negative_pairs(labels: Int64[Tensor, " batch"], anchors: slice = slice(None)) -> Bool[Tensor, "anchors batch"]:
    """Mask of the rows whose class differs from the anchor's."""
    return labels[anchors].unsqueeze(1) != labels


# The operation that adds rows in a fixed order differs by device: `index_add` on a CPU, and accumulating indexing
# on a GPU, which CPU threads do in any order. A sum of three numbers or more depends on their order.


def take_rows(values: Float[Tensor, "values dim"], index: Int64[Tensor, " rows"]) -> Float[Tensor, "rows dim"]:
    """The values at an index that may repeat; their gradient is bit-equal at every call."""
    return values[index] if values.is_cuda else values.index_select(0, index)


def sum_rows(
    rows: Float[Tensor, "rows dim"], index: Int64[Tensor, " rows"], num_sums: int
) -> Float[Tensor, "sums dim"]:
    """The sums of the rows that have the same index < num_sums; bit-equal at every call."""
    sums = rows.new_zeros((num_sums, rows.shape[1]))
    return sums.index_put((index,), rows, accumulate=True) if rows.is_cuda else sums.index_add(0, index, rows)


def may_read_values(labels: Tensor) -> bool:
    """Whether values may be read: on the CPU that waits for nothing; during the capture of a graph there are none."""
    return labels.device.type == "cpu" and not torch.compiler.is_compiling()
