"""Encoded images in a store: decoded at once if they fit into memory, else when they are read."""

import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from ssl_sec.data.crops import CentreSquare, Crop, RandomBox, ViewCrops
from ssl_sec.data.decode import Decoding, OnBadImage, decode_image, map_in_threads
from ssl_sec.data.encoded_images import LISTED_BAD_IMAGES, DecodedImages, EncodedImages, ImageStore, unreadable
from ssl_sec.data.image_set import UNLABELLED, ImageSet, ResidentImages, check_shape, subset
from ssl_sec.errors import ConfigError, DataError, counted
from ssl_sec.progress import logged

logger = logging.getLogger("ssl_sec.data")

# Unreadable images that an error names.
_NAMED = 10

# An image to decode: its name in errors, its file or bytes, and its label.
Encoded = tuple[str, Path | bytes, int]


@dataclass(frozen=True, kw_only=True)
class PackedBytes:
    """Many byte strings in one array.

    Pickling is a copy, and reading touches no reference counts: those of a million strings would duplicate the memory
    in every forked worker.

    Attributes:
        content: bytes of all strings.
        ends: index after the end of each string.
    """

    content: UInt8[np.ndarray, " bytes"]
    ends: Int64[np.ndarray, " strings"]

    @classmethod
    def of(cls, strings: Iterable[bytes]) -> "PackedBytes":
        """Packs strings."""
        strings = list(strings)
        ends = np.cumsum([len(string) for string in strings], dtype=np.int64)
        return cls(content=np.frombuffer(b"".join(strings), np.uint8), ends=ends)

    def __len__(self) -> int:
        """Number of strings."""
        return len(self.ends)

    def __getitem__(self, row: int) -> bytes:
        return self.content[self.ends[row - 1] if row else 0 : self.ends[row]].tobytes()


@dataclass(frozen=True, kw_only=True)
class FileStore:
    """Image files of a folder.

    Attributes:
        root: the folder.
        paths: file names relative to the folder, as the file system's bytes.
    """

    root: Path
    paths: PackedBytes

    @classmethod
    def of(cls, root: Path, paths: Iterable[str | bytes]) -> "FileStore":
        """The store of the files at these paths."""
        return cls(root=root, paths=PackedBytes.of(map(os.fsencode, paths)))

    def image_name(self, row: int) -> str:
        """The file's path."""
        return str(self.root / self.paths[row].decode("utf-8", "backslashreplace"))

    def source(self, row: int) -> Path:
        """The file's path."""
        return self.root / os.fsdecode(self.paths[row])


@dataclass(frozen=True, kw_only=True)
class ArrowStore:
    """A memory-mapped Arrow IPC file with the columns `name` and `encoded`.

    Attributes:
        path: path of the file. Only the path is pickled; every process maps the file once for itself.
    """

    path: Path

    def image_name(self, row: int) -> str:
        """The Parquet file and the row that the image came from."""
        return _mapped_column(self.path, "name")[row].as_py()

    def source(self, row: int) -> bytes:
        """The encoded bytes; empty where the Parquet file had none."""
        return _mapped_column(self.path, "encoded")[row].as_py()


@dataclass(frozen=True, kw_only=True)
class MemoryStore:
    """A few encoded images in memory.

    Attributes:
        names: name of each image in errors.
        encoded: bytes of each image.
    """

    names: PackedBytes
    encoded: PackedBytes

    @classmethod
    def of(cls, names: Iterable[str], encoded: Iterable[bytes]) -> "MemoryStore":
        """The store of these images."""
        return cls(names=PackedBytes.of(map(str.encode, names)), encoded=PackedBytes.of(encoded))

    def image_name(self, row: int) -> str:
        """The given name."""
        return self.names[row].decode()

    def source(self, row: int) -> bytes:
        """The encoded bytes."""
        return self.encoded[row]


@functools.lru_cache(maxsize=8)
def mapped_table(path: Path) -> Any:
    """An Arrow IPC file as a table whose columns are in the mapped file, not in memory."""
    import pyarrow as pa  # only streamed Parquet needs it

    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


@functools.lru_cache(maxsize=16)
def _mapped_column(path: Path, name: str) -> Any:
    """A column of `mapped_table`: making it takes longer with each record batch, reading a row of it does not."""
    return mapped_table(path)[name]


def from_store(
    store: ImageStore,
    labels: Int64[Tensor, " images"],
    class_names: tuple[str, ...],
    name: str,
    description: str,
    decoding: Decoding,
    rows: Int64[Tensor, " images"] | None = None,
    queries: Bool[Tensor, " images"] | None = None,
) -> ImageSet:
    """The images of a store: decoded into memory if they fit, else whenever they are read.

    Args:
        store: the encoded images.
        labels: class of each image, on the CPU; all UNLABELLED if there are no classes.
        class_names: name of each class; none if the images have no labels.
        name: name of the set.
        description: source of the images.
        decoding: how images become pixels.
        rows: row in `store` of each image, on the CPU; None for all rows in order.
        queries: mask of the queries, with the others as the gallery, on the CPU; None: each image is both.

    Raises:
        DataError: an image cannot be read, or has another size than the first.
    """
    places = ((image, image if rows is None else int(rows[image])) for image in range(len(labels)))
    encoded = ((store.image_name(row), store.source(row), int(labels[image])) for image, row in places)
    first, image_shape = first_shape(encoded, decoding)
    if decoding.is_resident(len(labels), image_shape):
        encoded = itertools.chain(first, encoded)
        return decode_all(
            encoded, len(labels), image_shape, decoding, lambda _: class_names, name, description, queries
        )
    return EncodedImages(
        store=store,
        labels=labels,
        class_names=class_names,
        image_shape=image_shape,
        crop=decoding.square,
        value_ranges=decoding.value_ranges,
        name=name,
        description=description,
        on_bad_image=decoding.on_bad_image,
        queries=queries,
        rows=rows,
    )


def limit_images(image_set: ImageSet, max_images: int, seed: int) -> ImageSet:
    """A view of at most `max_images` images, with class sizes as equal as possible.

    Images without labels are drawn as if all were of one class.

    Args:
        image_set: resident or encoded images.
        max_images: number of images to keep, ≥ 1; the set itself is returned if it has no more.
        seed: seed of the choice of images, and of the classes that keep one more.

    Raises:
        ConfigError: `max_images` is less than 1.
    """
    if max_images < 1:
        raise ConfigError(f"data.max_images = {max_images}; allowed: 1 or more")
    if max_images >= len(image_set):
        return image_set
    order = torch.randperm(len(image_set), generator=torch.Generator().manual_seed(seed))
    # The n-th image of every class comes before the n+1-st of any: classes take turns.
    classes = image_set.labels - UNLABELLED
    by_class = order[torch.argsort(classes[order], stable=True)]
    counts = torch.bincount(classes)
    starts = counts.cumsum(0) - counts
    turns = torch.empty(len(image_set), dtype=torch.int64)
    turns[by_class] = torch.arange(len(image_set)) - starts[classes[by_class]]
    chosen = order[torch.argsort(turns[order], stable=True)][:max_images]
    how = "balanced by class" if image_set.class_names else "drawn"
    return subset(image_set, chosen.sort().values, f"{how}, seed {seed}")


def with_crop(image_set: ImageSet, crop: Crop) -> ImageSet:
    """The same images with another crop: training and evaluation use one set.

    Args:
        image_set: encoded images, with which the result shares the count of bad ones; images of one size, resident or
            read at `data.image_size_px`, are returned unchanged.
        crop: the new crop of each image.
    """
    if not isinstance(image_set, EncodedImages) or isinstance(image_set.crop, CentreSquare):
        return image_set
    return replace(image_set, crop=crop, image_shape=(image_set.image_shape[0], crop.size_px, crop.size_px))


def with_view_crops(image_set: ImageSet, views: tuple[RandomBox, ...]) -> ImageSet:
    """The same encoded images, of which a draw cuts the parts that views show; without draws they are unchanged."""
    assert isinstance(image_set, DecodedImages) and isinstance(image_set.crop, CentreSquare)
    square = image_set.crop
    crop = ViewCrops(size_px=square.size_px, scaled_decoding=square.scaled_decoding, views=views)
    return replace(image_set, crop=crop)


def first_shape(encoded: Iterator[Encoded], decoding: Decoding) -> tuple[list[Encoded], tuple[int, int, int]]:
    """The shape of all images, and the items that were taken from `encoded` to find it."""
    if decoding.square is not None:
        return [], (decoding.num_channels, decoding.square.size_px, decoding.square.size_px)
    taken: list[Encoded] = []
    for item in encoded:
        taken.append(item)
        name, source, _ = item
        try:
            image = decode_image(source, name, decoding.num_channels, value_ranges=decoding.value_ranges)
        except DataError as error:
            if decoding.on_bad_image != "skip":
                raise unreadable(error, decoding.on_bad_image) from error.__cause__
        else:
            return taken, (image.shape[0], image.shape[1], image.shape[2])
    raise DataError(f"{counted(len(taken), 'image')}, and none can be read, the first being {taken[0][0]}")


def unreadable_images(
    reasons: Sequence[DataError], num_images: int, name: str, on_bad_image: OnBadImage | None
) -> DataError:
    """The error about unreadable images, with the option that skips them if there is one.

    Args:
        reasons: one or more errors.
        num_images: number of images that were tried.
        name: name of the set.
        on_bad_image: value of the option; None if there is no such option.
    """
    if len(reasons) == 1:
        return unreadable(reasons[0], on_bad_image)
    first = "; ".join(map(str, reasons[:_NAMED]))
    some = DataError(f"{name}: {len(reasons):,} of {num_images:,} images cannot be read, first: {first}")
    found = unreadable(some, on_bad_image)
    return found if on_bad_image is None else DataError(f"{found} and lists them in check.json")


def decode_all(
    encoded: Iterator[Encoded],
    num_images: int,
    image_shape: tuple[int, int, int],
    decoding: Decoding,
    class_names: Callable[[Int64[Tensor, " read"]], tuple[str, ...]],
    name: str,
    description: str,
    queries: Bool[Tensor, " images"] | None = None,
) -> ResidentImages:
    """Decodes the readable images; their labels may determine the class names.

    Args:
        encoded: the images.
        num_images: their number.
        image_shape: channels, height and width of each image.
        decoding: how images become pixels.
        class_names: labels of the readable images -> name of each class.
        name: name of the set.
        description: source of the images.
        queries: mask of the queries among all images, also unreadable ones; None: each image is a query and in the
            gallery.

    Raises:
        DataError: an image cannot be read and may not be left out, none can be read, or one has another shape.
    """

    def decode(item: Encoded) -> Tensor | DataError:
        try:
            return decode_image(
                item[1], item[0], decoding.num_channels, decoding.square, value_ranges=decoding.value_ranges
            )
        except DataError as error:
            return error

    images = torch.empty((num_images, *image_shape), dtype=torch.uint8)
    labels: list[int] = []
    kept: list[int] = []
    reasons: list[DataError] = []
    decoded = logged(map_in_threads(decode, encoded), f"loading {name}", num_images)
    for number, ((image_name, _, label), image) in enumerate(decoded):
        if isinstance(image, DataError):
            reasons.append(image)
            continue
        check_shape(image, image_shape, image_name)
        images[len(labels)] = image
        labels.append(label)
        kept.append(number)
    if reasons and decoding.on_bad_image != "skip":
        raise unreadable_images(reasons, num_images, name, decoding.on_bad_image)
    if reasons:
        first = "; ".join(map(str, reasons[:3]))
        logger.warning(
            "%s: %d of %d images cannot be read and were dropped, first: %s", name, len(reasons), num_images, first
        )
    if not labels:
        raise DataError(f"{name}: {counted(num_images, 'image')}, and none can be read, the first: {reasons[0]}")
    read = torch.tensor(labels)
    return ResidentImages(
        images=images[: len(labels)],
        labels=read,
        class_names=class_names(read),
        name=name,
        description=description,
        num_bad_images=len(reasons),
        bad_images=tuple(map(str, reasons[:LISTED_BAD_IMAGES])),
        numbers=torch.tensor(kept) if reasons else None,
        queries=None if queries is None else queries[kept],
    )
