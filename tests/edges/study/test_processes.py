import os
import signal
import subprocess
import sys
import threading

import pytest

from ssl_sec.edges.study import processes
from ssl_sec.edges.study.processes import Processes, Task


@pytest.fixture
def scripts(monkeypatch):
    """Runs Python code instead of commands."""

    def started(task, num_threads):
        return subprocess.Popen([sys.executable, "-S", "-c", *task.arguments], stdout=subprocess.PIPE)

    monkeypatch.setattr(processes, "_started", started)


def task(name, code="", tmp_path=None):
    return Task(name=name, arguments=[code], log=tmp_path)


def run(concurrent, tasks):
    ended, made = [], Processes(concurrent)
    made.run(tasks, lambda name, code, minutes: ended.append((name, code)))
    return ended, made


def test_each_task_ends_with_its_code(scripts):
    ended, _ = run(2, [task("a"), task("b", "raise SystemExit(3)"), task("c")])
    assert sorted(ended) == [("a", 0), ("b", 3), ("c", 0)]


def test_tasks_run_side_by_side(scripts, tmp_path):
    """Each waits for the other to open the pipe."""
    os.mkfifo(tmp_path / "pipe")
    codes = [f"open({str(tmp_path / 'pipe')!r}, {mode!r})" for mode in ("r", "w")]
    ended, _ = run(2, [task("reads", codes[0]), task("writes", codes[1])])
    assert sorted(ended) == [("reads", 0), ("writes", 0)]


def test_it_stops_after_failures_only(scripts):
    ended, _ = run(1, [task(str(number), "raise SystemExit(2)") for number in range(6)])
    assert ended == [("0", 2), ("1", 2), ("2", 2)]
    ended, _ = run(1, [task("good"), *(task(str(number), "raise SystemExit(2)") for number in range(5))])
    assert len(ended) == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_running_tasks_and_starts_no_more(scripts, monkeypatch, number):
    begun = threading.Event()
    real = processes._started

    def started(one, num_threads):
        process = real(one, num_threads)
        process.stdout.readline()
        begun.set()
        return process

    monkeypatch.setattr(processes, "_started", started)
    threading.Thread(target=lambda: (begun.wait(), os.kill(os.getpid(), number)), daemon=True).start()
    before = signal.getsignal(number)
    waits = "print('begun', flush=True); import signal; signal.pause()"
    ended, made = run(1, [task("waits", waits), task("next")])
    assert made.was_stopped and ended == []
    assert signal.getsignal(number) == before


def test_a_real_command_writes_its_log(tmp_path):
    log = tmp_path / "logs" / "help.txt"
    ended, _ = run(1, [Task(name="help", arguments=["replay", "--help"], log=log)])
    assert ended == [("help", 0)]
    assert "folder=<the run's folder>" in log.read_text()
