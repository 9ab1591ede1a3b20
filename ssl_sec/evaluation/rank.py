"""The number of dimensions that features use, and how fast their variance decays."""

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_sec.errors import DataError
from ssl_sec.evaluation.arrays import Embeddings, as_rows


@torch.no_grad()
def rankme(features: Embeddings, epsilon: float = 1e-7) -> float:
    """Effective rank of the features: exp of the entropy of their singular values (Garrido et al. 2023).

    RankMe = exp(-Σ p_k log p_k) with p_k = σ_k / Σ σ + epsilon, over the min(images, dim) singular values.

    The singular values are the square roots of the eigenvalues of the (dim, dim) Gram matrix. In float64 the squaring
    loses those below about 1e-8 of the largest, which `epsilon` hides anyway.

    Args:
        features: one row for each image.
        epsilon: constant > 0 that keeps the logarithm finite.

    Returns:
        About 1 for features on a line or all zero, at most about min(images, dim); NaN if a feature is not
        finite.

    Raises:
        DataError: there are no rows.
    """
    eigenvalues = _eigenvalues(as_rows(features))
    if eigenvalues is None:
        return float("nan")
    singular_values = eigenvalues.sqrt()
    shares = singular_values / singular_values.sum().clamp(min=torch.finfo(torch.float64).tiny) + epsilon
    return (-(shares * shares.log()).sum()).exp().item()


@torch.no_grad()
def alpha_req(features: Embeddings) -> float:
    """Decay α of the spectrum of the features' covariance, λ_k ∝ k^-α (Agrawal et al. 2022, "α-ReQ").

    Minus the slope of the least-squares line of log λ_k over log k, over the eigenvalues above 1e-10 of the largest.
    Good features were found near 1; a larger value means that few dimensions carry the variance.

    Args:
        features: one row for each image; they are centred first.

    Returns:
        α; NaN if a feature is not finite, or fewer than two eigenvalues are left.

    Raises:
        DataError: there are no rows.
    """
    rows = as_rows(features).double()
    eigenvalues = _eigenvalues(rows - rows.mean(dim=0))
    if eigenvalues is None:
        return float("nan")
    kept = eigenvalues[eigenvalues > 1e-10 * eigenvalues.max()].sort(descending=True).values
    if len(kept) < 2:
        return float("nan")
    places = torch.arange(1, len(kept) + 1, dtype=torch.float64, device=kept.device).log()
    centred = places - places.mean()
    return -((centred * kept.log()).sum() / centred.square().sum()).item()


def _eigenvalues(features: Float[Tensor, "images dim"]) -> Float[Tensor, " rank"] | None:
    """The min(images, dim) largest eigenvalues of the Gram matrix, ascending, ≥ 0; None if a feature is not finite."""
    num_images, dim = features.shape
    if not num_images:
        raise DataError("rank of features: found no rows, must be one or more")
    gram = torch.zeros(dim, dim, dtype=torch.float64, device=features.device)
    for chunk in features.split(4096):
        gram.addmm_(chunk.double().T, chunk.double())
    if not gram.isfinite().all():
        return None
    return torch.linalg.eigvalsh(gram)[-min(num_images, dim) :].clamp(min=0)
