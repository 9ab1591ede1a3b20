"""The run of a sweep in MLflow."""

import csv
import io
import logging
import os
import signal
import threading
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from ssl_sec.edges.run.signals import handled, interrupt
from ssl_sec.edges.run.sweeps import Sweep, as_csv, as_markdown
from ssl_sec.edges.tables import mean_and_std
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.errors import DataError, Stopped
from ssl_sec.recipes.tracking import TrackingConfig

DRAWS_PICTURES = True

RESULTS = {
    "none": [{"probe/top1": 80.0, "train/loss": 1.0}, {"probe/top1": 84.0}],
    "eta 0.5, width 2": [{"probe/top1": 90.0, "val/knn_top1": 70.0}],
}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """The folder of a store; making its tables takes longest."""
    return tmp_path_factory.mktemp("store")


def opened(folder: Path, known: Path | None = None, name: str = "n") -> Sweep:
    tracking = TrackingConfig(uri=uri_of(folder), experiment="e")
    return Sweep.opened(tracking, str(folder), {"arms": ["none"]}, known, recipe="r", job="ablate", name=name)


def uri_of(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def wait_for_closing() -> None:
    """Waits for the threads that close runs of dead processes."""
    for thread in threading.enumerate():
        if thread.name == "close-abandoned":
            thread.join(60)


def start(folder: Path) -> tuple[Sweep, MlflowClient]:
    return opened(folder), MlflowClient(uri_of(folder))


def test_the_table_becomes_figures_text_and_a_picture(store: Path):
    sweep, client = start(store)
    with sweep.ended_after(RESULTS, lambda: "the table"):
        assert client.get_run(sweep.run_id).info.status == "RUNNING"
    run = client.get_run(sweep.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics == pytest.approx(
        {
            "sweep/probe_top1_mean none": 82.0,
            "sweep/probe_top1_std none": 8**0.5,
            "sweep/probe_top1_mean eta 0.5_ width 2": 90.0,
            "sweep/val_knn_top1_mean eta 0.5_ width 2": 70.0,
        }
    )
    assert "| none | 2 | 82.00 ± 2.83 |  |" in run.data.tags["mlflow.note.content"]
    names = {item.path for item in client.list_artifacts(sweep.run_id)}
    assert {"sweep.txt", "sweep.csv", "plots", "packages.txt"} <= names
    assert [item.path for item in client.list_artifacts(sweep.run_id, "plots")] == ["plots/arms.png"]
    rows = list(csv.DictReader(io.StringIO(as_csv(RESULTS))))
    assert [(row["arm"], row["probe/top1"], row["val/knn_top1"]) for row in rows][2] == (
        "eta 0.5, width 2",
        "90.0",
        "70.0",
    )


@pytest.mark.parametrize(
    ("values", "shown"), [([], ""), ([80.0], "80.00"), ([1.0, 2.0, 6.0], "3.00 ± 2.65"), ([1.0, 1.0], "1.00 ± 0.00")]
)
def test_values_are_shown_by_their_mean_and_the_deviation_of_a_sample(values, shown):
    assert mean_and_std(values) == shown


def test_the_csv_of_a_sweep_keeps_arms_with_quotes_and_commas():
    arm = 'data.train=["a.parquet","b.parquet"]'
    (row,) = csv.DictReader(io.StringIO(as_csv({arm: [{"probe/top1": 80.0}]})))
    assert row == {"arm": arm, "probe/top1": "80.0"}


@pytest.mark.parametrize(
    ("error", "status", "ended"),
    [
        (DataError("no images"), "FAILED", "failed: no images"),
        (Stopped("stopped"), "KILLED", "stopped"),
        (KeyboardInterrupt(), "KILLED", "stopped"),
    ],
)
def test_a_sweep_that_ends_early_has_the_status_of_its_error(store: Path, error, status, ended):
    sweep, client = start(store)
    with pytest.raises(type(error)), sweep.ended_after({"none": []}, lambda: ""):
        raise error
    run = client.get_run(sweep.run_id)
    assert (run.info.status, run.data.tags["ended"]) == (status, ended)
    assert run.data.metrics == {} and not [each.path for each in client.list_artifacts(sweep.run_id, "plots")]


def test_a_continued_sweep_has_the_means_of_all_its_runs(store: Path, tmp_path: Path):
    for runs in ([50.0], [50.0, 70.0, 60.0]):
        sweep = opened(store, tmp_path / "known")
        with sweep.ended_after({"none": [{"probe/top1": top1} for top1 in runs]}, lambda: ""):
            pass
    _, client = start(store)
    metrics = client.get_run(str(sweep.run_id)).data.metrics
    assert metrics == {"sweep/probe_top1_mean none": 60.0, "sweep/probe_top1_std none": 10.0}


def test_a_file_with_the_id_of_the_run_that_a_full_disk_left_empty_is_written_again(store: Path, tmp_path: Path):
    (known := tmp_path / "known").touch()
    sweep = opened(store, known)
    assert sweep.run_id is not None and known.read_text() == sweep.run_id
    with sweep.ended_after({}, lambda: ""):
        pass


def test_a_signal_while_a_job_ends_lets_it_upload_and_end(store: Path):
    sweep, client = start(store)
    uploaded = []

    def upload(run):
        os.kill(os.getpid(), signal.SIGTERM)
        uploaded.append(run.run_id)

    with handled(interrupt), sweep.ended_with(upload):  # as for a job of the command line
        pass
    assert uploaded == [sweep.run_id]
    assert client.get_run(str(sweep.run_id)).info.status == "FINISHED"


def test_points_that_were_logged_with_other_values_are_replaced_by_the_newest(store: Path):
    _, client = start(store)
    run_id = client.create_run("0").info.run_id
    tracked = TrackedRun(client, run_id, "0")
    for values in ({1: 80.0, 3: 55.0, 4: 70.0}, {1: 80.0, 2: 95.0, 3: 90.0, 4: 70.0}):
        tracked.log_latest([{"step": step, "metrics": {"tune/trial": value}} for step, value in values.items()])
    history = sorted(client.get_metric_history(run_id, "tune/trial"), key=lambda point: point.timestamp)
    assert {point.step: point.value for point in history} == {1: 80.0, 2: 95.0, 3: 90.0, 4: 70.0}
    assert len(history) == 5


def test_a_sweep_runs_without_a_store(tmp_path: Path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        sweep = opened(tmp_path / "file")
    assert sweep.run_id is None
    assert "the runs of the sweep have no parent" in caplog.text
    with sweep.ended_after(RESULTS, lambda: "table"):
        pass


@pytest.mark.parametrize("is_away", [False, True])
def test_a_run_whose_parameters_cannot_be_logged_does_not_stay_running(store: Path, monkeypatch, caplog, is_away):
    def failing(*_, **__):
        raise MlflowException("a parameter is refused")

    name = f"refused{is_away}"
    with monkeypatch.context() as patch:
        patch.setattr(TrackedRun, "_log_parameters", failing)
        if is_away:  # until the next job
            patch.setattr(TrackedRun, "end", failing)
        sweep = opened(store, name=name)
    assert sweep.run_id is None and "a parameter is refused; the runs of the sweep have no parent run" in caplog.text
    client = MlflowClient(uri_of(store))
    (run,) = client.search_runs(["1"], f"attributes.run_name = '{name}'")
    assert (run.info.status == "RUNNING") == is_away
    left = store / ".running" / run.info.run_id
    assert left.exists() == is_away
    start(store)
    wait_for_closing()
    assert client.get_run(run.info.run_id).data.tags["ended"].endswith("a parameter is refused")
    assert not left.exists()


def test_earlier_runs_are_adopted_and_those_of_another_store_are_counted(store: Path, caplog):
    sweep, client = start(store)
    earlier = client.create_run(str(sweep.experiment_id)).info.run_id
    with caplog.at_level(logging.INFO, "ssl_sec"):
        sweep.adopt([None, "", "0" * 32, earlier, "1" * 32])
    assert client.get_run(earlier).data.tags["mlflow.parentRunId"] == sweep.run_id
    assert caplog.messages == ["runs that ended earlier and are not in this MLflow: 2"]


def test_the_page_has_the_labels_of_the_metrics():
    assert as_markdown(RESULTS).splitlines()[0].startswith("| arm | runs | probe top-1 %")


@pytest.mark.parametrize(
    "metrics",
    [
        ["finetune/top1", "finetune/top5", "val/top1"],
        ["retrieval/recall_at_1", "retrieval/nmi", "val/recall_at_1"],
        ["face/agedb_accuracy", "face/lfw_accuracy", "face/ijb_tar_at_far_1e-4", "val/verification_accuracy"],
        ["probe/few_shot_1", "probe/few_shot_10", "val/rankme"],
    ],
)
def test_runs_of_every_recipe_are_compared_by_its_metrics(metrics):
    results = {"none": [{name: 50.0 for name in [*reversed(metrics), "train/lr", "face/lfw_accuracy_std"]}]}
    assert next(csv.reader(io.StringIO(as_csv(results)))) == ["arm", *metrics]
    assert as_markdown(results).count("50.00") == len(metrics)


def test_a_store_lost_during_a_sweep_is_no_error(store: Path, monkeypatch, caplog):
    sweep, _ = start(store)

    def away(self, records):
        raise ConnectionError("away")

    monkeypatch.setattr(TrackedRun, "__call__", away)
    with sweep.ended_after(RESULTS, lambda: "table"):
        pass
    assert "away" in caplog.text
