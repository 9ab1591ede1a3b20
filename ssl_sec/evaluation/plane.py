"""The plane of embeddings of two dimensions, for the figure of `ssl_sec.figures.plane` (NormFace, Figs. 2 and 3)."""

import torch
from jaxtyping import Float
from torch import Tensor


def plane_reach(embeddings: Float[Tensor, "images 2"]) -> float:
    """Half the side of a square around 0 that contains all finite embeddings, with a small margin."""
    finite = embeddings[embeddings.isfinite().all(1)]
    return 1.05 * float(finite.abs().max()) if len(finite) and finite.any() else 1.0


def plane_grid(embeddings: Float[Tensor, "images 2"], side: int = 201) -> Float[Tensor, "points 2"]:
    """Points of the square of `plane_reach`, row by row from the lower left corner.

    Args:
        embeddings: raw embeddings.
        side: number of points on each side, odd, so that 0 is one of them.
    """
    reach = plane_reach(embeddings)
    ticks = torch.linspace(-reach, reach, side, dtype=embeddings.dtype, device=embeddings.device)
    rows, columns = torch.meshgrid(ticks, ticks, indexing="ij")
    return torch.stack([columns.flatten(), rows.flatten()], 1)
