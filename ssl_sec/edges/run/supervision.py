"""Child processes: jobs whose death by a signal is reported, and commands that end with the process that started them.

A crash in native code, or a kill for lack of memory, leaves a process no time to report it. The supervisor forwards
signals, waits, and if a signal killed the job, reports that in one line and closes its runs in MLflow.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from ssl_sec.edges.masking import masked
from ssl_sec.errors import first_line

_CAUSES = {
    signal.SIGKILL: "the machine or container may have run out of memory",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or a full /dev/shm",
    signal.SIGILL: "a crash in native code",
    signal.SIGFPE: "a crash in native code",
}
# Names as in Python's faulthandler.
_FATAL = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
}
# How long MLflow may take to close the runs.
_CLOSE_WITHIN_S = 20.0

# From <signal.h> and <sys/prctl.h>.
_SI_KERNEL, _PR_SET_PDEATHSIG = 0x80, 1

# The locks of the job's runs, one path per line, shared with the supervisor.
_locks: IO[bytes] | None = None


def supervised(job: Callable[[], int]) -> int:
    """Runs a job in a child process; on other systems than Linux, in this process.

    The job ends with its supervisor. A Ctrl-C of the terminal reaches both; other signals are forwarded.

    Args:
        job: returns its exit code. In the child process, this function returns it.

    Returns:
        The job's exit code, 128 + n if signal n ended it.
    """
    global _locks
    if not sys.platform.startswith("linux"):
        return job()
    _locks = os.fdopen(os.memfd_create("runs"), "r+b", buffering=0)
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
        code = job()
        for number in signals - {signal.SIGCHLD}:
            signal.signal(number, lambda *_: os._exit(code))  # of what libraries do at exit, nothing is needed
        return code
    code = os.waitstatus_to_exitcode(_wait(job_id, signals))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if code < 0:
        _report(job_id, f"was {(reason := describe_signal(signal.Signals(-code)))}")
        _close_runs(_locked_runs(), reason)
    elif code > 0 and (left := [lock for lock in _locked_runs() if _is_unended(lock, job_id)]):
        # A library has ended the process, as Ray's does when its services were killed.
        _report(job_id, f"ended with exit code {code} before it could end its run")
        _close_runs(left, f"exit code {code}")
    return code if code >= 0 else 128 - code


def register_lock(lock: Path) -> None:
    """Registers the lock of a run with the supervisor, in case this process cannot end the run."""
    if _locks is not None:
        _locks.write(os.fsencode(lock) + b"\n")


def describe_signal(number: signal.Signals) -> str:
    """The signal that killed a process, with its usual cause."""
    cause = f", {_CAUSES[number]}" if number in _CAUSES else ""
    return f"killed by {number.name}{cause}"


def dumped_signal(dump: Path) -> signal.Signals | None:
    """The signal that killed a process which has dumped its stack to a file; None if there is no dump."""
    try:
        first = dump.read_text(errors="replace").partition("\n")[0]
    except OSError:
        return None
    return _FATAL.get(first.removeprefix("Fatal Python error: ").replace("-", " "))


def _end_with(supervisor: int) -> None:
    """Makes the kernel kill this process when its supervisor dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != supervisor:  # the supervisor has already died
        os.kill(os.getpid(), signal.SIGKILL)


def start_command(
    arguments: Sequence[str], log: Path, cwd: str | None = None, env: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Starts a command of this package, whose output is appended to a log; the process ends with this one.

    Args:
        arguments: the command and its overrides.
        log: file of the output; its folder is made.
        cwd: its working directory; this process's by default.
        env: its environment; this process's by default.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "ssl_sec", *arguments],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a Ctrl-C goes to this process alone, which then stops the one that it started
            preexec_fn=partial(_end_with, os.getpid()) if sys.platform.startswith("linux") else None,
        )


def _wait(job_id: int, signals: set[signal.Signals]) -> int:
    """Forwards signals until the job has ended; returns its status."""
    while True:
        received = signal.sigwaitinfo(signals)
        if received.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(job_id, os.WNOHANG)
            if ended:
                return status
        elif received.si_signo != signal.SIGINT or received.si_code != _SI_KERNEL or not _is_in_this_group(job_id):
            os.kill(job_id, received.si_signo)


def _is_in_this_group(job_id: int) -> bool:
    """Whether a terminal sends its Ctrl-C to the job, too."""
    return os.getpgid(job_id) == os.getpgrp()


def _report(job_id: int, how: str) -> None:
    after_bar = "\n" if sys.stderr.isatty() else ""
    print(f"{after_bar}error: the job (process {job_id}) {how}", file=sys.stderr)


def _locked_runs() -> list[Path]:
    """The locks that the job has left."""
    assert _locks is not None
    _locks.seek(0)
    return [lock for line in _locks.read().splitlines() if (lock := Path(os.fsdecode(line))).exists()]


def _is_unended(lock: Path, job_id: int) -> bool:
    """Whether the job has left the lock without saying how its run ended."""
    record = json.loads(lock.read_text())
    return record.get("pid") == job_id and "status" not in record


def _close_runs(locks: list[Path], reason: str) -> None:
    """Closes runs in MLflow."""
    if locks:
        from ssl_sec.edges.run.running import close_in_its_store  # slow to import, which the limit does not include

        thread = threading.Thread(target=_close_each, args=(close_in_its_store, locks, reason), daemon=True)
        thread.start()
        thread.join(_CLOSE_WITHIN_S)


def _close_each(close: Callable[[Path, str], object], locks: list[Path], reason: str) -> None:
    for lock in locks:
        try:
            close(lock, reason)
        except Exception as error:
            print(masked(f"MLflow still shows the run as RUNNING: {first_line(error)}"), file=sys.stderr)
