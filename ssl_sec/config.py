"""What a run is: one frozen dataclass for each concept, which validates itself and builds its component.

The values come from `configs/`, composed by Hydra; nothing here looks a name up in the code.
"""

import os
import re
import shutil
from abc import abstractmethod
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

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
from ssl_sec.settings import (
    BelowOne,
    Count,
    CountOrZero,
    Local,
    Name,
    NotEmpty,
    NotNegative,
    PlainName,
    Positive,
    Probability,
    Range,
    Seconds,
    Seed,
    Settings,
    Share,
    check,
)
from ssl_sec.training import Computation, Precision

Split = Literal["train", "test"]

CPU = torch.device("cpu")

# The tags that a run has of itself, which `tracking.tags` leaves alone.
RUN_TAGS = (
    "job", "recipe", "data", "encoder", "loss", "constraint", "seed", "folder", "command", "git.dirty", "ran_on",
    "ended", "probe.protocol", "ray.job_id", "ssl_sec.version",
)  # fmt: skip

Width = Annotated[float, Range(gt=0, le=64)]
Side = Annotated[int, Range(ge=1, le=16384)]
Dim = Annotated[int, Range(ge=1, le=2**20)]
# A rate that an optimiser in float32 can take, and divide another by.
Rate = Annotated[float, Range(ge=0, le=10**6)]
PositiveRate = Annotated[float, Range(ge=1e-12, le=10**6)]
Processes = Annotated[int, Range(ge=0, le=1024)]


def check_memory(key: str, found: object, module: nn.Module) -> None:
    """Raises a ConfigError if this machine cannot hold a module's weights, their gradients and momenta."""
    needed = 3 * sum(each.numel() * each.element_size() for each in module.parameters())
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = f"less: training its layers needs {needed / 2**30:.0f} GiB, and this machine has {there / 2**30:.0f}"
    check(needed <= there, key, found, allowed)


def _wherever_possible(key: str, asked: bool | None, reason: str | None) -> bool:
    """Whether to do what is asked for (true), refused (false), or done wherever it is possible (None).

    Args:
        key: of the option.
        asked: its value.
        reason: why it is not possible here; None if it is.

    Raises:
        ConfigError: it is asked for where it is not possible.
    """
    if asked and reason is not None:
        raise ConfigError(f"{key}: found True, but {reason}; allowed here: false, or null")
    return asked is not False and reason is None


@dataclass(frozen=True, kw_only=True)
class _DataConfig(Settings, key="data"):
    """What every data set has.

    Attributes:
        max_images: train on a class-balanced subset of so many images, the same for every seed.
        num_train_classes: for metric learning, the first so many classes of the training split train and its others
            are the test set; None if the splits of the data set have classes of their own.
    """

    name: str
    max_images: Count | None = None
    num_train_classes: Count | None = None

    @property
    def title(self) -> str:
        """What the set is called in names: of runs, folders, experiments and registered models."""
        return self.name

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

    @abstractmethod
    def _open(self, split: Split, crop: Crop | None) -> ImageSet: ...

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
    root: Local = "data"
    download: bool = False

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        opener = open_cifar10 if self.name == "cifar10" else open_cifar100
        return opener(split, Path(self.root).expanduser(), self.download)


@dataclass(frozen=True, kw_only=True)
class _FilesConfig(_DataConfig):
    """Encoded images in files.

    Attributes:
        image_size_px: side that images are resized and cropped to; None if all images have one size, or, in metric
            learning, are cut by its crop.
        num_channels: 3 for colours, 1 for grey.
        on_bad_image: raise stops at an unreadable image; skip leaves it out and counts it.
        resident_limit_mib: a set that is no larger once decoded is kept on the device; a larger one is streamed.
    """

    image_size_px: Side | None = None
    num_channels: Literal[1, 3] = 3
    on_bad_image: Literal["raise", "skip"] = "raise"
    resident_limit_mib: CountOrZero = 4096


@dataclass(frozen=True, kw_only=True)
class FolderConfig(_FilesConfig):
    """Images in root/train/<class>/ and root/test/<class>/ (ImageFolder's layout).

    Attributes:
        root: the folder that holds train/ and test/, each with a folder of images for each class.
    """

    name: Literal["folder"] = "folder"
    root: Local

    @property
    def title(self) -> str:
        """The folder's own name."""
        return title_of_place(self.root) or self.name

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
        train: the training files: paths, globs or fsspec URLs.
        test: the test files, likewise; may be None where num_train_classes splits the training files, and in face
            recognition.
        image_column: the column of the images; None finds the one that holds images.
        label_column: the column of the classes, int64.
        cache_folder: where the files of a streamed set are laid out for random access.
    """

    name: Literal["parquet"] = "parquet"
    train: tuple[str, ...]
    test: tuple[str, ...] | None = None
    image_column: str | None = None
    label_column: str = "label"
    cache_folder: Local = "~/.cache/ssl_sec"

    @property
    def title(self) -> str:
        """The first file's own name, or that of its folder."""
        return (title_of_place(self.train[0]) if self.train else "") or self.name

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
    root: Local

    @property
    def title(self) -> str:
        """The folder's own name."""
        return title_of_place(self.root) or self.name

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
        on_bad_image: raise stops at an unreadable image; skip replaces it by the next one and counts it.
        root: the folder of the data set, as it is published.
    """

    name: str
    root: Local
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
    root: Local = "data/CUB_200_2011"

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        return open_cub(split, Path(self.root).expanduser(), crop, self.on_bad_image)


@dataclass(frozen=True, kw_only=True)
class Cars196Config(_RetrievalConfig):
    """Cars196 (Stanford Cars); see `ssl_sec.data.retrieval_sets`."""

    name: Literal["cars196"] = "cars196"
    root: Local = "data/cars196"

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        return open_cars196(split, Path(self.root).expanduser(), crop, self.on_bad_image)


@dataclass(frozen=True, kw_only=True)
class SOPConfig(_RetrievalConfig):
    """Stanford Online Products; see `ssl_sec.data.retrieval_sets`."""

    name: Literal["sop"] = "sop"
    root: Local = "data/Stanford_Online_Products"

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        return open_sop(split, Path(self.root).expanduser(), crop, self.on_bad_image)


@dataclass(frozen=True, kw_only=True)
class InShopConfig(_RetrievalConfig):
    """In-Shop Clothes Retrieval; see `ssl_sec.data.retrieval_sets`."""

    name: Literal["inshop"] = "inshop"
    root: Local = "data/inshop"

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
class _PairsConfig(Settings, key="benchmarks"):
    """What every set of pairs to verify has; its images have the size and the channels of the training images.

    Attributes:
        title: what figures call the set; None takes the name of the file that lists the pairs.
        resident_limit_mib: a set that is no larger once decoded is kept in memory.
    """

    title: str | None = None
    resident_limit_mib: CountOrZero = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        PlainName().check("benchmarks.title", self.figures_title)

    @property
    def figures_title(self) -> str:
        """What figures call the set."""
        return self.title or Path(self._list).stem

    @property
    @abstractmethod
    def _list(self) -> str:
        """The file that lists the pairs."""


@dataclass(frozen=True, kw_only=True)
class BinPairsConfig(_PairsConfig):
    """A .bin of InsightFace.

    Attributes:
        path: the .bin file.
    """

    name: Literal["bin"] = "bin"
    path: Local

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
        pairs: the file that lists the pairs, in the form of LFW's pairs.txt.
        root: the folder of the images.
    """

    name: Literal["lfw_pairs"] = "lfw_pairs"
    pairs: Local
    root: Local

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
        pairs: the CSV file of the pairs.
        images: the folder of the images, or a list of Parquet files with them.
        image_column: the column of the images in Parquet files; None finds the one that holds images.
        label_column: the column of Parquet files that says who is shown.
    """

    name: Literal["pairs"] = "pairs"
    pairs: Local
    images: Local | tuple[str, ...]
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
class AugmentConfig(Settings, key="augment"):
    """SimCLR's augmentation; see `ssl_sec.augment`.

    Attributes:
        min_scale: smallest crop, as a share of the image's area, in (0, 1].
        flip_probability: probability of a horizontal flip, in [0, 1].
        colour_strength: strength of the colour distortion, ≥ 0; SimCLR has 0.5 for CIFAR and 1 for ImageNet.
        fused: true: the views are made in one launch (Triton); null: wherever that is possible, for colour images of up
            to 64 pixels on a GPU.
    """

    min_scale: Share = 0.08
    flip_probability: Probability = 0.5
    colour_strength: Annotated[float, Range(ge=0, le=2.5)] = 0.5  # its hue turns by 0.2 of it, at most by half a turn
    fused: bool | None = None

    def build(
        self,
        image_size_px: int,
        num_channels: int,
        seed: int,
        num_views: int = 2,
        device: torch.device = CPU,
        layout: torch.memory_format = torch.contiguous_format,
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
        if _wherever_possible("augment.fused", self.fused, reason):
            return FusedSimCLRAugmentation(layout, **settings)
        return SimCLRAugmentation(**settings)


@dataclass(frozen=True, kw_only=True)
class _EncoderConfig(Settings, key="encoder"):
    """What every encoder has.

    Attributes:
        weights: a .safetensors file or a state dict that the backbone starts from; None starts from random weights.
        mean: subtracted from the pixels, which are in [0, 1]: one value, or one for each channel. None takes what the
            encoder's published weights expect, and 0 where there are none.
        std: what the pixels are then divided by, > 0, likewise; None takes what the published weights expect, and 1
            where there are none.
        freeze_batch_norm: true: the backbone's batch norms keep the statistics and the weights that they start with.
    """

    weights: Local | None = None
    mean: Annotated[tuple[Annotated[float, Range(ge=-1000, le=1000)], ...], NotEmpty()] | None = None
    std: Annotated[tuple[Annotated[float, Range(ge=1e-6, le=1000)], ...], NotEmpty()] | None = None
    freeze_batch_norm: bool = False

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

    @abstractmethod
    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """The backbone as others name it."""

    @property
    def _has_weights(self) -> bool:
        """Whether it starts from weights; the running statistics of others are not worth freezing."""
        return self.weights is not None

    def _published_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation that the published weights expect."""
        return (0.0,), (1.0,)

    @abstractmethod
    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]: ...


@dataclass(frozen=True, kw_only=True)
class _WidthConfig(_EncoderConfig):
    """What encoders have whose layers may be wider or narrower than the published ones.

    Attributes:
        width: of the layers, as a multiple of the published ones'.
    """

    width: Width = 1.0

    def build(self, num_channels: int, image_size_px: int) -> Encoder:
        """The encoder for images of one size, with the weights it is to start from."""
        with torch.device("meta"):
            backbone, _ = self._backbone(num_channels, image_size_px)
        check_memory("encoder.width", self.width, backbone)
        return super().build(num_channels, image_size_px)


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(_WidthConfig):
    """A ResNet; see `ssl_sec.encoders.resnet`.

    Attributes:
        stem: "cifar", a 3 x 3 convolution of stride 1 for small images, or "imagenet", one of 7 x 7 with pooling.
    """

    name: Literal["resnet18", "resnet34", "resnet50"]
    stem: Literal["cifar", "imagenet"] = "cifar"

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
class IRConfig(_WidthConfig):
    """An improved residual network of face recognition; see `ssl_sec.encoders.ir`."""

    name: IRName

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """What no installed library has."""
        kind, _, depth = self.name.upper().partition("IR")
        return OwnNetwork(title=f"{kind.replace('_', '-')}IR-{depth} of ArcFace, width {self.width:g}")

    def _published_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return FACE_MEAN, FACE_STD

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return ir(self.name, self.width, num_channels, image_size_px)


@dataclass(frozen=True, kw_only=True)
class SphereFaceNetConfig(_WidthConfig):
    """SphereFace's residual CNN; see `ssl_sec.encoders.sphereface`.

    Attributes:
        units: numbers of residual units of the four stages, each ≥ 0.
        width: multiplies the channels of every layer, > 0.
    """

    name: Literal["sphereface_net"] = "sphereface_net"
    units: tuple[Annotated[int, Range(ge=0, le=1000)], ...] = (3, 4, 6, 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(len(self.units) == 4, "encoder.units", list(self.units), "four numbers ≥ 0")
        check(not self.freeze_batch_norm, "encoder.freeze_batch_norm", True, "false: sphereface_net has no batch norm")

    def architecture(self, num_channels: int, image_size_px: int) -> Architecture:
        """What no installed library has."""
        return OwnNetwork(title=f"SphereFace's CNN of {list(self.units)} residual units, width {self.width:g}")

    def _published_scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return FACE_MEAN, FACE_STD

    def _backbone(self, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
        return sphereface_net(self.units, self.width, num_channels, image_size_px)


@dataclass(frozen=True, kw_only=True)
class LightCNNConfig(_WidthConfig):
    """Light CNN-9, whose last layer is the head `maxout`; see `ssl_sec.encoders.light_cnn`."""

    name: Literal["light_cnn"] = "light_cnn"

    def __post_init__(self) -> None:
        super().__post_init__()
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
        model: timm's name of the model, with the tag of its weights after a point or without.
        pretrained: true: timm downloads its weights, unless `weights` are given.
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
class _HeadConfig(Settings, key="head"):
    """What every head has.

    Attributes:
        dim: dimensions of the embeddings, > 0.
        weights: a file that the head starts from: a head that a run left, or, for fc_bn, weights of InsightFace's
            iresnet.
    """

    dim: Dim
    weights: Local | None = None

    def build(self, num_features: int, seed: int) -> nn.Module:
        """The head for an encoder's features, with the weights it is to start from; the seed is of its dropout."""
        with torch.device("meta"):
            check_memory("head.dim", self.dim, self._head(num_features, seed))
        head = self._head(num_features, seed)
        if self.weights is not None:
            load_head_weights(head, Path(self.weights).expanduser())
        return head

    @abstractmethod
    def _head(self, num_features: int, seed: int) -> nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class MLPHeadConfig(_HeadConfig):
    """The projection MLP; see `ssl_sec.heads`.

    Attributes:
        num_layers: linear layers, with batch norm and ReLU between them.
        hidden_dim: width of the hidden layers; None takes that of the features.
    """

    name: Literal["mlp"] = "mlp"
    num_layers: Literal[2, 3] = 2
    hidden_dim: Dim | None = None
    dim: Dim = 128

    def _head(self, num_features: int, seed: int) -> ProjectionHead:
        return ProjectionHead(num_features, self.hidden_dim or num_features, self.dim, self.num_layers)


@dataclass(frozen=True, kw_only=True)
class LinearHeadConfig(_HeadConfig):
    """A linear layer (fc), batch norm before (bn_fc) or behind it (fc_bn), or the maximum of two layers (maxout).

    Attributes:
        dropout: probability with which an entry of the embeddings, or of the features before fc_bn, is 0 in training.
    """

    name: Literal["bn_fc", "fc", "fc_bn", "maxout"]
    dim: Dim = 512
    dropout: BelowOne = 0.0

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
class SphericalConfig(Settings, key="constraint"):
    """The norm constraint and the schedule of its weight; see `ssl_sec.losses.spherical`.

    Attributes:
        name: the use, for people; what it is follows from rho and radius.
        eta: η ≥ 0, the weight of the constraint beside the loss.
        ramp: how η changes over the global step t of T: "constant"; "linear", η t / T (SEC, Eq. 29); "face", 0 for
            three epochs and linear over the fourth (SEC, B.2); "capped", min(η, 500 t / T) (SEC, Eq. 32).
        rho: weight of the batch's mean norm in μ, in (0, 1]; 1 is SEC, less is SEC-EMA.
        radius: a fixed μ ≥ 0 that norms are pulled to; 0 is L²-reg; None takes the mean norm.
    """

    name: Literal["sec", "sec_ema", "l2reg", "fixed_radius"]
    eta: NotNegative
    ramp: Literal["linear", "constant", "face", "capped"] = "linear"
    rho: Share = 1.0
    radius: NotNegative | None = None

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
class OptimiserConfig(Settings, key="optimiser"):
    """The optimiser and its learning rate, a cosine over the run.

    Attributes:
        learning_rate: the learning rate at its largest, ≥ 0.
        momentum: momentum, in [0, 1).
        weight_decay: weight decay, ≥ 0; biases and batch norm do not decay.
        warmup_epochs: epochs in which the learning rate rises from 0 to its largest, ≥ 0.
    """

    name: Literal["sgd", "lars"] = "sgd"
    learning_rate: Rate = 0.5
    momentum: BelowOne = 0.9
    weight_decay: Rate = 1e-4
    warmup_epochs: CountOrZero = 0

    def build(self, *modules: nn.Module) -> Optimizer:
        """The optimiser over the modules' parameters."""
        build = lars if self.name == "lars" else sgd
        return build(parameter_groups(modules, self.weight_decay), self.momentum)

    def schedule(self, steps_per_epoch: int, total_steps: int) -> Schedule:
        """The learning rate by global step."""
        return Cosine(self.learning_rate, total_steps, self.warmup_epochs * steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class _SteppedOptimiserConfig(Settings, key="optimiser"):
    """An optimiser whose learning rates fall at given steps.

    Attributes:
        learning_rate: the learning rate at the start of all but the backbone, > 0.
        backbone_learning_rate: that of the backbone at the start, ≥ 0.
        weight_decay: weight decay, ≥ 0; biases and batch norm do not decay.
        decay_at_steps: steps at which the rates fall.
        decay_factor: what the rates are multiplied by there, in (0, 1].
    """

    learning_rate: PositiveRate
    backbone_learning_rate: Rate
    weight_decay: Rate = 0.0
    decay_at_steps: tuple[Count, ...] = ()
    decay_factor: Share = 0.1

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

    @abstractmethod
    def _of_groups(self, groups: list[ParameterGroup]) -> Optimizer: ...


@dataclass(frozen=True, kw_only=True)
class SteppedAdamConfig(_SteppedOptimiserConfig):
    """Adam; SEC's choice for metric learning."""

    name: Literal["adam"] = "adam"

    def _of_groups(self, groups: list[ParameterGroup]) -> Optimizer:
        return adam(groups)


@dataclass(frozen=True, kw_only=True)
class SteppedSGDConfig(_SteppedOptimiserConfig):
    """SGD with momentum in [0, 1); the choice of the angular-loss and SFT papers.

    Attributes:
        momentum: momentum, in [0, 1).
    """

    name: Literal["sgd"] = "sgd"
    momentum: BelowOne = 0.9

    def _of_groups(self, groups: list[ParameterGroup]) -> Optimizer:
        return sgd(groups, self.momentum)


SteppedOptimiserConfig = SteppedAdamConfig | SteppedSGDConfig


def can_compile() -> bool:
    """Whether this machine has what torch.compile needs for a GPU: Triton and a C compiler."""
    compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
    return find_spec("triton") is not None and any(shutil.which(name) for name in compilers if name)


@dataclass(frozen=True, kw_only=True)
class _RuntimeConfig(Settings, key="runtime"):
    """How the network computes, wherever it runs.

    Attributes:
        device: auto takes a GPU if there is one.
        precision: of the forward pass; bfloat16 is autocast, float64 is for checks of exactness. None takes bfloat16 on
            GPUs that compute in it, else float32.
        channels_last: whether activations are laid out so; None for yes.
        compile: true: the network is compiled by torch.compile; None for on GPUs, where Triton and a C compiler are.
        graphs: true: the launches of a step are recorded once and replayed (CUDA graphs), in pretraining by one worker;
            None for wherever that is possible.
        num_loader_workers: processes of each worker that decode a streamed set, ≥ 0.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision | None = None
    channels_last: bool | None = None
    compile: bool | None = None
    graphs: bool | None = None
    num_loader_workers: Processes = 2

    def on(self, device: torch.device) -> Computation:
        """How the network computes on a device, with what is left to choose chosen."""
        on_gpu = device.type == "cuda"
        has_bfloat16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        return Computation(
            precision=self.precision or ("bfloat16" if has_bfloat16 else "float32"),
            channels_last=self.channels_last is not False,
            compiled=on_gpu and can_compile() if self.compile is None else self.compile,
        )

    def replays_steps(self, device: torch.device, world_size: int) -> bool:
        """Whether the launches of a pretraining step are recorded once and replayed.

        Raises:
            ConfigError: `graphs` is asked for where it is not possible.
        """
        reason = None
        if device.type != "cuda":
            reason = f"the device is {device.type}, and only a GPU has launches"
        elif self.precision == "float64":
            reason = "the precision is float64, and a recorded step has its learning rate in float32"
        elif world_size > 1:
            reason = f"there are {world_size} workers, and what they send each other is not recorded"
        return _wherever_possible("runtime.graphs", self.graphs, reason)


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
        num_workers: workers, each a process; [least, most] follows the cluster as it shrinks and grows, with those
            numbers between that divide the batch; None takes one for each GPU of the cluster, or one on CPUs.
        address: address of a Ray cluster; None joins the one that RAY_ADDRESS names, or starts one here.
        cpus_per_worker: CPUs of each worker; None shares the cluster's out among the workers.
        max_failures: how often in a row the workers are started again without a new checkpoint since, -1 for no limit;
            a node that is taken away with notice does not count.
        timeout_s: seconds that a worker waits for the others in a collective.
        start_timeout_s: seconds that Ray waits for the workers to start before it looks at the cluster again.
        resize_interval_s: seconds between two looks for room for more workers.
    """

    name: Literal["ray"] = "ray"
    num_workers: Count | tuple[Count, ...] | None = None
    address: str | None = None
    cpus_per_worker: Count | None = None
    max_failures: Annotated[int, Range(ge=-1, le=10**6, note="-1 for no limit")] = 3
    timeout_s: Annotated[int, Range(ge=1, le=10**7)] = 600
    start_timeout_s: Seconds = 60.0
    resize_interval_s: Seconds = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.num_workers, tuple):
            in_order = len(self.num_workers) == 2 and self.num_workers[0] <= self.num_workers[1]
            check(in_order, "runtime.num_workers", list(self.num_workers), "[least, most] with 1 ≤ least ≤ most")

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
class MonitorConfig(Settings, key="monitor"):
    """kNN accuracy and RankMe on training images while the encoder trains; the test set is never looked at.

    Attributes:
        every_epochs: epochs between two measurements, ≥ 1.
        max_images: so many of the training images are watched, ≥ 20; a tenth of them are the queries.
        neighbours: k of the kNN classifier, ≥ 1.
    """

    every_epochs: Count = 10
    max_images: Annotated[int, Range(ge=20)] = 10_000
    neighbours: Count = 200


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Settings, key="checkpoint"):
    """When checkpoints are saved, and how many stay.

    Attributes:
        every_epochs: a checkpoint is saved after so many epochs, and at the end.
        keep_last: so many of the newest stay; older ones are deleted.
    """

    every_epochs: Count = 5
    keep_last: Count = 2


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where figures go.

    Attributes:
        uri: of the MLflow server; None takes MLFLOW_TRACKING_URI, or sqlite in the output folder.
        experiment: in MLflow; None takes the recipe's name, or the data set's where there is no recipe.
        register_model: whether the encoder becomes a registered model.
        system_metrics: whether the use of the driver's machine (processor, memory, disk, network, GPUs) is followed.
        parent_run: the MLflow run that this one belongs to, a sweep's.
        tags: further tags of the run.
    """

    uri: str | None = None
    experiment: str | None = None
    register_model: bool = True
    system_metrics: bool = True
    parent_run: str | None = None
    tags: dict[str, str | bool | int | float] | None = None

    def __post_init__(self) -> None:
        for name in self.tags or {}:
            key = f"tracking.tags.{name}"
            check(re.fullmatch(r"[\w.:/ -]{1,250}", name) is not None, key, name, "letters, digits and _ - . : /")
            own = name in RUN_TAGS or name.startswith("mlflow.")
            check(not own, key, name, f"another name: {', '.join(RUN_TAGS)} and mlflow.* are set by the job")


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(Settings, key="probe"):
    """Linear evaluation (SEC, appendix B.3).

    Attributes:
        enabled: true: a linear probe follows the pretraining.
        augment: true: the probe trains on freshly augmented images, as SimCLR does, instead of cached features.
        learning_rates: learning rates, all trained at once; one is chosen on a held-out tenth of the training set.
        labels_per_class: train on so few labels of each class; None takes all.
        epochs: epochs of the linear classifier's training, ≥ 1.
        batch_size: images in a step of it, ≥ 1.
        momentum: momentum of its SGD, in [0, 1).
        decay_at: shares of the epochs, each in (0, 1), after which the learning rates fall.
        decay_factor: what the learning rates are divided by there, ≥ 1.
        seed: seed of the order of the images, the held-out tenth and the few labels.
    """

    enabled: bool = False
    augment: bool = False
    epochs: Count = 100
    batch_size: Count = 256
    learning_rates: Annotated[tuple[PositiveRate, ...], NotEmpty()] = (1.0, 2.0, 5.0, 10.0)
    momentum: BelowOne = 0.9
    decay_at: tuple[Annotated[float, Range(gt=0, lt=1)], ...] = (0.6, 0.75, 0.9)
    decay_factor: Annotated[float, Range(ge=1, le=1000)] = 5.0
    labels_per_class: Count | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        reached = self.epochs > 1 or not self.decay_at
        check(reached, "probe.decay_at", list(self.decay_at), "[] with probe.epochs=1, in which no decay is reached")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Settings):
    """What every training run has.

    Attributes:
        recipe: names the experiment in MLflow, the folder of its runs and the registered model; None takes the name of
            the data set.
        run_name: name of the run and its folder; None makes one of data set, encoder, constraint and seed.
        output_dir: where run folders are made.
        resume: true resumes the run of this name where it stopped; auto starts it where there is none. On a command
            line, resume=<folder, name or id> stands for the run's own configuration.
        seed: seed of weights, order and augmentation, ≥ 0.
        global_batch_size: images of all workers together in a step.
        log_every_steps: steps between two reports of the loss, ≥ 1; None for 50 on GPUs, which a report waits for, and
            10 on CPUs.
    """

    recipe: Name | None = None
    data: DataConfig
    encoder: EncoderConfig
    head: HeadConfig
    constraint: ConstraintConfig
    runtime: RuntimeConfig
    global_batch_size: Annotated[int, Range(ge=2, le=2**20)]
    seed: Seed = 0
    run_name: Name | None = None
    output_dir: Local = "runs"
    resume: bool | Literal["auto"] = False
    log_every_steps: Count | None = None
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume:
            check(self.run_name is not None, "resume", self.resume, "given together with the run_name to take up")
        if isinstance(self.runtime, RayConfig):
            self.runtime.check_shares(self.global_batch_size)

    @property
    def recipe_name(self) -> str:
        """The recipe, or the data set where none is given."""
        return self.recipe or self.data.title

    def steps_between_reports(self, device: torch.device) -> int:
        """How often the loss is reported on a device."""
        return self.log_every_steps or (50 if device.type == "cuda" else 10)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainingConfig):
    """A pretraining run.

    Attributes:
        epochs: passes over the training images; 0 keeps the encoder as it was initialised.
    """

    augment: AugmentConfig
    loss: PairLossConfig
    optimiser: OptimiserConfig
    epochs: CountOrZero
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)


@dataclass(frozen=True, kw_only=True)
class CropConfig(Settings, key="augment"):
    """Random crops in training, the centre in evaluation (SEC, appendix B.1); see `ssl_sec.data.crops`.

    Images that have one size already, as digits have, are cropped to that size, and evaluated whole.

    Attributes:
        short_side_px: pixels that the short side of an image is resized to before it is cropped.
        size_px: side of the crops, pixels.
        min_scale: smallest crop, as a share of the image's area, in (0, 1].
        min_aspect: smallest width / height of a crop, > 0.
        max_aspect: largest width / height of a crop, ≥ min_aspect.
        flip_probability: probability of a horizontal flip, in [0, 1].
    """

    short_side_px: Side = 256
    size_px: Side = 227
    min_scale: Share = 0.16
    min_aspect: Positive = 0.75
    max_aspect: Positive = 4 / 3
    flip_probability: Probability = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least = f"≥ augment.size_px = {self.size_px}"
        check(self.short_side_px >= self.size_px, "augment.short_side_px", self.short_side_px, at_least)
        at_least = f"≥ augment.min_aspect = {self.min_aspect:g}"
        check(self.max_aspect >= self.min_aspect, "augment.max_aspect", self.max_aspect, at_least)

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
class ClassSamplerConfig(Settings, key="sampler"):
    """C classes and K images of each in every batch.

    Attributes:
        images_per_class: images of each class in a batch, ≥ 2; it has global_batch_size / images_per_class classes.
    """

    name: Literal["classes"] = "classes"
    images_per_class: Annotated[int, Range(ge=2)] = 3

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
class RetrievalMonitorConfig(Settings, key="monitor"):
    """Recall@1 and norms while the embedding trains; the test classes are never looked at.

    Attributes:
        every_steps: steps between two measurements, ≥ 1.
        max_images: so many images are watched, ≥ 2.
    """

    every_steps: Count = 1000
    max_images: Annotated[int, Range(ge=2)] = 10_000


@dataclass(frozen=True, kw_only=True)
class StepCheckpointConfig(Settings, key="checkpoint"):
    """When checkpoints are saved, and how many stay.

    Attributes:
        every_steps: a checkpoint is saved after so many steps, and at the end.
        keep_last: so many of the newest stay; older ones are deleted.
    """

    every_steps: Count = 500
    keep_last: Count = 2


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig(Settings, key="evaluation"):
    """What is measured on the test classes, once, after the last step.

    Attributes:
        ks: the K of Recall@K, each ≥ 1.
        clustering: true: k-means, NMI and F1 are computed; In-Shop reports none.
        seed: seed of k-means.
    """

    ks: Annotated[tuple[Count, ...], NotEmpty()] = (1, 2, 4, 8)
    clustering: bool = True
    seed: Annotated[int, Range(ge=0, lt=2**32)] = 0


@dataclass(frozen=True, kw_only=True)
class MetricLearningConfig(TrainingConfig):
    """A run of deep metric learning.

    Attributes:
        transform: generates rows of other classes, or not.
        sampler: which images make up a batch.
        steps: steps of training; 0 evaluates the encoder as it starts.
        held_out_share: share of the training classes that are watched instead of trained on, in [0, 1); 0 trains on all
            of them, as the papers do, and watches those.
        evaluation: what is measured on the test classes.
    """

    augment: CropConfig
    loss: PairLossConfig
    sampler: SamplerConfig
    optimiser: SteppedOptimiserConfig
    steps: CountOrZero
    held_out_share: BelowOne = 0.1
    transform: TransformConfig = field(default_factory=NoTransformConfig)
    monitor: RetrievalMonitorConfig = field(default_factory=RetrievalMonitorConfig)
    checkpoint: StepCheckpointConfig = field(default_factory=StepCheckpointConfig)
    evaluation: RetrievalConfig = field(default_factory=RetrievalConfig)


@dataclass(frozen=True, kw_only=True)
class ProbeJobConfig(Settings):
    """A probe of a run that MLflow knows.

    Attributes:
        run: the pretraining's MLflow run id, its name, the beginning of one, or its folder.
        data: None takes the data set of that run.
        output_dir: where the folder of the run is made.
        run_name: None makes one from the time.
    """

    run: str
    probe: ProbeConfig
    runtime: RuntimeConfig
    data: DataConfig | None = None
    output_dir: Local = "runs"
    run_name: Name | None = None
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass(frozen=True, kw_only=True)
class AblateConfig(Settings):
    """What an ablation varies.

    Attributes:
        arms: what is compared: options of the group constraint, and random, which keeps the initial encoder.
        seeds: each arm runs once with each of these.
    """

    arms: Annotated[tuple[str, ...], NotEmpty()]
    seeds: Annotated[tuple[Seed, ...], NotEmpty()]


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Settings):
    """The encoder of a run that MLflow knows, in files that others read; with its head if embeddings were trained.

    Attributes:
        run: the training's MLflow run id, its name, the beginning of one, or its folder.
        format: of the files; see `ssl_sec.exporting`.
        output: a folder that is made; None takes one in output_dir/exports.
        overwrite: whether an export that is there is replaced.
        data: where the images of the check come from; None takes the data set of the run.
        output_dir: where MLflow's sqlite lies, unless tracking names a store.
    """

    run: str
    format: FormatName
    output: Local | None = None
    overwrite: bool = False
    data: DataConfig | None = None
    output_dir: Local = "runs"
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass(frozen=True, kw_only=True)
class AlignConfig(Settings):
    """Faces cut out of images by five points each; see `ssl_sec.data.alignment`.

    Attributes:
        images: the folder of the images, or of a folder of images for each person.
        landmarks: a CSV file with the columns path, x1, y1, …, x5, y5: eyes, nose and corners of the mouth, in pixels;
            paths are relative to the folder.
        output: the folder that the aligned images are written to, under the same paths; images that are there are kept.
        num_workers: processes; 0 aligns in the job's own, None takes one for each core.
    """

    images: Local
    landmarks: Local
    output: Local
    num_workers: Processes | None = None


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Settings):
    """Figures that MLflow has not.

    Attributes:
        folder: the folder of a run that has ended; or its name, its id, or the beginning of one.
        uri: MLflow's store; None takes the one that the run was meant for.
        output_dir: folder of the runs' folders, where a name or an id is looked for.
    """

    folder: Local
    uri: str | None = None
    output_dir: str = "runs"


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Settings):
    """Results beside a paper's, or two runs side by side; one of table, figure and compare.

    Attributes:
        paper: which paper's tables and figures.
        table: a table of the paper by its number: our results beside its own.
        figure: a figure of the paper by its number, drawn from our runs.
        compare: two runs, by id, name, or the beginning of one.
        all: true: a comparison shows what is equal, too.
        recipes: recipes of the runs that a figure shows; None takes all of the experiment with the newest run.
        output: the folder that the files are written to.
        output_dir: where the runs' folders are, with their store.
        tracking: which store; with `experiment`, only that experiment's runs count.
    """

    paper: str = "sec"
    table: int | None = None
    figure: int | str | None = None
    compare: tuple[str, ...] | None = None
    all: bool = False
    recipes: Annotated[tuple[str, ...], NotEmpty()] | None = None
    output: Local = "report"
    output_dir: Local = "runs"
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = [self.table, self.figure, self.compare]
        one = sum(what is not None for what in asked) == 1
        check(one, "table, figure, compare", asked, "one of them: table=5, figure=6 or compare <run> <run>")
        if self.compare is not None:
            check(len(self.compare) == 2, "compare", list(self.compare), "two runs: compare <run> <run>")


def title_of_place(location: str) -> str:
    """The last part of a path or URL that says what is there, fit for a name; empty if none does."""
    is_url = "://" in location
    path = location.partition("://")[2] if is_url else str(Path(location).expanduser().absolute())
    for part in reversed(path.split("/")):
        bare = re.sub(r"\.(parquet|pq)$|-?\d{5}-of-\d{5}", "", part)
        name = re.sub(r"[^\w.-]+", "-", bare).strip("-._")
        name = re.sub(r"^train[-._]|[-._]train$", "", name)
        if any(not word.isdigit() and word.lower() not in _SAYS_NOTHING for word in re.split(r"[-._]", name)):
            return name
    return ""


# What folders and files of any data set are called.
_SAYS_NOTHING = frozenset(("", "data", "dataset", "images", "img", "train", "training", "test", "val", "validation"))
