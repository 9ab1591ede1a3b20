"""The options of every data set; see `ssl_sec.data.config`."""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

from ssl_sec.data.bands import ValueRanges, check_value_ranges
from ssl_sec.data.crops import Crop
from ssl_sec.data.decode import Decoding, OnBadImage
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.image_set import ImageSet, Split
from ssl_sec.data.selection.class_splits import split_by_class
from ssl_sec.data.selection.left_out import require_lists, without_listed
from ssl_sec.data.stores import from_store, limit_images
from ssl_sec.effects import NoEffect
from ssl_sec.errors import ConfigError, require_path
from ssl_sec.rules import Count, CountOrZero, Range, Side
from ssl_sec.settings import Settings

# Words that name folders and files of any data set.
_GENERIC_WORDS = frozenset(("", "data", "dataset", "images", "img", "train", "training", "test", "val", "validation"))
# Keys of `places` that a training without a test does not need.
_OF_TEST_IMAGES = frozenset(("test", "query", "gallery"))
# A URL of fsspec, which may be chained: whether there are such files is known once they are opened.
_URL = re.compile("://|::")
_URL_OR_PATTERN = re.compile(rf"{_URL.pattern}|[*?\[{{]")


@dataclass(frozen=True, kw_only=True)
class DataSetConfig(Settings, key="data", is_base=True):
    """The options of every data set.

    Attributes:
        leave_out: tables that list training images to leave out.
        max_images: size of a class-balanced training subset, the same for every seed; None for all images.
        num_train_classes: for metric learning, the number of classes of the training split to train on, the first ones;
            the others are the test set. None if the splits of the data set have different classes.
    """

    name: str
    leave_out: tuple[str, ...] = ()
    max_images: Count | None = None
    num_train_classes: Count | None = None

    @property
    def title(self) -> str:
        """The name of the set in names of runs, folders, experiments and registered models."""
        return self.name

    @property
    def has_test_images(self) -> bool:
        """Whether the set has test images, as far as is known without opening it."""
        return True

    @property
    def places(self) -> Mapping[str, Sequence[str]]:
        """Key -> the folder, or the paths, globs and URLs, of the images; empty if nothing names them."""
        return {}

    @property
    def all_places(self) -> Mapping[str, Sequence[str]]:
        """The places of the images and of the lists of those that are left out."""
        return {**self.places, "leave_out": self.leave_out}

    def require_places(self, *, with_test: bool) -> None:
        """Checks that the images have places on this machine, without opening them, and reads the lists.

        Args:
            with_test: whether those of the test images are needed, too.

        Raises:
            DataError: one does not exist or holds no such set, or a list cannot be read.
        """
        for key, places in self.all_places.items():
            for place in places if with_test or key not in _OF_TEST_IMAGES else ():
                if not _URL_OR_PATTERN.search(place):
                    require_path(f"data.{key}", place)
        self._require_layout()
        require_lists([place for place in self.leave_out if not _URL_OR_PATTERN.search(place)])

    def _require_layout(self) -> None:
        """Checks that the places hold a set of this kind, as far as that is known at once."""

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return 3

    @property
    def ranges(self) -> ValueRanges | None:
        """Lowest and highest value of the pixels, where files are read with such; see `FilesConfig.value_ranges`."""
        return None

    def opens_at_once(self, num_images: int) -> bool:
        """Whether the set opens at once, so that a configuration may be checked with its number of images.

        Args:
            num_images: number below which the training images of a set of files are few enough, if they are quick to
                count.
        """
        return False

    @property
    def read_size_px(self) -> int | None:
        """Side that all images are resized and cropped to as they are read; None if they keep their own."""
        return None

    def read_as(
        self,
        image_size_px: int | None = None,
        num_channels: int | None = None,
        value_ranges: ValueRanges | None = None,
    ) -> Self:
        """The set with its files read so; sets that are no files as they are.

        Args:
            image_size_px: side of the images, unless the set has one; None leaves it.
            num_channels: channels of the images; None leaves them.
            value_ranges: lowest and highest value of the pixels, unless the set has such ranges.
        """
        return self

    def undecoded(self) -> Self:
        """The set as one whose images are decoded when they are read; sets that are no encoded files as they are."""
        return self

    def listed(self) -> Self:
        """The set as one whose files are opened without decoding or copying the images; others as they are."""
        return self.undecoded()

    def open(self, split: Split, crop: Crop | None = None) -> ImageSet:
        """Opens one split, its images cropped if they have no common size; the choice is of training images only."""
        return self._chosen(self._open(split, crop), split)

    def open_all(self, split: Split) -> ImageSet:
        """Opens one split with all its images but those left out, also where `max_images` limits what is trained on."""
        return replace(self, max_images=None).open(split)

    def open_to_embed(self, split: Split, crop: Crop | None = None) -> ImageSet:
        """Opens one split with all its images, also those left out, whose classes may be others than the other split's.

        Where `num_train_classes` is given, the splits are those of `open_by_class`.

        Args:
            split: the training or test images.
            crop: the crop of each image, if the images have no common size.
        """
        if self.num_train_classes is None:
            return self._open_any_classes(split, crop)
        return replace(self, leave_out=(), max_images=None).open_by_class(split, crop)

    def open_by_class(self, split: Split, crop: Crop | None) -> ImageSet:
        """Opens one of two splits without common classes, each with its own labels, 0, 1, ….

        Args:
            split: the training or test images; the subset is of the training split only.
            crop: the crop of each image, if the images have no common size.

        Raises:
            ConfigError: `num_train_classes` is missing, or leaves a split without classes.
            DataError: the splits have classes in common, or as the opener of the data set documents.
        """
        if self.num_train_classes is None:
            image_set = self._open_own_classes(split, crop)
        else:
            whole = split_by_class(self._open("train", crop), self.num_train_classes, split)
            image_set = self._without_listed(whole, split)
        return self._limited(image_set, split)

    def _chosen(self, image_set: ImageSet, split: Split) -> ImageSet:
        """The images of a split that are used."""
        return self._limited(self._without_listed(image_set, split), split)

    def _without_listed(self, image_set: ImageSet, split: Split) -> ImageSet:
        """The images of a split, with the labels of those that are embedded, without those that are left out."""
        return image_set if split == "test" else without_listed(image_set, self.leave_out)

    def _limited(self, image_set: ImageSet, split: Split) -> ImageSet:
        if split == "test" or self.max_images is None:
            return image_set
        return limit_images(image_set, self.max_images, seed=0)

    @abstractmethod
    def _open(self, split: Split, crop: Crop | None) -> ImageSet: ...

    def _open_any_classes(self, split: Split, crop: Crop | None) -> ImageSet:
        """As `_open`; a test split of other classes than the training split has its own labels."""
        return self._open(split, crop)

    def _open_own_classes(self, split: Split, crop: Crop | None) -> ImageSet:
        """One of two splits without common classes, with its own labels and without the images that are left out."""
        raise ConfigError("data.num_train_classes: found null, must be given: both splits have the same classes")


@dataclass(frozen=True, kw_only=True)
class FilesConfig(DataSetConfig, is_base=True):
    """Encoded images in files.

    Attributes:
        image_size_px: side that images are resized and cropped to; None if all images have one size, or, in metric
            learning, are cut by its crop.
        num_channels: channels of the images: 3 for colours, 1 for grey; another number for files of so many channels,
            such as those of satellites and microscopes.
        value_ranges: lowest and highest value of the pixels, which become 0 and 255: one pair for all channels, or one
            for each; None takes 8 bits as they are, and the high byte of 16.
        on_bad_image: action on an unreadable image: raise stops; skip leaves it out and counts it.
        resident_limit_mib: a set that is no larger once decoded is kept on the device; a larger one is streamed.
        scaled_decoding: whether JPEGs whose sides are 8 times image_size_px or more are decoded at a part of their
            size, with at least 4 times image_size_px: photos of 12 megapixels in less than half the time.
    """

    image_size_px: Side | None = None
    num_channels: Annotated[int, Range(ge=1, le=1024)] = 3
    value_ranges: ValueRanges | None = None
    on_bad_image: OnBadImage = "raise"
    resident_limit_mib: NoEffect[CountOrZero] = Decoding.resident_limit_mib
    scaled_decoding: bool = Decoding.scaled_decoding

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return self.num_channels

    @property
    def read_size_px(self) -> int | None:
        """Side that all images are resized and cropped to as they are read; None if they keep their own."""
        return self.image_size_px

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value_ranges(self.value_ranges, self.num_channels)

    @property
    def ranges(self) -> ValueRanges | None:
        """Lowest and highest value of the pixels."""
        return self.value_ranges

    def read_as(
        self,
        image_size_px: int | None = None,
        num_channels: int | None = None,
        value_ranges: ValueRanges | None = None,
    ) -> Self:
        """The set with its files read at this size and with these ranges, unless it has such, and these channels."""
        channels = self.num_channels if num_channels is None else num_channels
        # Ranges of other channels than the set's do not fit it.
        fits = value_ranges is not None and len(value_ranges) in (1, channels)
        return replace(
            self,
            image_size_px=image_size_px if self.image_size_px is None else self.image_size_px,
            num_channels=channels,
            value_ranges=value_ranges if fits and self.value_ranges is None else self.value_ranges,
        )

    def undecoded(self) -> Self:
        """The set as one whose images are decoded when they are read."""
        return replace(self, resident_limit_mib=0)

    def _decoding(self, crop: Crop | None) -> Decoding:
        return Decoding(
            image_size_px=self.image_size_px,
            num_channels=self.num_channels,
            value_ranges=self.value_ranges,
            on_bad_image=self.on_bad_image,
            resident_limit_mib=self.resident_limit_mib,
            scaled_decoding=self.scaled_decoding,
            crop=crop,
        )


@dataclass(frozen=True, kw_only=True)
class ByRowConfig(FilesConfig, is_base=True):
    """Encoded images that are read one by one, wherever they are in the set."""

    def open(self, split: Split, crop: Crop | None = None) -> ImageSet:
        """As for every data set; no images are decoded but those of a subset, chosen by labels or by lists."""
        if (self.max_images is None and not self.leave_out) or split == "test":
            return super().open(split, crop)
        chosen = self._chosen(self.listed()._open(split, crop), split)
        assert isinstance(chosen, EncodedImages)
        decoding = self._decoding(crop)
        return from_store(
            chosen.store, chosen.labels, chosen.class_names, chosen.name, chosen.description, decoding, chosen.rows
        )


def on_this_machine(place: str) -> bool:
    """Whether a place of images is a path or a pattern, not a URL of fsspec."""
    return _URL.search(place) is None


def title_of_place(location: str) -> str:
    """The last meaningful part of a path or URL, as a name; empty if there is none."""
    is_url = "://" in location
    # A URL may contain a password before its host, and a signature in its query.
    address = re.sub(r"^[^/]*@|[?#].*", "", location.partition("://")[2])
    path = address if is_url else str(Path(location).expanduser().absolute())
    for part in reversed(path.split("/")):
        # Shards are numbered: tr-000000.tar, or tr-{000..041}.tar for several.
        bare = re.sub(r"([-_.]?\{[^{}]*\}|[-_.]\d+)?\.tar$", "", part)
        bare = re.sub(r"\.(parquet|pq)$|-?\d{5}-of-\d{5}", "", bare)
        name = re.sub(r"[^\w.-]+", "-", bare).strip("-._")
        name = re.sub(r"^train[-._]|[-._]train$", "", name)
        if any(not word.isdigit() and word.lower() not in _GENERIC_WORDS for word in re.split(r"[-._]", name)):
            return name
    return ""
