"""Sets whose files hold many images each, Parquet and tar shards, as values of a run."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from ssl_sec.data.base_config import FilesConfig, on_this_machine, title_of_place
from ssl_sec.data.crops import Crop
from ssl_sec.data.image_set import CACHE_FOLDER, ImageSet, Locations, Split
from ssl_sec.data.parquet.columns import Columns
from ssl_sec.data.parquet.opening import open_parquet, parquet_class_names
from ssl_sec.data.selection.class_splits import own_classes, require_disjoint
from ssl_sec.data.shards.gallery import QueriesAndGallery, all_locations
from ssl_sec.data.shards.locations import find_files, require_apart
from ssl_sec.data.shards.opening import open_webdataset, shard_class_names
from ssl_sec.effects import ImageFiles, NoEffect
from ssl_sec.errors import ConfigError, require_path
from ssl_sec.rules import Count, Local, check


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

    _kind: ClassVar[str]  # of files, for errors

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

    def require_places(self, *, with_test: bool) -> None:
        """As for every set; of files on this machine also that there are some of each pattern, each only once.

        Raises:
            DataError: there are none, or one is found twice, or in both splits.
        """
        super().require_places(with_test=with_test)
        keys = self.places if with_test else ("train",)
        here = {key: [place for place in self.places[key] if on_this_machine(place)] for key in keys}
        for key, places in here.items():
            for _, path in find_files(places, self._kind) if places else ():
                require_path(f"data.{key}", path)
        train = here.pop("train")
        if test := list(itertools.chain(*here.values())):
            require_apart(find_files(test, self._kind), train, self._kind)

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

    _kind = "Parquet"

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
        return own_classes(self._without_listed(self._open(split, crop, shared_classes=False), split))


@dataclass(frozen=True, kw_only=True)
class WebDatasetConfig(_ShardsConfig):
    """Tar shards, <key>.jpg and, with labels, <key>.cls, local or by any fsspec URL: data.train=[…] data.test=[…].

    Attributes:
        index_folder: a folder that all machines see, or an fsspec URL, in which they share the positions of the images
            in the shards, so that all machines together read each shard once to find them; null if each machine reads
            all shards.
    """

    _kind = "tar"

    name: Literal["webdataset"] = "webdataset"
    index_folder: NoEffect[str | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        folder = self.index_folder
        check(folder is None or folder.strip() != "", "data.index_folder", folder, "a folder, a URL or null")

    def _open(self, split: Split, crop: Crop | None) -> ImageSet:
        return open_webdataset(
            split,
            train=list(self.train),
            test=self._test_files,
            decoding=self._decoding(crop),
            cache_folder=self.cache_folder,
            shuffle_window=self.shuffle_window,
            index_folder=self.index_folder,
        )

    def _open_own_classes(self, split: Split, crop: Crop | None) -> ImageSet:
        train, test = (shard_class_names(files, self.cache_folder, self.index_folder) for files in self._locations())
        require_disjoint(train, test, "webdataset")
        return own_classes(self._without_listed(self._open(split, crop), split))
