"""Contrastive self-supervision with the Spherical Embedding Constraint, on one machine or a cluster.

The names below are imported when they are first used, so that `import ssl_sec` itself is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from ssl_sec.data.folders import open_folder as open_folder
    from ssl_sec.data.image_set import ImageSet as ImageSet
    from ssl_sec.data.parquet.opening import open_parquet as open_parquet
    from ssl_sec.data.standard_sets import open_cifar10 as open_cifar10
    from ssl_sec.data.standard_sets import open_cifar100 as open_cifar100
    from ssl_sec.data.standard_sets import open_digits as open_digits
    from ssl_sec.edges.folder.encoder import load_encoder as load_encoder
    from ssl_sec.evaluation.features import extract_features as extract_features
    from ssl_sec.evaluation.knn import knn_top1 as knn_top1
    from ssl_sec.evaluation.linear_probe import linear_probe as linear_probe
    from ssl_sec.evaluation.retrieval import recall_at_k as recall_at_k
    from ssl_sec.losses import AngularHingeLoss as AngularHingeLoss
    from ssl_sec.losses import AngularLoss as AngularLoss
    from ssl_sec.losses import ArcFaceLoss as ArcFaceLoss
    from ssl_sec.losses import BYOLLoss as BYOLLoss
    from ssl_sec.losses import CContrastiveLoss as CContrastiveLoss
    from ssl_sec.losses import CenterLoss as CenterLoss
    from ssl_sec.losses import CombinedLoss as CombinedLoss
    from ssl_sec.losses import ContrastiveLoss as ContrastiveLoss
    from ssl_sec.losses import CosFaceLoss as CosFaceLoss
    from ssl_sec.losses import CrossEntropyLoss as CrossEntropyLoss
    from ssl_sec.losses import CTripletLoss as CTripletLoss
    from ssl_sec.losses import DCLLoss as DCLLoss
    from ssl_sec.losses import DisjointTripletLoss as DisjointTripletLoss
    from ssl_sec.losses import L2SoftmaxLoss as L2SoftmaxLoss
    from ssl_sec.losses import LiftedStructureLoss as LiftedStructureLoss
    from ssl_sec.losses import Loss as Loss
    from ssl_sec.losses import MoCoV3Loss as MoCoV3Loss
    from ssl_sec.losses import ModifiedSoftmaxLoss as ModifiedSoftmaxLoss
    from ssl_sec.losses import MultiSimilarityLoss as MultiSimilarityLoss
    from ssl_sec.losses import NormalizedNPairLoss as NormalizedNPairLoss
    from ssl_sec.losses import NormFaceLoss as NormFaceLoss
    from ssl_sec.losses import NPairAngularLoss as NPairAngularLoss
    from ssl_sec.losses import NPairLoss as NPairLoss
    from ssl_sec.losses import NTXentLoss as NTXentLoss
    from ssl_sec.losses import RankedListLoss as RankedListLoss
    from ssl_sec.losses import SemihardTripletLoss as SemihardTripletLoss
    from ssl_sec.losses import SoftmaxLoss as SoftmaxLoss
    from ssl_sec.losses import SphereFaceLoss as SphereFaceLoss
    from ssl_sec.losses import SphericalConstraint as SphericalConstraint
    from ssl_sec.losses import SphericalFeatureTransform as SphericalFeatureTransform
    from ssl_sec.losses import SupConLoss as SupConLoss
    from ssl_sec.losses import TeacherLoss as TeacherLoss
    from ssl_sec.losses import TripletLoss as TripletLoss
    from ssl_sec.losses import from_views as from_views
    from ssl_sec.networks import Encoder as Encoder
    from ssl_sec.networks import load_weights as load_weights
    from ssl_sec.networks import resnet as resnet
    from ssl_sec.networks import save_weights as save_weights
    from ssl_sec.networks import timm_backbone as timm_backbone
    from ssl_sec.training.objective import Objective as Objective
    from ssl_sec.training.objective import Terms as Terms
    from ssl_sec.training.schedules import CappedRamp as CappedRamp
    from ssl_sec.training.schedules import Constant as Constant
    from ssl_sec.training.schedules import FaceRamp as FaceRamp
    from ssl_sec.training.schedules import LinearRamp as LinearRamp

_HOMES = {
    "ssl_sec.data.folders": "open_folder",
    "ssl_sec.data.image_set": "ImageSet",
    "ssl_sec.data.parquet.opening": "open_parquet",
    "ssl_sec.data.standard_sets": "open_cifar10 open_cifar100 open_digits",
    "ssl_sec.edges.folder.encoder": "load_encoder",
    "ssl_sec.evaluation.features": "extract_features",
    "ssl_sec.evaluation.knn": "knn_top1",
    "ssl_sec.evaluation.linear_probe": "linear_probe",
    "ssl_sec.evaluation.retrieval": "recall_at_k",
    "ssl_sec.losses": """
        AngularHingeLoss AngularLoss ArcFaceLoss BYOLLoss CContrastiveLoss CenterLoss CombinedLoss
        ContrastiveLoss CosFaceLoss CrossEntropyLoss CTripletLoss DCLLoss DisjointTripletLoss L2SoftmaxLoss
        LiftedStructureLoss Loss MoCoV3Loss ModifiedSoftmaxLoss MultiSimilarityLoss NormalizedNPairLoss
        NormFaceLoss NPairAngularLoss NPairLoss NTXentLoss RankedListLoss SemihardTripletLoss SoftmaxLoss
        SphereFaceLoss SphericalConstraint SphericalFeatureTransform SupConLoss TeacherLoss TripletLoss
        from_views
    """,
    "ssl_sec.networks": "Encoder load_weights resnet save_weights timm_backbone",
    "ssl_sec.training.objective": "Objective Terms",
    "ssl_sec.training.schedules": "CappedRamp Constant FaceRamp LinearRamp",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *_HOME_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
