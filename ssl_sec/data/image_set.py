"""One split of a data set: what every kind of it offers, and the kind whose pixels are resident in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from ssl_sec.batch import Batch
from ssl_sec.errors import DataError, counted, printable

# Class names are listed up to the largest label, so that absurd labels must be refused.
MAX_CLASSES = 2**24
# A set may have this many classes, or sixteen for each image if that is more.
_MAX_EMPTY_CLASSES = 2**20

UNLABELLED = -1  # the label of an image without one

Split = Literal["train", "test"]
Locations = str | Path | Sequence[str | Path]

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


def representation(image_set: ImageSet) -> str:
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
        return representation(self)

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
