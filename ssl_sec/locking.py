"""One process of a machine at a time."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lets one process of this machine at a time run the block; the lock dies with its process.

    Args:
        path: the lock's own file, made if need be.
    """
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
