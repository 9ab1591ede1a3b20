"""Files in a folder or in object storage, each whole or absent."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.places import is_remote
from ssl_sec.errors import StorageError, writing
from ssl_sec.files import replaced


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPlace:
    """A folder on this machine, or one that all nodes share.

    Attributes:
        folder: the folder; it is created when a file is written.
        key: configuration key that it was given for, for messages.
    """

    folder: Path
    key: str = "output"

    def __str__(self) -> str:
        return str(self.folder)

    def write(self, name: str, content: bytes) -> None:
        """Replaces a file.

        Raises:
            StorageError: if it cannot be written; the file is as before.
        """
        path = self.folder / name
        with writing(self.key, path):
            self.folder.mkdir(parents=True, exist_ok=True)
            with replaced(path) as temporary:
                temporary.write_bytes(content)

    def files(self) -> dict[str, int]:
        """Name -> size in bytes of all files in the folder.

        Raises:
            StorageError: if they cannot be listed.
        """
        found: dict[str, int] = {}
        try:
            for path in self.folder.iterdir():
                with suppress(FileNotFoundError):  # another process has removed or renamed it
                    if path.is_file():
                        found[path.name] = path.stat().st_size
            return found
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StorageError(f"{self.key}: {self.folder} cannot be read: {error.strerror}") from error

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist.

        Raises:
            StorageError: if it cannot be read.
        """
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{self.key}: {self.folder / name} cannot be read: {error.strerror}") from error

    def open(self, name: str) -> BinaryIO:
        """Opens a file, to read parts of it.

        Raises:
            OSError: if it cannot be opened; later, if a part cannot be read.
        """
        return (self.folder / name).open("rb")

    def remove(self, names: Collection[str]) -> None:
        """Removes files; those that do not exist are ignored.

        Raises:
            StorageError: if one cannot be removed.
        """
        try:
            for name in names:
                (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{self.key}: {error.filename} cannot be removed: {error.strerror}") from error


# Both have files by name, each whole or absent.
Place = LocalPlace | Bucket


def place_at(output: str, key: str = "output") -> Place:
    """The place at a path or a URL.

    Args:
        output: the path or URL.
        key: configuration key that it was given for, for messages.

    Raises:
        ConfigError: if the URL cannot be used.
    """
    if is_remote(output):
        return Bucket(output, key)
    return LocalPlace(folder=Path(output.removeprefix("file://")).expanduser().resolve(), key=key)
