import os
import signal
import subprocess
import sys
import threading

import pytest

from ssl_sec.edges.run import signals
from ssl_sec.edges.study import processes
from ssl_sec.edges.study.processes import Processes, Task


@pytest.fixture
def scripts(monkeypatch):
    """Runs Python code instead of commands."""

    def started(task, num_threads, gpu):
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


def test_the_running_tasks_are_reported_until_they_end(scripts, monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "_REPORT_EVERY_S", 0.05)
    os.mkfifo(pipe := tmp_path / "pipe")
    waits, reported = task("waits", f"open({str(pipe)!r})"), []

    def report(running):
        if running and not reported:
            pipe.open("w").close()  # the task ends
        reported.extend(running)

    ended = []
    Processes(2).run([waits, task("next")], lambda name, code, minutes: ended.append((name, code)), report)
    assert waits.name in reported and sorted(ended) == [("next", 0), ("waits", 0)]


@pytest.mark.parametrize(
    ("concurrent", "listed", "count", "expected"),
    [
        (2, None, 4, ["0", "1"]),
        (3, "4, 6", 2, ["4", "6"]),  # two of three share a GPU
        (2, None, 1, [None]),
        (1, None, 4, [None]),  # one process at a time may use all
    ],
)
def test_processes_side_by_side_have_gpus_of_their_own(monkeypatch, concurrent, listed, count, expected):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    seen, waiting = [], []

    def started(task, num_threads, gpu):
        """A process that ends once as many as may run side by side have started."""
        seen.append(gpu)
        waiting.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
        if len(seen) >= concurrent:
            for process in waiting:
                process.stdin.close()
        return waiting[-1]

    monkeypatch.setattr(processes, "_started", started)
    run(concurrent, [task(str(number)) for number in range(6)])
    assert len(seen) == 6 and set(seen) == set(seen[:concurrent]) == set(expected)


def test_a_process_sees_its_gpu_alone(monkeypatch, tmp_path):
    environments = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **more: environments.append(env))
    for gpu in ("3", None):
        processes._started(task("any", tmp_path=tmp_path / "log"), 1, gpu)
    assert [env.get("CUDA_VISIBLE_DEVICES") for env in environments] == ["3", os.environ.get("CUDA_VISIBLE_DEVICES")]


def test_it_stops_after_failures_only(scripts):
    ended, _ = run(1, [task(str(number), "raise SystemExit(2)") for number in range(6)])
    assert ended == [("0", 2), ("1", 2), ("2", 2)]
    ended, _ = run(1, [task("good"), *(task(str(number), "raise SystemExit(2)") for number in range(5))])
    assert len(ended) == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_running_tasks_and_starts_no_more(scripts, monkeypatch, number):
    begun = threading.Event()
    real = processes._started

    def started(one, num_threads, gpu):
        process = real(one, num_threads, gpu)
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


def test_a_doubled_ctrl_c_lets_the_runs_save_and_a_later_one_does_not(monkeypatch):
    """A terminal or make may send a Ctrl-C twice."""
    stops = []
    monkeypatch.setattr(Processes, "_stop", lambda self, at_once: stops.append(at_once))
    monkeypatch.setattr(signals, "_SAME_SIGNAL_S", 60.0)

    def end(name, code, minutes):
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            signal.getsignal(number)(number, None)
        monkeypatch.setattr(signals, "_SAME_SIGNAL_S", 0.0)
        signal.getsignal(signal.SIGINT)(signal.SIGINT, None)

    monkeypatch.setattr(processes, "_started", lambda *_: subprocess.Popen(["true"]))
    Processes(1).run([task("one")], end)
    assert stops == [False, True]


def test_a_real_command_writes_its_log(tmp_path):
    log = tmp_path / "logs" / "help.txt"
    ended, _ = run(1, [Task(name="help", arguments=["replay", "--help"], log=log)])
    assert ended == [("help", 0)]
    assert "folder=<the run's folder>" in log.read_text()
