"""Files that another machine wrote: a file system that machines share may show them to the others only later."""

import time
from collections.abc import Callable

from ssl_sec.errors import StorageError

# NFS keeps what it knows of a folder for up to 60 s by default.
VISIBLE_WITHIN_S = 60.0


def wait_until_visible(
    is_visible: Callable[[], bool], describe: Callable[[], str], within_s: float | None = None
) -> None:
    """Waits until a file of another machine is visible here.

    Args:
        is_visible: function that looks for the file.
        describe: function that describes what is missing, for the error.
        within_s: how long to wait; None for `VISIBLE_WITHIN_S`.

    Raises:
        StorageError: if it is not visible in time.
    """
    deadline = time.monotonic() + (VISIBLE_WITHIN_S if within_s is None else within_s)
    while not is_visible():
        if time.monotonic() > deadline:
            raise StorageError(describe())
        time.sleep(0.1)
