"""The rows as a memory-mapped file.

Rows of Parquet cannot be read one by one, so a set that is too large for memory is copied once to an uncompressed
Arrow IPC file, which is mapped and not loaded.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from ssl_sec.data.parquet.reading import ParquetFiles, iterate_rows
from ssl_sec.data.shards.cache_files import made_table
from ssl_sec.data.shards.locations import stamp
from ssl_sec.errors import printable
from ssl_sec.progress import logged

logger = logging.getLogger("ssl_sec.data")

# Part of the cache's key; increase it when the columns change.
CACHE_LAYOUT = 1

# Time since the last opening after which a copy is removed if its files have changed.
_KEPT_S = 30 * 24 * 3600
# Time without a write after which a copy that is not finished is one of a process that was killed.
_ABANDONED_S = 3600


def cached_table(parquet_files: ParquetFiles, cache_folder: Path) -> Path:
    """The rows as an Arrow IPC file with the columns `name`, `encoded` and `label`, written if missing or damaged.

    Copies that were made before the same files changed are removed once no process has opened them for 30 days: a
    process on another machine with this folder may still map them. On one machine, a mapped file stays readable.
    Unfinished copies of processes that were killed are removed once nobody has written to them for an hour.

    Args:
        parquet_files: files to copy.
        cache_folder: folder of the copy, created if missing; it needs as much space as the Parquet files.

    Returns:
        The file, named by digests of the Parquet files' names, and of these with sizes and modification times.

    Raises:
        DataError: a Parquet file is damaged, or the folder cannot be written.
    """
    stamps = _stamps(parquet_files)
    of_files = _digest(parquet_files, [address for address, *_ in stamps])[:16]
    path = cache_folder / f"{of_files}-{_digest(parquet_files, stamps)}.arrow"
    with suppress(OSError):  # a folder that cannot be read; first, as the copy may need the space
        _remove_unfinished(cache_folder.glob(f".{of_files}-*.arrow.*"))
    made_table(path, lambda file: _write_table(parquet_files, file))
    with suppress(OSError):  # a file that cannot be written
        os.utime(path, (time.time(), path.stat().st_mtime))
    with suppress(OSError):
        _remove_former(path, cache_folder.glob(f"{of_files}-*.arrow"))
    return path


def digest(parquet_files: ParquetFiles) -> str:
    """32 hexadecimal digits that change with a file's name, size or modification time."""
    return _digest(parquet_files, _stamps(parquet_files))


def _stamps(parquet_files: ParquetFiles) -> list[list[str]]:
    return [stamp(file_system, path) for file_system, path in parquet_files.files]


def _digest(parquet_files: ParquetFiles, of_files: list[Any]) -> str:
    key = [CACHE_LAYOUT, parquet_files.image_column, parquet_files.label_column, of_files]
    if parquet_files.numbers is not None:  # the labels are numbers of these names
        key.append(parquet_files.class_names)
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


def _remove_former(path: Path, copies: Iterable[Path]) -> None:
    """Removes the copies beside `path` that were not opened for long, and logs the others."""
    for copy in copies:
        if copy == path:
            continue
        with suppress(OSError):  # it cannot be removed, or another process removes it now
            about = copy.stat()
            if time.time() - about.st_atime > _KEPT_S:
                copy.unlink()
                found = "removed"
            else:
                found = "removed 30 days after it was last opened; delete it earlier if no run reads it"
            logger.info("%s: a copy of %.1f MiB from before its files changed: %s", copy, about.st_size / 2**20, found)


def _remove_unfinished(copies: Iterable[Path]) -> None:
    """Removes the temporary files of `ssl_sec.files.replaced` that processes have left behind."""
    for copy in copies:
        with suppress(OSError):
            about = copy.stat()
            if time.time() - about.st_mtime > _ABANDONED_S:
                copy.unlink()
                logger.info("%s: an unfinished copy of %.1f MiB: removed", copy, about.st_size / 2**20)


def _write_table(parquet_files: ParquetFiles, file: BinaryIO) -> None:
    schema = pa.schema({"name": pa.string(), "encoded": pa.large_binary(), "label": pa.int64()})
    first = printable(parquet_files.files[0][1])
    with pa.ipc.new_file(file, schema) as writer:
        all_rows, total = iterate_rows(parquet_files), parquet_files.num_rows
        for rows in logged(all_rows, f"copying {first}", total, size=lambda rows: len(rows.names)):
            writer.write_batch(
                pa.record_batch([pa.array(rows.names), rows.encoded, pa.array(rows.labels)], schema=schema)
            )
    logger.info("%s: %d images are copied, %.1f MiB", first, total, file.tell() / 2**20)
