"""The data sets and samplers as values of a run; see `ssl_sec.settings`."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ssl_sec.data.base_config import ByRowConfig, DataSetConfig, FilesConfig, title_of_place
from ssl_sec.data.crops import Crop
from ssl_sec.data.decode import Decoding, OnBadImage
from ssl_sec.data.faces.records import find_record_file, open_records
from ssl_sec.data.folders.listing import has_images
from ssl_sec.data.folders.opening import find_test_folders, find_train_folder, open_folder
from ssl_sec.data.image_set import ImageSet, Split
from ssl_sec.data.retrieval_sets import RetrievalSet, open_retrieval_set, read_listing
from ssl_sec.data.selection.class_splits import own_classes
from ssl_sec.data.shards.config import ParquetConfig, WebDatasetConfig
from ssl_sec.data.standard_sets import open_cifar10, open_cifar100, open_digits, open_mnist, require_downloaded
from ssl_sec.effects import NoEffect, file_names, image_files, without_effect
from ssl_sec.errors import ConfigError
from ssl_sec.rules import Local
from ssl_sec.settings import to_values


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(DataSetConfig):
    """scikit-learn's 1,797 digits: real, grey, 8x8, no download."""

    name: Literal["digits"] = "digits"

    @property
    def channels(self) -> int:
        """One, grey."""
        return 1

    def opens_at_once(self, num_images: int) -> bool:
        """True: it needs no files."""
        return True

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        return open_digits(split)


@dataclass(frozen=True, kw_only=True)
class _TorchvisionConfig(DataSetConfig):
    """A set in torchvision's files.

    Attributes:
        root: the folder that holds torchvision's files.
        download: whether to download missing files.
    """

    root: Local = "data"
    download: NoEffect[bool] = False

    @property
    def places(self) -> Mapping[str, Sequence[str]]:
        """The folder, unless the files are downloaded."""
        return {} if self.download else {"root": (self.root,)}

    def require_places(self, *, with_test: bool) -> None:
        """Checks that the files, which hold the test images too, and the lists of images that are left out exist."""
        if not self.download:
            require_downloaded(self.name, Path(self.root).expanduser())
        super().require_places(with_test=with_test)

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        opener = {"cifar10": open_cifar10, "cifar100": open_cifar100, "mnist": open_mnist}[self.name]
        return opener(split, Path(self.root).expanduser(), self.download)


@dataclass(frozen=True, kw_only=True)
class CIFARConfig(_TorchvisionConfig):
    """CIFAR-10 or CIFAR-100 in torchvision's files under data.root; data.download=true fetches them."""

    name: Literal["cifar10", "cifar100"]


@dataclass(frozen=True, kw_only=True)
class MNISTConfig(_TorchvisionConfig):
    """MNIST, 28x28 and grey, in torchvision's files under data.root; data.download=true fetches them."""

    name: Literal["mnist"] = "mnist"

    @property
    def channels(self) -> int:
        """One, grey."""
        return 1


@dataclass(frozen=True, kw_only=True)
class _InFolderConfig(ByRowConfig):
    """A set in one folder, which names it."""

    root: Local

    @property
    def places(self) -> Mapping[str, Sequence[str]]:
        """The folder."""
        return {"root": (self.root,)}

    @property
    def title(self) -> str:
        """The name of the folder."""
        return title_of_place(self.root) or self.name


@dataclass(frozen=True, kw_only=True)
class FolderConfig(_InFolderConfig):
    """Your images: any tree of them in data.root, or data.root/train/<class>/ and data.root/test/<class>/.

    Attributes:
        root: the folder that holds the images, or train/ and test/. In place of test/, query/ and gallery/ may hold the
            queries of retrieval and the images that metric learning ranks for them.
        labels: whether the folders in train/ and test/ are classes; null decides by their contents.
    """

    name: Literal["folder"] = "folder"
    labels: bool | None = None

    @property
    def has_test_images(self) -> bool:
        """Whether the folder has one for test images, or is not on this machine."""
        root = Path(self.root).expanduser()
        return not root.is_dir() or bool(find_test_folders(root))

    def opens_at_once(self, num_images: int) -> bool:
        """Whether the training folder has fewer files of images."""
        return not has_images(find_train_folder(Path(self.root).expanduser()), num_images)

    def _require_layout(self) -> None:
        find_train_folder(Path(self.root).expanduser())

    def _open(self, split: Split, crop: Crop | None, shared_classes: bool | None = True) -> ImageSet:
        return open_folder(split, Path(self.root).expanduser(), self._decoding(crop), shared_classes, self.labels)

    def _open_any_classes(self, split: Split, crop: Crop | None) -> ImageSet:
        return self._open(split, crop, shared_classes=None)

    def _open_own_classes(self, split: Split, crop: Crop | None) -> ImageSet:
        return self._without_listed(self._open(split, crop, shared_classes=False), split)


@dataclass(frozen=True, kw_only=True)
class RecordsConfig(_InFolderConfig):
    """MXNet's record files of faces, as InsightFace publishes them: data.root holds train.rec, train.idx, property.

    Attributes:
        root: the folder that holds train.rec, train.idx and property.
    """

    name: Literal["records"] = "records"

    @property
    def has_test_images(self) -> bool:
        """False: the files hold only training images."""
        return False

    def _require_layout(self) -> None:
        find_record_file(Path(self.root).expanduser())

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        if split == "test":
            needed = f"must be given: {self.name!r} has no test split of its own"
            raise ConfigError(f"data.num_train_classes: found null, {needed}")
        return open_records(Path(self.root).expanduser(), self._decoding(crop))

    def _open_own_classes(self, split: Split, crop: Crop | None) -> ImageSet:
        return own_classes(self._without_listed(self._open(split, crop), split))


@dataclass(frozen=True, kw_only=True)
class _RetrievalConfig(DataSetConfig):
    """A data set of metric learning in the layout that it is published in; its images have no common size.

    Attributes:
        on_bad_image: action on an unreadable image: raise stops; skip replaces it by the next one of its class, and
            counts it.
        root: the folder of the data set in its published layout.
    """

    name: RetrievalSet
    root: Local
    on_bad_image: OnBadImage = FilesConfig.on_bad_image

    @property
    def places(self) -> Mapping[str, Sequence[str]]:
        """The folder."""
        return {"root": (self.root,)}

    def _require_layout(self) -> None:
        read_listing(self.name, Path(self.root).expanduser())

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        if crop is None:
            raise ConfigError(
                f"data.name: found {self.name!r}, whose images have no common size; only metric learning crops them"
            )
        decoding = Decoding(crop=crop, on_bad_image=self.on_bad_image)
        return open_retrieval_set(self.name, split, Path(self.root).expanduser(), decoding)

    def _open_own_classes(self, split: Split, crop: Crop | None) -> ImageSet:
        return self._without_listed(self._open(split, crop), split)


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
    | MNISTConfig
    | FolderConfig
    | ParquetConfig
    | WebDatasetConfig
    | RecordsConfig
    | CUBConfig
    | Cars196Config
    | SOPConfig
    | InShopConfig
)


def same_set(first: DataConfig, second: DataConfig, ignored: Set[str]) -> bool:
    """Whether two configurations describe the same data set, in any place.

    Args:
        first: one configuration.
        second: the other one.
        ignored: keys that may differ.
    """
    free, files = without_effect(DataConfig) | ignored, image_files(DataConfig)
    one, other = (
        {key: file_names(value) if key in files else value for key, value in to_values(data).items() if key not in free}
        for data in (first, second)
    )
    return one == other and first.title == second.title
