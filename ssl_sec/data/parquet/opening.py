"""Parquet files as image sets: decoded into memory, laid out on the disk, or read by row groups."""

import itertools
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_sec.data.decode import AS_THEY_ARE, Decoding
from ssl_sec.data.image_set import CACHE_FOLDER, ImageSet, Locations, Split
from ssl_sec.data.parquet.columns import NAMED_AS_USUAL, Columns
from ssl_sec.data.shards.gallery import QueriesAndGallery, all_locations
from ssl_sec.data.shards.streamed import streamed
from ssl_sec.data.stores import ArrowStore, decode_all, first_shape, from_store, mapped_table
from ssl_sec.errors import MissingDataError, check_option


def open_parquet(
    split: Split,
    train: Locations | None = None,
    *,
    test: Locations | QueriesAndGallery | None = None,
    decoding: Decoding = AS_THEY_ARE,
    columns: Columns = NAMED_AS_USUAL,
    cache_folder: str | Path = CACHE_FOLDER,
    shared_classes: bool | None = True,
    shuffle_window: int | None = None,
) -> ImageSet:
    """Parquet files in the Hugging Face layout, local or remote, with labels or without.

    Class names are those of the files' metadata, else the labels' numbers; for a label column of names they are these
    names in alphabetical order.

    Args:
        split: the training or test images.
        train: path, glob or fsspec URL of the training files, or a list of them.
        test: the same for the test files, or for those of queries and of a gallery.
        decoding: how images become pixels.
        columns: columns of the images and the labels.
        cache_folder: folder for the copy of a streamed set that is read by row; it needs the space of the files.
        shuffle_window: images that are shuffled at once in a set that is read by row groups; None copies the set.
        shared_classes: whether names in a label column get the same numbers in the test files as in the training files;
            None if they do unless no name is in both.

    Raises:
        MissingDataError: no files are given for the split, or they do not exist.
        DataError: a file is damaged or lacks the columns, is found twice or in both splits, a label is wrong, or an
            image cannot be read.
    """
    from ssl_sec.data.parquet import cache, reading  # Arrow, which no other set needs
    from ssl_sec.data.parquet.blocks import RowGroups
    from ssl_sec.data.shards.locations import query_mask, require_apart

    check_option("split", split, Split)
    locations = train if split == "train" else test
    if locations is None:
        raise MissingDataError(f"parquet: no files for the {split} split; set data.{split}")
    files = reading.inspect(all_locations(locations), columns)
    if split == "test":
        require_apart(files.files, train, "Parquet")
    if files.named_labels and split == "test" and train is not None and shared_classes is not False:
        of_train = reading.inspect(train, columns).class_names or ()
        if shared_classes or not set(of_train).isdisjoint(files.class_names or ()):
            files = replace(files, class_names=of_train)
    encoded = (
        (name, image.as_py(), int(label))
        for rows in reading.iterate_rows(files)
        for name, image, label in zip(rows.names, rows.encoded, rows.labels, strict=True)
    )
    first, image_shape = first_shape(encoded, decoding)
    queries = query_mask(locations, [footer.num_rows for footer in files.footers], "Parquet")
    name = f"parquet/{split}"
    paths = [path for _, path in files.files]
    more = f" and {len(paths) - 1} more files" if len(paths) > 1 else ""
    description = f"{files.num_rows} images in {paths[0]}{more}, digest {cache.digest(files)}"

    def class_names(labels: Int64[Tensor, " images"]) -> tuple[str, ...]:
        return reading.names_of_classes(files, labels.numpy())

    if decoding.is_resident(files.num_rows, image_shape):
        encoded = itertools.chain(first, encoded)
        return decode_all(encoded, files.num_rows, image_shape, decoding, class_names, name, description, queries)
    if shuffle_window is not None:
        labels = torch.from_numpy(reading.all_labels(files))
        return streamed(
            RowGroups(files=files),
            labels,
            class_names(labels),
            image_shape,
            name,
            description,
            decoding=decoding,
            window=shuffle_window,
        )
    store = ArrowStore(path=cache.cached_table(files, Path(cache_folder).expanduser()))
    labels = torch.from_numpy(mapped_table(store.path)["label"].to_numpy().copy())
    decoding = replace(decoding, resident_limit_mib=0)
    return from_store(store, labels, class_names(labels), name, description, decoding, queries=queries)


def parquet_class_names(locations: Locations, columns: Columns = NAMED_AS_USUAL) -> tuple[str, ...]:
    """Names of the classes that have images in Parquet files, in the order of their labels; only labels are read.

    Args:
        locations: path, glob or fsspec URL of the files, or a list of them.
        columns: columns of the images and the labels.

    Raises:
        MissingDataError: a file does not exist.
        DataError: a file is damaged or lacks the columns, or a label is wrong.
    """
    from ssl_sec.data.parquet import reading

    files = reading.inspect(locations, columns)
    labels = reading.distinct_labels(files)
    class_names = reading.names_of_classes(files, labels)
    return tuple(class_names[label] for label in labels.tolist())
