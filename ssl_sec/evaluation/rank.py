"""The number of dimensions that features use."""

import torch
from jaxtyping import Float
from torch import Tensor


@torch.no_grad()
def rankme(features: Float[Tensor, "images dim"], epsilon: float = 1e-7) -> float:
    """Effective rank of the features: exp of the entropy of their singular values (Garrido et al. 2023).

    RankMe = exp(-Σ p_k log p_k) with p_k = σ_k / Σ σ + epsilon, over the min(images, dim) singular values.

    The singular values are the square roots of the eigenvalues of the (dim, dim) Gram matrix. In float64 the squaring
    loses those below about 1e-8 of the largest, which `epsilon` hides anyway.

    Args:
        features: one row for each image.
        epsilon: keeps the logarithm finite, > 0.

    Returns:
        About 1 for features on a line or all zero, at most about min(images, dim); NaN if a feature is not
        finite.
    """
    num_images, dim = features.shape
    gram = torch.zeros(dim, dim, dtype=torch.float64, device=features.device)
    for chunk in features.split(4096):
        gram.addmm_(chunk.double().T, chunk.double())
    if not gram.isfinite().all():
        return float("nan")
    largest = torch.linalg.eigvalsh(gram)[-min(num_images, dim) :]
    singular_values = largest.clamp(min=0).sqrt()
    shares = singular_values / singular_values.sum().clamp(min=torch.finfo(torch.float64).tiny) + epsilon
    return (-(shares * shares.log()).sum()).exp().item()
