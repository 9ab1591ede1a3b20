"""A job in a process of its own, beside a light one that says how it died.

A crash in native code, or a kill for lack of memory, leaves a process no time to say anything. The supervisor hands
signals on, waits, and if a signal killed the job says so in one line and closes its run in MLflow.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ssl_sec.edges.masking import masked
from ssl_sec.errors import first_line

_CAUSES = {
    signal.SIGKILL: "the machine may have run out of memory",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or a full /dev/shm",
    signal.SIGILL: "a crash in native code",
    signal.SIGFPE: "a crash in native code",
}
# How long MLflow has to take note.
_CLOSE_WITHIN_S = 20.0

# Of <signal.h> and <sys/prctl.h>.
_SI_KERNEL, _PR_SET_PDEATHSIG = 0x80, 1

# What the job tells its supervisor: paths of locks, each with a line end.
_told: IO[bytes] | None = None


def supervised(job: Callable[[], int]) -> int:
    """Does a job in a process of its own; elsewhere than on Linux, in this one.

    The job ends with its supervisor. A Ctrl-C of the terminal reaches both by itself, other signals are handed on.

    Args:
        job: returns its exit code. It returns, from here, in its own process.

    Returns:
        The job's exit code, 128 + n if signal n ended it.
    """
    global _told
    if not sys.platform.startswith("linux"):
        return job()
    _told = os.fdopen(os.memfd_create("runs"), "r+b", buffering=0)
    sys.stdout.flush()
    sys.stderr.flush()
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signals.add(signal.SIGHUP)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    supervisor = os.getpid()
    job_id = os.fork()
    if job_id == 0:
        _end_with(supervisor)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return job()
    code = os.waitstatus_to_exitcode(_wait(job_id, signals))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if code >= 0:
        return code
    _bury(signal.Signals(-code), job_id)
    return 128 - code


def tell_supervisor(lock: Path) -> None:
    """Names the lock of a run that begins, for the case that this process cannot end it."""
    if _told is not None:
        _told.write(os.fsencode(lock) + b"\n")


def in_words(number: signal.Signals) -> str:
    """A signal that ended a process, with its usual cause."""
    cause = f", {_CAUSES[number]}" if number in _CAUSES else ""
    return f"killed by {number.name}{cause}"


def _end_with(supervisor: int) -> None:
    """Has the kernel kill this process when its supervisor ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != supervisor:  # it ended before that
        os.kill(os.getpid(), signal.SIGKILL)


def _wait(job_id: int, signals: set[signal.Signals]) -> int:
    """Hands signals on until the job has ended; returns its status."""
    while True:
        told = signal.sigwaitinfo(signals)
        if told.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(job_id, os.WNOHANG)
            if ended:
                return status
        elif told.si_signo != signal.SIGINT or told.si_code != _SI_KERNEL:  # a terminal sends SIGINT to both
            os.kill(job_id, told.si_signo)


def _bury(number: signal.Signals, job_id: int) -> None:
    """Says what ended the job, and has MLflow say so of its runs."""
    assert _told is not None
    reason = in_words(number)
    after_bar = "\n" if sys.stderr.isatty() else ""
    print(f"{after_bar}error: the job (process {job_id}) was {reason}", file=sys.stderr)
    _told.seek(0)
    left = [lock for line in _told.read().splitlines() if (lock := Path(os.fsdecode(line))).exists()]
    if left:
        thread = threading.Thread(target=_close, args=(left, reason), daemon=True)
        thread.start()
        thread.join(_CLOSE_WITHIN_S)


def _close(locks: list[Path], reason: str) -> None:
    from ssl_sec.edges.run.running import close_in_its_store  # only now, as it takes a while to import

    for lock in locks:
        try:
            close_in_its_store(lock, reason)
        except Exception as error:
            print(masked(f"MLflow still has the run as RUNNING: {first_line(error)}"), file=sys.stderr)
