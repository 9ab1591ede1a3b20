"""The loss core: `loss(embeddings, labels) -> scalar`, on raw embeddings, for every recipe."""

from collections.abc import Mapping

from ssl_sec.losses.angular import AngularHingeLoss, AngularLoss, DisjointTripletLoss, NPairAngularLoss
from ssl_sec.losses.base import CombinedLoss, Loss, from_views
from ssl_sec.losses.contrastive import (
    BYOLLoss,
    ContrastiveLoss,
    DCLLoss,
    MoCoV3Loss,
    NTXentLoss,
    SupConLoss,
    TeacherLoss,
)
from ssl_sec.losses.pair import (
    CircleLoss,
    LiftedStructureLoss,
    MultiSimilarityLoss,
    NormalizedNPairLoss,
    NPairLoss,
    RankedListLoss,
    SemihardTripletLoss,
    TripletLoss,
)
from ssl_sec.losses.spherical import SphericalConstraint, spherical_constraint
from ssl_sec.losses.templates.center import CenterLoss
from ssl_sec.losses.templates.hinges import CContrastiveLoss, CTripletLoss
from ssl_sec.losses.templates.margins import ArcFaceLoss, CosFaceLoss, SphereFaceLoss
from ssl_sec.losses.templates.norm_margins import AdaFaceLoss, MagFaceLoss
from ssl_sec.losses.templates.proxy_anchor import ProxyAnchorLoss
from ssl_sec.losses.templates.softmax import (
    CrossEntropyLoss,
    L2SoftmaxLoss,
    ModifiedSoftmaxLoss,
    NormFaceLoss,
    SoftmaxLoss,
    normalized_softmax_lower_bound,
)
from ssl_sec.losses.transform import Rotation, SphericalFeatureTransform, rotation

# Losses by name in which rows of one label are positives of each other.
PAIR_LOSSES: Mapping[str, type[Loss]] = {
    "ntxent": NTXentLoss,
    "supcon": SupConLoss,
    "dcl": DCLLoss,
    "contrastive": ContrastiveLoss,
    "triplet": TripletLoss,
    "triplet_disjoint": DisjointTripletLoss,
    "semihard": SemihardTripletLoss,
    "npair_normalized": NormalizedNPairLoss,
    "npair": NPairLoss,
    "multi_similarity": MultiSimilarityLoss,
    "circle": CircleLoss,
    "lifted_structure": LiftedStructureLoss,
    "ranked_list": RankedListLoss,
    "angular": AngularLoss,
    "angular_hinge": AngularHingeLoss,
    "npair_angular": NPairAngularLoss,
}
# Losses by name whose value depends on the order of the rows of a label if they are more than two: a row is paired with
# the first of the others, or its place among them is taken for its view.
ORDERED_LOSSES = frozenset(
    {"angular", "angular_hinge", "mocov3", "npair", "npair_angular", "npair_normalized", "triplet_disjoint"}
)
# Losses by name with parameters or centres for each class of the data.
CLASS_LOSSES: Mapping[str, type[Loss]] = {
    "softmax": SoftmaxLoss,
    "l2softmax": L2SoftmaxLoss,
    "modified_softmax": ModifiedSoftmaxLoss,
    "normface": NormFaceLoss,
    "sphereface": SphereFaceLoss,
    "cosface": CosFaceLoss,
    "arcface": ArcFaceLoss,
    "magface": MagFaceLoss,
    "adaface": AdaFaceLoss,
    "c_contrastive": CContrastiveLoss,
    "c_triplet": CTripletLoss,
    "proxy_anchor": ProxyAnchorLoss,
    "center": CenterLoss,
}

__all__ = [
    "CLASS_LOSSES",
    "ORDERED_LOSSES",
    "PAIR_LOSSES",
    "AdaFaceLoss",
    "AngularHingeLoss",
    "AngularLoss",
    "ArcFaceLoss",
    "BYOLLoss",
    "CContrastiveLoss",
    "CTripletLoss",
    "CenterLoss",
    "CircleLoss",
    "CombinedLoss",
    "ContrastiveLoss",
    "CosFaceLoss",
    "CrossEntropyLoss",
    "DCLLoss",
    "DisjointTripletLoss",
    "L2SoftmaxLoss",
    "LiftedStructureLoss",
    "Loss",
    "MagFaceLoss",
    "MoCoV3Loss",
    "ModifiedSoftmaxLoss",
    "MultiSimilarityLoss",
    "NPairAngularLoss",
    "NPairLoss",
    "NTXentLoss",
    "NormFaceLoss",
    "NormalizedNPairLoss",
    "ProxyAnchorLoss",
    "RankedListLoss",
    "Rotation",
    "SemihardTripletLoss",
    "SoftmaxLoss",
    "SphereFaceLoss",
    "SphericalConstraint",
    "SphericalFeatureTransform",
    "SupConLoss",
    "TeacherLoss",
    "TripletLoss",
    "from_views",
    "normalized_softmax_lower_bound",
    "rotation",
    "spherical_constraint",
]
