"""The data sets and samplers as values of a run; see `ssl_sec.settings`."""

import re
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from torch import Tensor

from ssl_sec.data.class_batches import ClassBatches, TripletBatches
from ssl_sec.data.class_splits import HeadAndTail, head_and_tail, own_classes, require_disjoint, split_by_class
from ssl_sec.data.crops import Crop
from ssl_sec.data.decode import Decoding, OnBadImage
from ssl_sec.data.faces.records import open_records
from ssl_sec.data.folders import open_folder
from ssl_sec.data.image_set import CACHE_FOLDER, Columns, ImageSet
from ssl_sec.data.retrieval_sets import RetrievalSet, open_retrieval_set
from ssl_sec.data.samplers import Sampler, ShuffledBatches
from ssl_sec.data.standard_sets import open_cifar10, open_cifar100, open_digits
from ssl_sec.data.stores import limit_images, open_parquet, parquet_class_names
from ssl_sec.errors import ConfigError
from ssl_sec.settings import (
    Count,
    CountOrZero,
    Local,
    Range,
    Seed,
    Settings,
    Side,
    check,
)

Split = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class _DataConfig(Settings, key="data"):
    """The options of every data set.

    Attributes:
        max_images: size of a class-balanced subset to train on, the same for every seed; None for all images.
        num_train_classes: for metric learning, how many of the training split's classes are trained on, the first ones;
            the others are the test set. None if the splits of the data set have different classes.
    """

    name: str
    max_images: Count | None = None
    num_train_classes: Count | None = None

    @property
    def title(self) -> str:
        """The set's name in the names of runs, folders, experiments and registered models."""
        return self.name

    def open(self, split: Split) -> ImageSet:
        """Opens one split; the subset is of the training split only."""
        return self._limit(self._open(split, None), split)

    def open_by_class(self, split: Split, crop: Crop) -> ImageSet:
        """Opens one of two splits without common classes, each with its own labels, 0, 1, ….

        Args:
            split: which part; the subset is of the training split only.
            crop: the crop of each image, if the images have no common size.

        Raises:
            ConfigError: `num_train_classes` is missing, or leaves a split without classes.
            DataError: the splits have classes in common, or as the data set's opener says.
        """
        if self.num_train_classes is None:
            image_set = self._open_own_classes(split, crop)
        else:
            image_set = split_by_class(self._open("train", crop), self.num_train_classes, split)
        return self._limit(image_set, split)

    def _limit(self, image_set: ImageSet, split: Split) -> ImageSet:
        if self.max_images is None or split == "test" or self.max_images >= len(image_set):
            return image_set
        return limit_images(image_set, self.max_images, seed=0)

    @abstractmethod
    def _open(self, split: Split, crop: Crop | None) -> ImageSet: ...

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        raise ConfigError("data.num_train_classes: found None, must be given: both splits have the same classes")


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(_DataConfig):
    """scikit-learn's 1,797 digits: real, grey, 8x8, no download."""

    name: Literal["digits"] = "digits"

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        return open_digits(split)


@dataclass(frozen=True, kw_only=True)
class CIFARConfig(_DataConfig):
    """CIFAR-10 or CIFAR-100 in torchvision's files under data.root; data.download=true fetches them.

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
    on_bad_image: OnBadImage = "raise"
    resident_limit_mib: CountOrZero = Decoding.resident_limit_mib

    def _decoding(self, crop: Crop | None) -> Decoding:
        return Decoding(
            image_size_px=self.image_size_px,
            num_channels=self.num_channels,
            on_bad_image=self.on_bad_image,
            resident_limit_mib=self.resident_limit_mib,
            crop=crop,
        )


@dataclass(frozen=True, kw_only=True)
class FolderConfig(_FilesConfig):
    """Your images in data.root/train/<class>/ and data.root/test/<class>/.

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
        return open_folder(split, Path(self.root).expanduser(), self._decoding(crop))

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        return open_folder(split, Path(self.root).expanduser(), self._decoding(crop), shared_classes=False)


@dataclass(frozen=True, kw_only=True)
class ParquetConfig(_FilesConfig):
    """Parquet in the Hugging Face layout, local or by any fsspec URL: data.train=[…] data.test=[…].

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
    image_column: str | None = Columns.image_column
    label_column: str = Columns.label_column
    cache_folder: Local = CACHE_FOLDER

    @property
    def _columns(self) -> Columns:
        return Columns(image_column=self.image_column, label_column=self.label_column)

    @property
    def title(self) -> str:
        """The first file's own name, or that of its folder."""
        return (title_of_place(self.train[0]) if self.train else "") or self.name

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        return open_parquet(
            split,
            train=list(self.train),
            test=None if self.test is None else list(self.test),
            decoding=self._decoding(crop),
            columns=self._columns,
            cache_folder=self.cache_folder,
        )

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        if self.test is None:
            raise ConfigError("data.test: found None, must be given, unless data.num_train_classes splits data.train")
        train, test = (parquet_class_names(list(files), self._columns) for files in (self.train, self.test))
        require_disjoint(train, test, "parquet")
        return own_classes(self._open(split, crop))


@dataclass(frozen=True, kw_only=True)
class RecordsConfig(_FilesConfig):
    """MXNet's record files of faces, as InsightFace publishes them: data.root holds train.rec, train.idx, property.

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
        return open_records(Path(self.root).expanduser(), self._decoding(crop))

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        return own_classes(self._open(split, crop))


@dataclass(frozen=True, kw_only=True)
class _RetrievalConfig(_DataConfig):
    """A data set of metric learning in the layout that it is published in; its images have no common size.

    Attributes:
        on_bad_image: raise stops at an unreadable image; skip replaces it by the next one and counts it.
        root: the folder of the data set in its published layout.
    """

    name: RetrievalSet
    root: Local
    on_bad_image: OnBadImage = _FilesConfig.on_bad_image

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        if crop is None:
            raise ConfigError(
                f"data.name: found {self.name!r}, whose images have no common size; only metric learning crops them"
            )
        return self._open_own_classes(split, crop)

    def _open_own_classes(self, split: Split, crop: Crop) -> ImageSet:
        decoding = Decoding(crop=crop, on_bad_image=self.on_bad_image)
        return open_retrieval_set(self.name, split, Path(self.root).expanduser(), decoding)


@dataclass(frozen=True, kw_only=True)
class CUBConfig(_RetrievalConfig):
    """CUB-200-2011 for metric learning: data.root holds images.txt, image_class_labels.txt and images/."""

    name: Literal["cub"] = "cub"
    root: Local = "data/CUB_200_2011"


@dataclass(frozen=True, kw_only=True)
class Cars196Config(_RetrievalConfig):
    """Cars196 (Stanford Cars) for metric learning: data.root holds car_ims/ and cars_annos.mat."""

    name: Literal["cars196"] = "cars196"
    root: Local = "data/cars196"


@dataclass(frozen=True, kw_only=True)
class SOPConfig(_RetrievalConfig):
    """Stanford Online Products for metric learning: data.root holds Ebay_train.txt, Ebay_test.txt and the images."""

    name: Literal["sop"] = "sop"
    root: Local = "data/Stanford_Online_Products"


@dataclass(frozen=True, kw_only=True)
class InShopConfig(_RetrievalConfig):
    """In-Shop Clothes Retrieval for metric learning: data.root holds Eval/list_eval_partition.txt and Img/img/."""

    name: Literal["inshop"] = "inshop"
    root: Local = "data/inshop"


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
class NoSplitConfig:
    """All training images, however many a class has."""

    name: Literal["none"] = "none"


@dataclass(frozen=True, kw_only=True)
class HeadAndTailConfig(Settings, key="split"):
    """Classes with many and with few training images, drawn among the large ones of a set (SFT, Section 4.2).

    Attributes:
        more_than: classes with more images than this are drawn from.
        num_head: classes with many training images, the heads.
        num_tail: classes with few, the tails; None for all large classes that are not heads.
        head_images: training images of each head class, at most more_than; its others test it.
        tail_images: training images of each tail class, fewer than head_images; its others test it.
        seed: of the draws of the classes and of their training images.
    """

    name: Literal["head_and_tail"] = "head_and_tail"
    more_than: Count = 100
    num_head: Count = 1500
    num_tail: Count | None = None
    head_images: Count = 50
    tail_images: Count = 5
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        most, fewer = self.more_than, self.head_images - 1
        check(self.head_images <= most, "split.head_images", self.head_images, f"at most split.more_than, {most}")
        check(self.tail_images <= fewer, "split.tail_images", self.tail_images, f"below split.head_images, {fewer + 1}")

    def divide(self, image_set: ImageSet) -> HeadAndTail:
        """The training and the test images of the drawn classes."""
        return head_and_tail(
            image_set,
            more_than=self.more_than,
            num_head=self.num_head,
            num_tail=self.num_tail,
            head_images=self.head_images,
            tail_images=self.tail_images,
            seed=self.seed,
        )


SplitConfig = NoSplitConfig | HeadAndTailConfig


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


def title_of_place(location: str) -> str:
    """The last meaningful part of a path or URL, as a name; empty if there is none."""
    is_url = "://" in location
    path = location.partition("://")[2] if is_url else str(Path(location).expanduser().absolute())
    for part in reversed(path.split("/")):
        bare = re.sub(r"\.(parquet|pq)$|-?\d{5}-of-\d{5}", "", part)
        name = re.sub(r"[^\w.-]+", "-", bare).strip("-._")
        name = re.sub(r"^train[-._]|[-._]train$", "", name)
        if any(not word.isdigit() and word.lower() not in _GENERIC_WORDS for word in re.split(r"[-._]", name)):
            return name
    return ""


# Words in the names of folders and files of any data set.
_GENERIC_WORDS = frozenset(("", "data", "dataset", "images", "img", "train", "training", "test", "val", "validation"))


@dataclass(frozen=True, kw_only=True)
class ShuffledSamplerConfig:
    """Every image once per epoch, in an order that the seed determines."""

    name: Literal["shuffled"] = "shuffled"

    def build(self, labels: Tensor, global_batch_size: int, seed: int) -> Sampler:
        """The sampler over the images of these classes."""
        return ShuffledBatches(num_images=len(labels), global_batch_size=global_batch_size, seed=seed)
