"""The Parquet files that an earlier start of a job has written."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ssl_sec.edges.storage.files import Place
from ssl_sec.embeddings.parts import origin_of
from ssl_sec.errors import StorageError, first_line

logger = logging.getLogger("ssl_sec")

# Files that are read at the same time.
_AT_ONCE = 16


def whole_files(place: Place, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name -> origin of the files that are whole; others, as after a crash of the machine, are named in a warning.

    Args:
        place: the place of the files.
        names: the names of existing files.

    Raises:
        StorageError: if a file cannot be read.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(names, pool.map(partial(_origin, place), names), strict=True))
    for name, origin in found.items():
        if origin is None:
            logger.warning("%s/%s is not a whole Parquet file; it is computed again", place, name)
    return {name: origin for name, origin in found.items() if origin is not None}


def _origin(place: Place, name: str) -> dict[str, Any] | None:
    """The origin of a file; None if the file is not whole."""
    try:
        with place.open(name) as opened, pq.ParquetFile(opened) as file:
            return origin_of(file.schema_arrow) or {}
    except pa.ArrowInvalid:
        return None
    except OSError as error:
        raise StorageError(f"output: {place}/{name} cannot be read: {first_line(error)}") from error
