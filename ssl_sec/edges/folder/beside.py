"""Small files beside the runs of a recipe."""

from ssl_sec.edges.folder.text import text_of, write_whole
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.places import is_remote, local_folder
from ssl_sec.errors import StorageError


class FileBeside:
    """A small file beside the runs of a recipe, on this machine or in object storage.

    Args:
        output_dir: of the runs.
        group: the recipe's folder there.
        name: of the file.
    """

    def __init__(self, output_dir: str, group: str, name: str) -> None:
        self._path = local_folder(output_dir) / group / name
        self._bucket = Bucket(f"{output_dir.rstrip('/')}/{group}") if is_remote(output_dir) else None

    def __str__(self) -> str:
        return str(self._path) if self._bucket is None else f"{self._bucket.url}/{self._path.name}"

    def text(self) -> str:
        """Its text; empty if there is no file.

        Raises:
            StorageError: if object storage cannot be used.
        """
        return text_of(self._path) if self._bucket is None else (self._bucket.read(self._path.name) or b"").decode()

    def write(self, content: bytes) -> None:
        """Replaces it as a whole.

        Raises:
            StorageError: if it cannot be written.
        """
        if self._bucket is not None:
            self._bucket.write(self._path.name, content)
            return
        try:
            write_whole(self._path, content)
        except OSError as error:
            raise StorageError(f"output_dir: {self._path} cannot be written: {error.strerror}") from error

    def remove(self) -> None:
        """Removes it, if it is there.

        Raises:
            StorageError: if object storage cannot be used.
        """
        if self._bucket is not None:
            self._bucket.remove([self._path.name])
        else:
            self._path.unlink(missing_ok=True)
