"""Files that several processes use: replaced whole, and locked."""

import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Answers of file systems that do not sync folders, as some in user space and of networks.
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)

# Answers of those that rename no folders; EMFILE is gcsfuse's, for a folder with more files than `rename-dir-limit`.
_NO_RENAMES = (*_NOT_SUPPORTED, errno.EMFILE, errno.EXDEV, errno.EPERM)


@contextmanager
def replaced(path: Path, sync: bool = True) -> Iterator[Path]:
    """Yields a path beside `path` to write a file to, which then replaces `path` atomically.

    Readers see the old file or the new one. After an error the old one is unchanged and nothing is left of the new one.
    Whoever may read other new files of the folder may read this one, however it was written.

    Args:
        path: file to write, in a folder that exists.
        sync: whether the content is on the disk before the name is, so that a crash of the machine cannot leave the
            name without the content.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        yield temporary
        if temporary.stat().st_mode != mode:  # safetensors makes a file of its own that others cannot read
            with suppress(OSError):  # some network file systems have one mode for all files
                temporary.chmod(stat.S_IMODE(mode))
        if sync:
            sync_path(temporary)
        os.replace(temporary, path)
        if sync:
            sync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replaces a file by a text in UTF-8; see `replaced`."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def rename_folder(folder: Path, to: Path, last: str = "") -> None:
    """Renames a folder; where the file system renames none, as that of a mounted bucket, its files one by one.

    Args:
        folder: a folder of files.
        to: its new path, in the same folder, where nothing is.
        last: name of the file that is renamed after the others.
    """
    try:
        folder.rename(to)
    except OSError as error:
        if error.errno not in _NO_RENAMES:
            raise
        to.mkdir()
        try:
            _move_files(folder, to, last)
        except BaseException:
            _move_files(to, folder)
            raise


def _move_files(folder: Path, to: Path, last: str = "") -> None:
    for file in sorted(folder.iterdir(), key=lambda file: file.name == last):
        file.rename(to / file.name)
    folder.rmdir()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lets one process of this machine at a time run the block; the lock is released when its process ends.

    Args:
        path: the lock's own file, created if it is missing.
    """
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_own(folder: Path) -> bool:
    """Whether a path is a folder of this user; among temporary files, others can make one of any name."""
    return folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()


def sync_path(path: Path) -> None:
    """Waits until a file's content, or a folder's names, are on the disk; for the latter where it can be waited for."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
