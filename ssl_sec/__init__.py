"""Contrastive self-supervision with the Spherical Embedding Constraint, on one machine or a cluster.

The names below are imported when they are first used, so that `import ssl_sec` itself is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from ssl_sec.data.folders import open_folder
    from ssl_sec.data.image_set import ImageSet
    from ssl_sec.data.parquet.opening import open_parquet
    from ssl_sec.data.standard_sets import open_cifar10, open_cifar100, open_digits
    from ssl_sec.edges.folder.encoder import load_encoder
    from ssl_sec.evaluation.features import extract_features
    from ssl_sec.evaluation.knn import knn_top1
    from ssl_sec.evaluation.linear_probe import linear_probe
    from ssl_sec.evaluation.retrieval import recall_at_k
    from ssl_sec.losses import (
        AngularHingeLoss,
        AngularLoss,
        ArcFaceLoss,
        BYOLLoss,
        CContrastiveLoss,
        CenterLoss,
        CombinedLoss,
        ContrastiveLoss,
        CosFaceLoss,
        CrossEntropyLoss,
        CTripletLoss,
        DCLLoss,
        DisjointTripletLoss,
        L2SoftmaxLoss,
        LiftedStructureLoss,
        Loss,
        MoCoV3Loss,
        ModifiedSoftmaxLoss,
        MultiSimilarityLoss,
        NormalizedNPairLoss,
        NormFaceLoss,
        NPairAngularLoss,
        NPairLoss,
        NTXentLoss,
        RankedListLoss,
        SemihardTripletLoss,
        SoftmaxLoss,
        SphereFaceLoss,
        SphericalConstraint,
        SphericalFeatureTransform,
        SupConLoss,
        TeacherLoss,
        TripletLoss,
        from_views,
    )
    from ssl_sec.networks import Encoder, load_weights, resnet, save_weights, timm_backbone
    from ssl_sec.training.objective import Objective, Terms
    from ssl_sec.training.schedules import CappedRamp, Constant, FaceRamp, LinearRamp

_HOMES = {
    "ssl_sec.data.image_set": ("ImageSet",),
    "ssl_sec.data.folders": ("open_folder",),
    "ssl_sec.data.parquet.opening": ("open_parquet",),
    "ssl_sec.data.standard_sets": ("open_cifar10", "open_cifar100", "open_digits"),
    "ssl_sec.edges.folder.encoder": ("load_encoder",),
    "ssl_sec.networks": ("Encoder", "load_weights", "resnet", "save_weights", "timm_backbone"),
    "ssl_sec.evaluation.features": ("extract_features",),
    "ssl_sec.evaluation.knn": ("knn_top1",),
    "ssl_sec.evaluation.linear_probe": ("linear_probe",),
    "ssl_sec.evaluation.retrieval": ("recall_at_k",),
    "ssl_sec.losses": (
        *(
            "AngularHingeLoss",
            "AngularLoss",
            "ArcFaceLoss",
            "BYOLLoss",
            "CContrastiveLoss",
            "CTripletLoss",
            "CenterLoss",
        ),
        *("CombinedLoss", "ContrastiveLoss", "CosFaceLoss", "CrossEntropyLoss"),
        *("DCLLoss", "DisjointTripletLoss", "L2SoftmaxLoss"),
        *(
            "LiftedStructureLoss",
            "Loss",
            "MoCoV3Loss",
            "ModifiedSoftmaxLoss",
            "MultiSimilarityLoss",
            "NPairAngularLoss",
            "NPairLoss",
        ),
        *("NTXentLoss", "NormFaceLoss", "NormalizedNPairLoss"),
        *("RankedListLoss", "SemihardTripletLoss", "SoftmaxLoss", "SphereFaceLoss", "SphericalConstraint"),
        *("SphericalFeatureTransform", "SupConLoss", "TeacherLoss", "TripletLoss"),
        "from_views",
    ),
    "ssl_sec.training.objective": ("Objective", "Terms"),
    "ssl_sec.training.schedules": ("CappedRamp", "Constant", "FaceRamp", "LinearRamp"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AngularHingeLoss",
    "AngularLoss",
    "ArcFaceLoss",
    "BYOLLoss",
    "CContrastiveLoss",
    "CTripletLoss",
    "CappedRamp",
    "CenterLoss",
    "CombinedLoss",
    "Constant",
    "ContrastiveLoss",
    "CosFaceLoss",
    "CrossEntropyLoss",
    "DCLLoss",
    "DisjointTripletLoss",
    "Encoder",
    "FaceRamp",
    "ImageSet",
    "L2SoftmaxLoss",
    "LiftedStructureLoss",
    "LinearRamp",
    "Loss",
    "ModifiedSoftmaxLoss",
    "MoCoV3Loss",
    "MultiSimilarityLoss",
    "NPairAngularLoss",
    "NPairLoss",
    "NTXentLoss",
    "NormFaceLoss",
    "NormalizedNPairLoss",
    "Objective",
    "RankedListLoss",
    "SemihardTripletLoss",
    "SoftmaxLoss",
    "SphereFaceLoss",
    "SphericalConstraint",
    "SphericalFeatureTransform",
    "SupConLoss",
    "TeacherLoss",
    "Terms",
    "TripletLoss",
    "__version__",
    "extract_features",
    "from_views",
    "knn_top1",
    "linear_probe",
    "load_encoder",
    "load_weights",
    "open_cifar10",
    "open_cifar100",
    "open_digits",
    "open_folder",
    "open_parquet",
    "recall_at_k",
    "resnet",
    "save_weights",
    "timm_backbone",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
