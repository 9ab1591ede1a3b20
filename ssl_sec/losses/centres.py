"""Class centres that follow the batches.

With n_j rows x_i of class j in the batch, the centre of that class moves by

    Δμ_j = Σ_i (μ_j − x_i) / (1 + n_j),    μ_j ← μ_j − Δμ_j                        (SFT, Eq. 9; Wen et al. 2016)

and the other centres stay, as does one that would not be finite, after an overflow in half precision. A centre starts
at 0 and is 0 until its class is first seen.
"""

from typing import cast

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from ssl_sec.losses.classes import classes_of, sum_rows


@torch.no_grad()
def move_centres(
    centres: Float[Tensor, "classes dim"], embeddings: Float[Tensor, "batch dim"], labels: Int64[Tensor, " batch"]
) -> None:
    """Moves the centres of the batch's classes in place, in time and memory of the batch alone.

    Args:
        centres: one for each class.
        embeddings: rows of the global batch, raw or normalised like the centres.
        labels: 0 ≤ label < classes.
    """
    classes = classes_of(labels)
    rows = embeddings.to(centres.dtype)
    number, size = classes.number, classes.size.unsqueeze(1)
    sums = sum_rows(rows, number, len(rows))[number]
    own = centres[labels]
    _replace(centres, labels, own - (size * own - sums) / (1 + size))


@torch.no_grad()
def pick_centres(
    centres: Float[Tensor, "classes dim"],
    embeddings: Float[Tensor, "batch dim"],
    labels: Int64[Tensor, " batch"],
    draws: Int64[Tensor, " batch"],
) -> None:
    """Replaces the centres of the batch's classes by one row of each class, in place: that with the largest draw.

    Args:
        centres: one for each class.
        embeddings: rows of the global batch, raw or normalised like the centres.
        labels: 0 ≤ label < classes.
        draws: a number ≥ 0 for each row.
    """
    number = classes_of(labels).number
    largest = torch.zeros_like(draws).scatter_reduce(0, number, draws, "amax")[number]
    place = torch.arange(len(labels), device=labels.device)
    picked = torch.zeros_like(place).scatter_reduce(0, number, torch.where(draws == largest, place, 0), "amax")[number]
    _replace(centres, labels, embeddings.to(centres.dtype)[picked])


def _replace(
    centres: Float[Tensor, "classes dim"], labels: Int64[Tensor, " batch"], values: Float[Tensor, "batch dim"]
) -> None:
    """Replaces the centres by their new values, the same for all rows of a class, where these are finite."""
    is_finite = values.isfinite().all(1, keepdim=True)
    centres.index_copy_(0, labels, torch.where(is_finite, values, centres[labels]))


def snapshot(values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """The values of a buffer that is updated in the same step, safe in a compiled graph.

    A compiled backward pass may read the buffer again instead of keeping its values, after the update: silently wrong
    gradients (pytorch/pytorch#197039). It never recomputes a custom operator.
    """
    return cast(Tensor, _copy(values)) if torch.compiler.is_compiling() else values


@torch.library.custom_op("ssl_sec::snapshot", mutates_args=())
def _copy(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


@_copy.register_fake  # pyright: ignore[reportUnknownMemberType]
def _like(values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)
