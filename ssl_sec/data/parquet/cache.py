"""The rows as a memory-mapped file.

Rows of Parquet cannot be read one by one, so a set that is too large for memory is copied once to an uncompressed
Arrow IPC file, which is mapped and not loaded.
"""

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from ssl_sec.data.parquet.reading import ParquetFiles, iterate_rows
from ssl_sec.data.shards.cache_files import made_table
from ssl_sec.data.shards.locations import stamp

# Part of the cache's key; increase it when the columns change.
CACHE_LAYOUT = 1


def cached_table(parquet_files: ParquetFiles, cache_folder: Path) -> Path:
    """The rows as an Arrow IPC file with the columns `name`, `encoded` and `label`, written if missing or damaged.

    Args:
        parquet_files: files to copy.
        cache_folder: folder of the copy, created if missing; it needs as much space as the Parquet files.

    Returns:
        The file, named by a digest of the Parquet files' names, sizes and modification times.

    Raises:
        DataError: a Parquet file is damaged, or the folder cannot be written.
    """
    path = cache_folder / f"{digest(parquet_files)}.arrow"
    made_table(path, lambda file: _write_table(parquet_files, file))
    return path


def digest(parquet_files: ParquetFiles) -> str:
    """32 hexadecimal digits that change with a file's name, size or modification time."""
    stamps = [stamp(file_system, path) for file_system, path in parquet_files.files]
    key = [CACHE_LAYOUT, parquet_files.image_column, parquet_files.label_column, stamps]
    if parquet_files.numbers is not None:  # the labels are numbers of these names
        key.append(parquet_files.class_names)
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


def _write_table(parquet_files: ParquetFiles, file: BinaryIO) -> None:
    schema = pa.schema({"name": pa.string(), "encoded": pa.large_binary(), "label": pa.int64()})
    with pa.ipc.new_file(file, schema) as writer:
        for rows in iterate_rows(parquet_files):
            writer.write_batch(
                pa.record_batch([pa.array(rows.names), rows.encoded, pa.array(rows.labels)], schema=schema)
            )
