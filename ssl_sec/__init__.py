"""Contrastive self-supervision with the Spherical Embedding Constraint, on one machine or a cluster.

The names below are imported when they are first used, so that `import ssl_sec` itself is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from ssl_sec.augment.views import FlipAugmentation as FlipAugmentation
    from ssl_sec.augment.views import SimCLRAugmentation as SimCLRAugmentation
    from ssl_sec.batch import Batch as Batch
    from ssl_sec.data.decode import Decoding as Decoding
    from ssl_sec.data.folders.opening import open_folder as open_folder
    from ssl_sec.data.image_set import ImageSet as ImageSet
    from ssl_sec.data.parquet.columns import Columns as Columns
    from ssl_sec.data.parquet.opening import open_parquet as open_parquet
    from ssl_sec.data.shards.gallery import QueriesAndGallery as QueriesAndGallery
    from ssl_sec.data.shards.opening import open_webdataset as open_webdataset
    from ssl_sec.data.standard_sets import open_cifar10 as open_cifar10
    from ssl_sec.data.standard_sets import open_cifar100 as open_cifar100
    from ssl_sec.data.standard_sets import open_digits as open_digits
    from ssl_sec.data.standard_sets import open_mnist as open_mnist
    from ssl_sec.edges.folder.encoder import TrainedNetwork as TrainedNetwork
    from ssl_sec.edges.folder.encoder import load_embedder as load_embedder
    from ssl_sec.edges.folder.encoder import load_encoder as load_encoder
    from ssl_sec.edges.folder.encoder import load_network as load_network
    from ssl_sec.edges.run.summary import Finished as Finished
    from ssl_sec.edges.run.train import train as train
    from ssl_sec.errors import ConfigError as ConfigError
    from ssl_sec.errors import DataError as DataError
    from ssl_sec.errors import MissingDataError as MissingDataError
    from ssl_sec.errors import Stopped as Stopped
    from ssl_sec.errors import StorageError as StorageError
    from ssl_sec.errors import UserError as UserError
    from ssl_sec.evaluation.classification.knn import knn_top1 as knn_top1
    from ssl_sec.evaluation.classification.linear_probe import ProbeResult as ProbeResult
    from ssl_sec.evaluation.classification.linear_probe import linear_probe as linear_probe
    from ssl_sec.evaluation.clustering import kmeans_assignments as kmeans_assignments
    from ssl_sec.evaluation.clustering import nmi_f1 as nmi_f1
    from ssl_sec.evaluation.config import ProbeConfig as ProbeConfig
    from ssl_sec.evaluation.faces.roc import ROC as ROC
    from ssl_sec.evaluation.faces.roc import equal_error_rate as equal_error_rate
    from ssl_sec.evaluation.faces.roc import roc as roc
    from ssl_sec.evaluation.faces.roc import tar_at_far as tar_at_far
    from ssl_sec.evaluation.faces.roc import thresholds_at_far as thresholds_at_far
    from ssl_sec.evaluation.faces.verification import FoldedAccuracy as FoldedAccuracy
    from ssl_sec.evaluation.faces.verification import kfold_accuracy as kfold_accuracy
    from ssl_sec.evaluation.faces.verification import kfold_accuracy_of_scores as kfold_accuracy_of_scores
    from ssl_sec.evaluation.features import extract_features as extract_features
    from ssl_sec.evaluation.rank import alpha_req as alpha_req
    from ssl_sec.evaluation.rank import rankme as rankme
    from ssl_sec.evaluation.retrieval import RPrecision as RPrecision
    from ssl_sec.evaluation.retrieval import nearest as nearest
    from ssl_sec.evaluation.retrieval import precision_at_r as precision_at_r
    from ssl_sec.evaluation.retrieval import recall_at_k as recall_at_k
    from ssl_sec.evaluation.uniformity import alignment as alignment
    from ssl_sec.evaluation.uniformity import uniformity as uniformity
    from ssl_sec.losses import AdaFaceLoss as AdaFaceLoss
    from ssl_sec.losses import AngularHingeLoss as AngularHingeLoss
    from ssl_sec.losses import AngularLoss as AngularLoss
    from ssl_sec.losses import ArcFaceLoss as ArcFaceLoss
    from ssl_sec.losses import BYOLLoss as BYOLLoss
    from ssl_sec.losses import CContrastiveLoss as CContrastiveLoss
    from ssl_sec.losses import CenterLoss as CenterLoss
    from ssl_sec.losses import CircleLoss as CircleLoss
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
    from ssl_sec.losses import MagFaceLoss as MagFaceLoss
    from ssl_sec.losses import MoCoV3Loss as MoCoV3Loss
    from ssl_sec.losses import ModifiedSoftmaxLoss as ModifiedSoftmaxLoss
    from ssl_sec.losses import MultiSimilarityLoss as MultiSimilarityLoss
    from ssl_sec.losses import NormalizedNPairLoss as NormalizedNPairLoss
    from ssl_sec.losses import NormFaceLoss as NormFaceLoss
    from ssl_sec.losses import NPairAngularLoss as NPairAngularLoss
    from ssl_sec.losses import NPairLoss as NPairLoss
    from ssl_sec.losses import NTXentLoss as NTXentLoss
    from ssl_sec.losses import ProxyAnchorLoss as ProxyAnchorLoss
    from ssl_sec.losses import RankedListLoss as RankedListLoss
    from ssl_sec.losses import Rotation as Rotation
    from ssl_sec.losses import SemihardTripletLoss as SemihardTripletLoss
    from ssl_sec.losses import SoftmaxLoss as SoftmaxLoss
    from ssl_sec.losses import SphereFaceLoss as SphereFaceLoss
    from ssl_sec.losses import SphericalConstraint as SphericalConstraint
    from ssl_sec.losses import SphericalFeatureTransform as SphericalFeatureTransform
    from ssl_sec.losses import SupConLoss as SupConLoss
    from ssl_sec.losses import TeacherLoss as TeacherLoss
    from ssl_sec.losses import TripletLoss as TripletLoss
    from ssl_sec.losses import from_views as from_views
    from ssl_sec.losses import normalized_softmax_lower_bound as normalized_softmax_lower_bound
    from ssl_sec.losses import rotation as rotation
    from ssl_sec.losses import spherical_constraint as spherical_constraint
    from ssl_sec.losses.generators.base import GlobalBatch as GlobalBatch
    from ssl_sec.losses.generators.base import RatedLayers as RatedLayers
    from ssl_sec.losses.generators.base import RowGenerator as RowGenerator
    from ssl_sec.losses.generators.base import Shares as Shares
    from ssl_sec.losses.generators.dvml import VariationalSynthesis as VariationalSynthesis
    from ssl_sec.losses.generators.hdml import HardnessAwareSynthesis as HardnessAwareSynthesis
    from ssl_sec.losses.generators.memory import CrossBatchMemory as CrossBatchMemory
    from ssl_sec.losses.geometry import grad_scale as grad_scale
    from ssl_sec.networks import Embedded as Embedded
    from ssl_sec.networks import Encoder as Encoder
    from ssl_sec.networks import Network as Network
    from ssl_sec.networks import bn_inception as bn_inception
    from ssl_sec.networks import freeze_batch_norm as freeze_batch_norm
    from ssl_sec.networks import googlenet as googlenet
    from ssl_sec.networks import ir as ir
    from ssl_sec.networks import light_cnn as light_cnn
    from ssl_sec.networks import load_head_weights as load_head_weights
    from ssl_sec.networks import load_weights as load_weights
    from ssl_sec.networks import published_googlenet as published_googlenet
    from ssl_sec.networks import resnet as resnet
    from ssl_sec.networks import save_weights as save_weights
    from ssl_sec.networks import sphereface_net as sphereface_net
    from ssl_sec.networks import timm_backbone as timm_backbone
    from ssl_sec.networks.batch_norm import GlobalBatchNorm as GlobalBatchNorm
    from ssl_sec.networks.batch_norm import globalise_batch_norm as globalise_batch_norm
    from ssl_sec.networks.heads import BatchNormLinearHead as BatchNormLinearHead
    from ssl_sec.networks.heads import IdentityHead as IdentityHead
    from ssl_sec.networks.heads import LinearBatchNormHead as LinearBatchNormHead
    from ssl_sec.networks.heads import LinearClassifier as LinearClassifier
    from ssl_sec.networks.heads import LinearHead as LinearHead
    from ssl_sec.networks.heads import MaxoutHead as MaxoutHead
    from ssl_sec.networks.heads import PredictionHead as PredictionHead
    from ssl_sec.networks.heads import ProjectionHead as ProjectionHead
    from ssl_sec.networks.initialisation import cut_ as cut_
    from ssl_sec.training.objective import Objective as Objective
    from ssl_sec.training.objective import Terms as Terms
    from ssl_sec.training.optimisers.clipping import clip_gradients as clip_gradients
    from ssl_sec.training.optimisers.groups import lars as lars
    from ssl_sec.training.optimisers.groups import parameter_groups as parameter_groups
    from ssl_sec.training.optimisers.groups import set_learning_rate as set_learning_rate
    from ssl_sec.training.schedules import CappedRamp as CappedRamp
    from ssl_sec.training.schedules import Constant as Constant
    from ssl_sec.training.schedules import Cosine as Cosine
    from ssl_sec.training.schedules import FaceRamp as FaceRamp
    from ssl_sec.training.schedules import LinearRamp as LinearRamp
    from ssl_sec.training.schedules import Polynomial as Polynomial
    from ssl_sec.training.schedules import StepDecay as StepDecay
    from ssl_sec.training.schedules import TeacherMomentum as TeacherMomentum

_HOMES = {
    "ssl_sec.augment.views": "FlipAugmentation SimCLRAugmentation",
    "ssl_sec.batch": "Batch",
    "ssl_sec.data.decode": "Decoding",
    "ssl_sec.data.folders.opening": "open_folder",
    "ssl_sec.data.image_set": "ImageSet",
    "ssl_sec.data.parquet.columns": "Columns",
    "ssl_sec.data.parquet.opening": "open_parquet",
    "ssl_sec.data.shards.gallery": "QueriesAndGallery",
    "ssl_sec.data.shards.opening": "open_webdataset",
    "ssl_sec.data.standard_sets": "open_cifar10 open_cifar100 open_digits open_mnist",
    "ssl_sec.edges.folder.encoder": "TrainedNetwork load_embedder load_encoder load_network",
    "ssl_sec.edges.run.summary": "Finished",
    "ssl_sec.edges.run.train": "train",
    "ssl_sec.errors": "ConfigError DataError MissingDataError Stopped StorageError UserError",
    "ssl_sec.evaluation.clustering": "kmeans_assignments nmi_f1",
    "ssl_sec.evaluation.config": "ProbeConfig",
    "ssl_sec.evaluation.faces.roc": "ROC equal_error_rate roc tar_at_far thresholds_at_far",
    "ssl_sec.evaluation.faces.verification": "FoldedAccuracy kfold_accuracy kfold_accuracy_of_scores",
    "ssl_sec.evaluation.features": "extract_features",
    "ssl_sec.evaluation.classification.knn": "knn_top1",
    "ssl_sec.evaluation.classification.linear_probe": "ProbeResult linear_probe",
    "ssl_sec.evaluation.rank": "alpha_req rankme",
    "ssl_sec.evaluation.retrieval": "RPrecision nearest precision_at_r recall_at_k",
    "ssl_sec.evaluation.uniformity": "alignment uniformity",
    "ssl_sec.losses": """
        AdaFaceLoss AngularHingeLoss AngularLoss ArcFaceLoss BYOLLoss CContrastiveLoss CenterLoss CircleLoss
        CombinedLoss ContrastiveLoss CosFaceLoss CrossEntropyLoss CTripletLoss DCLLoss DisjointTripletLoss L2SoftmaxLoss
        LiftedStructureLoss Loss MagFaceLoss MoCoV3Loss ModifiedSoftmaxLoss MultiSimilarityLoss NormalizedNPairLoss
        NormFaceLoss NPairAngularLoss NPairLoss NTXentLoss ProxyAnchorLoss RankedListLoss Rotation SemihardTripletLoss
        SoftmaxLoss SphereFaceLoss SphericalConstraint SphericalFeatureTransform SupConLoss TeacherLoss
        TripletLoss from_views normalized_softmax_lower_bound rotation spherical_constraint
    """,
    "ssl_sec.losses.generators.base": "GlobalBatch RatedLayers RowGenerator Shares",
    "ssl_sec.losses.generators.dvml": "VariationalSynthesis",
    "ssl_sec.losses.generators.hdml": "HardnessAwareSynthesis",
    "ssl_sec.losses.generators.memory": "CrossBatchMemory",
    "ssl_sec.losses.geometry": "grad_scale",
    "ssl_sec.networks": """
        Embedded Encoder Network bn_inception freeze_batch_norm googlenet ir light_cnn load_head_weights
        load_weights published_googlenet resnet save_weights sphereface_net timm_backbone
    """,
    "ssl_sec.networks.batch_norm": "GlobalBatchNorm globalise_batch_norm",
    "ssl_sec.networks.heads": """
        BatchNormLinearHead IdentityHead LinearBatchNormHead LinearClassifier LinearHead MaxoutHead
        PredictionHead ProjectionHead
    """,
    "ssl_sec.networks.initialisation": "cut_",
    "ssl_sec.training.objective": "Objective Terms",
    "ssl_sec.training.optimisers.clipping": "clip_gradients",
    "ssl_sec.training.optimisers.groups": "lars parameter_groups set_learning_rate",
    "ssl_sec.training.schedules": "CappedRamp Constant Cosine FaceRamp LinearRamp Polynomial StepDecay TeacherMomentum",
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
