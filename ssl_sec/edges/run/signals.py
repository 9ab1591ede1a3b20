"""Signals that ask a run to save and stop."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# A terminal's Ctrl-C may come twice, by way of another process; a person's second one comes later.
_SAME_SIGNAL_S = 0.5


@contextmanager
def stopped_by_signals(stop_path: Path) -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into a request to save and stop, until the run has ended altogether.

    Only a later SIGINT interrupts; all else after the first changes nothing, so that no save is lost. A SIGHUP that was
    ignored from the start, as by nohup, stays so.

    Args:
        stop_path: the file that asks the run to stop.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked_at: float | None = None
    driver = os.getpid()

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if os.getpid() != driver:  # loaders, whom a terminal asks as well, end with the driver
            return
        if asked_at is None:
            asked_at = time.monotonic()
            try:
                stop_path.touch()
            except OSError:  # there is no run yet, or no more
                raise KeyboardInterrupt from None
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(2, b"\nstopping: the state is saved first (Ctrl-C again to stop at once)\n")
        elif number == signal.SIGINT and time.monotonic() - asked_at > _SAME_SIGNAL_S:
            raise KeyboardInterrupt

    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [signal.SIGINT, signal.SIGTERM, *([] if under_nohup else [signal.SIGHUP])]
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
