"""Encoded images, in a store or in shards, which are decoded when they are read; some of them cannot be read."""

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from ssl_sec.batch import Batch
from ssl_sec.data.bands import ValueRanges
from ssl_sec.data.crops import Crop, ViewCrops
from ssl_sec.data.decode import OnBadImage, decode_image
from ssl_sec.data.image_set import check_shape, representation
from ssl_sec.data.samplers import own_class_first
from ssl_sec.errors import DataError, counted

logger = logging.getLogger("ssl_sec.data")

# Unreadable images that a list names.
LISTED_BAD_IMAGES = 1000
# This many unreadable images in a row mean that the store is unavailable, not that some files are bad.
MAX_BAD_IN_A_ROW = 100

Candidate = tuple[int, str, Callable[[], Path | bytes]]  # an image: index, name in errors, what gets its file or bytes


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
        value_ranges: lowest and highest value of the pixels, of all channels or of each; see `Decoding`.
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
    value_ranges: ValueRanges | None = None
    on_bad_image: OnBadImage | None = None
    queries: Bool[Tensor, " images"] | None = None
    rows: Int64[Tensor, " images"] | None = None
    bad_indices: set[int] = field(default_factory=set)

    def __repr__(self) -> str:
        return representation(self)

    @property
    def num_bad_images(self) -> int:
        """How many images of this set were replaced so far, each counted once."""
        return len(self.bad_indices)

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def empty_batch(self, num_images: int, draws: Tensor | None) -> UInt8[Tensor, "batch *shape"]:
        """Memory for the pixels of a batch, on the CPU: for the parts of `ViewCrops` if there are draws."""
        shape: tuple[int, ...] = self.image_shape
        if isinstance(self.crop, ViewCrops) and draws is not None:
            shape = (self.crop.num_values(self.image_shape[0]),)
        return torch.empty((num_images, *shape), dtype=torch.uint8)

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
        images = self.empty_batch(len(indices), draws)
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
) -> tuple[UInt8[Tensor, "*shape"], int]:
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
            image = decode_image(source(), name, image_set.image_shape[0], image_set.crop, draw, image_set.value_ranges)
        except DataError as error:
            if image_set.on_bad_image != "skip":
                raise unreadable(error, image_set.on_bad_image) from error.__cause__
            bad[index] = str(error)
            reasons.append(str(error))
        else:
            # Outside of the `try`: a wrong size is due to a wrong setting, which a replacement cannot fix.
            if image.dim() == len(image_set.image_shape):  # the parts for views have sizes of their own
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
