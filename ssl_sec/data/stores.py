"""Encoded images in a store: decoded at once if they fit into memory, else when they are read."""

import itertools
import logging
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from ssl_sec.data.crops import CentreSquare, Crop
from ssl_sec.data.decode import OnBadImage, decode_image
from ssl_sec.data.image_set import (
    ArrowStore,
    EncodedImages,
    ImageSet,
    ImageStore,
    Locations,
    ResidentImages,
    Split,
    check_shape,
    mapped_table,
    subset,
    unreadable,
)
from ssl_sec.errors import ConfigError, DataError, MissingDataError

logger = logging.getLogger("ssl_sec.data")

# What a thread pool of decoders is given at once: enough to be busy, few enough to hold.
IMAGES_PER_TASK_LIST = 256

# A label and an image to decode, with the name that errors give it.
Encoded = tuple[str, Path | bytes, int]


def from_store(
    store: ImageStore,
    labels: Int64[Tensor, " images"],
    class_names: tuple[str, ...],
    name: str,
    description: str,
    image_size_px: int | None = None,
    num_channels: int = 3,
    on_bad_image: OnBadImage | None = None,
    resident_limit_mib: int = 2048,
    crop: Crop | None = None,
    rows: Int64[Tensor, " images"] | None = None,
) -> ImageSet:
    """Images of a store: decoded into memory if they fit there, else whenever they are read.

    Args:
        store: the encoded images.
        labels: class of each image, on the CPU.
        class_names: name of each class.
        name: what the set is called.
        description: where the images came from.
        image_size_px: as in `open_folder`.
        num_channels: as in `open_folder`.
        on_bad_image: as in `open_folder`; None raises the error where no setting could skip the image.
        resident_limit_mib: as in `open_folder`.
        crop: as in `open_folder`.
        rows: row in `store` of each image, on the CPU; None if they are all of them in order.

    Raises:
        DataError: an image cannot be read, or has another size than the first.
    """
    assert image_size_px is None or crop is None
    _check_format(image_size_px, num_channels)
    resize = None if image_size_px is None else CentreSquare(size_px=image_size_px)
    places = ((image, image if rows is None else int(rows[image])) for image in range(len(labels)))
    encoded = ((store.image_name(row), store.source(row), int(labels[image])) for image, row in places)
    first, image_shape = _first_shape(encoded, crop or resize, num_channels, on_bad_image)
    if crop is None and _fits(len(labels), image_shape, resident_limit_mib):
        images, labels_read, num_bad_images = _decode_all(
            itertools.chain(first, encoded), len(labels), image_shape, resize, on_bad_image, name
        )
        return ResidentImages(
            images=images,
            labels=labels_read,
            class_names=class_names,
            name=name,
            description=description,
            num_bad_images=num_bad_images,
        )
    return EncodedImages(
        store=store,
        labels=labels,
        class_names=class_names,
        image_shape=image_shape,
        crop=crop or resize,
        name=name,
        description=description,
        on_bad_image=on_bad_image,
        rows=rows,
    )


def limit_images(image_set: ImageSet, max_images: int, seed: int) -> ImageSet:
    """A view of at most `max_images` images with as equal numbers of each class as there are images for.

    Args:
        image_set: resident or encoded images.
        max_images: how many to keep, ≥ 1; the set itself is returned if it has no more.
        seed: which images of each class are kept, and which classes get one more.

    Raises:
        ConfigError: `max_images` is less than 1.
    """
    if max_images < 1:
        raise ConfigError(f"data.max_images = {max_images}; allowed: 1 or more")
    if max_images >= len(image_set):
        return image_set
    order = torch.randperm(len(image_set), generator=torch.Generator().manual_seed(seed))
    # The n-th image of every class comes before the n+1-st of any: a round of each class in turn.
    by_class = order[torch.argsort(image_set.labels[order], stable=True)]
    counts = torch.bincount(image_set.labels)
    starts = counts.cumsum(0) - counts
    turns = torch.empty(len(image_set), dtype=torch.int64)
    turns[by_class] = torch.arange(len(image_set)) - starts[image_set.labels[by_class]]
    chosen = order[torch.argsort(turns[order], stable=True)][:max_images]
    return subset(image_set, chosen.sort().values, f"balanced by class, seed {seed}")


def _check_format(image_size_px: int | None, num_channels: int) -> None:
    if num_channels not in (1, 3):
        raise ConfigError(f"data.num_channels = {num_channels}; allowed: 1, 3")
    if image_size_px is not None and image_size_px < 1:
        raise ConfigError(f"data.image_size_px = {image_size_px}; allowed: 1 or more, or null")


def _first_shape(
    encoded: Iterator[Encoded], crop: Crop | None, num_channels: int, on_bad_image: OnBadImage | None
) -> tuple[list[Encoded], tuple[int, int, int]]:
    """The shape of all images, and what had to be taken from `encoded` to learn it."""
    if crop is not None:
        return [], (num_channels, crop.size_px, crop.size_px)
    taken: list[Encoded] = []
    for item in encoded:
        taken.append(item)
        name, source, _ = item
        try:
            _, height, width = decode_image(source, name, num_channels).shape
        except DataError as error:
            if on_bad_image != "skip":
                raise unreadable(error, on_bad_image) from error.__cause__
        else:
            return taken, (num_channels, height, width)
    raise DataError(f"none of the {len(taken)} images can be read, the first being {taken[0][0]}")


def _fits(num_images: int, image_shape: tuple[int, int, int], resident_limit_mib: int) -> bool:
    return num_images * math.prod(image_shape) <= resident_limit_mib * 2**20


def _decode_all(
    encoded: Iterator[Encoded],
    num_images: int,
    image_shape: tuple[int, int, int],
    resize: CentreSquare | None,
    on_bad_image: OnBadImage | None,
    name: str,
) -> tuple[UInt8[Tensor, "read channels height width"], Int64[Tensor, " read"], int]:
    """Pixels and labels of the images that can be read, and how many cannot."""

    def decode(item: Encoded) -> Tensor | DataError:
        try:
            return decode_image(item[1], item[0], image_shape[0], resize)
        except DataError as error:
            return error

    images = torch.empty((num_images, *image_shape), dtype=torch.uint8)
    labels: list[int] = []
    reasons: list[DataError] = []
    with ThreadPoolExecutor() as pool:
        while items := list(itertools.islice(encoded, IMAGES_PER_TASK_LIST)):
            for (image_name, _, label), image in zip(items, pool.map(decode, items), strict=True):
                if isinstance(image, DataError):
                    if on_bad_image != "skip":
                        raise unreadable(image, on_bad_image) from image.__cause__
                    reasons.append(image)
                    continue
                check_shape(image, image_shape, image_name)
                images[len(labels)] = image
                labels.append(label)
    if reasons:
        first = "; ".join(map(str, reasons[:3]))
        logger.warning(
            "%s: %d of %d images cannot be read and were dropped, first: %s", name, len(reasons), num_images, first
        )
    if not labels:
        raise DataError(f"{name}: none of the {num_images} images can be read, the first: {reasons[0]}")
    return images[: len(labels)], torch.tensor(labels), len(reasons)


def open_parquet(
    split: Split,
    train: Locations | None,
    test: Locations | None,
    image_column: str | None = None,
    label_column: str = "label",
    image_size_px: int | None = None,
    num_channels: int = 3,
    on_bad_image: OnBadImage = "raise",
    resident_limit_mib: int = 2048,
    cache_folder: str | Path = "~/.cache/ssl_sec",
    crop: Crop | None = None,
) -> ImageSet:
    """Parquet files in the Hugging Face layout, local or remote.

    Class names are those of the files' metadata, else the labels' numbers.

    Args:
        split: which part.
        train: path, glob or fsspec URL of the training files, or a list of them.
        test: the same for the test files.
        image_column: column of struct{bytes, path}; None takes the only one of that type.
        label_column: column of integers, 0 or more.
        image_size_px: side that images are resized to; None requires that all have one size.
        num_channels: 3 for RGB, 1 for grey.
        on_bad_image: raise an error about an unreadable image, or skip it: drop it from a resident set,
            replace it in a streamed one.
        resident_limit_mib: the set is decoded into memory if its pixels need no more than this.
        cache_folder: where a streamed set is copied to, to be read by row; needs the space of the files.
        crop: what is cut out of images of any size whenever they are read: the set is then streamed, however small it
            is. Only without image_size_px.

    Raises:
        MissingDataError: no files are given for the split, or they do not exist.
        DataError: a file is damaged or lacks the columns, a label is wrong, or an image cannot be read.
    """
    from ssl_sec.data import parquet  # Arrow, which no other set needs

    assert image_size_px is None or crop is None
    _check_format(image_size_px, num_channels)
    resize = None if image_size_px is None else CentreSquare(size_px=image_size_px)
    locations = train if split == "train" else test
    if locations is None:
        raise MissingDataError(f"parquet: no files for the {split} split; set data.{split}")
    files = parquet.inspect(locations, image_column, label_column)
    rows = parquet.iterate_rows(files)
    encoded = (
        (name, image.as_py(), int(label))
        for some in rows
        for name, image, label in zip(some.names, some.encoded, some.labels, strict=True)
    )
    first, image_shape = _first_shape(encoded, crop or resize, num_channels, on_bad_image)
    name = f"parquet/{split}"
    paths = [path for _, path in files.files]
    more = f" and {len(paths) - 1} more files" if len(paths) > 1 else ""
    description = f"{files.num_rows} images in {paths[0]}{more}, digest {parquet.digest(files)}"
    if crop is None and _fits(files.num_rows, image_shape, resident_limit_mib):
        images, labels, num_bad_images = _decode_all(
            itertools.chain(first, encoded), files.num_rows, image_shape, resize, on_bad_image, name
        )
        return ResidentImages(
            images=images,
            labels=labels,
            class_names=parquet.class_names(files, labels.numpy()),
            name=name,
            description=description,
            num_bad_images=num_bad_images,
        )
    store = ArrowStore(path=parquet.cached_table(files, Path(cache_folder).expanduser()))
    labels = torch.from_numpy(mapped_table(store.path)["label"].to_numpy().copy())
    return EncodedImages(
        store=store,
        labels=labels,
        class_names=parquet.class_names(files, labels.numpy()),
        image_shape=image_shape,
        crop=crop or resize,
        name=name,
        description=description,
        on_bad_image=on_bad_image,
    )


def parquet_class_names(
    locations: Locations, image_column: str | None = None, label_column: str = "label"
) -> tuple[str, ...]:
    """Names of the classes that have images in Parquet files, in the order of their labels; only labels are read.

    Args:
        locations: path, glob or fsspec URL of the files, or a list of them.
        image_column: as in `open_parquet`.
        label_column: as in `open_parquet`.

    Raises:
        MissingDataError: a file does not exist.
        DataError: a file is damaged or lacks the columns, or a label is wrong.
    """
    from ssl_sec.data import parquet

    files = parquet.inspect(locations, image_column, label_column)
    labels = parquet.distinct_labels(files)
    class_names = parquet.class_names(files, labels)
    return tuple(class_names[label] for label in labels.tolist())
