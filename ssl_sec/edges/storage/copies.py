"""Copies of runs in object storage, each in a folder that ends with the process that made it."""

import atexit
import fcntl
import shutil
import uuid
from pathlib import Path
from typing import IO

from ssl_sec.edges.storage.places import STAGING_VARIABLE, local_folder
from ssl_sec.errors import writing
from ssl_sec.files import locked

_FOLDER = "copies"
# File in the folder of a copy, which its process has locked.
_LOCK = ".process"

_held: list[IO[str]] = []


def new_copy(output_dir: str) -> Path:
    """An empty folder for a copy, which this process removes at its end; the folders of killed processes are removed.

    Args:
        output_dir: URL of the folder of the runs.

    Raises:
        StorageError: if it cannot be made.
    """
    staging = local_folder(output_dir).parent
    with writing(STAGING_VARIABLE, staging), locked(staging / f".{_FOLDER}"):
        for folder in staging.glob(f"*/{_FOLDER}/*/"):
            if _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
        copy = local_folder(output_dir, _FOLDER, uuid.uuid4().hex)
        lock = (copy / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    _held.append(lock)
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    return copy


def _is_abandoned(folder: Path) -> bool:
    """Whether the process of a copy has ended: a lock ends with its process, however that dies."""
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    return True
