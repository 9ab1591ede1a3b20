"""The data sets and samplers as values of a run; see `ssl_sec.settings`."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from ssl_sec.data.base_config import ByRowConfig, DataSetConfig, FilesConfig, title_of_place
from ssl_sec.data.crops import Crop
from ssl_sec.data.decode import Decoding, OnBadImage
from ssl_sec.data.faces.records import find_record_file, open_records
from ssl_sec.data.folders.opening import find_test_folders, find_train_folder, open_folder
from ssl_sec.data.image_set import CACHE_FOLDER, ImageSet, Locations, Split
from ssl_sec.data.parquet.columns import Columns
from ssl_sec.data.parquet.opening import open_parquet, parquet_class_names
from ssl_sec.data.retrieval_sets import RetrievalSet, open_retrieval_set, read_listing
from ssl_sec.data.selection.class_splits import own_classes, require_disjoint
from ssl_sec.data.shards.gallery import QueriesAndGallery, all_locations
from ssl_sec.data.shards.opening import open_webdataset, shard_class_names
from ssl_sec.data.standard_sets import open_cifar10, open_cifar100, open_digits, open_mnist, require_downloaded
from ssl_sec.effects import ImageFiles, NoEffect, file_names, image_files, without_effect
from ssl_sec.errors import ConfigError
from ssl_sec.settings import Count, Local, check, to_values


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(DataSetConfig):
    """scikit-learn's 1,797 digits: real, grey, 8x8, no download."""

    name: Literal["digits"] = "digits"

    @property
    def channels(self) -> int:
        """One, grey."""
        return 1

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

    def _require_layout(self) -> None:
        find_train_folder(Path(self.root).expanduser())

    def _open(self, split: Split, crop: Crop | None, shared_classes: bool | None = True) -> ImageSet:
        return open_folder(split, Path(self.root).expanduser(), self._decoding(crop), shared_classes, self.labels)

    def _open_any_classes(self, split: Split, crop: Crop | None) -> ImageSet:
        return self._open(split, crop, shared_classes=None)

    def _open_own_classes(self, split: Split, crop: Crop | None) -> ImageSet:
        return self._open(split, crop, shared_classes=False)


@dataclass(frozen=True, kw_only=True)
class _ShardsConfig(FilesConfig):
    """Files of many images.

    Attributes:
        train: the training files: paths, globs, ranges ({000..041}) or fsspec URLs.
        test: the test files, likewise; may be None where num_train_classes splits the training files, and in face
            recognition.
        query: in place of data.test, the files of the queries, which metric learning ranks the images of data.gallery
            for, as In-Shop does; elsewhere both are test images.
        gallery: the files of the gallery.
        cache_folder: the folder for copies and indices that are made of the files once.
        shuffle_window: pretraining reads a streamed set by blocks of a few hundred images and shuffles this many at
            once, so that the set may be larger than the disk; null for any order, for which the files are on this
            machine or are laid out on its disk.
    """

    train: ImageFiles[tuple[str, ...]]
    test: ImageFiles[tuple[str, ...] | None] = None
    query: ImageFiles[tuple[str, ...] | None] = None
    gallery: ImageFiles[tuple[str, ...] | None] = None
    cache_folder: Local = CACHE_FOLDER
    shuffle_window: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.query is None and self.gallery is None:
            return
        for key, found, other in (("query", self.query, "gallery"), ("gallery", self.gallery, "query")):
            check(found is not None, f"data.{key}", None, f"given with data.{other}")
        needed = "null with data.query and data.gallery, which are the test images"
        check(self.test is None, "data.test", self.test, needed)
        check(self.num_train_classes is None, "data.num_train_classes", self.num_train_classes, needed)

    @property
    def places(self) -> Mapping[str, Sequence[str]]:
        """The files."""
        files = {"train": self.train, "test": self.test, "query": self.query, "gallery": self.gallery}
        return {key: places or () for key, places in files.items()}

    @property
    def title(self) -> str:
        """The name of the first file, or that of its folder."""
        return (title_of_place(self.train[0]) if self.train else "") or self.name

    @property
    def has_test_images(self) -> bool:
        """Whether the options say where test images are."""
        return self._test_files is not None

    @property
    def _test_files(self) -> Locations | QueriesAndGallery | None:
        if self.query is not None and self.gallery is not None:
            return QueriesAndGallery(query=list(self.query), gallery=list(self.gallery))
        return None if self.test is None else list(self.test)

    def listed(self) -> Self:
        """The set as one whose files are opened without decoding or copying the images."""
        return replace(super().listed(), shuffle_window=self.shuffle_window or 1)

    def open_by_class(self, split: Split, crop: Crop | None) -> ImageSet:
        """As for every data set; the set may not be streamed, since the images of a class may be anywhere in it."""
        needed = "null: batches of classes are drawn from the whole set"
        check(self.shuffle_window is None, "data.shuffle_window", self.shuffle_window, needed)
        return super().open_by_class(split, crop)

    def _locations(self) -> tuple[Locations, Locations]:
        """Where the training files and the test files are.

        Raises:
            ConfigError: there are no test files.
        """
        if self._test_files is None:
            raise ConfigError(
                "data.test: found null, must be given, unless data.num_train_classes splits data.train; data.query and "
                "data.gallery may take its place"
            )
        return list(self.train), all_locations(self._test_files)


@dataclass(frozen=True, kw_only=True)
class ParquetConfig(_ShardsConfig):
    """Parquet in the Hugging Face layout, local or by any fsspec URL: data.train=[…] data.test=[…].

    Attributes:
        image_column: the column of the images; None finds the one that holds images.
        label_column: the column of the classes, integers or names; null for images without labels, such as those of
            files without a column `label`.
    """

    name: Literal["parquet"] = "parquet"
    image_column: str | None = Columns.image_column
    label_column: str | None = Columns.label_column

    @property
    def _columns(self) -> Columns:
        return Columns(image_column=self.image_column, label_column=self.label_column)

    def _open(self, split: Split, crop: Crop | None, shared_classes: bool | None = True) -> ImageSet:
        return open_parquet(
            split,
            train=list(self.train),
            test=self._test_files,
            decoding=self._decoding(crop),
            columns=self._columns,
            cache_folder=self.cache_folder,
            shared_classes=shared_classes,
            shuffle_window=self.shuffle_window,
        )

    def _open_any_classes(self, split: Split, crop: Crop | None) -> ImageSet:
        return self._open(split, crop, shared_classes=None)

    def _open_own_classes(self, split: Split, crop: Crop | None) -> ImageSet:
        train, test = (parquet_class_names(files, self._columns) for files in self._locations())
        require_disjoint(train, test, "parquet")
        return own_classes(self._open(split, crop, shared_classes=False))


@dataclass(frozen=True, kw_only=True)
class WebDatasetConfig(_ShardsConfig):
    """Tar shards, <key>.jpg and, with labels, <key>.cls, local or by any fsspec URL: data.train=[…] data.test=[…]."""

    name: Literal["webdataset"] = "webdataset"

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        return open_webdataset(
            split,
            train=list(self.train),
            test=self._test_files,
            decoding=self._decoding(crop),
            cache_folder=self.cache_folder,
            shuffle_window=self.shuffle_window,
        )

    def _open_own_classes(self, split: Split, crop: Crop | None) -> ImageSet:
        train, test = (shard_class_names(files, self.cache_folder) for files in self._locations())
        require_disjoint(train, test, "webdataset")
        return own_classes(self._open(split, crop))


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
        return own_classes(self._open(split, crop))


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
        return self._open(split, crop)


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
