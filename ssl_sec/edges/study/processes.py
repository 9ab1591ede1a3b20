"""Runs of a study in their own processes, several at a time; a signal makes them save and stop."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch

from ssl_sec.edges.environment import allowed_cpus
from ssl_sec.edges.run.signals import announce_stop, stop_requests
from ssl_sec.edges.run.supervision import start_command

# Seconds between two reports of the tasks that run.
_REPORT_EVERY_S = 300.0
# After this many failures without a run that ended well, no further run is started.
_FAILURES_TO_GIVE_UP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A process to run.

    Attributes:
        name: name of the task.
        arguments: arguments of `python -m ssl_sec`.
        log: file to which its output is appended.
    """

    name: str
    arguments: Sequence[str]
    log: Path


# Called with the name of a task, its exit code and its duration in minutes, in any thread.
End = Callable[[str, int, float], None]
# Called from time to time with the names of the tasks that run.
Report = Callable[[Sequence[str]], None]


class Processes:
    """Processes that run side by side, each on a GPU of its own where there are several.

    Args:
        concurrent: number of processes at a time, ≥ 1.

    Attributes:
        was_stopped: whether a signal has stopped the processes.
    """

    def __init__(self, concurrent: int) -> None:
        self._concurrent = concurrent
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._num_ended = self._num_failed = 0
        gpus = _visible_gpus() if concurrent > 1 else []
        # The GPU of each process that may run; None leaves all to it.
        self._gpus: SimpleQueue[str | None] = SimpleQueue()
        for number in range(concurrent):
            self._gpus.put(gpus[number % len(gpus)] if len(gpus) > 1 else None)
        self.was_stopped = False

    def run(self, tasks: Sequence[Task], end: End, report: Report = lambda running: None) -> None:
        """Runs the tasks in order; after a signal no further one is started.

        Args:
            tasks: the tasks to run, each with a name of its own.
            end: called after each task, except those that a signal stopped.
            report: called every five minutes.
        """

        def ask() -> None:
            announce_stop("the runs save their states first")
            self._stop(at_once=False)

        force = partial(self._stop, at_once=True)
        with stop_requests(ask, force), ThreadPoolExecutor(self._concurrent) as pool:
            futures = [pool.submit(self._run, task, end) for task in tasks]
            while wait(futures, timeout=_REPORT_EVERY_S).not_done:
                report(list(self._running))
            for ended in futures:
                ended.result()

    def _run(self, task: Task, end: End) -> None:
        gpu = self._gpus.get()
        try:
            self._run_on(gpu, task, end)
        finally:
            self._gpus.put(gpu)

    def _run_on(self, gpu: str | None, task: Task, end: End) -> None:
        with self._lock:
            if self.was_stopped or (self._num_failed >= _FAILURES_TO_GIVE_UP and not self._num_ended):
                return
            begun = time.monotonic()
            process = _started(task, self._num_threads, gpu)
            self._running[task.name] = process
        if self.was_stopped:  # stopped while the process was starting
            process.send_signal(signal.SIGTERM)
        code = process.wait()
        with self._lock:
            del self._running[task.name]
            stopped = self.was_stopped and code != 0
            self._num_ended, self._num_failed = self._num_ended + (code == 0), self._num_failed + (code != 0)
        if stopped:
            return
        try:
            end(task.name, code, (time.monotonic() - begun) / 60)
        except BaseException:
            self._stop(at_once=False)  # the results of the others could not be kept either
            raise

    @property
    def _num_threads(self) -> int:
        """Threads of each process on CPUs."""
        return max(1, allowed_cpus() // self._concurrent)

    def _stop(self, at_once: bool) -> None:
        """Asks the processes to save and stop; a signal handler calls it, which must not wait for the lock."""
        self.was_stopped = True
        for process in list(self._running.values()):
            process.send_signal(signal.SIGINT if at_once else signal.SIGTERM)


def _visible_gpus() -> list[str]:
    """The GPUs of this machine that processes may use, as `CUDA_VISIBLE_DEVICES` names them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return [name.strip() for name in listed.split(",")][:count] if listed else [str(number) for number in range(count)]


def _started(task: Task, num_threads: int, gpu: str | None) -> "subprocess.Popen[bytes]":
    environment = {"OMP_NUM_THREADS": str(num_threads), **os.environ}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    return start_command(task.arguments, task.log, env=environment)
