"""What a run is: one frozen dataclass for each concept, which validates itself and builds its component.

The values come from `configs/`, composed by Hydra; nothing here looks a name up in the code.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ssl_sec.augment import (
    FusedSimCLRAugmentation,
    RetrievalAugmentation,
    SimCLRAugmentation,
    why_not_fused,
)
from ssl_sec.data.class_batches import ClassBatches, TripletBatches
from ssl_sec.data.class_splits import own_classes, require_disjoint, split_by_class
from ssl_sec.data.crops import CentreCrop, Crop, RandomResizedCrop
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.records import open_records
from ssl_sec.data.retrieval_sets import open_cars196, open_cub, open_inshop, open_sop
from ssl_sec.data.samplers import worker_counts, worker_rows
from ssl_sec.data.sources import (
    limit_images,
    open_cifar10,
    open_cifar100,
    open_digits,
    open_folder,
    open_parquet,
    parquet_class_names,
)
from ssl_sec.data.verification_sets import VerificationPairs, open_bin, open_lfw_pairs, open_pair_table
from ssl_sec.encoders import (
    Encoder,
    bn_inception,
    freeze_batch_norm,
    googlenet,
    ir,
    light_cnn,
    load_head_weights,
    load_weights,
    resnet,
    sphereface_net,
    timm_backbone,
)
from ssl_sec.encoders.architecture import (
    Architecture,
    OwnNetwork,
    TimmModel,
    TorchvisionGoogLeNet,
    TorchvisionResNet,
)
from ssl_sec.encoders.bn_inception import CAFFE_MEAN, CAFFE_STD
from ssl_sec.encoders.face_maps import FACE_MEAN, FACE_STD
from ssl_sec.encoders.googlenet import GOOGLENET_MEAN, GOOGLENET_STD
from ssl_sec.encoders.ir import IRName
from ssl_sec.encoders.timm import timm_arguments, timm_scaling
from ssl_sec.errors import ConfigError
from ssl_sec.exporting import FormatName
from ssl_sec.heads import BatchNormLinearHead, LinearBatchNormHead, LinearHead, MaxoutHead, ProjectionHead
from ssl_sec.loss_config import NoTransformConfig, PairLossConfig, TransformConfig
from ssl_sec.losses import SphericalConstraint
from ssl_sec.optimisers import ParameterGroup, adam, lars, parameter_groups, sgd
from ssl_sec.schedules import CappedRamp, Constant, Cosine, FaceRamp, LinearRamp, Schedule, StepDecay
from ssl_sec.settings import check
from ssl_sec.training import Precision

Split = Literal["train", "test"]

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class _DataConfig:
    """What every data set has.

    Attributes:
        max_images: train on a class-balanced subset of so many images, the same for every seed.
        num_train_classes: for metric learning, the first so many classes of the training split train and its others
            are the test set; None if the splits of the data set have classes of their own.
    """

    max_images: int | None = None
    num_train_classes: int | None = None

    def __post_init__(self) -> None:
        if self.max_images is not None:
            check(self.max_images > 0, "data.max_images", self.max_images, "> 0")
        if self.num_train_classes is not None:
            check(self.num_train_classes > 0, "data.num_train_classes", self.num_train_classes, "> 0")

    def open(self, split: Split) -> ImageSet:
        """Opens one split; the subset is of the training split only."""
        return self._limited(self._open(split, None), split)

    def open_by_class(self, split: Split, crop: Crop) -> ImageSet:
        """Opens one of two splits without common classes, each with labels of its own, 0, 1, ….

        Args:
            split: which part; the subset is of the training split only.
            crop: what is cut out of each image, where the images have no common size.

        Raises:
            ConfigError: `num_train_classes` is missing, or leaves a split without classes.
            DataError: the splits have classes in common, or as the data set's opener says.
        """
        if self.num_train_classes is None:
            image_set = self._open_own_classes(split, crop)
        else:
            image_set = split_by_class(self._open("train", crop), self.num_train_classes, split)
        return self._limited(image_set, split)

    def _limited(self, image_set: ImageSet, split: Split) -> ImageSet:
        if self.max_images is None or split == "test" or self.max_images >= len(image_set):
            return image_set
        return limit_images(image_set, self.max_images, seed=0)

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        raise AssertionError("each data set opens itself")

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        raise ConfigError("data.num_train_classes: found None, must be given: both splits have the same classes")


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(_DataConfig):
    """scikit-learn's 1,797 digits: real, grey, 8x8, always there."""

    name: Literal["digits"] = "digits"

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        return open_digits(split)


@dataclass(frozen=True, kw_only=True)
class CIFARConfig(_DataConfig):
    """CIFAR-10 or CIFAR-100 by torchvision.

    Attributes:
        root: the folder that holds torchvision's files.
        download: whether to fetch them if they are not there.
    """

    name: Literal["cifar10", "cifar100"]
    root: str = "data"
    download: bool = False

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        opener = open_cifar10 if self.name == "cifar10" else open_cifar100
        return opener(split, Path(self.root).expanduser(), self.download)


@dataclass(frozen=True, kw_only=True)
class _FilesConfig(_DataConfig):
    """Encoded images in files.

    Attributes:
        image_size_px: short side after resizing, then centre crop; None if all images have one size, or, in metric
            learning, are cut by its crop.
        num_channels: 3, or 1 for grey.
        on_bad_image: stop at an unreadable image, or leave it out and count it.
        resident_limit_mib: a set that is no larger once decoded is kept on the device.
    """

    image_size_px: int | None = None
    num_channels: Literal[1, 3] = 3
    on_bad_image: Literal["raise", "skip"] = "raise"
    resident_limit_mib: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size_px is not None:
            check(self.image_size_px > 0, "data.image_size_px", self.image_size_px, "> 0")
        check(self.resident_limit_mib >= 0, "data.resident_limit_mib", self.resident_limit_mib, "≥ 0")


@dataclass(frozen=True, kw_only=True)
class FolderConfig(_FilesConfig):
    """Images in root/train/<class>/ and root/test/<class>/ (ImageFolder's layout)."""

    name: Literal["folder"] = "folder"
    root: str

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        return self._open_folder(split, crop, shared_classes=True)

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        return self._open_folder(split, crop, shared_classes=False)

    def _open_folder(self, split: Split, crop: Crop | None, shared_classes: bool) -> ImageSet:
        return open_folder(
            split,
            root=Path(self.root).expanduser(),
            image_size_px=self.image_size_px,
            num_channels=self.num_channels,
            on_bad_image=self.on_bad_image,
            resident_limit_mib=self.resident_limit_mib,
            crop=crop if self.image_size_px is None else None,
            shared_classes=shared_classes,
        )


@dataclass(frozen=True, kw_only=True)
class ParquetConfig(_FilesConfig):
    """Parquet in the Hugging Face layout.

    Attributes:
        train: a path, a glob or an fsspec URL, or several.
        test: likewise; may be None where num_train_classes splits the training files, and in face recognition.
        image_column: None finds the one that holds images.
        label_column: int64 classes.
        cache_folder: where a streamed set is laid out for random access.
    """

    name: Literal["parquet"] = "parquet"
    train: tuple[str, ...]
    test: tuple[str, ...] | None = None
    image_column: str | None = None
    label_column: str = "label"
    cache_folder: str = "~/.cache/ssl_sec"

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        return open_parquet(
            split,
            train=list(self.train),
            test=None if self.test is None else list(self.test),
            image_column=self.image_column,
            label_column=self.label_column,
            image_size_px=self.image_size_px,
            num_channels=self.num_channels,
            on_bad_image=self.on_bad_image,
            resident_limit_mib=self.resident_limit_mib,
            cache_folder=Path(self.cache_folder).expanduser(),
            crop=crop if self.image_size_px is None else None,
        )

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        if self.test is None:
            raise ConfigError("data.test: found None, must be given, unless data.num_train_classes splits data.train")
        train, test = (
            parquet_class_names(list(files), self.image_column, self.label_column) for files in (self.train, self.test)
        )
        require_disjoint(train, test, "parquet")
        return own_classes(self._open(split, crop))


@dataclass(frozen=True, kw_only=True)
class RecordsConfig(_FilesConfig):
    """Record files of MXNet, as InsightFace publishes its training sets; see `ssl_sec.data.records`.

    Attributes:
        root: the folder that holds train.rec, train.idx and property.
    """

    name: Literal["records"] = "records"
    root: str

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        if split == "test":
            raise ConfigError(
                f"data.num_train_classes: found None, must be given: {self.name!r} has no test split of its own"
            )
        return open_records(
            Path(self.root).expanduser(),
            image_size_px=self.image_size_px,
            num_channels=self.num_channels,
            on_bad_image=self.on_bad_image,
            resident_limit_mib=self.resident_limit_mib,
            crop=crop if self.image_size_px is None else None,
        )

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        return own_classes(self._open(split, crop))


@dataclass(frozen=True, kw_only=True)
class _RetrievalConfig(_DataConfig):
    """A benchmark of metric learning in the layout that it is published in; its images have no common size.

    Attributes:
        root: see the data set's opener.
        on_bad_image: stop at an unreadable image, or replace and count it.
    """

    name: str
    root: str
    on_bad_image: Literal["raise", "skip"] = "raise"

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        if crop is None:
            raise ConfigError(
                f"data.name: found {self.name!r}, whose images have no common size; only metric learning crops them"
            )
        return self._open_own_classes(split, crop)


@dataclass(frozen=True, kw_only=True)
class CUBConfig(_RetrievalConfig):
    """CUB-200-2011; see `ssl_sec.data.retrieval_sets`."""

    name: Literal["cub"] = "cub"
    root: str = "data/CUB_200_2011"

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        return open_cub(split, Path(self.root).expanduser(), crop, self.on_bad_image)


@dataclass(frozen=True, kw_only=True)
class Cars196Config(_RetrievalConfig):
    """Cars196 (Stanford Cars); see `ssl_sec.data.retrieval_sets`."""

    name: Literal["cars196"] = "cars196"
    root: str = "data/cars196"

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        return open_cars196(split, Path(self.root).expanduser(), crop, self.on_bad_image)


@dataclass(frozen=True, kw_only=True)
class SOPConfig(_RetrievalConfig):
    """Stanford Online Products; see `ssl_sec.data.retrieval_sets`."""

    name: Literal["sop"] = "sop"
    root: str = "data/Stanford_Online_Products"

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        return open_sop(split, Path(self.root).expanduser(), crop, self.on_bad_image)


@dataclass(frozen=True, kw_only=True)
class InShopConfig(_RetrievalConfig):
    """In-Shop Clothes Retrieval; see `ssl_sec.data.retrieval_sets`."""

    name: Literal["inshop"] = "inshop"
    root: str = "data/inshop"

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        return open_inshop(split, Path(self.root).expanduser(), crop, self.on_bad_image)


DataConfig = (
    DigitsConfig
    | CIFARConfig
    | FolderConfig
    | ParquetConfig
    | RecordsConfig
    | CUBConfig
    | Cars196Config
    | SOPConfig
    | InShopConfig
)


@dataclass(frozen=True, kw_only=True)
class _PairsConfig:
    """What every set of pairs to verify has; its images have the size and the channels of the training images.

    Attributes:
        title: what figures call the set; None takes the name of the file that lists the pairs.
        resident_limit_mib: a set that is no larger once decoded is kept in memory.
    """

    title: str | None = None
    resident_limit_mib: int = 4096

    def __post_init__(self) -> None:
        check_name("benchmarks.title", self.figures_title)
        check(self.resident_limit_mib >= 0, "benchmarks.resident_limit_mib", self.resident_limit_mib, "≥ 0")

    @property
    def figures_title(self) -> str:
        """What figures call the set."""
        return self.title or Path(self._list).stem

    @property
    def _list(self) -> str:
        """The file that lists the pairs."""
        raise AssertionError("each kind has its own")


@dataclass(frozen=True, kw_only=True)
class BinPairsConfig(_PairsConfig):
    """A .bin of InsightFace.

    Attributes:
        path: the file.
    """

    name: Literal["bin"] = "bin"
    path: str

    @property
    def _list(self) -> str:
        return self.path

    def open(self, image_size_px: int | None, num_channels: int) -> VerificationPairs:
        """The pairs, with their images resized, or all of one size as they are."""
        path = Path(self.path).expanduser()
        return open_bin(path, self.title, image_size_px, num_channels, self.resident_limit_mib)


@dataclass(frozen=True, kw_only=True)
class LFWPairsConfig(_PairsConfig):
    """A list of pairs in the form of LFW's.

    Attributes:
        pairs: the list.
        root: the folder of the images.
    """

    name: Literal["lfw_pairs"] = "lfw_pairs"
    pairs: str
    root: str

    @property
    def _list(self) -> str:
        return self.pairs

    def open(self, image_size_px: int | None, num_channels: int) -> VerificationPairs:
        """The pairs, with their images resized, or all of one size as they are."""
        pairs, root = Path(self.pairs).expanduser(), Path(self.root).expanduser()
        return open_lfw_pairs(pairs, root, self.title, image_size_px, num_channels, self.resident_limit_mib)


@dataclass(frozen=True, kw_only=True)
class PairTableConfig(_PairsConfig):
    """A CSV file of pairs; see `ssl_sec.data.verification_sets.open_pair_table`.

    Attributes:
        pairs: the table.
        images: a folder, or a list of Parquet files.
        image_column: of Parquet files; None finds the one that holds images.
        label_column: of Parquet files.
    """

    name: Literal["pairs"] = "pairs"
    pairs: str
    images: str | tuple[str, ...]
    image_column: str | None = None
    label_column: str = "label"

    @property
    def _list(self) -> str:
        return self.pairs

    def open(self, image_size_px: int | None, num_channels: int) -> VerificationPairs:
        """The pairs, with their images resized, or all of one size as they are."""
        return open_pair_table(
            Path(self.pairs).expanduser(),
            Path(self.images).expanduser() if isinstance(self.images, str) else list(self.images),
            self.title,
            self.image_column,
            self.label_column,
            image_size_px,
            num_channels,
            self.resident_limit_mib,
        )


PairsConfig = BinPairsConfig | LFWPairsConfig | PairTableConfig


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """SimCLR's augmentation; see `ssl_sec.augment`.

    Attributes:
        min_scale: smallest crop, as a share of the image's area, in (0, 1].
        flip_probability: of a horizontal flip, in [0, 1].
        colour_strength: of the colour distortion, ≥ 0; 0.5 on CIFAR, 1.0 on ImageNet.
        fused: whether the views are made in one launch (Triton); None for wherever that is possible: colour images of
            up to 64 pixels on a GPU.
    """

    min_scale: float = 0.08
    flip_probability: float = 0.5
    colour_strength: float = 0.5
    fused: bool | None = None

    def __post_init__(self) -> None:
        check(0 < self.min_scale <= 1, "augment.min_scale", self.min_scale, "in (0, 1]")
        check(0 <= self.flip_probability <= 1, "augment.flip_probability", self.flip_probability, "in [0, 1]")
        check(self.colour_strength >= 0, "augment.colour_strength", self.colour_strength, "≥ 0")

    def build(
        self,
        image_size_px: int,
        num_channels: int,
        seed: int,
        num_views: int = 2,
        device: torch.device = CPU,
        channels_last: bool = False,
    ) -> SimCLRAugmentation:
        """The augmentation for images of one size.

        Raises:
            ConfigError: `fused` is asked for where it is not possible.
        """
        settings: dict[str, Any] = {
            "image_size_px": image_size_px,
            "num_channels": num_channels,
            "seed": seed,
            "num_views": num_views,
            "min_scale": self.min_scale,
            "flip_probability": self.flip_probability,
            "colour_strength": self.colour_strength,
        }
        reason = why_not_fused(image_size_px, num_channels, device)
        if self.fused and reason is not None:
            raise ConfigError(f"augment.fused: found True, but {reason}; allowed here: false, or null")
        if self.fused is False or reason is not None:
            return SimCLRAugmentation(**settings)
        return FusedSimCLRAugmentation(torch.channels_last if channels_last else torch.contiguous_format, **settings)


@dataclass(frozen=True, kw_only=True)
class _EncoderConfig:
    """What every encoder has.

    Attributes:
        weights: a .safetensors file or a state dict to start from.
        mean: of the pixels in [0, 1] that the weights expect; 0 leaves them, as SimCLR does. None takes what the
            encoder's published weights expect, and 0 where there are none.
        std: likewise, and 1.
        freeze_batch_norm: whether the backbone's batch norms keep their running statistics and their weights.
    """

    weights: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    freeze_batch_norm: bool = False

    def __post_init__(self) -> None:
        for key, values in (("encoder.mean", self.mean), ("encoder.std", self.std)):
            check(values is None or len(values) > 0, key, values, "one value or more")
        check(self.std is None or min(self.std) > 0, "encoder.std", self.std, "> 0")

    def build(self, num_channels: int, image_size_px: int) -> Encoder:
        """The encoder for images of one size, with the weights it is to start from."""
        mean, std = self._published_scaling()
        mean, std = mean if self.mean is None else self.mean, std if self.std is None else self.std
        for key, values in (("encoder.mean", mean), ("encoder.std", std)):
            check(
                len(values) in (1, num_channels), key, values, f"one value, or one for each of {num_channels} channels"
            )
        backbone, num_features = self._backbone(num_channels, image_size_px)
        if self.weights is not None:
            load_weights(backbone, Path(self.weights).expanduser())
        if self.freeze_batch_norm:
            check(self._has_weights, "encoder.freeze_batch_norm", True, "together with encoder.weights=<file>")
            backbone = freeze_batch_norm(backbone)
        return Encoder(backbone, num_features, mean, std)

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """The backbone as others name it."""
        raise AssertionError("each encoder has its own")

    @property
    def _has_weights(self) -> bool:
        """Whether it starts from weights; the running statistics of others are not worth freezing."""
        return self.weights is not None

    def _published_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation that the published weights expect."""
        return (0.0,), (1.0,)

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        raise AssertionError("each encoder builds its own")


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(_EncoderConfig):
    """A ResNet; see `ssl_sec.encoders.resnet`."""

    name: Literal["resnet18", "resnet34", "resnet50"]
    stem: Literal["cifar", "imagenet"] = "cifar"
    width: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.width > 0, "encoder.width", self.width, "> 0")

    @property
    def _depth(self) -> int:
        return int(self.name.removeprefix("resnet"))

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """The ResNet in torchvision's words."""
        return TorchvisionResNet(depth=self._depth, stem=self.stem, width=self.width, num_channels=num_channels)

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return resnet(self._depth, self.stem, self.width, num_channels)


@dataclass(frozen=True, kw_only=True)
class BNInceptionConfig(_EncoderConfig):
    """BN-Inception; see `ssl_sec.encoders.bn_inception`."""

    name: Literal["bn_inception"] = "bn_inception"

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """What no other library has."""
        return OwnNetwork(title="BN-Inception")

    def _published_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return CAFFE_MEAN, CAFFE_STD

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return bn_inception(num_channels, image_size_px)


@dataclass(frozen=True, kw_only=True)
class GoogLeNetConfig(_EncoderConfig):
    """torchvision's GoogLeNet; see `ssl_sec.encoders.googlenet`."""

    name: Literal["googlenet"] = "googlenet"

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """The GoogLeNet in torchvision's words."""
        return TorchvisionGoogLeNet(num_channels=num_channels)

    def _published_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return GOOGLENET_MEAN, GOOGLENET_STD

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return googlenet(num_channels, image_size_px)


@dataclass(frozen=True, kw_only=True)
class IRConfig(_EncoderConfig):
    """An improved residual network of face recognition; see `ssl_sec.encoders.ir`."""

    name: IRName
    width: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.width > 0, "encoder.width", self.width, "> 0")

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """What no installed library has."""
        kind, _, depth = self.name.upper().partition("IR")
        return OwnNetwork(title=f"{kind.replace('_', '-')}IR-{depth} of ArcFace, width {self.width:g}")

    def _published_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return FACE_MEAN, FACE_STD

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return ir(self.name, self.width, num_channels, image_size_px)


@dataclass(frozen=True, kw_only=True)
class SphereFaceNetConfig(_EncoderConfig):
    """SphereFace's residual CNN; see `ssl_sec.encoders.sphereface`.

    Attributes:
        units: residual units of each of the four stages, ≥ 0.
    """

    name: Literal["sphereface_net"] = "sphereface_net"
    units: tuple[int, ...] = (3, 4, 6, 3)
    width: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        four = len(self.units) == 4 and min(self.units) >= 0
        check(four, "encoder.units", list(self.units), "four numbers ≥ 0")
        check(self.width > 0, "encoder.width", self.width, "> 0")
        check(not self.freeze_batch_norm, "encoder.freeze_batch_norm", True, "false: sphereface_net has no batch norm")

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """What no installed library has."""
        return OwnNetwork(title=f"SphereFace's CNN of {list(self.units)} residual units, width {self.width:g}")

    def _published_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return FACE_MEAN, FACE_STD

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return sphereface_net(self.units, self.width, num_channels, image_size_px)


@dataclass(frozen=True, kw_only=True)
class LightCNNConfig(_EncoderConfig):
    """Light CNN-9, whose last layer is the head `maxout`; see `ssl_sec.encoders.light_cnn`."""

    name: Literal["light_cnn"] = "light_cnn"
    width: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.width > 0, "encoder.width", self.width, "> 0")
        check(not self.freeze_batch_norm, "encoder.freeze_batch_norm", True, "false: light_cnn has no batch norm")

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """What no installed library has."""
        return OwnNetwork(title=f"Light CNN-9, width {self.width:g}")

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return light_cnn(self.width, num_channels, image_size_px)


@dataclass(frozen=True, kw_only=True)
class PixelsConfig(_EncoderConfig):
    """The pixels themselves as features, the floor that an encoder has to beat."""

    name: Literal["pixels"] = "pixels"

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """Nothing that has weights."""
        return OwnNetwork(title="the pixels")

    def _published_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return FACE_MEAN, FACE_STD

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return nn.Flatten(), num_channels * image_size_px**2


@dataclass(frozen=True, kw_only=True)
class TimmConfig(_EncoderConfig):
    """Any timm model by name.

    Attributes:
        model: the name, with the tag of its weights after a point or without.
        pretrained: whether timm downloads its weights, unless `weights` are given.
    """

    name: Literal["timm"] = "timm"
    model: str
    pretrained: bool = False

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """The model by its name."""
        return TimmModel(model=self.model, arguments=timm_arguments(self.model, num_channels, image_size_px))

    @property
    def _has_weights(self) -> bool:
        return self.pretrained or super()._has_weights

    def _published_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return timm_scaling(self.model) if self.pretrained else super()._published_scaling()

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
class _HeadConfig:
    """What every head has.

    Attributes:
        dim: of the embeddings.
        weights: a file to start from: a head that a run left, or, for fc_bn, weights of InsightFace's iresnet.
    """

    dim: int
    weights: str | None = None

    def __post_init__(self) -> None:
        check(self.dim > 0, "head.dim", self.dim, "> 0")

    def build(self, num_features: int, seed: int) -> nn.Module:
        """The head for an encoder's features, with the weights it is to start from; the seed is of its dropout."""
        head = self._head(num_features, seed)
        if self.weights is not None:
            load_head_weights(head, Path(self.weights).expanduser())
        return head

    def _head(self, num_features: int, seed: int) -> nn.Module:
        raise AssertionError("each head builds its own")


@dataclass(frozen=True, kw_only=True)
class MLPHeadConfig(_HeadConfig):
    """The projection MLP; see `ssl_sec.heads`.

    Attributes:
        num_layers: 2 or 3.
        hidden_dim: None for the width of the features.
    """

    name: Literal["mlp"] = "mlp"
    num_layers: Literal[2, 3] = 2
    hidden_dim: int | None = None
    dim: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_dim is not None:
            check(self.hidden_dim > 0, "head.hidden_dim", self.hidden_dim, "> 0")

    def _head(self, num_features: int, seed: int) -> ProjectionHead:
        return ProjectionHead(num_features, self.hidden_dim or num_features, self.dim, self.num_layers)


@dataclass(frozen=True, kw_only=True)
class LinearHeadConfig(_HeadConfig):
    """A linear layer (fc), batch norm before (bn_fc) or behind it (fc_bn), or the maximum of two layers (maxout).

    Attributes:
        dropout: probability with which an entry of the embeddings, or of the features before fc_bn, is 0 in training.
    """

    name: Literal["bn_fc", "fc", "fc_bn", "maxout"]
    dim: int = 512
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 <= self.dropout < 1, "head.dropout", self.dropout, "in [0, 1)")

    def _head(
        self, num_features: int, seed: int
    ) -> BatchNormLinearHead | LinearHead | LinearBatchNormHead | MaxoutHead:
        match self.name:
            case "bn_fc":
                return BatchNormLinearHead(num_features, self.dim, self.dropout, seed)
            case "fc":
                return LinearHead(num_features, self.dim, self.dropout, seed)
            case "fc_bn":
                return LinearBatchNormHead(num_features, self.dim, self.dropout, seed)
            case "maxout":
                return MaxoutHead(num_features, self.dim, self.dropout, seed)


@dataclass(frozen=True, kw_only=True)
class IdentityHeadConfig(_HeadConfig):
    """The features are the embeddings; `dim` is their number."""

    name: Literal["identity"] = "identity"

    def _head(self, num_features: int, seed: int) -> nn.Identity:
        check(
            self.dim == num_features,
            "head.dim",
            self.dim,
            f"{num_features}, the number of features, with head=identity",
        )
        return nn.Identity()


HeadConfig = MLPHeadConfig | LinearHeadConfig | IdentityHeadConfig


@dataclass(frozen=True, kw_only=True)
class NoConstraintConfig:
    """No norm constraint."""

    name: Literal["none"] = "none"

    def build(self) -> None:
        """Nothing to build."""

    def weight(self, steps_per_epoch: int, total_steps: int) -> Schedule:
        """η = 0."""
        return Constant(0.0)


@dataclass(frozen=True, kw_only=True)
class SphericalConfig:
    """The norm constraint and the schedule of its weight; see `ssl_sec.losses.spherical`.

    Attributes:
        name: the use, for people; what it is follows from rho and radius.
        eta: η ≥ 0.
        ramp: of η over the global step t of T: "constant"; "linear", η t / T (SEC, Eq. 29); "face", 0 for three
            epochs and linear over the fourth (SEC, B.2); "capped", min(η, 500 t / T) (SEC, Eq. 32).
        rho: weight of the batch's mean in μ; 1 is SEC, less is SEC-EMA.
        radius: a fixed μ; 0 is L²-reg.
    """

    name: Literal["sec", "sec_ema", "l2reg", "fixed_radius"]
    eta: float
    ramp: Literal["linear", "constant", "face", "capped"] = "linear"
    rho: float = 1.0
    radius: float | None = None

    def __post_init__(self) -> None:
        check(self.eta >= 0, "constraint.eta", self.eta, "≥ 0")
        check(0 < self.rho <= 1, "constraint.rho", self.rho, "in (0, 1]")
        if self.radius is not None:
            check(self.radius >= 0, "constraint.radius", self.radius, "≥ 0")

    def build(self) -> SphericalConstraint:
        """The constraint."""
        return SphericalConstraint(self.rho, self.radius)

    def weight(self, steps_per_epoch: int, total_steps: int) -> Schedule:
        """η by global step."""
        match self.ramp:
            case "constant":
                return Constant(self.eta)
            case "linear":
                return LinearRamp(self.eta, total_steps)
            case "face":
                return FaceRamp(self.eta, steps_per_epoch)
            case "capped":
                return CappedRamp(self.eta, total_steps)


ConstraintConfig = NoConstraintConfig | SphericalConfig


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """The optimiser and its learning rate, a cosine over the run.

    Attributes:
        learning_rate: at its height, ≥ 0.
        momentum: in [0, 1).
        weight_decay: of weights; biases and batch norm do not decay.
        warmup_epochs: of linear rise.
    """

    name: Literal["sgd", "lars"] = "sgd"
    learning_rate: float = 0.5
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup_epochs: int = 0

    def __post_init__(self) -> None:
        check(self.learning_rate >= 0, "optimiser.learning_rate", self.learning_rate, "≥ 0")
        check(0 <= self.momentum < 1, "optimiser.momentum", self.momentum, "in [0, 1)")
        check(self.weight_decay >= 0, "optimiser.weight_decay", self.weight_decay, "≥ 0")
        check(self.warmup_epochs >= 0, "optimiser.warmup_epochs", self.warmup_epochs, "≥ 0")

    def build(self, *modules: nn.Module) -> Optimizer:
        """The optimiser over the modules' parameters."""
        build = lars if self.name == "lars" else sgd
        return build(parameter_groups(modules, self.weight_decay), self.momentum)

    def schedule(self, steps_per_epoch: int, total_steps: int) -> Schedule:
        """The learning rate by global step."""
        return Cosine(self.learning_rate, total_steps, self.warmup_epochs * steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class _SteppedOptimiserConfig:
    """An optimiser whose learning rates fall at given steps.

    Attributes:
        learning_rate: of all but the backbone at the start, > 0.
        backbone_learning_rate: of the backbone at the start, ≥ 0.
        weight_decay: of weights; biases and batch norm do not decay.
        decay_at_steps: where the rates fall.
        decay_factor: by which they are multiplied there, in (0, 1].
    """

    learning_rate: float
    backbone_learning_rate: float
    weight_decay: float = 0.0
    decay_at_steps: tuple[int, ...] = ()
    decay_factor: float = 0.1

    def __post_init__(self) -> None:
        check(self.learning_rate > 0, "optimiser.learning_rate", self.learning_rate, "> 0")
        rate = self.backbone_learning_rate
        check(rate >= 0, "optimiser.backbone_learning_rate", rate, "≥ 0")
        check(self.weight_decay >= 0, "optimiser.weight_decay", self.weight_decay, "≥ 0")
        check(all(step > 0 for step in self.decay_at_steps), "optimiser.decay_at_steps", self.decay_at_steps, "> 0")
        check(0 < self.decay_factor <= 1, "optimiser.decay_factor", self.decay_factor, "in (0, 1]")

    def build(self, backbone: nn.Module, *rest: nn.Module) -> Optimizer:
        """The optimiser over the backbone's parameters and the others'."""
        factor = self.backbone_learning_rate / self.learning_rate
        return self._of_groups(
            [
                *parameter_groups([backbone], self.weight_decay, factor),
                *parameter_groups(rest, self.weight_decay),
            ]
        )

    def schedule(self) -> Schedule:
        """The learning rate of all but the backbone by global step."""
        return StepDecay(self.learning_rate, self.decay_at_steps, self.decay_factor)

    def _of_groups(self, groups: list[ParameterGroup]) -> Optimizer:
        raise AssertionError("each optimiser builds itself")


@dataclass(frozen=True, kw_only=True)
class SteppedAdamConfig(_SteppedOptimiserConfig):
    """Adam; SEC's choice for metric learning."""

    name: Literal["adam"] = "adam"

    def _of_groups(self, groups: list[ParameterGroup]) -> Optimizer:
        return adam(groups)


@dataclass(frozen=True, kw_only=True)
class SteppedSGDConfig(_SteppedOptimiserConfig):
    """SGD with momentum in [0, 1); the choice of the angular-loss and SFT papers."""

    name: Literal["sgd"] = "sgd"
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 <= self.momentum < 1, "optimiser.momentum", self.momentum, "in [0, 1)")

    def _of_groups(self, groups: list[ParameterGroup]) -> Optimizer:
        return sgd(groups, self.momentum)


SteppedOptimiserConfig = SteppedAdamConfig | SteppedSGDConfig


@dataclass(frozen=True, kw_only=True)
class _RuntimeConfig:
    """How the network computes, wherever it runs.

    Attributes:
        device: "auto" takes a GPU if there is one.
        precision: of the forward pass; bfloat16 is autocast.
        channels_last: whether activations are laid out so; None for on CPUs.
        compile: whether the network is compiled.
        num_loader_workers: processes a worker that decode a streamed set.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision = "float32"
    channels_last: bool | None = None
    compile: bool = False
    num_loader_workers: int = 2

    def __post_init__(self) -> None:
        check(self.num_loader_workers >= 0, "runtime.num_loader_workers", self.num_loader_workers, "≥ 0")

    def uses_channels_last(self, device: torch.device) -> bool:
        """Whether activations are laid out so on a device."""
        return device.type == "cpu" if self.channels_last is None else self.channels_last


@dataclass(frozen=True, kw_only=True)
class LocalConfig(_RuntimeConfig):
    """One process, without Ray."""

    name: Literal["local"] = "local"

    def resolve_device(self) -> torch.device:
        """The device of this process."""
        has_gpu = torch.cuda.is_available()
        if self.device == "cuda" and not has_gpu:
            raise ConfigError("runtime.device: found 'cuda', but this machine has no usable GPU; allowed here: cpu")
        return torch.device("cuda", 0) if has_gpu and self.device != "cpu" else torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class RayConfig(_RuntimeConfig):
    """Ray Train.

    Attributes:
        num_workers: how many; (least, most) follows the cluster as it shrinks and grows, with those numbers between
            that divide the batch; None for one worker a GPU of the cluster, or one on CPUs.
        address: of a Ray cluster; None joins the one that the environment names, or starts one here.
        cpus_per_worker: None shares the cluster's CPUs out among the workers.
        max_failures: how often in a row the workers are started again without a new checkpoint since; a node that is
            taken away with notice does not count.
        timeout_s: how long a worker waits for the others in a collective.
        start_timeout_s: how long Ray waits for the workers to start before it looks at the cluster again.
        resize_interval_s: how often Ray looks for room for more workers.
    """

    name: Literal["ray"] = "ray"
    num_workers: int | tuple[int, ...] | None = None
    address: str | None = None
    cpus_per_worker: int | None = None
    max_failures: int = 3
    timeout_s: int = 600
    start_timeout_s: float = 60.0
    resize_interval_s: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.num_workers, tuple):
            in_order = len(self.num_workers) == 2 and 1 <= self.num_workers[0] <= self.num_workers[1]
            check(in_order, "runtime.num_workers", list(self.num_workers), "[least, most] with 1 ≤ least ≤ most")
        elif self.num_workers is not None:
            check(self.num_workers >= 1, "runtime.num_workers", self.num_workers, "≥ 1")
        if self.cpus_per_worker is not None:
            check(self.cpus_per_worker >= 1, "runtime.cpus_per_worker", self.cpus_per_worker, "≥ 1")
        check(self.max_failures >= -1, "runtime.max_failures", self.max_failures, "≥ 0, or -1 for no limit")
        for key in ("timeout_s", "start_timeout_s", "resize_interval_s"):
            check(getattr(self, key) > 0, f"runtime.{key}", getattr(self, key), "> 0")

    def check_shares(self, global_batch_size: int) -> None:
        """Raises a ConfigError if no allowed number of workers can share the batch equally."""
        if isinstance(self.num_workers, int):
            worker_rows(global_batch_size, 0, self.num_workers)
        elif self.num_workers is not None:
            least, most = self.num_workers
            counts = worker_counts(global_batch_size)
            check(
                any(least <= count <= most for count in counts),
                "runtime.num_workers",
                [least, most],
                f"a range with a number of workers that divides global_batch_size = {global_batch_size}: "
                f"{', '.join(map(str, counts))}",
            )


RuntimeConfig = LocalConfig | RayConfig


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """kNN accuracy and RankMe on training images while the encoder trains; the test set is never looked at.

    Attributes:
        every_epochs: ≥ 1.
        max_images: of the training set; a tenth of them are the queries.
        neighbours: k of the kNN.
    """

    every_epochs: int = 10
    max_images: int = 10_000
    neighbours: int = 200

    def __post_init__(self) -> None:
        check(self.every_epochs >= 1, "monitor.every_epochs", self.every_epochs, "≥ 1")
        check(self.max_images >= 20, "monitor.max_images", self.max_images, "≥ 20")
        check(self.neighbours >= 1, "monitor.neighbours", self.neighbours, "≥ 1")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, and how many stay."""

    every_epochs: int = 5
    keep_last: int = 2

    def __post_init__(self) -> None:
        check(self.every_epochs >= 1, "checkpoint.every_epochs", self.every_epochs, "≥ 1")
        check(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "≥ 1")


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where figures go.

    Attributes:
        uri: of the MLflow server; None takes MLFLOW_TRACKING_URI, or sqlite in the output folder.
        experiment: in MLflow; None takes the recipe's name.
        register_model: whether the encoder becomes a registered model.
        system_metrics: whether the use of the driver's machine (processor, memory, disk, network, GPUs) is followed.
        parent_run: the MLflow run that this one belongs to, a sweep's.
    """

    uri: str | None = None
    experiment: str | None = None
    register_model: bool = True
    system_metrics: bool = True
    parent_run: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Linear evaluation (SEC, appendix B.3).

    Attributes:
        enabled: whether pretraining is followed by it.
        augment: train on freshly augmented images, as SimCLR does, instead of cached features.
        learning_rates: all are trained at once; one is chosen on a held-out tenth of the training set.
        labels_per_class: train on so few labels; None takes all.
    """

    enabled: bool = False
    augment: bool = False
    epochs: int = 100
    batch_size: int = 256
    learning_rates: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0)
    momentum: float = 0.9
    decay_epochs: tuple[int, ...] = (60, 75, 90)
    decay_factor: float = 5.0
    labels_per_class: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check(self.epochs >= 1, "probe.epochs", self.epochs, "≥ 1")
        check(self.batch_size >= 1, "probe.batch_size", self.batch_size, "≥ 1")
        check(len(self.learning_rates) > 0, "probe.learning_rates", self.learning_rates, "one value or more")
        check(all(rate > 0 for rate in self.learning_rates), "probe.learning_rates", self.learning_rates, "> 0")
        check(0 <= self.momentum < 1, "probe.momentum", self.momentum, "in [0, 1)")
        check(self.decay_factor > 0, "probe.decay_factor", self.decay_factor, "> 0")
        if self.labels_per_class is not None:
            check(self.labels_per_class >= 1, "probe.labels_per_class", self.labels_per_class, "≥ 1")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What every training run has.

    Attributes:
        recipe: names the experiment in MLflow and the folder of its runs.
        run_name: None makes one from the time and the seed.
        output_dir: where run folders are made.
        resume: take up the run of this name where it stopped; "auto" starts it where there is none.
        seed: of weights, order and augmentation.
        global_batch_size: images of all workers together in a step.
        log_every_steps: how often figures are reported.
    """

    recipe: str
    data: DataConfig
    encoder: EncoderConfig
    head: HeadConfig
    constraint: ConstraintConfig
    runtime: RuntimeConfig
    global_batch_size: int
    seed: int = 0
    run_name: str | None = None
    output_dir: str = "runs"
    resume: bool | Literal["auto"] = False
    log_every_steps: int = 10
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        check(self.global_batch_size >= 2, "global_batch_size", self.global_batch_size, "≥ 2")
        check(self.log_every_steps >= 1, "log_every_steps", self.log_every_steps, "≥ 1")
        check(self.seed >= 0, "seed", self.seed, "≥ 0")
        check_name("recipe", self.recipe)
        if self.run_name is not None:
            check_name("run_name", self.run_name)
        if self.resume:
            check(self.run_name is not None, "resume", self.resume, "given together with the run_name to take up")
        if isinstance(self.runtime, RayConfig):
            self.runtime.check_shares(self.global_batch_size)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainingConfig):
    """A pretraining run.

    Attributes:
        epochs: 0 keeps the encoder as it was initialised.
    """

    augment: AugmentConfig
    loss: PairLossConfig
    optimiser: OptimiserConfig
    epochs: int
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.epochs >= 0, "epochs", self.epochs, "≥ 0")


@dataclass(frozen=True, kw_only=True)
class CropConfig:
    """Random crops in training, the centre in evaluation (SEC, appendix B.1); see `ssl_sec.data.crops`.

    Images that have one size already, as digits have, are cropped to that size, and evaluated whole.

    Attributes:
        short_side_px: that images are resized to before they are cropped.
        size_px: side of the crops.
        min_scale: smallest crop, as a share of the image's area, in (0, 1].
        min_aspect: smallest width / height of a crop, > 0.
        max_aspect: largest, ≥ min_aspect.
        flip_probability: of a horizontal flip, in [0, 1].
    """

    short_side_px: int = 256
    size_px: int = 227
    min_scale: float = 0.16
    min_aspect: float = 0.75
    max_aspect: float = 4 / 3
    flip_probability: float = 0.5

    def __post_init__(self) -> None:
        check(self.size_px >= 1, "augment.size_px", self.size_px, "≥ 1")
        at_least = f"≥ augment.size_px = {self.size_px}"
        check(self.short_side_px >= self.size_px, "augment.short_side_px", self.short_side_px, at_least)
        check(0 < self.min_scale <= 1, "augment.min_scale", self.min_scale, "in (0, 1]")
        check(self.min_aspect > 0, "augment.min_aspect", self.min_aspect, "> 0")
        at_least = f"≥ augment.min_aspect = {self.min_aspect:g}"
        check(self.max_aspect >= self.min_aspect, "augment.max_aspect", self.max_aspect, at_least)
        check(0 <= self.flip_probability <= 1, "augment.flip_probability", self.flip_probability, "in [0, 1]")

    def random_crop(self) -> RandomResizedCrop:
        """The crop of training."""
        return RandomResizedCrop(
            short_side_px=self.short_side_px,
            size_px=self.size_px,
            min_scale=self.min_scale,
            min_aspect=self.min_aspect,
            max_aspect=self.max_aspect,
            flip_probability=self.flip_probability,
        )

    def centre_crop(self) -> CentreCrop:
        """The crop of evaluation."""
        return CentreCrop(short_side_px=self.short_side_px, size_px=self.size_px)

    def on_device(self, image_size_px: int, seed: int) -> RetrievalAugmentation:
        """The augmentation of images that have one size already."""
        return RetrievalAugmentation(
            image_size_px=image_size_px,
            seed=seed,
            min_scale=self.min_scale,
            min_aspect=self.min_aspect,
            max_aspect=self.max_aspect,
            flip_probability=self.flip_probability,
        )


@dataclass(frozen=True, kw_only=True)
class ClassSamplerConfig:
    """C classes and K images of each in every batch."""

    name: Literal["classes"] = "classes"
    images_per_class: int = 3

    def __post_init__(self) -> None:
        check(self.images_per_class >= 2, "sampler.images_per_class", self.images_per_class, "≥ 2")

    def build(self, labels: Tensor, global_batch_size: int, seed: int) -> ClassBatches:
        """The sampler over the images of these classes."""
        return ClassBatches(
            labels=labels, images_per_class=self.images_per_class, global_batch_size=global_batch_size, seed=seed
        )


@dataclass(frozen=True, kw_only=True)
class TripletSamplerConfig:
    """Disjoint triplets of an anchor, a positive and a negative (angular loss, Fig. 4a)."""

    name: Literal["triplets"] = "triplets"

    def build(self, labels: Tensor, global_batch_size: int, seed: int) -> TripletBatches:
        """The sampler over the images of these classes."""
        return TripletBatches(labels=labels, global_batch_size=global_batch_size, seed=seed)


SamplerConfig = ClassSamplerConfig | TripletSamplerConfig


@dataclass(frozen=True, kw_only=True)
class RetrievalMonitorConfig:
    """Recall@1 and norms while the embedding trains; the test classes are never looked at.

    Attributes:
        every_steps: ≥ 1.
        max_images: that are watched.
    """

    every_steps: int = 1000
    max_images: int = 10_000

    def __post_init__(self) -> None:
        check(self.every_steps >= 1, "monitor.every_steps", self.every_steps, "≥ 1")
        check(self.max_images >= 2, "monitor.max_images", self.max_images, "≥ 2")


@dataclass(frozen=True, kw_only=True)
class StepCheckpointConfig:
    """When checkpoints are saved, and how many stay."""

    every_steps: int = 500
    keep_last: int = 2

    def __post_init__(self) -> None:
        check(self.every_steps >= 1, "checkpoint.every_steps", self.every_steps, "≥ 1")
        check(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "≥ 1")


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig:
    """What is measured on the test classes, once, after the last step.

    Attributes:
        ks: of Recall@K.
        clustering: whether k-means, NMI and F1 are computed; In-Shop reports none.
        seed: of k-means.
    """

    ks: tuple[int, ...] = (1, 2, 4, 8)
    clustering: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check(len(self.ks) > 0 and min(self.ks) >= 1, "evaluation.ks", list(self.ks), "one value ≥ 1 or more")
        check(0 <= self.seed < 2**32, "evaluation.seed", self.seed, "in [0, 2³²)")


@dataclass(frozen=True, kw_only=True)
class MetricLearningConfig(TrainingConfig):
    """A run of deep metric learning.

    Attributes:
        transform: generates rows of other classes, or not.
        sampler: which images make up a batch.
        steps: 0 evaluates the encoder as it starts.
        held_out_share: of the training classes, which are watched instead of trained on; 0 trains on all of them, as
            the papers do, and watches those.
        evaluation: what is measured on the test classes.
    """

    augment: CropConfig
    loss: PairLossConfig
    sampler: SamplerConfig
    optimiser: SteppedOptimiserConfig
    steps: int
    held_out_share: float = 0.1
    transform: TransformConfig = field(default_factory=NoTransformConfig)
    monitor: RetrievalMonitorConfig = field(default_factory=RetrievalMonitorConfig)
    checkpoint: StepCheckpointConfig = field(default_factory=StepCheckpointConfig)
    evaluation: RetrievalConfig = field(default_factory=RetrievalConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.steps >= 0, "steps", self.steps, "≥ 0")
        check(0 <= self.held_out_share < 1, "held_out_share", self.held_out_share, "in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class ProbeJobConfig:
    """A probe of a run that MLflow knows.

    Attributes:
        run: the MLflow run id of the pretraining.
        data: None takes the data set of that run.
    """

    run: str
    probe: ProbeConfig
    runtime: RuntimeConfig
    data: DataConfig | None = None
    output_dir: str = "runs"
    run_name: str | None = None
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        if self.run_name is not None:
            check_name("run_name", self.run_name)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The encoder of a run that MLflow knows, in files that others read; with its head if embeddings were trained.

    Attributes:
        run: the MLflow run id of the training.
        format: of the files; see `ssl_sec.exporting`.
        output: a folder that is made; None takes one in output_dir/exports.
        overwrite: whether an export that is there is replaced.
        data: where the images of the check come from; None takes the data set of the run.
        output_dir: where MLflow's sqlite lies, unless tracking names a store.
    """

    run: str
    format: FormatName
    output: str | None = None
    overwrite: bool = False
    data: DataConfig | None = None
    output_dir: str = "runs"
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass(frozen=True, kw_only=True)
class AlignConfig:
    """Faces cut out of images by five points each; see `ssl_sec.data.alignment`.

    Attributes:
        images: a folder with images or with folders of each person's images.
        landmarks: a CSV file with the columns path, x1, y1, …, x5, y5; paths are relative to the folder.
        output: a folder that gets the aligned images under the same paths.
        num_workers: processes; 0 aligns in the job's own, None takes one for each core.
    """

    images: str
    landmarks: str
    output: str
    num_workers: int | None = None

    def __post_init__(self) -> None:
        if self.num_workers is not None:
            check(self.num_workers >= 0, "num_workers", self.num_workers, "≥ 0")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Figures that MLflow has not.

    Attributes:
        folder: of the run that has ended.
        uri: of the store; None takes the one that the run was meant for.
    """

    folder: str
    uri: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Results beside a paper's, or two runs side by side; one of table, figure and compare.

    Attributes:
        paper: its short name.
        table: a number of the paper.
        figure: likewise.
        compare: two runs, by id, name, or the beginning of one.
        all: whether a comparison shows what is equal, too.
        recipes: of the runs that a figure shows; None for all of the experiment with the newest run.
        output: the folder for the files.
        output_dir: where the runs' folders are, with their store.
        tracking: which store; with `experiment`, only that experiment's runs count.
    """

    paper: str = "sec"
    table: int | None = None
    figure: int | str | None = None
    compare: tuple[str, ...] | None = None
    all: bool = False
    recipes: tuple[str, ...] | None = None
    output: str = "report"
    output_dir: str = "runs"
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        asked = [self.table, self.figure, self.compare]
        one = sum(what is not None for what in asked) == 1
        check(one, "table, figure, compare", asked, "one of them: table=5, figure=6 or compare <run> <run>")
        if self.compare is not None:
            check(len(self.compare) == 2, "compare", list(self.compare), "two runs: compare <run> <run>")
        if self.recipes is not None:
            check(len(self.recipes) > 0, "recipes", list(self.recipes), "one name or more")


def check_name(key: str, name: str) -> None:
    """Refuses a name that is no single folder's."""
    plain = name not in {"", ".", ".."} and not any(part in name for part in ("/", os.sep, "\0"))
    check(plain, key, name, "a plain name without slashes")
