"""The Parquet files that an earlier start of a job has written, and a lock against another job at the same time."""

import logging
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ssl_sec.edges.run.running import RunLock
from ssl_sec.edges.storage.files import LocalPlace, Place
from ssl_sec.edges.storage.lease import Lease
from ssl_sec.embeddings.parts import origin_of
from ssl_sec.errors import ConfigError, StorageError, first_line

logger = logging.getLogger("ssl_sec")

# Files that are read at the same time.
_AT_ONCE = 16


@contextmanager
def alone_in(place: Place, what: str, *, may_be_whole: bool = True) -> Iterator[None]:
    """Refuses another process that writes the same files until the block ends, since both would leave a mix of files.

    A process that was suspended for so long that another one has taken over its place in object storage is
    interrupted.

    Args:
        place: the place of the files.
        what: name of the files; others may be written at once.
        may_be_whole: the files may be there already, so that a place that cannot be written needs no lock.

    Raises:
        ConfigError: if another process writes them.
        StorageError: if the place cannot be written, and not `may_be_whole`.
    """
    lock, harmless = None, (StorageError,) if may_be_whole else ()
    with suppress(*harmless):
        if isinstance(place, LocalPlace):
            path = place.folder / ".running" / what
            lock = RunLock(path, {"folder": str(place.folder)}, "output", "another folder", "output")
        else:
            lock = Lease(place, _interrupt, name=f".lease-{what}", key="output", other="another folder")
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _interrupt() -> None:
    """Interrupts the main thread, also while it waits."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeFile:
    """A file that is whole.

    Attributes:
        origin: what it was computed from; empty for a file of another program.
        num_rows: number of its rows.
    """

    origin: dict[str, Any]
    num_rows: int


def whole_files(place: Place, names: Sequence[str], origin: Mapping[str, Any], what: str) -> dict[str, WholeFile]:
    """The files that are whole, by name; others, as after a crash of the machine, are named in a warning.

    Args:
        place: the place of the files.
        names: the names of existing files.
        origin: what the files must have been computed from.
        what: files with another origin, in words.

    Raises:
        ConfigError: if a file has another origin.
        StorageError: if a file cannot be read.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(names, pool.map(partial(_whole, place), names), strict=True))
    for name, file in found.items():
        if file is None:
            logger.warning("%s/%s is not a whole Parquet file; it is computed again", place, name)
    whole = {name: file for name, file in found.items() if file is not None}
    for file in whole.values():
        for key, now in origin.items():
            if (before := file.origin.get(key)) != now:
                raise ConfigError(
                    f"output: {place} holds {what}, with {key} {before} instead of {now}; allowed: another folder"
                )
    return whole


def _whole(place: Place, name: str) -> WholeFile | None:
    """A file; None if it is not whole."""
    try:
        with place.open(name) as opened, pq.ParquetFile(opened) as file:
            return WholeFile(origin=origin_of(file.schema_arrow) or {}, num_rows=file.metadata.num_rows)
    except pa.ArrowInvalid:
        return None
    except OSError as error:
        raise StorageError(f"output: {place}/{name} cannot be read: {first_line(error)}") from error
