"""A search by Ray Tune, from the command to MLflow."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest
import ray
from mlflow.entities import Run
from ray.tune.search import BasicVariantGenerator

from ssl_sec.edges.config.tune import TuneConfig
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.on_ray.joining import connect
from ssl_sec.edges.run.running import running
from ssl_sec.edges.tune import job
from ssl_sec.edges.tune.claims import claimed
from ssl_sec.edges.tune.job import _described, _resources, _searcher, _without_measurements, run_search
from ssl_sec.edges.tune.space import read_search
from ssl_sec.edges.tune.trial import TrialPlan
from ssl_sec.errors import ConfigError, Stopped, StorageError, UserError
from tests.edges.conftest import QUICK, WHOLE
from tests.edges.run.faulty import Once, steps_so_far

DRAWS_PICTURES = True
METRIC = {"val/probe_top1": 50.0}


def tune(*overrides: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "jobs.tune", *QUICK, *WHOLE, *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def test_a_damaged_description_of_a_search_is_one_line(tmp_path: Path):
    assert claimed(tmp_path, "it", {"trials": 2})
    assert not claimed(tmp_path, "it", {"trials": 2})
    (tmp_path / "it.tune.json").write_text('{"tri')
    with pytest.raises(StorageError, match=r"run_name: .*it.tune.json cannot be read: Unterminated .*another name"):
        claimed(tmp_path, "it", {"trials": 2})


def test_another_search_is_named_as_it_is(tmp_path: Path):
    assert claimed(tmp_path, "0.5-none-search", {"trials": None})
    with pytest.raises(ConfigError, match="run_name: 0.5-none-search is another search, with trials null instead of 3"):
        claimed(tmp_path, "0.5-none-search", {"trials": 3})


def test_the_address_of_a_dashboard_is_refused_before_a_search_is_made(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    search = read_search(["experiment=digits", "epochs=16", "constraint=choice(none,sec)", f"output_dir={tmp_path}"])
    with pytest.raises(ConfigError, match="^RAY_ADDRESS: found 'http://head:8265', a cluster's dashboard, to which"):
        run_search(search)
    assert not list(tmp_path.iterdir())


def test_a_search_that_another_process_runs_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch):
    search = read_search(
        ["experiment=digits", "epochs=16", "constraint=choice(none,sec)", "run_name=s", f"output_dir={tmp_path}"]
    )
    written: list[list[Path]] = []

    def run_again(*_: object) -> None:
        assert not written, "two run it"
        written.append(sorted(tmp_path.rglob("*")))
        try:
            run_search(search)
        finally:
            written.append(sorted(tmp_path.rglob("*")))

    monkeypatch.setattr("ssl_sec.edges.tune.job._run", run_again)
    monkeypatch.setattr("ssl_sec.edges.run.running._FREE_WITHIN_S", 0.0)
    with pytest.raises(ConfigError, match=f"run_name: .*/digits/s-ray is in use: process {os.getpid()} on .* runs it"):
        run_search(search)
    before, after = written
    assert after == before
    assert not (tmp_path / ".running").exists()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    assert len(client.search_runs([each.experiment_id for each in client.search_experiments()])) == 1


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine, with two CPUs whatever it has."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_AIR_NEW_OUTPUT", "TUNE_DISABLE_SIGINT_HANDLER"):
            patch.setenv(name, "")  # a search sets them
        connect("local", num_cpus=2)
        yield
        ray.shutdown()


FOUR_AND_TWO = [{"CPU": 4.0}, {"CPU": 2.0}]
WITH_GPUS = [{"CPU": 64.0}, {"CPU": 8.0, "GPU": 1.0}, {"CPU": 16.0, "GPU": 4.0}]


@pytest.mark.parametrize(
    ("asked", "nodes", "expected"),
    [
        ({}, FOUR_AND_TWO, {"cpu": 1, "gpu": 0}),
        ({"cpus_per_trial": 4}, FOUR_AND_TWO, {"cpu": 4, "gpu": 0}),
        ({}, WITH_GPUS, {"cpu": 4, "gpu": 1}),
        ({"gpus_per_trial": 0.5}, WITH_GPUS, {"cpu": 2, "gpu": 0.5}),
        ({"gpus_per_trial": 2}, WITH_GPUS, {"cpu": 8, "gpu": 2}),
        ({"gpus_per_trial": 0, "cpus_per_trial": 64}, WITH_GPUS, {"cpu": 64, "gpu": 0}),
    ],
)
def test_a_trial_gets_its_share_of_a_node(asked, nodes, expected):
    assert _resources(TuneConfig(**asked), nodes) == expected


@pytest.mark.parametrize(
    ("asked", "nodes", "message"),
    [
        (
            {"cpus_per_trial": 5},
            FOUR_AND_TWO,
            "cpus_per_trial: found 5, must be at most 4, the number of CPUs of the largest node",
        ),
        (
            {"cpus_per_trial": 17},
            WITH_GPUS,
            "cpus_per_trial: found 17, must be at most 16, the number of CPUs of the largest node with 1 GPU",
        ),
        (
            {"gpus_per_trial": 5},
            WITH_GPUS,
            "gpus_per_trial: found 5, must be at most 4, the number of GPUs of the largest node",
        ),
    ],
)
def test_a_trial_that_no_node_can_hold_is_refused(asked, nodes, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        _resources(TuneConfig(**asked), nodes)


def test_a_probe_is_left_to_the_training_with_the_best_values():
    given = ["experiment=digits", "epochs=16", "seed=1,2"]
    plain, probed = read_search(given), read_search([*given, "probe.enabled=true"])
    # A search of an earlier version continues: its description has no such override.
    assert _described(probed) == _described(plain)
    assert "probe" not in _described(plain)["overrides"]
    assert _without_measurements(plain) == ["experiment=digits", "epochs=16", "runtime=local"]
    assert _without_measurements(probed) == ["experiment=digits", "epochs=16", "probe.enabled=true", "runtime=local"]


@pytest.mark.parametrize(("asked", "most"), [("max_concurrent=2", 2), ("max_concurrent=null", 0)])
def test_a_random_search_has_as_many_trials_at_once_as_asked(asked: str, most: int):
    searcher = _searcher(read_search(["experiment=digits", "epochs=16", "searcher=random", "seed=1,2", asked]))
    assert isinstance(searcher, BasicVariantGenerator)
    assert searcher.max_concurrent == most  # 0 is no limit


@pytest.mark.slow
@pytest.mark.distributed
def test_a_search_is_one_run_with_its_trials_and_continues(tmp_path: Path):
    options = (f"output_dir={tmp_path}", "recipe=r", "run_name=s", "trials=3", "epochs=3", "max_concurrent=1")
    space = ("optimiser.learning_rate=choice(0.3,1e6)", "constraint=choice(none,sec)", "searcher=random", "seed=1")
    done = tune(*options, *space)
    assert done.returncode == 0, done.stderr
    # A trial may take hours: where to look is known at the start.
    begin = done.stderr.partition("searching")[0]
    assert f"search s: the output of its trials is in {tmp_path}/r/s-logs" in begin
    assert re.search(r"MLflow UI: .*\n.*then open http.*/runs/", begin)
    rows = re.findall(r"^(s-00\d)  +(\S+)  +(none|sec)  +([\d.]+)  +3$", done.stdout, re.M)
    failed = re.findall(r"(s-00\d) failed: training diverged", done.stderr)
    assert len(rows) + len(failed) == 3
    assert rows
    assert [float(row[3]) for row in rows] == sorted((float(row[3]) for row in rows), reverse=True)
    assert f"optimiser.learning_rate=0.3 constraint={rows[0][2]}" in done.stdout.splitlines()[-1]
    table = (tmp_path / "r/s-logs/trials.csv").read_bytes()
    assert table.count(b"\n") == 1 + len(rows) and b"\r" not in table

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = (each for each in client.search_experiments() if each.name == "r")

    def runs() -> dict[str, list[Run]]:
        found: dict[str, list[Run]] = {}
        for run in client.search_runs([experiment.experiment_id]):
            found.setdefault(str(run.info.run_name), []).append(run)
        return found

    (parent,) = runs()["s"]
    assert (parent.info.status, parent.data.tags["job"]) == ("FINISHED", "tune")
    names = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {"sweep.txt", "trials.csv", "parallel.png"} <= names
    assert parent.data.metrics["tune/best"] == pytest.approx(float(rows[0][3]), abs=0.05)
    assert f"| {rows[0][0]} | 0.3 | {rows[0][2]} |" in parent.data.tags["mlflow.note.content"]
    assert parent.data.params["search.constraint"] == "none, sec"
    for name in ("s-001", "s-002", "s-003"):
        (run,) = runs()[name]
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.info.status == ("FAILED" if name in failed else "FINISHED")

    # All trials have ended: nothing is trained again, and the search's run is reopened.
    again = tune(*options, *space)
    assert again.returncode == 0, again.stderr
    assert re.findall(r"^s-00.*$", again.stdout, re.M) == re.findall(r"^s-00.*$", done.stdout, re.M)
    assert "continues" in again.stderr
    (reopened,) = runs()["s"]
    assert (reopened.info.run_id, reopened.info.status) == (parent.info.run_id, "FINISHED")
    assert {run.data.tags["mlflow.parentRunId"] for name in ("s-001", "s-002", "s-003") for run in runs()[name]} == {
        parent.info.run_id
    }
    other = tune(*options, *space, "seed=2")
    assert other.returncode == 2
    assert "run_name: s is another search, with overrides" in other.stderr


@pytest.mark.slow
@pytest.mark.distributed
def test_a_continued_search_runs_failed_trials_again_once(cluster, tmp_path: Path):
    options = (f"output_dir={tmp_path}", "recipe=r", "run_name=s", "trials=2", "epochs=1", "seed=1")
    search = read_search([*QUICK, *options, "optimiser.learning_rate=choice(0.3,1e6)", "searcher=random"])
    with (
        running(RunFolder(tmp_path / "r/s-001")),
        running(RunFolder(tmp_path / "r/s-002")),
        pytest.raises(UserError, match=r"^all trials failed; the last: .*/r/s-00\d is in use: process"),
    ):
        run_search(search)
    # One cause has passed. The other trial diverges, whenever it is run again.
    for attempts in (1, 2):
        (trial,), num_failed, logs = run_search(search)
        assert trial.overrides == ["optimiser.learning_rate=0.3"]
        assert num_failed == 1
        (diverged,) = {"s-001", "s-002"} - {trial.name}
        assert (logs / f"{diverged}.txt").read_text().count("error: training diverged") == attempts


@pytest.mark.slow
@pytest.mark.distributed
def test_a_search_ends_with_its_first_trial_if_that_lacks_the_metric(cluster, tmp_path: Path):
    options = (f"output_dir={tmp_path}", "recipe=r", "run_name=s", "trials=8", "epochs=1", "searcher=random")
    lacks = ("metric=val/probe_top1", "monitor.online_probe=false", "optimiser.learning_rate=interval(0.1,0.3)")
    search = read_search([*QUICK, *options, *lacks])
    for _ in range(2):
        with pytest.raises(
            ConfigError, match="^metric: found 'val/probe_top1', .*'val/knn_top1'.* no further trial was"
        ):
            run_search(search)
        assert len(list((tmp_path / "r").glob("s-0*"))) <= 4
        assert not (tmp_path / "r/s.tune.stop").exists()


@pytest.mark.parametrize(
    ("space", "reason", "measured", "ends"),
    [
        ("constraint=choice(none,sec)", "metric: found 'val/probe_top1', which needs labelled images; x", {}, True),
        ("constraint=choice(none,sec)", "training diverged", {}, False),
        (
            "constraint=choice(none,sec)",
            "metric: found 'val/probe_top1', which needs labelled images; x",
            METRIC,
            False,
        ),
        ("data.max_images=choice(9,99)", "metric: found 'val/probe_top1', which needs labelled images; x", {}, False),
    ],
)
def test_the_other_trials_are_stopped_only_if_all_lack_the_metric(tmp_path, monkeypatch, space, reason, measured, ends):
    event = threading.Event()
    monkeypatch.setattr(job, "_unmeasured", event)
    monkeypatch.setattr(job, "last_line", lambda log: reason)
    search = read_search(["experiment=digits", "epochs=16", "metric=val/probe_top1", space, f"output_dir={tmp_path}"])
    plan: TrialPlan = {"name": "s", "folder": str(tmp_path), "metric": search.metric}  # pyright: ignore[reportAssignmentType]
    first, other = SimpleNamespace(last_result=None), SimpleNamespace(last_result=measured)
    job._Progress(search, plan).on_trial_error(1, [first, other], first)
    assert event.is_set() == ends


def test_a_trial_is_announced_when_it_begins_and_when_it_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    search = read_search([*QUICK, "epochs=4", "optimiser.learning_rate=choice(0.1,0.3)", f"output_dir={tmp_path}"])
    plan: Plan = {"name": "s", "folder": str(tmp_path), "metric": search.metric}  # pyright: ignore[reportAssignmentType]

    class Ended(SimpleNamespace):
        def __str__(self) -> str:
            return "s-001"

    last = {search.metric: 80.0, "at": 1}
    trial = Ended(config={"optimiser.learning_rate": "0.3"}, last_result=last, is_finished=lambda: True)
    progress = job._Progress(search, plan)
    with caplog.at_level("INFO", logger="ssl_sec"):
        progress.on_trial_start(1, [trial], trial)
        progress.on_trial_complete(1, [trial], trial)
    begun, ended = caplog.messages
    assert begun == "s-001 begins with optimiser.learning_rate=0.3"
    assert "80 when it was stopped after 1 epoch with optimiser.learning_rate=0.3" in ended


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stopped_search_saves_its_trials_and_continues_from_there(cluster, tmp_path: Path):
    """Their next measurement is far away, and they save only then or at a stop."""
    options = (f"output_dir={tmp_path}", "recipe=r", "run_name=s", "trials=2", "epochs=4000", "log_every_steps=1")
    rarely = ("monitor.every_epochs=2000", "checkpoint.every_epochs=2000", "searcher=random")
    search = read_search([*QUICK, *options, *rarely, "optimiser.learning_rate=interval(0.1,0.3)"])
    runs = [RunFolder(tmp_path / f"r/s-00{number}") for number in (1, 2)]
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")

    def saved_at() -> list[int]:
        return [int(run.checkpoint_names()[-1].removeprefix("step-")) for run in runs]

    before = [0, 0]
    for _ in range(2):
        enough = [steps + 3 for steps in before]

        def have_trained(enough: list[int] = enough) -> bool:
            return all(steps_so_far(run) >= steps for run, steps in zip(runs, enough, strict=True))

        with (
            Once(have_trained, lambda: signal.raise_signal(signal.SIGTERM)) as stopping,
            pytest.raises(Stopped, match="^stopped; the same command with run_name=s continues the search"),
        ):
            run_search(search)
        assert stopping.happened
        # No step is trained twice: there is one record for each, and the last one was saved.
        assert saved_at() == [steps_so_far(run) for run in runs]
        assert all(steps >= least for steps, least in zip(saved_at(), enough, strict=True))
        assert [client.get_run(str(run.run_id)).info.status for run in runs] == ["KILLED", "KILLED"]
        assert not (tmp_path / ".running").exists() and not (tmp_path / "r/s.tune.stop").exists()
        before = saved_at()
