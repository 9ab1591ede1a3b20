"""Signals that request a run to save and stop."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ssl_sec.errors import Stopped

# A Ctrl-C may arrive twice, through another process; a second one of the user comes later.
_SAME_SIGNAL_S = 0.5


@contextmanager
def handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles SIGINT, SIGTERM and SIGHUP in the block; in another thread than the main one, it handles none.

    Args:
        handle: called with each signal, in this process alone: data loaders also get the signal, and end. A SIGHUP that
            was ignored at the start, as under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = os.getpid()

    def handle_here(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own:
            handle(number, frame)

    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [signal.SIGINT, signal.SIGTERM, *([] if under_nohup else [signal.SIGHUP])]
    before, hook = {number: signal.signal(number, handle_here) for number in numbers}, sys.unraisablehook
    sys.unraisablehook = partial(_interrupt_again, threading.get_ident(), hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt_again(thread: int, hook: Callable[[Any], object], lost: Any) -> None:
    """Sends SIGINT again if Python has ignored its error, as it does in functions that the garbage collector calls."""
    if lost.exc_type is KeyboardInterrupt:
        # At once, it would be ignored here, too. A true signal also ends a system call that waits.
        threading.Timer(0.01, signal.pthread_kill, (thread, signal.SIGINT)).start()
    else:
        hook(lost)


def interrupt(*_: object) -> None:
    """Interrupts at once; may handle signals.

    Raises:
        KeyboardInterrupt: always.
    """
    raise KeyboardInterrupt


@contextmanager
def stop_requests(ask: Callable[[], object], force: Callable[[], object] = interrupt) -> Iterator[None]:
    """Calls `ask` at the first SIGINT, SIGTERM or SIGHUP in the block, and `force` at a later SIGINT."""
    asked_at: float | None = None

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if asked_at is None:
            asked_at = time.monotonic()
            ask()
        elif number == signal.SIGINT and time.monotonic() - asked_at > _SAME_SIGNAL_S:
            force()

    with handled(request):
        yield


@contextmanager
def interruptible(kept: str) -> Iterator[None]:
    """Lets SIGINT, SIGTERM and SIGHUP interrupt a block that keeps its finished parts.

    Args:
        kept: what is kept, and where, for the message.

    Raises:
        Stopped: if a signal interrupted it.
    """
    try:
        with handled(interrupt):
            yield
    except KeyboardInterrupt:
        raise Stopped(f"stopped; {kept}, and the same command continues with the others") from None


def announce_stop(what: str) -> None:
    """Prints in a signal handler what happens before the end; a closed terminal is no error."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nstopping: {what} (Ctrl-C again to stop at once)\n".encode())


@contextmanager
def stopped_by_signals(stop_path: Path, what: Callable[[], str]) -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into a request to save and stop, until the run has ended.

    After the first signal, only a later SIGINT interrupts the run, without saving.

    Args:
        stop_path: the file that requests a stop.
        what: returns what happens before the end, for the message.
    """

    def request() -> None:
        try:
            stop_path.touch()
        except OSError:  # there is no run yet, or it has ended
            raise KeyboardInterrupt from None
        announce_stop(what())

    with stop_requests(request):
        yield
