"""A trial: a pretraining in its own process, measured while it runs."""

import os
import select
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ssl_sec.edges.folder.text import json_lines
from ssl_sec.edges.tune.space import Choices, Interval
from ssl_sec.edges.tune.trial import TrainingTrial, TrialPlan, last_line, log_of, reason_of, stop_path, trial_name
from tests.edges.conftest import QUICK

SPACE = {
    "optimiser.learning_rate": Interval(low=0.1, high=1e6, is_log=True, is_integer=False),
    "constraint": Choices(values=("none", "sec")),
}


class Trial(TrainingTrial):
    """A trial without Ray."""

    def __init__(self) -> None:
        pass

    @property
    def trial_name(self) -> str:
        return "search-001"


def plan(folder: Path, **changes: Any) -> TrialPlan:
    """A plan of three epochs, each measured."""
    given = [f"output_dir={folder}", "recipe=r", "runtime=local", "monitor.every_epochs=1", "epochs=3"]
    shared = TrialPlan(
        name="search",
        folder=str(folder / "r"),
        cwd=os.getcwd(),
        metric="val/knn_top1",
        job="pretrain",
        every=1,
        length=3,
        overrides=[*QUICK, *given],
    )
    return TrialPlan(**{**shared, **changes})


@pytest.mark.slow
def test_each_step_is_a_measurement_and_the_last_awaits_the_end(tmp_path: Path):
    trial = Trial()
    trial.setup({"optimiser.learning_rate": 0.3, "constraint": "sec"}, plan=plan(tmp_path), space=SPACE)
    results = [trial.step() for _ in range(3)]
    assert [result["at"] for result in results] == [1, 2, 3]
    assert [result.get("done", False) for result in results] == [False, False, True]
    folder = tmp_path / "r/search-001"
    assert "learning_rate: 0.3" in (folder / "config.yaml").read_text()
    assert "name: sec" in (folder / "config.yaml").read_text()
    records = [record["metrics"] for record in json_lines(folder / "metrics.jsonl") if "metrics" in record]
    measured = [metrics["val/knn_top1"] for metrics in records if "val/knn_top1" in metrics]
    assert [result["val/knn_top1"] for result in results] == measured
    assert trial._run is not None
    assert trial._run.poll() == 0
    trial.cleanup()  # there is nothing to stop


@pytest.mark.slow
def test_a_trial_that_is_stopped_saves_and_continues(tmp_path: Path):
    values = {"optimiser.learning_rate": 0.3, "constraint": "none"}
    longer = plan(tmp_path, length=200, overrides=[*plan(tmp_path)["overrides"], "epochs=200"])
    trial = Trial()
    trial.setup(values, plan=longer, space=SPACE)
    first = trial.step()
    trial.cleanup()
    assert trial._run is not None
    assert trial._run.returncode == 130
    again = Trial()
    again.setup(values, plan=longer, space=SPACE)
    try:
        assert again.step() == first  # earlier measurements are reported again
        for _ in range(2):
            again.step()
    finally:
        again.cleanup()
    log = log_of(longer, "search-001").read_text()
    assert "resum" in log


def test_a_trial_ends_its_wait_and_does_not_start_while_its_search_stops(tmp_path: Path):
    request = stop_path(plan(tmp_path))
    request.parent.mkdir()
    request.touch()
    waiting, late = Trial(), Trial()
    waiting._plan, waiting._run = plan(tmp_path), subprocess.Popen(["sleep", "600"])
    late.setup({"optimiser.learning_rate": 0.3, "constraint": "none"}, plan=plan(tmp_path), space=SPACE)
    assert [trial.step() for trial in (waiting, late)] == [{}, {}]
    assert waiting._run.returncode == -signal.SIGTERM
    assert late._run is None


@pytest.mark.slow
def test_a_failed_trial_says_why(tmp_path: Path):
    trial = Trial()
    trial.setup({"optimiser.learning_rate": 1e6, "constraint": "none"}, plan=plan(tmp_path), space=SPACE)
    with pytest.raises(RuntimeError, match="training diverged: the objective is"):
        for _ in range(3):
            trial.step()


@pytest.mark.parametrize(
    ("script", "reason"),
    [("kill -KILL $$", "the process was killed by SIGKILL, "), ("exit 3", "exit code 3"), ("echo error: new", "new")],
)
def test_a_trial_that_fails_again_has_the_reason_of_its_last_start(tmp_path: Path, monkeypatch, script, reason):
    def start(arguments, log, cwd):
        with log.open("a") as output:
            return subprocess.Popen(["sh", "-c", f"{script}; exit 2"], stdout=output)

    monkeypatch.setattr("ssl_sec.edges.tune.trial.start_command", start)
    trial, log = Trial(), log_of(plan(tmp_path), "search-001")
    log.parent.mkdir(parents=True)
    log.write_text("error: old\n")
    trial.setup({"optimiser.learning_rate": 0.3, "constraint": "none"}, plan=plan(tmp_path), space=SPACE)
    with pytest.raises(RuntimeError, match=f"^{reason}"):
        trial.step()
    assert last_line(log).startswith(reason)


@pytest.mark.slow
def test_a_metric_that_is_not_measured_is_named(tmp_path: Path):
    trial = Trial()
    other = plan(tmp_path, metric="val/knn")
    trial.setup({"optimiser.learning_rate": 0.3, "constraint": "none"}, plan=other, space=SPACE)
    with pytest.raises(
        RuntimeError, match=r"metric: found 'val/knn', which is not measured; did you mean 'val/knn_top1"
    ):
        trial.step()
    assert last_line(log_of(other, trial.trial_name)).startswith("metric: found 'val/knn'")


def test_a_trial_that_lacks_the_metric_at_its_first_measurement_is_stopped_then(tmp_path: Path, monkeypatch):
    def start(arguments: object, log: Path, cwd: str) -> "subprocess.Popen[bytes]":
        log.parent.mkdir(parents=True)
        (tmp_path / "r/search-001").mkdir()
        records = '{"step": 0, "metrics": {"train/loss": 4.0}}\n{"step": 4, "metrics": {"val/rankme": 2.0}}\n'
        (tmp_path / "r/search-001/metrics.jsonl").write_text(records)
        return subprocess.Popen(["sleep", "60"])

    monkeypatch.setattr("ssl_sec.edges.tune.trial.start_command", start)
    trial = Trial()
    trial.setup({"optimiser.learning_rate": 0.3, "constraint": "none"}, plan=plan(tmp_path), space=SPACE)
    reason = "metric: found 'val/knn_top1', which needs labelled images; allowed: val/rankme"
    with pytest.raises(RuntimeError, match=f"^{reason}$"):
        trial.step()
    assert trial._run is not None
    assert trial._run.poll() == -signal.SIGTERM
    assert last_line(log_of(plan(tmp_path), trial.trial_name)) == reason


@pytest.mark.slow
def test_a_trial_ends_with_the_process_that_started_it(tmp_path: Path):
    parent = os.fork()
    if parent == 0:  # a worker that is killed
        trial = Trial()
        longer = plan(tmp_path, length=500, overrides=[*plan(tmp_path)["overrides"], "epochs=500"])
        trial.setup({"optimiser.learning_rate": 0.3, "constraint": "none"}, plan=longer, space=SPACE)
        assert trial._run is not None
        (tmp_path / "pid").write_text(str(trial._run.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    pid = int((tmp_path / "pid").read_text())
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([descriptor], [], [], 10)[0] == [descriptor]


def test_names_and_last_lines(tmp_path: Path):
    assert trial_name("search", 1, SimpleNamespace(experiment_tag="7_constraint=none")) == "search-007"
    assert trial_name("search", 0, SimpleNamespace(experiment_tag="00012")) == "search-013"
    log = tmp_path / "log.txt"
    assert last_line(log) == ""
    log.write_text("one\nerror: two\nMLflow UI\n")
    assert last_line(log) == "two"
    log.write_text("one\ntwo\n")
    assert last_line(log) == "two"


def test_a_command_that_a_signal_killed_says_so_and_not_its_last_line(tmp_path: Path):
    log = tmp_path / "log.txt"
    log.write_text("epoch 1.00/2  loss 6.2")
    killed = subprocess.run(["sh", "-c", "kill -KILL $$"])
    expected = "the process was killed by SIGKILL, the machine or container may have run out of memory"
    assert reason_of(killed.returncode, log) == expected
    log.write_text("one\nerror: two\n")
    assert reason_of(2, log) == "two"
    assert reason_of(2, tmp_path / "none.txt") == "exit code 2"
