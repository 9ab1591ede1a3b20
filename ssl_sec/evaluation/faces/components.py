"""Principal components that fit embeddings to the people of a test set (NormFace, section 5.1).

They are fitted on some images of the test set, never on those whose accuracy is measured, and on the embeddings as they
are: an image's direction is taken after the reduction, when two are compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_sec.errors import ConfigError

# Rows that should equal the mean differ from it by float32 rounding, in arbitrary directions.
_ROUNDING = 1e-6


class Components(NamedTuple):
    """A reduction, x ↦ Vᵀ(x - mean).

    Attributes:
        mean: mean of the fitted embeddings, in float64.
        directions: V, the directions of largest variance, in float64.
    """

    mean: Float[Tensor, " dim"]
    directions: Float[Tensor, "dim components"]

    def reduce(self, rows: Float[Tensor, "images dim"]) -> Float[Tensor, "images components"]:
        """The rows along the components, in float64; 0 for a row that equals the mean up to rounding.

        Args:
            rows: raw embeddings.
        """
        rows = rows.double()
        reduced = (rows - self.mean) @ self.directions
        length = rows.norm(dim=1).maximum(self.mean.norm())
        return reduced.masked_fill((reduced.norm(dim=1) < _ROUNDING * length).unsqueeze(1), 0)


@torch.no_grad()
def fit_components(chunks: Sequence[Float[Tensor, "_ dim"]], count: int) -> Components:
    """The mean of some embeddings and the directions of their largest variance.

    Args:
        chunks: raw embeddings, in one part or more; rows that are not finite are left out. Without any other row the
            mean is NaN, so that every later comparison counts as wrong.
        count: number of components, 1 to the dimension of the embeddings.

    Raises:
        ConfigError: `count` is outside its range.
    """
    dim = chunks[0].shape[1]
    if not 1 <= count <= dim:
        raise ConfigError(f"PCA to {count} components; allowed: 1 to the dimension of the embeddings, {dim}")
    total = chunks[0].new_zeros(dim, dtype=torch.float64)
    num_rows = 0
    for rows in map(_finite, chunks):
        total += rows.sum(0)
        num_rows += len(rows)
    mean = total / num_rows
    scatter = total.new_zeros(dim, dim)
    for rows in map(_finite, chunks):
        centred = rows - mean
        scatter += centred.T @ centred
    # eigh sorts eigenvalues in ascending order.
    return Components(mean, torch.linalg.eigh(scatter).eigenvectors[:, -count:])


def _finite(rows: Float[Tensor, "images dim"]) -> Float[Tensor, "_ dim"]:
    return rows[rows.isfinite().all(1)].double()
