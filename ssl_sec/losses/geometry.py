"""Norms, directions and similarities of embeddings.

An embedding f has the norm ‖f‖ and the direction f̂ = f / ‖f‖; s_ij = ⟨f̂_i, f̂_j⟩ and, for unit directions,
d²_ij = ‖f̂_i − f̂_j‖² = 2 − 2 s_ij. A zero row has no direction: it stays zero, and its gradient is that of the
identity, so that one dead row can neither yield a NaN nor a gradient without bound.
"""

import math
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_sec.errors import check_option
from ssl_sec.rules import Range

# The norms that GradScale uses: each row's own, or the mean of the batch.
GradScaleBy = Literal["rows", "batch"]
_GRAD_SCALE_BY = get_args(GradScaleBy)


def in_full_precision(embeddings: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
    """The rows in float32, or in float64 if they already are: only the network uses half precision."""
    return embeddings if embeddings.dtype == torch.float64 else embeddings.float()


def norms(embeddings: Float[Tensor, "batch dim"]) -> Float[Tensor, " batch"]:
    """L2 norm of each row, ≥ 0; its gradient at a zero row is zero."""
    # torch ships no type for it.
    return torch.linalg.vector_norm(in_full_precision(embeddings), dim=1)  # pyright: ignore


class _Directions(torch.autograd.Function):
    """f̂ with its gradient (g − f̂ ⟨f̂, g⟩) / ‖f‖ (SEC, Eq. 11), in half as many passes as autograd."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor) -> Tensor:
        ctx.save_for_backward(embeddings)
        lengths = _divisors(embeddings)
        return embeddings / lengths

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (embeddings,) = ctx.saved_tensors
        lengths = _divisors(embeddings)  # computed again, for second derivatives with respect to the embeddings
        unit = embeddings / lengths
        along = (unit * grad_outputs[0]).sum(1, keepdim=True)
        return torch.addcmul(grad_outputs[0], unit, along, value=-1) / lengths


def _divisors(embeddings: Tensor) -> Tensor:
    lengths = norms(embeddings).unsqueeze(1)
    # Divided by infinity, a row that has overflowed would pass for a zero row, whose loss is finite.
    return torch.where(lengths == 0, 1.0, torch.where(lengths.isinf(), torch.nan, lengths))


def directions(embeddings: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
    """Rows of unit norm; a zero row stays zero, and one whose norm overflows (from 1.8e19 in float32) is NaN."""
    unit = _Directions.apply(in_full_precision(embeddings))
    assert isinstance(unit, Tensor)
    return unit


class _GradScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, power: float, by: GradScaleBy) -> Tensor:
        ctx.save_for_backward(embeddings)
        ctx.power, ctx.by = power, by
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (embeddings,) = ctx.saved_tensors
        lengths = norms(embeddings)
        factors = (lengths if ctx.by == "rows" else lengths.mean(0, keepdim=True)).pow(ctx.power)
        return grad_outputs[0] * factors.unsqueeze(1), None, None


def grad_scale(
    embeddings: Float[Tensor, "batch dim"], power: float, by: GradScaleBy = "rows"
) -> Float[Tensor, "batch dim"]:
    """The rows as they are, with gradients ‖f_i‖^p · ∂L/∂f_i (GradScale, Draganov et al. 2025).

    An angular loss has gradients that fall with 1 / ‖f‖ (SEC, Eq. 4); p = 1 makes them independent of the norm, and
    with p = 2 the angle by which a step of SGD on a row turns it (SEC, Eq. 6) is.

    Args:
        embeddings: raw rows f_i of the global batch.
        power: p ≥ 0; 0 changes nothing.
        by: "rows", or "batch" to take the mean norm of all rows in place of ‖f_i‖: the steps grow with the norms as
            with "rows", and the rows keep their relative weights.

    Raises:
        ConfigError: `power` or `by` is not allowed.
    """
    if power == 0:
        return embeddings
    if not 0 <= power < math.inf or by not in _GRAD_SCALE_BY:  # the checks themselves would break a compiled graph
        Range(ge=0).check("power", power)
        check_option("by", by, GradScaleBy)
    scaled = _GradScale.apply(embeddings, power, by)
    assert isinstance(scaled, Tensor)
    return scaled


def angles(first: Float[Tensor, "batch dim"], second: Float[Tensor, "batch dim"]) -> Float[Tensor, " batch"]:
    """The angle between the rows of the same index, in radians, exact also where it is small; π/2 with a zero row.

    Two zero rows have the angle 0.
    """
    one, other = directions(first), directions(second)
    return 2 * torch.atan2(norms(one - other), norms(one + other))


def turn_tangents(
    embeddings: Float[Tensor, "batch dim"], gradients: Float[Tensor, "batch dim"]
) -> Float[Tensor, " batch"]:
    """How far a step of SGD on each row turns it: tan Δθ_i = ‖∂L/∂f_i‖ / ‖f_i‖ (SEC, Eq. 6).

    It is the tangent at a learning rate of 1; at α it is α times that. The gradient of an angular loss is orthogonal to
    the row (Prop. 1). The part along the row, which a norm constraint adds, turns nothing and is left out; it changes
    the tangent in the second order of α.

    Args:
        embeddings: raw rows f_i before the step.
        gradients: ∂L/∂f_i.

    Returns:
        Tangents, ≥ 0; 0 for a zero row, which has no direction.
    """
    unit = directions(embeddings)
    across = gradients - unit * (unit * gradients).sum(1, keepdim=True)
    lengths = norms(embeddings)
    return torch.where(lengths == 0, 0.0, norms(across) / lengths)


class _InnerProducts(torch.autograd.Function):
    """X Xᵀ, with one product in the backward pass, (G + Gᵀ) X, in place of autograd's two."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows @ rows.T

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        return (grad_outputs[0] + grad_outputs[0].T) @ rows


def inner_products(rows: Float[Tensor, "batch dim"], anchors: slice = slice(None)) -> Float[Tensor, "anchors batch"]:
    """⟨x_i, x_j⟩ of each anchor with every row; these are the similarities s_ij if the rows are directions."""
    if len(range(len(rows))[anchors]) < len(rows):
        return rows[anchors] @ rows.T
    products = _InnerProducts.apply(rows)
    assert isinstance(products, Tensor)
    return products


def squared_distances(unit: Float[Tensor, "batch dim"], anchors: slice = slice(None)) -> Float[Tensor, "anchors batch"]:
    """d²_ij = 2 − 2 s_ij of each anchor to every row; rounding may leave it a little below 0 for equal rows."""
    return 2 - 2 * inner_products(unit, anchors)


def root(squares: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """√x, and 0 with gradient 0 where x ≤ 0, as for the distance between equal rows."""
    outside = squares <= 0
    return torch.where(outside, 0.0, torch.where(outside, 1.0, squares).sqrt())
