"""The spherical embedding constraint: it pulls the norms of a batch towards one radius.

    L_sec = (1/N) Σ_i (‖f_i‖ − μ)²                                           (SEC, Eq. 17)

with μ the mean norm of the batch (SEC, Eqs. 17-18), its exponential moving average
μ_t = (1 − ρ) μ_{t−1} + ρ · mean (SEC-EMA, Eq. 31), a constant radius (Fig. 6), or 0 (L²-reg, Eq. 30).
"""

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_sec.losses.averages import Averages
from ssl_sec.losses.base import described
from ssl_sec.losses.geometry import norms
from ssl_sec.rules import Range


def spherical_constraint(lengths: Float[Tensor, " batch"], radius: Float[Tensor, ""] | float) -> Float[Tensor, ""]:
    """Mean squared distance of embedding norms from a sphere's radius (SEC, Eq. 17).

    Args:
        lengths: L2 norms of the raw embeddings, ≥ 0.
        radius: radius of the sphere; detached, so that only the norms are pulled.

    Raises:
        ValueError: `lengths` are not one number for each row, as if they were the embeddings themselves.
    """
    if lengths.ndim != 1:
        wanted = "norms of shape [batch]; of embeddings: SphericalConstraint()(embeddings)"
        raise ValueError(f"spherical_constraint: found {described(lengths)}, must be {wanted}")
    return (lengths - (radius.detach() if isinstance(radius, Tensor) else radius)).square().mean()


class SphericalConstraint(Averages):
    """The norm constraint in its four uses.

    Args:
        rho: weight of the batch's mean in μ, in (0, 1]; 1 is SEC, smaller values are SEC-EMA.
        radius: fixed μ ≥ 0 in place of the mean; 0 is L²-reg.
    """

    mean_norm: Tensor

    def __init__(self, rho: float = 1.0, radius: float | None = None) -> None:
        super().__init__(rho, "mean_norm")
        if radius is not None:
            Range(ge=0).check("radius", radius)
        self.radius = radius

    def extra_repr(self) -> str:
        """The values that define the constraint."""
        return f"rho={self.rho}" if self.radius is None else f"radius={self.radius}"

    def forward(self, embeddings: Float[Tensor, "batch dim"]) -> Float[Tensor, ""]:
        """The constraint's value; in training mode the running μ is updated first.

        A batch whose mean norm is not finite, as after an overflow in half precision, leaves the running μ as it was.

        Args:
            embeddings: raw rows of the global batch, one or more.

        Raises:
            ValueError: the embeddings have another shape or type, or no rows.
        """
        given = cast("object", embeddings)  # NumPy's arrays have a shape and rows, too
        if not (isinstance(given, Tensor) and given.is_floating_point() and given.ndim == 2 and len(given)):
            raise ValueError(
                f"SphericalConstraint: found {described(embeddings)}, must be embeddings of shape [batch, dim], "
                "floats, one row or more"
            )
        with torch.autocast(embeddings.device.type, enabled=False):
            lengths = norms(embeddings)
            return spherical_constraint(lengths, self._radius_for(lengths))

    @torch.no_grad()
    def _radius_for(self, lengths: Tensor) -> Tensor:
        if self.radius is not None:
            return lengths.new_full((), self.radius)
        mean = lengths.mean()
        return mean if self.rho == 1 else self.average(mean)[0].to(lengths.dtype)
