"""A folder or a bucket in which several machines share the files that each would otherwise make for itself."""

import logging
import threading
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ssl_sec.data.shards.locations import one_line
from ssl_sec.errors import DataError
from ssl_sec.files import replaced

logger = logging.getLogger("ssl_sec.data")

_KEY = "data.index_folder"


class SharedFolder:
    """Small files by name, each whole or absent.

    Args:
        location: path, or URL of fsspec; the folder need not exist.

    Raises:
        DataError: the file system is unknown.
    """

    def __init__(self, location: str) -> None:
        self._may_warn = threading.Lock()
        with one_line(f"{_KEY}: {location}"):
            self._file_system, self._path = fsspec.url_to_fs(location)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none.

        Raises:
            DataError: it cannot be read.
        """
        path = f"{self._path}/{name}"
        with one_line(f"{_KEY}: {path}"):
            try:
                return self._file_system.cat_file(path)
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Adds a file, or logs one warning for all that cannot be written: this machine needs none of them."""
        path = f"{self._path}/{name}"
        try:
            with one_line(f"{_KEY}: {path}", "written"):
                if isinstance(self._file_system, LocalFileSystem):
                    Path(path).parent.mkdir(parents=True, exist_ok=True)
                    with replaced(Path(path)) as temporary:
                        temporary.write_bytes(content)
                else:  # in object storage a file appears when it is whole
                    self._file_system.pipe_file(path, content)
        except DataError as error:
            if self._may_warn.acquire(blocking=False):
                logger.warning("%s; other machines read the shards themselves", error)
