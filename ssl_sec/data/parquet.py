"""Parquet files in the Hugging Face layout, read a few rows at a time, and their memory-mapped cache.

An image is a struct{bytes, path} with the encoded file in `bytes`; a label is an integer; names of the
classes are in the schema's metadata. Rows of Parquet cannot be read one by one, so a set that is too
large for memory is copied once to an uncompressed Arrow IPC file, which is mapped and not loaded.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from jaxtyping import Int64

from ssl_sec.data.image_set import (
    MAX_CLASSES,
    Columns,
    Locations,
    check_num_classes,
)
from ssl_sec.errors import DataError, MissingDataError, first_line, nearest, printable
from ssl_sec.locking import locked

logger = logging.getLogger(__name__)

# Rows held at once while reading; large images make this some tens of MiB.
ROWS_PER_BATCH = 256

# Part of the cache's key; increase it when the columns change.
CACHE_LAYOUT = 1


@dataclass(frozen=True, kw_only=True)
class ParquetFiles:
    """The files of one split, found and with checked columns.

    Attributes:
        files: file system and path of each file.
        image_column: the column of images.
        label_column: the column of labels.
        class_names: from the metadata of the first file; None if it has none.
        num_rows: images in all files.
    """

    files: tuple[tuple[AbstractFileSystem, str], ...]
    image_column: str
    label_column: str
    class_names: tuple[str, ...] | None
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """Some consecutive rows.

    Attributes:
        names: what errors call each image: file and row.
        paths: of the files that the images were; empty where there are none.
        encoded: the bytes of each image; empty where there are none.
        labels: class of each image, 0 ≤ label < MAX_CLASSES.
    """

    names: list[str]
    paths: list[str]
    encoded: pa.Array
    labels: Int64[np.ndarray, " rows"]


def find_files(locations: Locations) -> list[tuple[AbstractFileSystem, str]]:
    """The files that paths, globs or fsspec URLs name; those of a glob sorted.

    Raises:
        MissingDataError: a path does not exist, or a glob matches nothing.
        DataError: the file system is unknown or does not answer.
    """
    found: list[tuple[AbstractFileSystem, str]] = []
    for location in [locations] if isinstance(locations, str | Path) else locations:
        with _one_line(str(location)):
            file_system, path = fsspec.url_to_fs(str(location))
            # A file may have the characters of a glob in its name.
            is_glob = not file_system.exists(path) and any(c in path for c in "*?[")
            paths = sorted(map(str, file_system.glob(path))) if is_glob else [path]
        if not paths:
            raise MissingDataError(f"no Parquet file matches {location}; set data.train and data.test")
        found += [(file_system, path) for path in paths]
    if not found:
        raise MissingDataError("the list of Parquet files is empty; set data.train and data.test")
    return found


def inspect(locations: Locations, columns: Columns) -> ParquetFiles:
    """Opens each file's footer and checks its columns.

    Args:
        locations: a path, a glob, an fsspec URL or a list of them.
        columns: of the images and the labels.

    Raises:
        MissingDataError: a file does not exist.
        DataError: a file is not Parquet, has no such columns or no rows.
    """
    files = find_files(locations)
    num_rows, class_names, found_column = 0, None, columns.image_column
    for file_system, path in files:
        with _opened(file_system, path) as parquet:
            schema = parquet.schema_arrow
            num_rows += parquet.metadata.num_rows
        found_column = _find_image_column(schema, found_column, path)
        _check_label_column(schema, columns.label_column, path)
        named = _class_names(schema, columns.label_column)
        if named and class_names and named != class_names:
            listed = printable(", ".join(named))
            raise DataError(f"{printable(path)}: its metadata names other classes than another file's: {listed}")
        class_names = class_names or named
    assert found_column is not None
    if num_rows == 0:
        raise DataError(f"{_listed(files)}: no rows")
    return ParquetFiles(
        files=tuple(files),
        image_column=found_column,
        label_column=columns.label_column,
        class_names=class_names,
        num_rows=num_rows,
    )


def iterate_rows(parquet_files: ParquetFiles) -> Iterator[EncodedRows]:
    """All rows in order, at most ROWS_PER_BATCH at once.

    Raises:
        DataError: a file is damaged, or a label is missing, negative or ≥ MAX_CLASSES.
    """
    columns = [parquet_files.image_column, parquet_files.label_column]
    for file_system, path in parquet_files.files:
        row = 0
        with _opened(file_system, path) as parquet:
            record_batches = parquet.iter_batches(batch_size=ROWS_PER_BATCH, columns=columns)
            while (record_batch := _next_batch(record_batches, path)) is not None:
                images = record_batch.column(parquet_files.image_column)
                # After flattening, the bytes are null if the whole struct is.
                encoded = images.flatten()[images.type.get_field_index("bytes")]
                yield EncodedRows(
                    names=[f"{path} row {row + i}" for i in range(len(images))],
                    paths=_image_paths(images),
                    encoded=encoded.cast(pa.large_binary()).fill_null(b""),
                    labels=_check_labels(record_batch.column(parquet_files.label_column), path, row),
                )
                row += record_batch.num_rows


def distinct_labels(parquet_files: ParquetFiles) -> Int64[np.ndarray, " classes"]:
    """The labels that occur, ascending; the images are not read.

    Raises:
        DataError: as `iterate_rows`.
    """
    found: set[int] = set()
    for file_system, path in parquet_files.files:
        row = 0
        with _opened(file_system, path) as parquet:
            record_batches = parquet.iter_batches(columns=[parquet_files.label_column])
            while (record_batch := _next_batch(record_batches, path)) is not None:
                found.update(_check_labels(record_batch.column(0), path, row).tolist())
                row += record_batch.num_rows
    return np.array(sorted(found), np.int64)


def class_names(files: ParquetFiles, labels: Int64[np.ndarray, " images"]) -> tuple[str, ...]:
    """Names of the classes, from the metadata or else the labels' numbers.

    Raises:
        DataError: a label has no name in the metadata, or there are far more classes than images.
    """
    largest = int(labels.max())
    if files.class_names is None:
        check_num_classes(largest + 1, len(labels), files.files[0][1])
        return tuple(map(str, range(largest + 1)))
    if largest >= len(files.class_names):
        raise DataError(
            f"{files.files[0][1]}: label {largest} in column {files.label_column!r}, but the metadata names "
            f"{len(files.class_names)} classes; allowed: 0 to {len(files.class_names) - 1}"
        )
    found, named = len(np.unique(labels)), len(files.class_names)
    if found < named:
        logger.info("%s: %d of the %d classes that the metadata names have images", files.files[0][1], found, named)
    return files.class_names


def cached_table(parquet_files: ParquetFiles, cache_folder: Path) -> Path:
    """The rows as an Arrow IPC file with the columns `name`, `encoded` and `label`, written if it is missing.

    The file appears under its name only when it is whole and on the disk. Processes of one machine wait for
    the one that makes it; those of several machines with a common folder may each make it, and one of
    the equal copies stays.

    Args:
        parquet_files: what to copy.
        cache_folder: where to; created if missing. It needs as much space as the Parquet files.

    Returns:
        The file, named by a digest of the Parquet files' names, sizes and times of change.

    Raises:
        DataError: a Parquet file is damaged, or the folder cannot be written.
    """
    with _one_line(f"cache folder {cache_folder}"):
        path = cache_folder / f"{digest(parquet_files)}.arrow"
        if path.exists():
            return path
        cache_folder.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                _write_table(parquet_files, path)
    return path


def digest(parquet_files: ParquetFiles) -> str:
    """32 hexadecimal digits that change with a file's name, size or modification time."""
    stamps = [_stamp(file_system, path) for file_system, path in parquet_files.files]
    key = [CACHE_LAYOUT, parquet_files.image_column, parquet_files.label_column, stamps]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


def _write_table(parquet_files: ParquetFiles, path: Path) -> None:
    schema = pa.schema({"name": pa.string(), "encoded": pa.large_binary(), "label": pa.int64()})
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            with pa.ipc.new_file(file, schema) as writer:
                for rows in iterate_rows(parquet_files):
                    writer.write_batch(
                        pa.record_batch([pa.array(rows.names), rows.encoded, pa.array(rows.labels)], schema=schema)
                    )
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _stamp(file_system: AbstractFileSystem, path: str) -> list[str]:
    info = file_system.info(path)
    # Each storage has its own name for the modification time; the last ones are for stores that never overwrite.
    times = ("mtime", "LastModified", "last_modified", "updated", "ETag", "etag", "created")
    changed = next((str(info[key]) for key in times if info.get(key)), "")
    return [file_system.unstrip_protocol(path), str(info.get("size")), changed]


def _next_batch(record_batches: Iterator[pa.RecordBatch], path: str) -> pa.RecordBatch | None:
    with _one_line(path):
        return next(record_batches, None)


@contextmanager
def _opened(file_system: AbstractFileSystem, path: str) -> Iterator[pq.ParquetFile]:
    with _one_line(path):
        file = file_system.open(path, "rb")
    with file:
        with _one_line(path):
            # Read page by page: a row group may be larger than memory.
            parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
        yield parquet


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turns any error of the block into one line; the block may only call storage libraries."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise MissingDataError(f"{printable(what)}: no such file; set data.train and data.test") from None
    # pyarrow, fsspec and its many back ends have no common base class of errors.
    except Exception as error:
        raise DataError(f"{printable(what)}: cannot be read: {first_line(error)}") from error


def _listed(files: Sequence[tuple[AbstractFileSystem, str]]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0][1]}{more}"


def _find_image_column(schema: pa.Schema, image_column: str | None, path: str) -> str:
    images = [column.name for column in schema if _is_image(column.type)]
    _check_unique(schema, image_column, path)
    if image_column is None:
        if not images:
            raise DataError(
                f"{path}: no image column of type struct{{bytes, path}}; columns: {', '.join(schema.names)}"
            )
        if len(images) > 1:
            raise DataError(f"{path}: several image columns: {', '.join(images)}; set data.image_column")
        return images[0]
    if image_column not in schema.names:
        raise DataError(f"{path}: no image column {image_column!r}; {nearest(image_column, schema.names)}")
    if image_column not in images:
        found = schema.field(image_column).type
        raise DataError(f"{path}: column {image_column!r} is {found}; allowed: struct{{bytes, path}}")
    return image_column


def _is_image(column_type: pa.DataType) -> bool:
    if not pa.types.is_struct(column_type) or column_type.get_field_index("bytes") < 0:
        return False
    bytes_type = column_type.field("bytes").type
    return pa.types.is_binary(bytes_type) or pa.types.is_large_binary(bytes_type)


def _image_paths(images: pa.Array) -> list[str]:
    place = images.type.get_field_index("path")
    if place < 0 or not pa.types.is_string(images.type.field(place).type):
        return [""] * len(images)
    return images.flatten()[place].fill_null("").to_pylist()


def _check_label_column(schema: pa.Schema, label_column: str, path: str) -> None:
    if label_column not in schema.names:
        raise DataError(f"{path}: no label column {label_column!r}; {nearest(label_column, schema.names)}")
    _check_unique(schema, label_column, path)
    found = schema.field(label_column).type
    if not pa.types.is_integer(found):
        raise DataError(f"{path}: label column {label_column!r} is {found}; allowed: integers")


def _check_unique(schema: pa.Schema, column: str | None, path: str) -> None:
    count = schema.names.count(column)
    if count > 1:
        raise DataError(f"{printable(path)}: {count} columns are named {column!r}; allowed: one")


def _check_labels(column: pa.Array, path: str, first_row: int) -> Int64[np.ndarray, " rows"]:
    if column.null_count:
        row = first_row + column.is_null().to_pylist().index(True)
        raise DataError(f"{path} row {row}: no label; allowed: integers, 0 or more")
    labels = column.to_numpy()
    wrong = (labels < 0) | (labels >= MAX_CLASSES)
    if wrong.any():
        where = int(wrong.argmax())
        raise DataError(f"{path} row {first_row + where}: label {labels[where]}; allowed: 0 to {MAX_CLASSES - 1}")
    return labels.astype(np.int64)


def _class_names(schema: pa.Schema, label_column: str) -> tuple[str, ...] | None:
    # The `datasets` library writes it into its files.
    try:
        metadata = json.loads((schema.metadata or {})[b"huggingface"])
        names = metadata["info"]["features"][label_column]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return tuple(map(str, names)) if isinstance(names, list) and names else None
