"""Alignment and uniformity on the sphere: what a contrastive loss asks for, measured without labels.

Wang and Isola 2020, "Understanding Contrastive Representation Learning through Alignment and Uniformity on the
Hypersphere". Both measure directions, and lower values are better for both.
"""

import math

import torch
from torch import Tensor

from ssl_sec.errors import DataError, counted
from ssl_sec.evaluation.arrays import Embeddings, Rows, as_rows, tiles, unit_rows
from ssl_sec.rules import Range


@torch.no_grad()
def alignment(first: Rows, second: Rows) -> float:
    """Mean squared distance of the directions of two views of an image, E ‖f(x) - f(y)‖², in [0, 4] (Eq. 6, α = 2).

    Args:
        first: embeddings of one view of each image, of any norm.
        second: embeddings of another view, in the same order.

    Raises:
        DataError: the shapes of both differ, or there are no rows.
    """
    first, second = as_rows(first), as_rows(second)
    if first.shape != second.shape:
        raise DataError(f"alignment: found {list(first.shape)} and {list(second.shape)}, must be views of one shape")
    if not len(first):
        raise DataError("alignment: found no rows, must be one or more")
    difference = unit_rows(first.double()) - unit_rows(second.double())
    return difference.square().sum(dim=1).mean().item()


@torch.no_grad()
def uniformity(embeddings: Embeddings, t: float = 2.0, chunk_size: int = 1024) -> float:
    """Logarithm of the mean Gaussian potential of pairs of directions, log E exp(-t ‖f(x) - f(y)‖²) (Eq. 7).

    A row of zeros has no direction and stays where it is, as for `alignment`: if all rows are zero, as of an encoder
    that has collapsed, the value is 0, the worst one.

    Args:
        embeddings: one row for each image, of any norm; two rows or more.
        t: factor in the exponent, > 0.
        chunk_size: number of rows that are compared with all others at once.

    Returns:
        A value in [-4 t, 0]; 0 if all directions are equal.

    Raises:
        ConfigError: `t` is outside its range.
        DataError: there are fewer than two rows.
    """
    Range(gt=0).check("t", t)
    directions = unit_rows(as_rows(embeddings).double())
    num_images, squares = len(directions), (directions != 0).any(dim=1).double()
    if num_images < 2:
        raise DataError(f"uniformity: found {counted(num_images, 'row')}, must be two or more")
    sums: list[Tensor] = []
    for rows in tiles(num_images, chunk_size):
        distances = squares[rows].unsqueeze(1) + squares - 2 * directions[rows] @ directions.T
        exponents = -t * distances.clamp(min=0)
        exponents.diagonal(rows.start).fill_(-torch.inf)  # an image and itself are no pair
        sums.append(exponents.logsumexp((0, 1)))
    return torch.stack(sums).logsumexp(0).item() - math.log(num_images * (num_images - 1))
