"""One split of a data set: resident in memory as pixels, or encoded in a store and decoded when read."""

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from ssl_sec.batch import Batch
from ssl_sec.data.crops import Crop
from ssl_sec.data.decode import OnBadImage, decode_image
from ssl_sec.data.samplers import own_class_first
from ssl_sec.errors import DataError, counted, printable

logger = logging.getLogger("ssl_sec.data")

# Unreadable images that a list names.
LISTED_BAD_IMAGES = 1000
# This many unreadable images in a row mean that the store is unavailable, not that some files are bad.
MAX_BAD_IN_A_ROW = 100
# Class names are listed up to the largest label, so that absurd labels must be refused.
MAX_CLASSES = 2**24
# A set may have this many classes, or sixteen for each image if that is more.
_MAX_EMPTY_CLASSES = 2**20

UNLABELLED = -1  # the label of an image without one

Split = Literal["train", "test"]
Locations = str | Path | Sequence[str | Path]
Candidate = tuple[int, str, Callable[[], Path | bytes]]  # an image: index, name in errors, what gets its file or bytes

CACHE_FOLDER = "~/.cache/ssl_sec"  # for copies of Parquet files that are read by row, and for indices of shards


@runtime_checkable
class ImageSet(Protocol):
    """The images of one split."""

    @property
    def name(self) -> str:
        """The name of the split, for example ``cifar10/train``."""
        ...

    @property
    def description(self) -> str:
        """The source of the images and the selection among them; for tracking."""
        ...

    @property
    def labels(self) -> Int64[Tensor, " images"]:
        """Class of each image, on the CPU, 0 ≤ label < len(class_names); all UNLABELLED if there are no classes."""
        ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class; none if the images have no labels."""
        ...

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of each image."""
        ...

    @property
    def queries(self) -> Bool[Tensor, " images"] | None:
        """Mask of the queries, with the others as the gallery, on the CPU; None: each image is both."""
        ...

    @property
    def num_bad_images(self) -> int:
        """How many images could not be read so far, and were dropped or replaced."""
        ...

    def __len__(self) -> int:
        """Number of images."""
        ...

    def read(self, indices: Int64[Tensor, " batch"], draws: Int64[Tensor, " batch"] | None = None) -> Batch:
        """The images at `indices`.

        Args:
            indices: positions in this set, on the CPU, 0 ≤ index < len(self).
            draws: random numbers for the crops of encoded images, on the CPU.

        Returns:
            The images in that order; its `indices` are those of the images actually read.

        Raises:
            DataError: an image cannot be read and may not be replaced.
        """
        ...


def _shown(image_set: ImageSet) -> str:
    """A set in one line, without its pixels and labels."""
    shown = f"{image_set.name!r}, images={len(image_set)}, image_shape={image_set.image_shape}"
    return f"{type(image_set).__name__}({shown}, classes={len(image_set.class_names)})"


@dataclass(frozen=True, kw_only=True)
class ResidentImages:
    """All images in memory, on the CPU or on a device; images that could not be decoded are left out.

    Attributes:
        images: pixels, 0-255.
        labels: class of each image of this set, on the CPU; all UNLABELLED if there are no classes.
        class_names: name of each class; none if the images have no labels.
        name: name of the split.
        description: source of the images.
        num_bad_images: number of images that were dropped when the set was loaded.
        bad_images: the reasons why they, at most the first LISTED_BAD_IMAGES, could not be decoded, with their names.
        numbers: number of each image in `images` among those in the files; None if none was dropped.
        queries: mask of the queries, with the others as the gallery, on the CPU; None: each image is both.
        rows: row in `images` of each image of this set, on the CPU; None for all rows in order.
    """

    images: UInt8[Tensor, "stored channels height width"]
    labels: Int64[Tensor, " images"]
    class_names: tuple[str, ...]
    name: str
    description: str
    num_bad_images: int = 0
    bad_images: tuple[str, ...] = ()
    numbers: Int64[Tensor, " stored"] | None = None
    queries: Bool[Tensor, " images"] | None = None
    rows: Int64[Tensor, " images"] | None = None

    def __repr__(self) -> str:
        return _shown(self)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of each image."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def to(self, device: torch.device) -> "ResidentImages":
        """The same set with its pixels on `device`, where `read` then indexes; labels stay on the CPU."""
        return replace(self, images=self.images.to(device))

    def read(self, indices: Int64[Tensor, " batch"], draws: Int64[Tensor, " batch"] | None = None) -> Batch:
        """The images at `indices` (on the CPU), whatever the draws, as a batch on the device of the images."""
        device = self.images.device
        rows = indices if self.rows is None else self.rows[indices]
        return Batch(
            images=self.images[rows.to(device, non_blocking=True)],
            labels=self.labels[indices].to(device, non_blocking=True),
            indices=indices.to(device, non_blocking=True),
        )


@runtime_checkable
class ImageStore(Protocol):
    """Encoded images that are read by row."""

    def image_name(self, row: int) -> str:
        """The name of an image in errors."""
        ...

    def source(self, row: int) -> Path | bytes:
        """The file of an image, or its encoded bytes.

        Raises:
            DataError: this part of the store is damaged.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodedImages(ABC):
    """Images that are decoded whenever they are read.

    An unreadable image is an error (`on_bad_image="raise"`) or is replaced (`"skip"`) by another one; it is counted and
    logged once.

    Attributes:
        labels: class of each image of this set, on the CPU; all UNLABELLED if there are no classes.
        class_names: name of each class; none if the images have no labels.
        image_shape: channels, height and width of each image.
        name: name of the split.
        description: source of the images.
        crop: the crop of each image; None if all must have `image_shape` already.
        on_bad_image: action on an unreadable image; None raises an error if no option can skip the image.
        queries: mask of the queries, with the others as the gallery, on the CPU; None: each image is both.
        rows: number of each image of this set among those that are stored; None for all of them in order.
        bad_indices: the unreadable images met so far.
    """

    labels: Int64[Tensor, " images"]
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    name: str
    description: str
    crop: Crop | None = None
    on_bad_image: OnBadImage | None = None
    queries: Bool[Tensor, " images"] | None = None
    rows: Int64[Tensor, " images"] | None = None
    bad_indices: set[int] = field(default_factory=set)

    def __repr__(self) -> str:
        return _shown(self)

    @property
    def num_bad_images(self) -> int:
        """How many images of this set were replaced so far, each counted once."""
        return len(self.bad_indices)

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    @abstractmethod
    def read(self, indices: Int64[Tensor, " batch"], draws: Int64[Tensor, " batch"] | None = None) -> Batch:
        """The images at `indices`, on the CPU; `Batch.indices` are those of the images actually read."""

    @abstractmethod
    def candidates(self, indices: Int64[Tensor, " chosen"]) -> Iterator[Candidate]:
        """The encoded images at `indices`, ascending, with their names."""

    @abstractmethod
    def image_name(self, index: int) -> str:
        """The name of an image in errors."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EncodedImages(DecodedImages):
    """Images of a store, decoded whenever they are read.

    An unreadable image is replaced by the next readable one of its class, or else of the set, the first following the
    last: a function of the index alone, so that batches do not depend on how many workers read them. The draw of its
    row determines its crop.

    Attributes:
        store: the encoded images.
        within_class: whether only an image of its class may replace an unreadable one.
    """

    store: ImageStore
    within_class: bool = False

    def read(self, indices: Int64[Tensor, " batch"], draws: Int64[Tensor, " batch"] | None = None) -> Batch:
        """The images at `indices`, on the CPU; `Batch.indices` are those of the images actually read."""
        batch, bad = self.decode(indices, draws)
        record_bad(self, bad)
        return batch

    def decode(
        self, indices: Int64[Tensor, " batch"], draws: Int64[Tensor, " batch"] | None = None
    ) -> tuple[Batch, dict[int, str]]:
        """The batch of `read`, and the reasons why images were replaced, by index.

        Loader workers call this, and the main process calls `record_bad` with their bad images, since the workers'
        copies of the set and of the log are lost.
        """
        bad: dict[int, str] = {}
        images = torch.empty((len(indices), *self.image_shape), dtype=torch.uint8)
        read = indices.clone()
        each_draw = [None] * len(indices) if draws is None else draws.tolist()
        for position, (index, draw) in enumerate(zip(indices.tolist(), each_draw, strict=True)):
            where = f" of class {self.class_names[self.labels[index]]}" if self.within_class else ""
            images[position], read[position] = first_readable(self, self._in_turn(index), draw, bad, where)
        return Batch(images=images, labels=self.labels[read], indices=read), bad

    def candidates(self, indices: Int64[Tensor, " chosen"]) -> Iterator[Candidate]:
        """The encoded images at `indices` with their names."""
        for index in indices.tolist():
            row = self._row(index)
            yield index, self.store.image_name(row), partial(self.store.source, row)

    def image_name(self, index: int) -> str:
        """The name of an image in errors."""
        return self.store.image_name(self._row(index))

    def _row(self, index: int) -> int:
        return index if self.rows is None else int(self.rows[index])

    def _in_turn(self, index: int) -> Iterator[Candidate]:
        """The image, and those that may replace it."""
        parts = own_class_first(self.labels, index)
        if self.within_class:
            parts = (part[self.labels[part] == self.labels[index]] for part in parts)
        return itertools.islice(itertools.chain.from_iterable(map(self.candidates, parts)), MAX_BAD_IN_A_ROW)


def first_readable(
    image_set: DecodedImages, candidates: Iterable[Candidate], draw: int | None, bad: dict[int, str], where: str = ""
) -> tuple[UInt8[Tensor, "channels height width"], int]:
    """The first of some images that can be read, and its index in the set.

    Args:
        image_set: the set, which decides whether images may be replaced, and how they become pixels.
        candidates: an image and those that may replace it: index, name in errors, and a getter of its file or bytes.
        draw: random number for the crop.
        bad: receives the reason of each unreadable image, by its index.
        where: class that all candidates are of, for errors.

    Raises:
        DataError: an image cannot be read and may not be replaced, or none can be read.
    """
    reasons: list[str] = []
    for index, name, source in candidates:
        try:
            image = decode_image(source(), name, image_set.image_shape[0], image_set.crop, draw)
        except DataError as error:
            if image_set.on_bad_image != "skip":
                raise unreadable(error, image_set.on_bad_image) from error.__cause__
            bad[index] = str(error)
            reasons.append(str(error))
        else:
            # Outside of the `try`: a wrong size is due to a wrong setting, which a replacement cannot fix.
            check_shape(image, image_set.image_shape, name)
            return image, index
    found = f"{counted(len(reasons), 'image')}{where} in a row"
    raise DataError(f"{image_set.name}: {found} cannot be read, the first: {reasons[0]}")


def record_bad(image_set: DecodedImages, bad: dict[int, str]) -> None:
    """Counts the images in `bad` (index to reason) and logs the new ones."""
    for index, reason in bad.items():
        if index not in image_set.bad_indices:
            image_set.bad_indices.add(index)
            logger.warning("%s: an image is skipped: %s", image_set.name, reason)


def unreadable(error: DataError, on_bad_image: OnBadImage | None) -> DataError:
    """The error about an unreadable image, with the option that skips such images if there is one."""
    return error if on_bad_image is None else DataError(f"{error}; data.on_bad_image=skip leaves such images out")


def check_shape(image: UInt8[Tensor, "channels height width"], image_shape: tuple[int, int, int], name: str) -> None:
    """Refuses an image of another shape than the set's, in one line that names it."""
    if tuple(image.shape) != image_shape:
        (_, height, width), (_, set_height, set_width) = image.shape, image_shape
        raise DataError(
            f"{name}: {width} x {height} pixels found, but the first image has {set_width} x {set_height}; "
            "set data.image_size_px to resize all of them"
        )


def check_num_classes(num_classes: int, num_images: int, where: str) -> None:
    """Refuses a number of classes that only a damaged label can explain, since every class takes memory.

    Raises:
        DataError: there are far more classes than images.
    """
    allowed = max(_MAX_EMPTY_CLASSES, 16 * num_images)
    if num_classes > allowed:
        found = f"{printable(where)}: classes up to {num_classes - 1} in {counted(num_images, 'image')}"
        raise DataError(f"{found}; allowed: 0 to {allowed - 1}")


def subset(image_set: ImageSet, indices: Int64[Tensor, " chosen"], which: str = "stated") -> ImageSet:
    """A view of some images: pixels or the store are shared, only labels and row numbers are copied.

    Args:
        image_set: resident or encoded images.
        indices: positions in `image_set`, on the CPU; their order becomes that of the view.
        which: the choice in words, for the description.

    Returns:
        A set of the same kind. Bad encoded images are replaced by images of the view, so that a held-out split never
        leaks into the rest; the view counts its own bad images.
    """
    whole = cast(Any, image_set)  # a dataclass of any kind of set
    rows = indices if whole.rows is None else whole.rows[indices]
    queries = None if image_set.queries is None else image_set.queries[indices]
    description = f"{image_set.description}; {len(indices)} of {len(image_set)} images, {which}"
    bad = {} if isinstance(image_set, ResidentImages) else {"bad_indices": set[int]()}
    return replace(whole, labels=image_set.labels[indices], queries=queries, rows=rows, description=description, **bad)


def require_labels(image_set: ImageSet, purpose: str, key: str = "data") -> None:
    """Refuses images without labels, or of one class, where every classifier is right; says why, and names the key."""
    match image_set.class_names:
        case ():
            kind = image_set.name.partition("/")[0]
            hint = {
                "folder": f", or {key}.labels=true if the folders are classes",
                "parquet": f", or {key}.label_column=<name> if a column holds the classes",
            }.get(kind, "")
            wanted = f"{purpose} needs the class of each image: give labelled images{hint}"
            raise DataError(f"{image_set.name}: {counted(len(image_set), 'image')} without labels found; {wanted}")
        case (only,):
            raise DataError(f"{image_set.name}: found one class, {only}; {purpose} needs two or more")


def on_device(image_set: ImageSet, device: torch.device) -> ImageSet:
    """The same images, on `device` if they are resident; encoded ones are decoded when they are read."""
    return image_set.to(device) if isinstance(image_set, ResidentImages) else image_set
