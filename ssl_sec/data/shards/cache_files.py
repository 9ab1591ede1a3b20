"""Files that are made once and kept, such as a copy of a set or the index of a shard."""

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ssl_sec.data.shards.locations import one_line
from ssl_sec.data.stores import mapped_table
from ssl_sec.files import locked, replaced

logger = logging.getLogger("ssl_sec.data")


def made_once(path: Path, write: Callable[[BinaryIO], None], is_whole: Callable[[Path], bool] = Path.exists) -> Path:
    """The file, written if it is missing; it appears under its name only when it is whole and on the disk.

    Processes of one machine wait for the one that makes it; those of several machines with a common folder may each
    make it, and one of the equal copies is kept.

    Args:
        path: path of the file, whose name must depend on its content; its folder is created if missing.
        write: function that writes the content.
        is_whole: whether the file is there and can be used; a damaged one is removed, with a warning, and written.

    Raises:
        DataError: the folder cannot be written, or an error of `write`.
    """
    with one_line(f"cache folder {path.parent}"):
        if is_whole(path):
            return path
    with one_line(f"cache folder {path.parent}", "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            if not is_whole(path):
                if path.exists():
                    logger.warning("%s is damaged and is made again", path)
                    path.unlink()  # a copy may need its space
                with replaced(path) as temporary, temporary.open("wb") as file:
                    write(file)
    return path


def made_table(path: Path, write: Callable[[BinaryIO], None]) -> Any:
    """A table in an Arrow IPC file that is made once, mapped and not loaded; made again if the file is damaged.

    Args:
        path: path of the file, as for `made_once`.
        write: function that writes the file.

    Raises:
        DataError: the folder cannot be written, the file is damaged as soon as it is written, or an error of `write`.
    """
    made_once(path, write, is_whole=_is_table)
    with one_line(str(path)):
        return mapped_table(path)


def _is_table(path: Path) -> bool:
    if not path.exists():  # removed, although this process may still have it mapped
        return False
    try:
        mapped_table(path)
    except (OSError, ValueError) as error:
        # Arrow's errors about the content have no number; one of the system says nothing about the content.
        if getattr(error, "errno", None) not in (None, errno.ENOENT):
            raise
        return False
    return True
