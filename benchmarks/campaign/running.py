"""Runs a campaign in a worker process that outlives the command, with one process for each part.

The worker holds a lock on the campaign's folder, so that there is never a second one. Each part is forked from it and
ends with it. A part that fails, even by a signal, does not stop the others.
"""

import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.campaign.sheet import Plan, Sheet, State
from benchmarks.measure import write_json
from ssl_sec.errors import Stopped, first_line

# Time in which a training run that is to stop finishes its step and saves.
GRACE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a campaign.

    Attributes:
        name: the name of the part and its file.
        limit_s: the time limit in one call.
        measure: measures and writes to the sheet; raises Stopped if SIGTERM stopped it and it can be resumed.
    """

    name: str
    limit_s: float
    measure: Callable[[Sheet], None]


@contextmanager
def lock_folder(folder: Path, timeout_s: float = 0.0) -> Iterator[bool]:
    """Locks the folder until the block ends; yields whether that succeeded.

    Args:
        folder: the campaign's folder.
        timeout_s: how long to wait for the lock, which `has_worker` holds for a moment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + timeout_s
    with (folder / "lock").open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    yield False
                    return
                time.sleep(0.05)


def has_worker(folder: Path) -> bool:
    """Returns whether a worker is running."""
    with lock_folder(folder) as is_locked:
        return not is_locked


def set_deadline(folder: Path, minutes: float) -> None:
    """Sets the worker's deadline, in minutes from now."""
    write_json(folder / "deadline.json", {"deadline": time.time() + 60 * minutes})


def read_deadline(folder: Path) -> float:
    """Reads when the worker stops, in seconds since 1970."""
    return float(json.loads((folder / "deadline.json").read_text())["deadline"])


def work(plan: Plan, parts: Sequence[Part], again: Sequence[str] = ()) -> bool:
    """Runs the remaining parts, in order, until the deadline.

    Args:
        plan: the campaign's plan.
        parts: all parts.
        again: names of parts to run although they are done or have failed.

    Returns:
        False if another worker is running.
    """
    with lock_folder(plan.folder, timeout_s=2.0) as is_locked:
        if not is_locked:
            return False
        started: dict[str, float] = {}
        _write_status(plan, parts, started, None)
        for part in parts:
            sheet = Sheet(plan, part.name)
            if sheet.read_state() in ("done", "failed") and part.name not in again:
                continue
            if time.time() >= read_deadline(plan.folder):
                break
            started[part.name] = time.time()
            _write_status(plan, parts, started, part.name)
            print(f"\n{part.name}: started", flush=True)
            _run_part(plan, part, sheet)
            seconds = time.time() - started[part.name]
            print(
                f"{part.name}: {sheet.read_state()} after {seconds:.0f} s {sheet.read().get('error', '')}", flush=True
            )
        _write_status(plan, parts, started, None)
    return True


def _run_part(plan: Plan, part: Part, sheet: Sheet) -> None:
    """Runs a part in its own process, and stops it when its time is up."""
    process = multiprocessing.get_context("fork").Process(target=_measure, args=(part, sheet, os.getpid()))
    process.start()
    assert process.pid is not None
    start, terminated_at, reason = time.time(), None, ""
    while process.is_alive():
        process.join(0.2)
        now = time.time()
        if terminated_at is None and (now >= read_deadline(plan.folder) or now >= start + part.limit_s):
            terminated_at = now
            reason = "" if now >= read_deadline(plan.folder) else f"exceeded its limit of {part.limit_s:.0f} s"
            process.terminate()
        if terminated_at is not None and now > terminated_at + GRACE_S:
            process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # including its loaders, tests and compilers
    if sheet.read_state() in ("running", None):
        if terminated_at is not None and not reason:
            sheet.close("stopped", "the time was up")
        else:
            sheet.close("failed", reason or f"its process ended with {_describe_exit(process.exitcode)}")


def _describe_exit(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def end_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies: two processes must never work on a run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # it has already died
            os.kill(os.getpid(), signal.SIGKILL)


def _measure(part: Part, sheet: Sheet, worker: int) -> None:
    """Measures a part, in its process."""
    os.setsid()
    end_with(worker)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    state: State = "done"
    before = sheet.read()
    if before.get("state") in ("stopped", "running", "failed"):
        # The durations that add up over calls; a training that failed continues from its checkpoint, too.
        sheet.results.update({key: before[key] for key in ("seconds", "train_s") if key in before})
    elif before.get("state") == "done":  # it runs again, and a finished training would give its old results
        for path in sheet.run_paths:
            shutil.rmtree(path, ignore_errors=True)
    sheet.write()
    start = time.time()
    try:
        part.measure(sheet)
    except Stopped as stopped:
        state, sheet.results["error"] = "stopped", first_line(stopped)
    except BaseException as error:
        traceback.print_exc()
        state, sheet.results["error"] = "failed", f"{type(error).__name__}: {first_line(error)}"
    sheet.write(state, seconds=sheet.results.get("seconds", 0.0) + time.time() - start)
    sys.stdout.flush()
    os._exit(0)


def _write_status(plan: Plan, parts: Sequence[Part], started: Mapping[str, float], current: str | None) -> None:
    states = {part.name: Sheet(plan, part.name).read_state() or "not started" for part in parts}
    status = {
        "worker": os.getpid(),
        "deadline": read_deadline(plan.folder),
        "part": current,
        "started_at": dict(started),
    }
    write_json(plan.folder / "status.json", {**status, "parts": states})


def follow(plan: Plan, command: Sequence[str], environment: Mapping[str, str], until: float) -> int:
    """Shows the worker's output; starts a worker first if none is running.

    Args:
        plan: the campaign's plan.
        command: the command of a worker.
        environment: the worker's environment variables.
        until: when to stop following, in seconds since 1970.

    Returns:
        0 if the worker is running or has finished, 1 if it died.
    """
    log = plan.folder / "log.txt"
    log.touch()
    with log.open(errors="replace") as output:
        output.seek(0, os.SEEK_END)
        process = None
        if has_worker(plan.folder):
            print("following the running worker", flush=True)
        else:
            with log.open("a") as appended:
                process = subprocess.Popen(
                    command,
                    stdout=appended,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=dict(environment),
                    start_new_session=True,
                )
        is_running = True
        while is_running and time.time() < until:
            time.sleep(0.2)
            is_running = has_worker(plan.folder) if process is None or process.poll() is not None else True
            print(output.read(), end="", flush=True)
        print(output.read(), end="", flush=True)
    if is_running:
        return 0
    names = [path.stem for path in plan.folder.glob("results/*.json")]
    interrupted = [name for name in names if Sheet(plan, name).read_state() == "running"]
    for name in interrupted:
        print(f"{name}: its worker died; run the same command to continue")
    return int(bool(interrupted) or (process is not None and process.wait() != 0))
