"""Files that are made once and kept, such as a copy of a set or the index of a shard."""

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ssl_sec.data.shards.locations import one_line
from ssl_sec.files import locked, replaced


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
                with replaced(path) as temporary, temporary.open("wb") as file:
                    write(file)
    return path
