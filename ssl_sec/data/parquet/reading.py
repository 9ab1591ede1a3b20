"""Files and rows: an image is a struct{bytes, path} with the encoded file in `bytes`; labels are optional."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from jaxtyping import Int64

from ssl_sec.data.folders.listing import display
from ssl_sec.data.image_set import UNLABELLED, Locations, check_num_classes
from ssl_sec.data.parquet import labels
from ssl_sec.data.parquet.columns import Columns
from ssl_sec.data.shards.locations import File, find_files, one_line
from ssl_sec.errors import DataError, counted, nearest, printable, some_names

logger = logging.getLogger(__name__)

# Rows held at once while reading, and their size: Arrow cannot have more than 2 GiB of images in one array of structs.
_ROWS_PER_BATCH = 256
_BYTES_PER_BATCH = 2**28


@dataclass(frozen=True, kw_only=True)
class ParquetFiles:
    """The files of one split, found and with checked columns.

    Attributes:
        files: file system and path of each file.
        image_column: name of the column of images.
        label_column: name of the column of labels; None if the images have none.
        class_names: class names in the files' metadata, or those in the label column; None if there are none.
        named_labels: whether the label column holds names.
        num_rows: number of images in all files.
        footers: footer of each file.
    """

    files: tuple[File, ...]
    image_column: str
    label_column: str | None
    class_names: tuple[str, ...] | None
    named_labels: bool
    num_rows: int
    footers: tuple[pq.FileMetaData, ...]

    @cached_property
    def numbers(self) -> Mapping[str, int] | None:
        """The number of each class by name, where the label column holds names."""
        return {name: number for number, name in enumerate(self.class_names or ())} if self.named_labels else None


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """Some consecutive rows.

    Attributes:
        names: name of each image in errors: file and row.
        images: the column of the images.
        labels: class of each image, 0 ≤ label < MAX_CLASSES; UNLABELLED if there are no labels.
    """

    names: list[str]
    images: pa.Array
    labels: Int64[np.ndarray, " rows"]

    @cached_property
    def encoded(self) -> pa.Array:
        """The bytes of each image; empty where there are none."""
        return encoded_images(self.images)

    @property
    def paths(self) -> list[str]:
        """The original path of each image; empty where there is none."""
        place = self.images.type.get_field_index("path")
        kind = pa.null() if place < 0 else self.images.type.field(place).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            return [""] * len(self.images)
        return self.images.flatten()[place].fill_null("").to_pylist()


def inspect(locations: Locations, columns: Columns) -> ParquetFiles:
    """Opens each file's footer and checks its columns.

    Args:
        locations: a path, a glob, an fsspec URL or a list of them.
        columns: columns of the images and the labels.

    Raises:
        MissingDataError: a file does not exist.
        DataError: a file is not Parquet, or lacks the columns or any rows.
    """
    files = find_files(locations, "Parquet")
    footers: list[pq.FileMetaData] = []
    class_names, found_column, kind = None, columns.image_column, None
    for file_system, path in files:
        with opened(file_system, path) as parquet:
            schema = parquet.schema_arrow
            footers.append(parquet.metadata)
        found_column = _find_image_column(schema, found_column, path)
        _require_bytes(footers[-1], found_column, path)
        found = labels.find_labels(schema, columns.label_column, path)
        kind = kind or found
        if found != kind:
            raise DataError(f"{path}: {found} found; allowed: {kind}, as in {files[0][1]}")
        named = labels.names_in_metadata(schema, columns.label_column) if kind == labels.Kind.NUMBERS else None
        if named and class_names and named != class_names:
            raise DataError(
                f"{printable(path)}: its metadata names other classes ({some_names(named)}) than that of an earlier "
                f"file ({some_names(class_names)}); allowed: the same names in the same order in all files of a split"
            )
        class_names = class_names or named
    assert found_column is not None
    num_rows = sum(footer.num_rows for footer in footers)
    if num_rows == 0:
        raise DataError(f"{_listed(files)}: no rows")
    label_column = None if kind == labels.Kind.NONE else columns.label_column
    if kind == labels.Kind.NAMES:
        columns_read = _label_columns(files, label_column)
        class_names = tuple(sorted(set[str]().union(*(labels.names_in(column) for _, _, column in columns_read))))
    return ParquetFiles(
        files=tuple(files),
        image_column=found_column,
        label_column=label_column,
        class_names=class_names,
        named_labels=kind == labels.Kind.NAMES,
        num_rows=num_rows,
        footers=tuple(footers),
    )


def iterate_rows(parquet_files: ParquetFiles) -> Iterator[EncodedRows]:
    """All rows in order, some at once; see `rows_per_batch`.

    Raises:
        DataError: a file is damaged, or a label is missing, negative, ≥ MAX_CLASSES or no known class.
    """
    label_column = parquet_files.label_column
    columns = [parquet_files.image_column, *([] if label_column is None else [label_column])]
    for (file_system, path), footer in zip(parquet_files.files, parquet_files.footers, strict=True):
        row, shown = 0, display(path)
        with opened(file_system, path) as parquet:
            record_batches = parquet.iter_batches(rows_per_batch(footer), columns=columns)
            while (record_batch := _next_batch(record_batches, path)) is not None:
                images = record_batch.column(parquet_files.image_column)
                yield EncodedRows(
                    names=[f"{shown} row {row + i}" for i in range(len(images))],
                    images=images,
                    labels=np.full(len(images), UNLABELLED)
                    if label_column is None
                    else labels.read_labels(record_batch.column(label_column), parquet_files.numbers, path, row),
                )
                row += record_batch.num_rows


def rows_per_batch(footer: pq.FileMetaData) -> int:
    """Number of rows of a file that are held at once, ≥ 1: fewer of large images."""
    groups = map(footer.row_group, range(footer.num_row_groups))
    largest = max((math.ceil(group.total_byte_size / group.num_rows) for group in groups if group.num_rows), default=1)
    return max(1, min(_ROWS_PER_BATCH, _BYTES_PER_BATCH // max(1, largest)))


def encoded_images(images: pa.Array) -> pa.Array:
    """The bytes of each image in a column; empty where there are none."""
    # After flattening, the bytes are null if the whole struct is.
    encoded = images.flatten()[images.type.get_field_index("bytes")]
    return encoded.cast(pa.large_binary()).fill_null(b"")


def all_labels(parquet_files: ParquetFiles) -> Int64[np.ndarray, " images"]:
    """The labels of all rows in order; the images are not read.

    Raises:
        DataError: as `iterate_rows`.
    """
    if parquet_files.label_column is None:
        return np.full(parquet_files.num_rows, UNLABELLED)
    columns = _label_columns(parquet_files.files, parquet_files.label_column)
    return np.concatenate(
        [labels.read_labels(column, parquet_files.numbers, path, row) for path, row, column in columns]
    )


def distinct_labels(parquet_files: ParquetFiles) -> Int64[np.ndarray, " classes"]:
    """The labels that occur, ascending; none without labels. The images are not read.

    Raises:
        DataError: as `iterate_rows`.
    """
    found: set[int] = set()
    for path, row, column in _label_columns(parquet_files.files, parquet_files.label_column):
        found.update(labels.read_labels(column, parquet_files.numbers, path, row).tolist())
    return np.array(sorted(found), np.int64)


def names_of_classes(files: ParquetFiles, found: Int64[np.ndarray, " images"]) -> tuple[str, ...]:
    """Names of the classes: from the files, or else the labels' numbers; none without labels.

    Args:
        files: files of the images.
        found: labels of the images.

    Raises:
        DataError: a label has no name in the metadata, or there are far more classes than images.
    """
    if files.label_column is None:
        return ()
    largest = int(found.max())
    if files.class_names is None:
        check_num_classes(largest + 1, len(found), files.files[0][1])
        return tuple(map(str, range(largest + 1)))
    if largest >= len(files.class_names):
        raise DataError(
            f"{_listed(files.files)}: label {largest} in column {files.label_column!r}, but the metadata names "
            f"{counted(len(files.class_names), 'class')}; allowed: 0 to {len(files.class_names) - 1}"
        )
    used, named = len(np.unique(found)), len(files.class_names)
    if used < named:
        logger.info("%s: %d of the %d classes that have names have images", files.files[0][1], used, named)
    return files.class_names


def _label_columns(files: Sequence[File], label_column: str | None) -> Iterator[tuple[str, int, pa.Array]]:
    """The labels of some rows at a time, with their file and the position of the first; nothing without the column."""
    for file_system, path in files if label_column is not None else ():
        row = 0
        with opened(file_system, path) as parquet:
            record_batches = parquet.iter_batches(columns=[label_column])
            while (record_batch := _next_batch(record_batches, path)) is not None:
                yield path, row, record_batch.column(0)
                row += record_batch.num_rows


def _next_batch(record_batches: Iterator[pa.RecordBatch], path: str) -> pa.RecordBatch | None:
    with one_line(path):
        return next(record_batches, None)


@contextmanager
def opened(
    file_system: AbstractFileSystem, path: str, footer: pq.FileMetaData | None = None
) -> Iterator[pq.ParquetFile]:
    """An open file; its footer is read unless it is given."""
    with one_line(path):
        file = file_system.open(path, "rb")
    with file:
        with one_line(path):
            # Read page by page: a row group may be larger than memory.
            parquet = pq.ParquetFile(file, metadata=footer, pre_buffer=False, buffer_size=2**20)
        yield parquet


def _listed(files: Sequence[File]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0][1]}{more}"


def _find_image_column(schema: pa.Schema, image_column: str | None, path: str) -> str:
    images = [column.name for column in schema if _is_image(column.type)]
    labels.check_unique(schema, image_column, path)
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


def _require_bytes(footer: pq.FileMetaData, image_column: str, path: str) -> None:
    """Refuses a file with paths of images, but without any image, as its statistics tell."""
    has_paths = False
    for group in map(footer.row_group, range(footer.num_row_groups)):
        columns = {(column := group.column(number)).path_in_schema: column for number in range(group.num_columns)}
        of_bytes, of_paths = (columns.get(f"{image_column}.{name}") for name in ("bytes", "path"))
        if of_bytes is None or not _is_null(of_bytes):
            return
        has_paths = has_paths or (of_paths is not None and not _is_null(of_paths))
    if has_paths:
        raise DataError(
            f"{printable(path)}: column {image_column!r} holds only paths of images; write the file with the images "
            "embedded, as their bytes"
        )


def _is_null(column: pq.ColumnChunkMetaData) -> bool:
    """Whether all values are known to be missing."""
    statistics = column.statistics
    return statistics is not None and statistics.has_null_count and statistics.null_count == column.num_values


def _is_image(column_type: pa.DataType) -> bool:
    if not pa.types.is_struct(column_type) or column_type.get_field_index("bytes") < 0:
        return False
    bytes_type = column_type.field("bytes").type
    return pa.types.is_binary(bytes_type) or pa.types.is_large_binary(bytes_type)
