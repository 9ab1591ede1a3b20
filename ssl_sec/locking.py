"""A lock between the processes of a machine."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lets one process of this machine at a time run the block; the lock is released when its process ends.

    Args:
        path: the lock's own file, created if it is missing.
    """
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
