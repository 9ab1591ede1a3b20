"""Sums over all rows or all classes, a tile of the matrix at a time, in memory that is linear in their number.

The whole matrix never exists: a tile is reduced to a number for each row, or to one for all of them, and discarded, and
recomputed backward.

**Rows with each other:** log Σ_{k ≠ i} exp(z_ik) over inner products z = X Xᵀ, or with k over the rows of other groups
than i's. Its backward pass needs ∂/∂z_ik = exp(z_ik − log Σ_i). Two forms:

*All rows are anchors, and |z| is so bounded that exp(z) neither overflows nor vanishes:* no maximum is needed,
and since z is symmetric, a tile above the diagonal is used for both its rows and its columns. This costs half of the
matrix forward; backward, half of it again and one product with X for each half.

*Else* (a worker's share of the anchors, or a very low temperature): a running log-sum-exp over each anchor's row.

**Rows with all classes:** a function of the rows and a tile of the classes' templates. Memory is that of the rows, the
templates and their gradients.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

# A float32 tile of a CPU stays in a core's cache; on a GPU it is large enough to be worth its launches.
CPU_TILE_ROWS = 512
GPU_TILE_ROWS = 4096
# Rows times classes of the largest tile: 64 MiB in float32.
TILE_ENTRIES = 1 << 24
# The largest number of classes of a tile on a CPU, where a tile in the cache is reduced faster than a larger one.
CPU_TILE_CLASSES = 2048

# What a function of a tile of classes takes, and gives for each row; see `over_tiles`.
Rows = Float[Tensor, "rows dim"]
Templates = Float[Tensor, "some columns"]
Places = Int64[Tensor, " rows"]
RowValues = Float[Tensor, " rows"]
Part = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def log_sum_exp_of_others(
    rows: Float[Tensor, "batch dim"],
    anchors: slice,
    largest_logit: float,
    groups: Int64[Tensor, " batch"] | None = None,
) -> Float[Tensor, " anchors"]:
    """The log-sum-exp log Σ_{k ≠ i} exp(⟨x_i, x_k⟩) for each anchor i; −inf for a row that is alone.

    Args:
        rows: x, in float32 or float64.
        anchors: range of rows with step 1.
        largest_logit: upper bound of |⟨x_i, x_k⟩|.
        groups: group of each row; k then runs only over the rows of other groups. None for all other rows.
    """
    own = range(len(rows))[anchors]
    # Below this bound e^z and e^-z stay far from the ends of the exponent's range, and so do sums of them.
    bounded = largest_logit < 0.45 * math.log(torch.finfo(rows.dtype).max)
    if bounded and len(own) == len(rows):
        result = _SymmetricForm.apply(rows, groups)
    else:
        of_anchors = None if groups is None else groups[anchors]
        result = _RowForm.apply(rows[anchors], rows, own.start, of_anchors, groups)
    assert isinstance(result, Tensor)
    return result


def log_sum_exp_of_keys(
    rows: Float[Tensor, "rows dim"],
    keys: Float[Tensor, "keys dim"],
    groups: Int64[Tensor, " rows"],
    groups_of_keys: Int64[Tensor, " keys"],
) -> Float[Tensor, " rows"]:
    """The log-sum-exp log Σ_k exp(⟨x_i, y_k⟩) over the keys k of other groups than the row i's; −inf if there are none.

    Args:
        rows: x, in float32 or float64.
        keys: y, likewise.
        groups: group of each row.
        groups_of_keys: group of each key.
    """
    result = _RowForm.apply(rows, keys, 0, groups, groups_of_keys)
    assert isinstance(result, Tensor)
    return result


def _in_own_precision(rows: Tensor) -> AbstractContextManager[object]:
    """A context for a backward pass that runs, or is compiled, under autocast, which would halve its products."""
    return torch.autocast(rows.device.type, enabled=False)


def _refuse_second_derivative() -> None:
    """Raises a RuntimeError if a second derivative is requested."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("create_graph=True: found a loss that is summed in tiles, which has no second derivative")


class _SymmetricForm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, groups: Tensor | None) -> Tensor:
        sums = rows.new_zeros(len(rows))
        for above, left, tile in _upper_tiles(rows, groups):
            sums[above] += tile.sum(1)
            if above != left:
                sums[left] += tile.sum(0)
        ctx.save_for_backward(rows, sums, groups)
        return sums.log()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        _refuse_second_derivative()
        rows, sums, groups = ctx.saved_tensors
        weights = grad_outputs[0] / sums
        grad = torch.zeros_like(rows)
        with _in_own_precision(rows):
            for above, left, tile in _upper_tiles(rows, groups):
                # Entry (i, k) stands for itself and for (k, i).
                tile.mul_(weights[above].unsqueeze(1) + weights[left])
                grad[above].addmm_(tile, rows[left])
                if above != left:
                    grad[left].addmm_(tile.T, rows[above])
        return grad, None


class _RowForm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchors: Tensor, rows: Tensor, first: int, groups: Tensor | None, groups_of_rows: Tensor | None
    ) -> Tensor:
        result = rows.new_full((len(anchors),), -torch.inf)
        for own, _, logits in _row_tiles(anchors, rows, first, groups, groups_of_rows):
            result[own] = torch.logaddexp(result[own], logits.logsumexp(1))
        ctx.save_for_backward(anchors, rows, result, groups, groups_of_rows)
        ctx.first = first
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        anchors, rows, result, groups, groups_of_rows = ctx.saved_tensors
        grad_anchors = torch.zeros_like(anchors)
        grad = torch.zeros_like(rows) if ctx.needs_input_grad[1] else None
        with _in_own_precision(rows):
            for own, others, logits in _row_tiles(anchors, rows, ctx.first, groups, groups_of_rows):
                weights = logits.sub_(result[own].unsqueeze(1)).exp_().mul_(grad_outputs[0][own].unsqueeze(1))
                grad_anchors[own].addmm_(weights, rows[others])
                if grad is not None:
                    grad[others].addmm_(weights.T, anchors[own])
        return grad_anchors, grad, None, None, None


def _ranges(rows: Tensor, start: int, stop: int) -> Iterator[slice]:
    step = CPU_TILE_ROWS if rows.device.type == "cpu" else GPU_TILE_ROWS
    for first in range(start, stop, step):
        yield slice(first, first + step)


def _upper_tiles(rows: Tensor, groups: Tensor | None = None) -> Iterator[tuple[slice, slice, Tensor]]:
    """exp(z) in tiles on and above the diagonal; 0 on it, or where both rows are of one group."""
    for above in _ranges(rows, 0, len(rows)):
        for left in _ranges(rows, above.start, len(rows)):
            tile = (rows[above] @ rows[left].T).exp_()
            if groups is not None:
                tile.masked_fill_(groups[above].unsqueeze(1) == groups[left], 0)
            elif above == left:
                tile.fill_diagonal_(0)
            yield above, left, tile


def _row_tiles(
    anchors: Tensor, rows: Tensor, first: int, groups: Tensor | None, groups_of_rows: Tensor | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles of z = ⟨anchor, row⟩; the first slice is of anchors.

    Entries are −inf where both rows are of one group or, without groups, the same row: the anchors are then the rows
    from `first` on.
    """
    for own in _ranges(rows, 0, len(anchors)):
        for others in _ranges(rows, 0, len(rows)):
            tile = anchors[own] @ rows[others].T
            if groups is not None and groups_of_rows is not None:
                tile.masked_fill_(groups[own].unsqueeze(1) == groups_of_rows[others], -torch.inf)
            else:
                # Row i of the batch is compared with itself in column i - others.start.
                tile.diagonal(first + own.start - others.start).fill_(-torch.inf)
            yield own, others, tile


def over_tiles(
    part: Part,
    rows: Float[Tensor, "rows dim"],
    templates: Float[Tensor, "classes columns"],
    places: Int64[Tensor, " rows"],
    own: Float[Tensor, " rows"],
) -> Float[Tensor, "*values tiles"]:
    """The values of `part` for each tile of classes.

    Args:
        part: (rows, templates of a tile, places in the tile, own) -> a number for each row, or one for all of them;
            must be a pure function.
        rows: the rows, as similarities use them.
        templates: one for each class, with as many columns as the rows, or a multiple of these.
        places: index of the row's own class; out of range if it is none of these.
        own: similarity of each row to its own template.
    """
    products = templates.shape[1] // rows.shape[1]  # of a row with a template
    step = max(1, TILE_ENTRIES // max(1, len(rows) * products))
    if len(templates) <= step:
        return part(rows, templates, places, own).unsqueeze(-1)
    if not rows.is_cuda:
        step = min(step, max(1, CPU_TILE_CLASSES // products))
    result = _OverTiles.apply(part, step, rows, templates, places, own)
    assert isinstance(result, Tensor)
    return result


def without_own(
    values: Float[Tensor, "rows some"], places: Int64[Tensor, " rows"], instead: float
) -> Float[Tensor, "rows some"]:
    """The values, with `instead` in each row's own place where it is in range."""
    column = places.clamp(0, values.shape[1] - 1).unsqueeze(1)
    kept = torch.where(places.unsqueeze(1) == column, instead, values.gather(1, column))
    return values.scatter(1, column, kept)


class _OverTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Part, step: int, rows: Tensor, templates: Tensor, places: Tensor, own: Tensor
    ) -> Tensor:
        ctx.part, ctx.step = part, step
        ctx.save_for_backward(rows, templates, places, own)
        starts = range(0, len(templates), step)
        return torch.stack([part(rows, templates[a : a + step], places - a, own) for a in starts], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        rows, templates, places, own = ctx.saved_tensors
        grad_rows, grad_own = torch.zeros_like(rows), torch.zeros_like(own)
        grad_templates = torch.empty_like(templates)
        for number, start in enumerate(range(0, len(templates), ctx.step)):
            tile = slice(start, start + ctx.step)
            inputs = [value.detach().requires_grad_() for value in (rows, templates[tile], own)]
            with torch.enable_grad(), _in_own_precision(rows):
                values = ctx.part(inputs[0], inputs[1], places - start, inputs[2])
                of_rows, of_templates, of_own = torch.autograd.grad(
                    values, inputs, grad_outputs[0][..., number], allow_unused=True, materialize_grads=True
                )
            grad_rows += of_rows
            grad_own += of_own
            grad_templates[tile] = of_templates
        return None, None, grad_rows, grad_templates, None, grad_own
