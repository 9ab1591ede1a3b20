"""Who does the work of a campaign: one process, which outlives the command that started it, and one for each part.

The worker holds a lock on its folder while it lives, so that there are never two. Each part is forked from it, with
what it has imported, and ends with it; a part that fails, even by a signal, leaves the others.
"""

import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
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

# A training run that is asked to stop ends its step and saves.
GRACE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """Something to be measured.

    Attributes:
        name: of the part and its file.
        limit_s: it is stopped after so many seconds of one call.
        measure: does it, and writes to the sheet; Stopped if it goes on another time, as SIGTERM asks it to.
    """

    name: str
    limit_s: float
    measure: Callable[[Sheet], None]


@contextmanager
def locked(folder: Path, within_s: float = 0.0) -> Iterator[bool]:
    """Whether this process alone works in the folder, until the block ends.

    Args:
        folder: of the campaign.
        within_s: seconds to wait for it, as those who only look hold the lock for a moment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + within_s
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


def is_worked_on(folder: Path) -> bool:
    """Whether a worker lives."""
    with locked(folder) as free:
        return not free


def set_deadline(folder: Path, minutes: float) -> None:
    """Says until when the worker works, from now on."""
    write_json(folder / "deadline.json", {"deadline": time.time() + 60 * minutes})


def deadline(folder: Path) -> float:
    """When the worker stops, in seconds of the epoch."""
    return float(json.loads((folder / "deadline.json").read_text())["deadline"])


def work(plan: Plan, parts: Sequence[Part], again: Sequence[str] = ()) -> bool:
    """Does what is left of the parts, in their order, until the deadline.

    Args:
        plan: the campaign's.
        parts: all of them.
        again: names of parts to do although they are done or have failed.

    Returns:
        Whether this process worked; another one may.
    """
    with locked(plan.folder, within_s=2.0) as free:
        if not free:
            return False
        begun: dict[str, float] = {}
        _write_status(plan, parts, begun, None)
        for part in parts:
            sheet = Sheet(plan, part.name)
            if sheet.state() in ("done", "failed") and part.name not in again:
                continue
            if time.time() >= deadline(plan.folder):
                break
            begun[part.name] = time.time()
            _write_status(plan, parts, begun, part.name)
            print(f"\n{part.name}: begins", flush=True)
            _done_apart(plan, part, sheet)
            took = time.time() - begun[part.name]
            print(f"{part.name}: {sheet.state()} after {took:.0f} s {sheet.read().get('error', '')}", flush=True)
        _write_status(plan, parts, begun, None)
    return True


def _done_apart(plan: Plan, part: Part, sheet: Sheet) -> None:
    """Does a part in a process of its own, which is told to stop when its time is over."""
    process = multiprocessing.get_context("fork").Process(target=_measure, args=(part, sheet))
    process.start()
    assert process.pid is not None
    begun, asked_at, reason = time.time(), None, ""
    while process.is_alive():
        process.join(0.2)
        now = time.time()
        if asked_at is None and (now >= deadline(plan.folder) or now >= begun + part.limit_s):
            asked_at = now
            reason = "" if now >= deadline(plan.folder) else f"not done after its limit of {part.limit_s:.0f} s"
            process.terminate()
        if asked_at is not None and now > asked_at + GRACE_S:
            process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # loaders, tests and compilers that it has left
    if sheet.state() == "running" or sheet.state() is None:
        if asked_at is not None and not reason:
            sheet.close("stopped", "the time was over")
        else:
            sheet.close("failed", reason or f"its process ended with {_told_exit(process.exitcode)}")


def _told_exit(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _measure(part: Part, sheet: Sheet) -> None:
    """The process of a part."""
    os.setsid()
    if sys.platform == "linux":  # ends with the worker, as two processes must never work on a run
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    state: State = "done"
    before = sheet.read()
    if before.get("state") in ("stopped", "running"):
        sheet.figures["seconds"] = before.get("seconds", 0.0)
    sheet.write()
    start = time.time()
    try:
        part.measure(sheet)
    except Stopped as stopped:
        state, sheet.figures["error"] = "stopped", first_line(stopped)
    except BaseException as error:
        traceback.print_exc()
        state, sheet.figures["error"] = "failed", f"{type(error).__name__}: {first_line(error)}"
    sheet.write(state, seconds=sheet.figures.get("seconds", 0.0) + time.time() - start)
    sys.stdout.flush()
    os._exit(0)


def _write_status(plan: Plan, parts: Sequence[Part], begun: Mapping[str, float], current: str | None) -> None:
    states = {part.name: Sheet(plan, part.name).state() or "not yet begun" for part in parts}
    about = {"worker": os.getpid(), "deadline": deadline(plan.folder), "part": current, "begun": dict(begun)}
    write_json(plan.folder / "status.json", {**about, "parts": states})


def follow(plan: Plan, command: Sequence[str], environment: Mapping[str, str], until: float) -> int:
    """Shows what the worker says; starts one first if none lives.

    Args:
        plan: the campaign's.
        command: starts a worker.
        environment: its.
        until: when to stop following, in seconds of the epoch.

    Returns:
        0 if the worker lives or has ended by itself, 1 if it died.
    """
    log = plan.folder / "log.txt"
    log.touch()
    with log.open(errors="replace") as said:
        said.seek(0, os.SEEK_END)
        process = None
        if is_worked_on(plan.folder):
            print("a worker lives: following it", flush=True)
        else:
            with log.open("a") as written:
                process = subprocess.Popen(
                    command,
                    stdout=written,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=dict(environment),
                    start_new_session=True,
                )
        lives = True
        while lives and time.time() < until:
            time.sleep(0.2)
            lives = is_worked_on(plan.folder) if process is None or process.poll() is not None else True
            print(said.read(), end="", flush=True)
        print(said.read(), end="", flush=True)
    if lives:
        return 0
    left = [path.stem for path in plan.folder.glob("results/*.json") if Sheet(plan, path.stem).state() == "running"]
    for name in left:
        print(f"{name}: its worker died; the same command goes on from there")
    return int(bool(left) or (process is not None and process.wait() != 0))
