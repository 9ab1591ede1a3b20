"""Keeps a copy of a run's folder in object storage while the run is active."""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.holder import write_holder
from ssl_sec.errors import StorageError
from ssl_sec.files import locked

# Time between two checks of the folder; longer if uploads are slow, so that they take a tenth of the time.
UPLOADS_EVERY_S = 5.0
_SHARE_OF_TIME = 0.1

# Files that stay on the machine: checkpoints have their own uploads, and requests are for this process.
_LOCAL = ("checkpoints", "ray", "stop", "save", "launch", "crash-*")

# Files that show that the run is complete; they are uploaded last.
_LAST = ("outcome", "unclosed")
# The only files that a run removes again. Another one that disappears was taken by a cleaner of temporary files.
_REMOVED = (*_LAST, "error.json", "not_uploaded")

# File in the folder, locked by the process that uploads.
_LOCK = ".mirror"

# Time of a file's last change, and its size.
Version = tuple[int, int]


def versions(folder: Path) -> dict[str, Version]:
    """Name -> version of the files that are kept in object storage; names are relative, with `/`."""
    found: dict[str, Version] = {}
    for name in _names(folder, folder):
        with contextlib.suppress(FileNotFoundError):  # replaced or removed in the meantime
            about = (folder / name).stat()
            found[name] = about.st_mtime_ns, about.st_size
    return found


def _names(folder: Path, root: Path) -> Iterator[str]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith(".") or _is_local(path.relative_to(root).as_posix()):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _names(path, root)
        else:
            yield path.relative_to(root).as_posix()


def download_run(bucket: Bucket, folder: Path) -> None:
    """Makes a folder equal to that of a run in object storage, without its checkpoints.

    Args:
        bucket: the run's folder.
        folder: folder on this machine; its other files are removed.

    Raises:
        StorageError: if it cannot be read.
    """
    stored = [name for name in bucket.files() if not _is_local(name)]
    for name in versions(folder).keys() - set(stored):
        (folder / name).unlink(missing_ok=True)
    for name in stored:
        with contextlib.suppress(FileNotFoundError):  # removed in the meantime
            bucket.download(name, folder / name)


def upload_run(folder: Path, bucket: Bucket) -> None:
    """Uploads the folder of a run on this machine, without its checkpoints.

    A file that is missing here stays in object storage, unless it is one that runs remove.

    Raises:
        StorageError: if the storage cannot be used.
    """
    present = versions(folder)
    for name in _last_ones_last(present):
        bucket.upload(folder / name, name)
    bucket.remove([name for name in _REMOVED if name not in present])


def _last_ones_last(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (name in _LAST, name))


def _is_local(name: str) -> bool:
    first = name.partition("/")[0]
    return first.startswith(".") or any(fnmatch(first, pattern) for pattern in _LOCAL)


class Mirror:
    """Uploads the files of a run's folder whenever they change, in a thread.

    A failed upload is tried again for as long as the run is active; training does not wait for it.

    Args:
        folder: the run's folder on this machine, equal to that in object storage.
        bucket: the run's folder in object storage.
        interval_s: time between two checks of the folder; None to upload only on `flush`.
        holder: holder of the run, which is kept in the folder by `write_holder`; None if another process does that.
    """

    def __init__(
        self, folder: Path, bucket: Bucket, interval_s: float | None = UPLOADS_EVERY_S, holder: str | None = None
    ) -> None:
        self._folder = folder
        self._bucket = bucket
        self._holder = holder
        self._interval_s = 0.0 if interval_s is None else interval_s
        self._uploaded = versions(folder)
        self._ended = threading.Event()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        if interval_s is not None:
            self._thread.start()

    def flush(self) -> None:
        """Uploads all changes, and waits for the upload; a file that has disappeared here is downloaded again.

        Raises:
            StorageError: if the storage cannot be used.
        """
        if not self._folder.is_dir():
            return
        # Of two uploads of a file at the same time, the older content could arrive last.
        with locked(self._folder / _LOCK):
            if self._is_abandoned:
                return
            if self._holder is not None:
                with contextlib.suppress(OSError):  # the next check tries again
                    write_holder(self._folder, self._holder)
            present = versions(self._folder)
            changed = [name for name, version in present.items() if self._uploaded.get(name) != version]
            for name in _last_ones_last(changed):
                with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                    self._bucket.upload(self._folder / name, name)
                    self._uploaded[name] = present[name]
            gone = self._uploaded.keys() - present.keys()
            self._bucket.remove(sorted(gone.intersection(_REMOVED)))
            for name in sorted(gone.difference(_REMOVED)):
                with contextlib.suppress(FileNotFoundError):  # it is not stored either
                    self._bucket.download(name, self._folder / name)
            for name in gone:
                del self._uploaded[name]

    def abandon(self) -> None:
        """Stops all uploads."""
        self._is_abandoned = True
        self._ended.set()

    def close(self) -> None:
        """Uploads the last changes, and ends.

        Raises:
            StorageError: if the upload fails.
        """
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.flush()

    def _follow(self) -> None:
        wait_s = self._interval_s
        while not self._ended.wait(wait_s):
            started = time.monotonic()
            with contextlib.suppress(StorageError):  # the error has been logged, and it is tried again
                self.flush()
            wait_s = max(self._interval_s, (time.monotonic() - started) / _SHARE_OF_TIME)
