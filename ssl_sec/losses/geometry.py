"""Norms and directions of embeddings, and which rows a loss compares.

An embedding f has the norm ‖f‖ and the direction f̂ = f / ‖f‖. A zero row has no direction: it stays zero, and
its gradient is that of the identity, so that one dead row can neither yield a NaN nor a gradient without bound.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def in_full_precision(embeddings: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
    """The rows in float32, or in float64 where they already are: half precision is for the network only."""
    return embeddings if embeddings.dtype == torch.float64 else embeddings.float()


def norms(embeddings: Float[Tensor, "batch dim"]) -> Float[Tensor, " batch"]:
    """L2 norm of each row, ≥ 0; its gradient at a zero row is zero."""
    # torch ships no type for it.
    return torch.linalg.vector_norm(in_full_precision(embeddings), dim=1)  # pyright: ignore


def directions(embeddings: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
    """Rows of unit norm; a zero row stays zero."""
    embeddings = in_full_precision(embeddings)
    lengths = norms(embeddings)
    return embeddings / torch.where(lengths == 0, 1.0, lengths).unsqueeze(1)


def positive_pairs(
    labels: Int64[Tensor, " batch"], anchors: slice = slice(None)
) -> tuple[Bool[Tensor, "anchors batch"], Bool[Tensor, "anchors batch"]]:
    """Which rows are an anchor's positives, and which is the anchor itself (told by index, not by value).

    Args:
        labels: one label a row; rows of one label are positives of each other.
        anchors: the range of rows that are anchors.

    Returns:
        `positive` and `itself`, both [anchors, batch].
    """
    rows = torch.arange(len(labels), device=labels.device)
    itself = rows[anchors].unsqueeze(1) == rows
    return (labels[anchors].unsqueeze(1) == labels) & ~itself, itself
