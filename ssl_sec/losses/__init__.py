"""The loss core: `loss(embeddings, labels) -> scalar`, on raw embeddings, for every recipe."""

from ssl_sec.losses.contrastive import NTXentLoss
from ssl_sec.losses.spherical import SphericalConstraint, spherical_constraint

__all__ = ["NTXentLoss", "SphericalConstraint", "spherical_constraint"]
