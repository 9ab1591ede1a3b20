"""Tar shards as image sets: decoded into memory, read by image from this machine's disk, or by blocks from anywhere."""

import itertools
import logging
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_sec.data.decode import AS_THEY_ARE, Decoding
from ssl_sec.data.image_set import CACHE_FOLDER, UNLABELLED, ImageSet, Locations, Split, check_num_classes
from ssl_sec.data.log import log_once
from ssl_sec.data.shards.gallery import QueriesAndGallery, all_locations
from ssl_sec.data.shards.streamed import streamed
from ssl_sec.data.stores import decode_all, first_shape, from_store
from ssl_sec.errors import ConfigError, MissingDataError, check_option


def open_webdataset(
    split: Split,
    train: Locations | None = None,
    *,
    test: Locations | QueriesAndGallery | None = None,
    decoding: Decoding = AS_THEY_ARE,
    cache_folder: str | Path = CACHE_FOLDER,
    shuffle_window: int | None = None,
    index_folder: str | None = None,
) -> ImageSet:
    """Tar files of images, with a `.cls` file for each or without labels; see `ssl_sec.data.shards.tar`.

    Args:
        split: the training or test images.
        train: path, glob, range (`{000..041}`) or fsspec URL of the training shards, or a list of them.
        test: the same for the test shards, or for those of queries and of a gallery.
        decoding: how images become pixels.
        cache_folder: folder for the indices of the images in the shards.
        shuffle_window: number of images shuffled at once in a set that is read by blocks; None for images in any order,
            which only local shards allow.
        index_folder: path or fsspec URL of a folder in which machines share the indices; None if they do not.

    Raises:
        MissingDataError: no files are given for the split, or they do not exist.
        DataError: a shard is damaged, a label is wrong or missing, a file is found twice or in both splits, or an image
            cannot be read.
        ConfigError: the shards are remote, the set does not fit into memory, and there is no `shuffle_window`.
    """
    from ssl_sec.data.shards import tar  # Arrow, which few other sets need
    from ssl_sec.data.shards.locations import find_files, query_mask, require_apart

    check_option("split", split, Split)
    locations = train if split == "train" else test
    if locations is None:
        raise MissingDataError(f"webdataset: no files for the {split} split; set data.{split}")
    files = find_files(all_locations(locations), "tar")
    if split == "test":
        require_apart(files, train, "tar")
    shards = tar.open_shards(files, Path(cache_folder).expanduser(), index_folder)
    name = f"webdataset/{split}"
    for reason, (count, first) in shards.left_out.items():
        log_once(logging.WARNING, "%s: %s %s, first: %s", name, str(count), reason, first)
    labels = shards.labels
    encoded = (
        (shards.image_name(block, row), image, int(label))
        for block, of_block in enumerate(labels.split(shards.sizes.tolist()))
        for row, (image, label) in enumerate(zip(shards.read(block), of_block, strict=True))
    )
    first, image_shape = first_shape(encoded, decoding)
    where, *others = [path for _, path in files]
    more = f" and {len(others)} more shards" if others else ""
    description = f"{len(labels)} images in {where}{more}, digest {shards.digest}"
    class_names = _class_names(labels, where)
    queries = query_mask(locations, [len(index) for index in shards.indices], "tar")
    if decoding.is_resident(len(labels), image_shape):
        encoded = itertools.chain(first, encoded)
        return decode_all(
            encoded, len(labels), image_shape, decoding, lambda _: class_names, name, description, queries
        )
    if shuffle_window is None:
        if not shards.are_local:
            raise ConfigError("data.shuffle_window: found null, must be ≥ 1: the shards are not on this machine")
        store = tar.ShardStore(shards=shards)
        return from_store(store, labels, class_names, name, description, decoding, queries=queries)
    return streamed(
        shards, labels, class_names, image_shape, name, description, decoding=decoding, window=shuffle_window
    )


def shard_class_names(
    locations: Locations, cache_folder: str | Path = CACHE_FOLDER, index_folder: str | None = None
) -> tuple[str, ...]:
    """Names of the classes that have images in tar files, in the order of their labels; none without labels.

    Args:
        locations: paths, globs, ranges or fsspec URLs of the shards.
        cache_folder: folder for the indices and the labels of the images in the shards.
        index_folder: path or fsspec URL of a folder in which machines share them; None if they do not.

    Raises:
        MissingDataError: a shard does not exist.
        DataError: a shard is damaged, or a label is wrong or missing.
    """
    from ssl_sec.data.shards import tar
    from ssl_sec.data.shards.locations import find_files

    files = find_files(locations, "tar")
    present = tar.open_shards(files, Path(cache_folder).expanduser(), index_folder).labels.unique()
    return tuple(map(str, present[present != UNLABELLED].tolist()))


def _class_names(labels: Int64[Tensor, " images"], where: str) -> tuple[str, ...]:
    """The numbers of the classes; none without labels."""
    largest = int(labels.max())
    check_num_classes(largest + 1, len(labels), where)
    return tuple(map(str, torch.arange(largest + 1).tolist()))
