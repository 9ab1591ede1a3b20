"""Files that are made once and kept, such as a copy of a set or the index of a shard."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ssl_sec.data.shards.locations import one_line
from ssl_sec.locking import locked


def made_once(path: Path, write: Callable[[BinaryIO], None]) -> Path:
    """The file, written if it is missing; it appears under its name only when it is whole and on the disk.

    Processes of one machine wait for the one that makes it; those of several machines with a common folder may each
    make it, and one of the equal copies is kept.

    Args:
        path: path of the file, whose name must depend on its content; its folder is created if missing.
        write: function that writes the content.

    Raises:
        DataError: the folder cannot be written, or an error of `write`.
    """
    with one_line(f"cache folder {path.parent}"):
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                _write_whole(path, write)
    return path


def _write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
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
