"""The loss core: `loss(embeddings, labels) -> scalar`, on raw embeddings, for every recipe."""

from ssl_sec.losses.angular import AngularLoss, NPairAngularLoss
from ssl_sec.losses.base import Loss
from ssl_sec.losses.combined import CombinedLoss
from ssl_sec.losses.contrastive import ContrastiveLoss, NTXentLoss
from ssl_sec.losses.pair import (
    LiftedStructureLoss,
    MultiSimilarityLoss,
    NormalizedNPairLoss,
    NPairLoss,
    RankedListLoss,
    SemihardTripletLoss,
    TripletLoss,
)
from ssl_sec.losses.spherical import SphericalConstraint, spherical_constraint
from ssl_sec.losses.template import (
    ArcFaceLoss,
    CContrastiveLoss,
    CenterLoss,
    CosFaceLoss,
    CTripletLoss,
    L2SoftmaxLoss,
    ModifiedSoftmaxLoss,
    NormFaceLoss,
    SoftmaxLoss,
    SphereFaceLoss,
    normalized_softmax_lower_bound,
)
from ssl_sec.losses.transform import Rotation, SphericalFeatureTransform, rotation
from ssl_sec.losses.views import from_views

__all__ = [
    "AngularLoss",
    "ArcFaceLoss",
    "CContrastiveLoss",
    "CTripletLoss",
    "CenterLoss",
    "CombinedLoss",
    "ContrastiveLoss",
    "CosFaceLoss",
    "L2SoftmaxLoss",
    "LiftedStructureLoss",
    "Loss",
    "ModifiedSoftmaxLoss",
    "MultiSimilarityLoss",
    "NPairAngularLoss",
    "NPairLoss",
    "NTXentLoss",
    "NormFaceLoss",
    "NormalizedNPairLoss",
    "RankedListLoss",
    "Rotation",
    "SemihardTripletLoss",
    "SoftmaxLoss",
    "SphereFaceLoss",
    "SphericalConstraint",
    "SphericalFeatureTransform",
    "TripletLoss",
    "from_views",
    "normalized_softmax_lower_bound",
    "rotation",
    "spherical_constraint",
]
