"""The encoders and heads as values of a run; each builds its module."""

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from ssl_sec.collectives import rank
from ssl_sec.effects import Content
from ssl_sec.errors import ConfigError, counted
from ssl_sec.networks import (
    Encoder,
    bn_inception,
    freeze_batch_norm,
    googlenet,
    heads,
    ir,
    light_cnn,
    load_head_weights,
    load_weights,
    published_googlenet,
    resnet,
    sphereface_net,
    timm_backbone,
)
from ssl_sec.networks.architecture import Architecture, OwnNetwork, TimmModel, TorchvisionGoogLeNet, TorchvisionResNet
from ssl_sec.networks.backbones.bn_inception import CAFFE_MEAN, CAFFE_STD
from ssl_sec.networks.backbones.face_maps import FACE_MEAN, FACE_STD
from ssl_sec.networks.backbones.googlenet import GOOGLENET_MEAN, GOOGLENET_STD
from ssl_sec.networks.backbones.ir import IRName
from ssl_sec.networks.backbones.timm import timm_arguments, timm_scaling
from ssl_sec.networks.heads import Dim
from ssl_sec.networks.memory import check_memory
from ssl_sec.rules import NotEmpty, Range, check
from ssl_sec.settings import Declared, Settings, declare_settings

logger = logging.getLogger("ssl_sec")

# Of the weights of torchvision's ResNets.
IMAGENET_SCALING = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Width = Annotated[float, Range(gt=0, le=64)]
Mean = Annotated[tuple[Annotated[float, Range(ge=-1000, le=1000)], ...], NotEmpty()]
Std = Annotated[tuple[Annotated[float, Range(ge=1e-6, le=1000)], ...], NotEmpty()]


@dataclass(frozen=True, kw_only=True)
class _EncoderConfig(Settings, key="encoder"):
    """The options of every encoder.

    Attributes:
        weights: a .safetensors file or a state dict with the backbone's initial weights; None for random weights.
        mean: subtracted from the pixels, which are in [0, 1]: one value, or one for each channel. None takes the mean
            that the encoder's published weights expect, or 0 if there are none.
        std: the pixels are then divided by it, > 0; None takes the one that the published weights expect, or 1 if there
            are none.
        freeze_batch_norm: whether the backbone's batch norms keep their initial statistics and weights.
    """

    weights: Content | None = None
    mean: Mean | None = (0.0,)
    std: Std | None = (1.0,)
    freeze_batch_norm: bool = False

    def build(self, num_channels: int, image_size_px: int) -> Encoder:
        """The encoder for images of one size, with its initial weights."""
        mean, std = self._published_scaling()
        mean, std = mean if self.mean is None else self.mean, std if self.std is None else self.std
        for key, values in (("encoder.mean", mean), ("encoder.std", std)):
            check(
                len(values) in (1, num_channels),
                key,
                values,
                f"one value, or one for each of {counted(num_channels, 'channel')}",
            )
        backbone, num_features = self._backbone(num_channels, image_size_px)
        if self.weights is not None:
            is_published = load_weights(backbone, Path(self.weights).expanduser())
            if is_published and (mean, std) == ((0.0,), (1.0,)) and (usual := self._usual_scaling()) and rank() == 0:
                logger.warning(
                    "encoder.weights: the pixels stay in [0, 1]; published weights of this network usually expect "
                    "encoder.mean=[%s] encoder.std=[%s]",
                    *(",".join(f"{value:g}" for value in values) for values in usual),
                )
        if self.freeze_batch_norm:
            has_some = any(isinstance(module, _BatchNorm) for module in backbone.modules())
            check(has_some, "encoder.freeze_batch_norm", True, "false: the encoder has no batch norm")
            check(self.has_weights, "encoder.freeze_batch_norm", True, "together with encoder.weights=<file>")
            backbone = freeze_batch_norm(backbone)
        return Encoder(backbone, num_features, mean, std, num_channels)

    @abstractmethod
    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """The backbone, as other libraries build it."""

    @property
    def has_weights(self) -> bool:
        """Whether the initial weights are trained."""
        return self.weights is not None

    def _published_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation that the published weights expect: the defaults; 0 and 1 if there are none."""
        return type(self).mean or (0.0,), type(self).std or (1.0,)

    def _usual_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and standard deviation that weights published elsewhere usually expect; None if nothing is known."""
        return None

    @abstractmethod
    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]: ...


@dataclass(frozen=True, kw_only=True)
class _WidthConfig(_EncoderConfig):
    """The options of encoders whose layers may be wider or narrower than the published ones.

    Attributes:
        width: width of the layers divided by that of the published ones.
    """

    width: Width = 1.0

    def build(self, num_channels: int, image_size_px: int) -> Encoder:
        """The encoder for images of one size, with its initial weights."""
        with torch.device("meta"):
            backbone, _ = self._backbone(num_channels, image_size_px)
        check_memory("encoder.width", self.width, backbone)
        return super().build(num_channels, image_size_px)


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(_WidthConfig):
    """A ResNet of 18, 34 or 50 layers; stem cifar or imagenet; width multiplies every layer's channels.

    Attributes:
        stem: "cifar", a 3 x 3 convolution of stride 1 for small images, or "imagenet", one of 7 x 7 with pooling.
    """

    name: Literal["resnet18", "resnet34", "resnet50"]
    stem: Literal["cifar", "imagenet"] = "cifar"

    @property
    def _depth(self) -> int:
        return int(self.name.removeprefix("resnet"))

    def _usual_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        return IMAGENET_SCALING if self.stem == "imagenet" else None

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """The ResNet, as torchvision builds it."""
        return TorchvisionResNet(depth=self._depth, stem=self.stem, width=self.width, num_channels=num_channels)

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return resnet(self._depth, self.stem, self.width, num_channels)


@dataclass(frozen=True, kw_only=True)
class BNInceptionConfig(_EncoderConfig):
    """BN-Inception; published ImageNet weights: bn_inception-52deb4733.pth."""

    name: Literal["bn_inception"] = "bn_inception"
    mean: Mean | None = CAFFE_MEAN
    std: Std | None = CAFFE_STD

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """A network that no other library builds."""
        return OwnNetwork(title="BN-Inception")

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return bn_inception(num_channels, image_size_px)


@dataclass(frozen=True, kw_only=True)
class GoogLeNetConfig(_EncoderConfig):
    """GoogLeNet, torchvision's or the published one; torchvision's ImageNet weights: googlenet-1378be20.pth.

    Attributes:
        variant: "torchvision", with batch norm and 3 x 3 convolutions in place of 5 x 5, or "published", without batch
            norm and with 5 x 5 ones, for which torchvision has no weights.
    """

    name: Literal["googlenet"] = "googlenet"
    variant: Literal["torchvision", "published"] = "torchvision"
    mean: Mean | None = GOOGLENET_MEAN
    std: Std | None = GOOGLENET_STD

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant == "published":
            allowed = "false: the published GoogLeNet has no batch norm"
            check(not self.freeze_batch_norm, "encoder.freeze_batch_norm", self.freeze_batch_norm, allowed)

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """The GoogLeNet, as torchvision builds it, or a network that no installed library builds."""
        if self.variant == "published":
            return OwnNetwork(title="GoogLeNet without batch norm")
        return TorchvisionGoogLeNet(num_channels=num_channels)

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        build = published_googlenet if self.variant == "published" else googlenet
        return build(num_channels, image_size_px)


@dataclass(frozen=True, kw_only=True)
class IRConfig(_WidthConfig):
    """An IR network of ArcFace for aligned faces of 112 x 112; se_ir50 is SEC's SE-ResNet50E-IR.

    Attributes:
        weights: a file with the backbone's initial weights: InsightFace's iresnet, whose std is 0.5 and whose head is
            head=fc_bn, or one of ours; None for random weights.
    """

    name: IRName
    mean: Mean | None = FACE_MEAN
    std: Std | None = FACE_STD

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """A network that no installed library builds."""
        kind, _, depth = self.name.upper().partition("IR")
        return OwnNetwork(title=f"{kind.replace('_', '-')}IR-{depth} of ArcFace, width {self.width:g}")

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return ir(self.name, self.width, num_channels, image_size_px)


@dataclass(frozen=True, kw_only=True)
class SphereFaceNetConfig(_WidthConfig):
    """SphereFace's residual CNN without batch norm.

    Attributes:
        units: numbers of residual units of the four stages, each ≥ 0; [3, 4, 6, 3] is SFT's network, 37 layers,
            [1, 1, 1, 1] that of its Table 5.
    """

    name: Literal["sphereface_net"] = "sphereface_net"
    units: tuple[Annotated[int, Range(ge=0, le=1000)], ...] = (3, 4, 6, 3)
    mean: Mean | None = FACE_MEAN
    std: Std | None = FACE_STD

    def __post_init__(self) -> None:
        super().__post_init__()
        check(len(self.units) == 4, "encoder.units", list(self.units), "four numbers ≥ 0")
        check(not self.freeze_batch_norm, "encoder.freeze_batch_norm", True, "false: sphereface_net has no batch norm")

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """A network that no installed library builds."""
        return OwnNetwork(title=f"SphereFace's CNN of {list(self.units)} residual units, width {self.width:g}")

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return sphereface_net(self.units, self.width, num_channels, image_size_px)


@dataclass(frozen=True, kw_only=True)
class LightCNNConfig(_WidthConfig):
    """Light CNN-9 of Wu et al. 2015 without batch norm, published for grey images of 128 pixels and head=maxout."""

    name: Literal["light_cnn"] = "light_cnn"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(not self.freeze_batch_norm, "encoder.freeze_batch_norm", True, "false: light_cnn has no batch norm")

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """A network that no installed library builds."""
        return OwnNetwork(title=f"Light CNN-9, width {self.width:g}")

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return light_cnn(self.width, num_channels, image_size_px)


@dataclass(frozen=True, kw_only=True)
class PixelsConfig(_EncoderConfig):
    """The pixels themselves, a baseline for encoders; with head=identity and epochs=0."""

    name: Literal["pixels"] = "pixels"
    mean: Mean | None = FACE_MEAN
    std: Std | None = FACE_STD

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """A network without weights."""
        return OwnNetwork(title="the pixels")

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return nn.Flatten(), num_channels * image_size_px**2


@dataclass(frozen=True, kw_only=True)
class TimmConfig(_EncoderConfig):
    """Any timm model: encoder=timm encoder.model=<name>.

    Attributes:
        model: timm's name of the model, with the tag of its weights after a point or without.
        pretrained: whether timm downloads its weights, unless `weights` are given.
    """

    name: Literal["timm"] = "timm"
    model: str
    pretrained: bool = False
    mean: Mean | None = None
    std: Std | None = None

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """The timm model."""
        return TimmModel(model=self.model, arguments=timm_arguments(self.model, num_channels, image_size_px))

    @property
    def has_weights(self) -> bool:
        """As for every encoder, or those that timm downloads."""
        return self.pretrained or super().has_weights

    def _published_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return timm_scaling(self.model) if self.pretrained else ((0.0,), (1.0,))

    def _usual_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        with contextlib.suppress(ConfigError):  # a model without published weights
            return timm_scaling(self.model)
        return None

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return timm_backbone(self.model, self.pretrained and self.weights is None, num_channels, image_size_px)


EncoderConfig = (
    ResNetConfig
    | BNInceptionConfig
    | GoogLeNetConfig
    | IRConfig
    | SphereFaceNetConfig
    | LightCNNConfig
    | PixelsConfig
    | TimmConfig
)


@dataclass(frozen=True, kw_only=True)
class _HeadConfig(Declared, key="head"):
    """The options of every head.

    Attributes:
        weights: a file with the head's initial weights: a head that a run saved, or, for fc_bn, weights of
            InsightFace's iresnet.
    """

    dim: Dim
    weights: Content | None = None

    def build(self, num_features: int, seed: int) -> nn.Module:
        """The head for an encoder's features, with its initial weights; the seed is that of its dropout."""
        with torch.device("meta"):
            check_memory("head.dim", self.dim, self._construct(num_features=num_features, seed=seed))
        head = self._construct(num_features=num_features, seed=seed)
        if self.weights is not None:
            load_head_weights(head, Path(self.weights).expanduser())
        return head


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(_HeadConfig):
    """A linear classifier of the data's classes.

    Attributes:
        dim: number of classes; None for those of the data.
        weights: a file with the classifier's initial weights, as a run saved it.
        initial: the initial weights without a file: zeros, or normal with a standard deviation of 0.01.
    """

    component = heads.LinearClassifier
    name: Literal["classifier"] = "classifier"  # pyright: ignore[reportIncompatibleVariableOverride]
    dim: Dim | None = None  # pyright: ignore[reportIncompatibleVariableOverride]  # before the data is opened
    initial: Literal["zeros", "normal"] = "zeros"


HEADS: Mapping[str, type[nn.Module]] = {
    "mlp": heads.ProjectionHead,
    "bn_fc": heads.BatchNormLinearHead,
    "fc": heads.LinearHead,
    "fc_bn": heads.LinearBatchNormHead,
    "maxout": heads.MaxoutHead,
    "identity": heads.IdentityHead,
}
HEAD_CONFIGS: Mapping[str, type[Any]] = {
    name: declare_settings(head, name, _HeadConfig, ("num_features", "seed")) for name, head in HEADS.items()
}
if TYPE_CHECKING:
    HeadConfig = _HeadConfig
else:
    HeadConfig = Union[tuple(HEAD_CONFIGS.values())]  # noqa: UP007
