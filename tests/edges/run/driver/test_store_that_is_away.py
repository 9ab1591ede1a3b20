"""Runs whose store cannot be reached, and are sent to it later."""

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from mlflow.tracking import MlflowClient

from ssl_sec.edges.config import ReplayConfig
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run import uploading, worker
from ssl_sec.edges.run.driver import run_replay, run_training
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.errors import ConfigError, StorageError, counted
from ssl_sec.recipes.registry import PRETRAIN
from tests.edges.run.driver.conftest import pretrain_config


def test_training_continues_without_mlflow_and_metrics_are_sent_later(quick, caplog, tmp_path: Path, monkeypatch):
    (tmp_path / "store").write_text("a file where a folder must be")
    uri = f"sqlite:///{tmp_path}/store/mlflow.db"
    finished = run_training(PRETRAIN, pretrain_config([*quick, f"tracking.uri={uri}"]))
    assert finished.run_id is None
    records = finished.folder.records()
    assert len(records) > 2
    assert "cannot be used" in caplog.text
    assert (
        f"MLflow lacks {counted(len(records), 'record')} of metrics; upload what is missing with: "
        "python -m jobs.replay folder=" in caplog.text
    )
    assert "none; see the warning" in str(finished)
    with pytest.raises(StorageError, match="cannot be used"):
        run_replay(ReplayConfig(folder=str(finished.folder.path)))

    (tmp_path / "store").unlink()
    replayed = run_replay(ReplayConfig(folder=str(finished.folder.path)))
    client = MlflowClient(uri)
    run = client.get_run(replayed.run_id)
    assert run.info.status == "FINISHED" and replayed.experiment_id == run.info.experiment_id
    assert run.data.params["epochs"] == "2"
    for name in ("train/loss", "val/knn_top1"):
        expected = [(r["step"], r["metrics"][name]) for r in records if name in r["metrics"]]
        assert [(p.step, p.value) for p in client.get_metric_history(replayed.run_id, name)] == expected
    assert {"config.yaml", "encoder.safetensors", "plots"} <= {a.path for a in client.list_artifacts(replayed.run_id)}

    monkeypatch.setattr(uploading.Upload, "upload_results", None)  # MLflow has all of them
    again = run_replay(ReplayConfig(folder=str(finished.folder.path)))
    assert again.run_id == replayed.run_id
    assert client.get_run(again.run_id).info.end_time == run.info.end_time
    assert len(client.get_metric_history(replayed.run_id, "train/loss")) == len(
        [r for r in records if "train/loss" in r["metrics"]]
    )


def test_a_replay_takes_runs_that_were_started(tmp_path: Path):
    folder = RunFolder(tmp_path / "runs" / "digits" / "one")
    folder.start({})
    with pytest.raises(ConfigError, match=r"^folder: .*/digits/one holds no run that was started; allowed: the folder"):
        run_replay(ReplayConfig(folder=str(folder.path)))


def test_a_store_that_is_not_beside_a_copied_run_is_not_made_anew(quick, tmp_path: Path):
    """Without the address, the run would seem to have been uploaded to a store that has nothing else."""
    uri = f"sqlite:///{tmp_path}/before/mlflow.db"
    finished = run_training(PRETRAIN, pretrain_config([*quick, f"tracking.uri={uri}"]))
    copied = tmp_path / "copies" / finished.folder.path.parent.name / finished.folder.name
    shutil.copytree(finished.folder.path, copied)
    (tmp_path / "before" / "mlflow.db").unlink()
    with pytest.raises(
        ConfigError, match=r"^uri: found null, but the store that the run had in .*/before/mlflow.db, is "
    ):
        run_replay(ReplayConfig(folder=str(copied)))
    assert not (tmp_path / "before" / "mlflow.db").exists()


def test_a_store_has_every_point_once_after_an_outage(quick, monkeypatch, caplog):
    """The store even accepts a batch whose response is lost."""
    log_batch, calls, asked = MlflowClient.log_batch, [], threading.Event()
    report = worker.FolderRuntime.report

    def waiting(self, step, metrics, norms=None):  # so that the first call comes before the end
        report(self, step, metrics, norms)
        assert step < 5 or asked.wait(120)

    monkeypatch.setattr(worker.FolderRuntime, "report", waiting)

    def unreliable(self, run_id, metrics=(), params=(), **options):
        if metrics:
            calls.append(len(metrics))
            asked.set()
            if len(calls) == 1:
                raise ConnectionError("refused")
            if len(calls) == 2:
                log_batch(self, run_id, metrics=metrics, **options)
                raise ConnectionError("no answer")
        return log_batch(self, run_id, metrics=metrics, params=params, **options)

    monkeypatch.setattr(MlflowClient, "log_batch", unreliable)
    finished = run_training(PRETRAIN, pretrain_config([*quick, "log_every_steps=1"]))
    assert len(calls) >= 2
    assert "it is retried" in caplog.text
    history = MlflowClient(finished.uri).get_metric_history(finished.run_id, "train/loss")
    expected = [r["step"] for r in finished.folder.records() if "train/loss" in r["metrics"]]
    told_of_loss = "MLflow lacks " in caplog.text
    assert sorted(point.step for point in history) == expected
    assert told_of_loss == (len(calls) == 2)


@pytest.mark.slow
def test_a_store_too_slow_for_files_has_the_end_of_the_run_and_a_replay_that_fails_says_so(quick, monkeypatch, caplog):
    log_artifact, limits, wait_s = MlflowClient.log_artifact, [], 2.2

    def slow(self, run_id, local_path, artifact_path=None):
        if Path(local_path).name == "config.yaml":
            limits.append(MLFLOW_HTTP_REQUEST_TIMEOUT.get())
            time.sleep(wait_s)
            raise TimeoutError("Read timed out")
        log_artifact(self, run_id, local_path, artifact_path)

    before = MLFLOW_HTTP_REQUEST_TIMEOUT.get()
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_artifact", slow)
        with monkeypatch.context() as impatient:
            impatient.setattr(uploading, "ANSWER_S", 2.0)
            finished = run_training(PRETRAIN, pretrain_config(quick))
        client, replay = MlflowClient(finished.uri), ReplayConfig(folder=str(finished.folder.path))
        assert client.get_run(finished.run_id).info.status == "FINISHED"
        assert "MLflow did not answer for 2 s; upload what is missing with: python -m jobs.replay" in caplog.text
        wait_s = 0.0
        with pytest.raises(StorageError, match=r"MLflow: Read timed out; upload what is missing with: .*jobs\.replay"):
            run_replay(replay)
    assert limits == [600, 600] and before < 600 and MLFLOW_HTTP_REQUEST_TIMEOUT.get() == before
    run_replay(replay)
    assert "encoder.safetensors" in {file.path for file in client.list_artifacts(finished.run_id)}


def refused(*_):
    raise MlflowException("500: the artifact store is full")


@pytest.mark.parametrize("what", ["network", pytest.param("checkpoints", marks=pytest.mark.slow)])
def test_a_replay_uploads_what_was_refused_and_registers_a_network_once(quick, monkeypatch, caplog, what):
    quick = [*quick, "tracking.register_model=true", f"recipe={what}_later"]
    with monkeypatch.context() as patch:
        owner, name = (TrackedRun, "log_network") if what == "network" else (uploading, "log_checkpoints")
        patch.setattr(owner, name, refused)
        finished = run_training(PRETRAIN, pretrain_config(quick))
    assert "500: the artifact store is full; upload what is missing with: python -m jobs.replay" in caplog.text
    client, replay = MlflowClient(finished.uri), ReplayConfig(folder=str(finished.folder.path))
    run_replay(replay)
    (version,) = client.search_model_versions(f"name='{what}_later-encoder'")
    assert version.run_id == finished.run_id
    kept = client.search_logged_models([finished.experiment_id], filter_string="name LIKE 'checkpoint%'")
    assert len(kept) == 1 and client.get_run(finished.run_id).info.status == "FINISHED"


def test_plots_that_cannot_be_drawn_keep_nothing_else_from_mlflow_and_a_replay_draws_them(quick, monkeypatch, caplog):
    def broken(*_):
        raise ValueError("$x_$: expected a symbol")

    said = "the plots cannot be drawn: ValueError: $x_$: expected a symbol"
    with monkeypatch.context() as patch:
        patch.setattr(uploading, "save_figures", broken)
        finished = run_training(PRETRAIN, pretrain_config(quick))
    assert f"MLflow: {said}; upload what is missing with: python -m jobs.replay" in caplog.text
    client, files = MlflowClient(finished.uri), ["config.yaml", "encoder.safetensors", "norms.json"]
    assert set(files) <= set(files_of(client, finished.run_id)) and "plots" not in files_of(client, finished.run_id)
    run = client.get_run(finished.run_id)
    assert (run.info.status, run.data.tags["upload.missing"]) == ("FINISHED", said)
    run_replay(ReplayConfig(folder=str(finished.folder.path)))
    assert "plots" in files_of(client, finished.run_id)
    assert "upload.missing" not in client.get_run(finished.run_id).data.tags


@pytest.mark.slow
def test_a_refused_registration_keeps_no_file_from_mlflow_and_a_replay_tries_it_again(quick, monkeypatch, caplog):
    def forbidden(*_):
        raise MlflowException("403: Permission denied", PERMISSION_DENIED)

    quick = [*quick, "tracking.register_model=true", "recipe=shared"]
    said = "tracking.register_model: found true, but MLflow lets this user register no version of 'shared-encoder'"
    with monkeypatch.context() as patch:
        patch.setattr(TrackedRun, "log_network", forbidden)
        finished = run_training(PRETRAIN, pretrain_config(quick))
        client, replay = MlflowClient(finished.uri), ReplayConfig(folder=str(finished.folder.path))
        assert f"MLflow: {said}" in caplog.text and "encoder.safetensors" in files_of(client, finished.run_id)
        with pytest.raises(StorageError, match=said):
            run_replay(replay)
    assert client.get_run(finished.run_id).data.tags["upload.missing"].startswith(said)
    run_replay(replay)
    assert "upload.missing" not in client.get_run(finished.run_id).data.tags
    (version,) = client.search_model_versions("name='shared-encoder'")
    assert version.run_id == finished.run_id


def test_the_reason_for_missing_files_is_in_mlflow_without_passwords(quick, monkeypatch):
    def fails(*_):
        raise MlflowException("400: no place at https://me:secret@store/models")

    monkeypatch.setattr(TrackedRun, "log_network", fails)
    finished = run_training(PRETRAIN, pretrain_config([*quick, "tracking.register_model=true"]))
    tags = MlflowClient(finished.uri).get_run(finished.run_id).data.tags
    assert tags["upload.missing"] == "400: no place at https://***@store/models"


def files_of(client: MlflowClient, run_id: str | None) -> set[str]:
    return {file.path for file in client.list_artifacts(run_id)}


def test_a_replay_of_a_folder_without_its_features_ends_the_run_with_the_reason(quick, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(TrackedRun, "log_file", refused)
        finished = run_training(PRETRAIN, pretrain_config(quick))
    finished.folder.features_path.unlink()
    with pytest.raises(StorageError, match=r"features\.pt is missing"):
        run_replay(ReplayConfig(folder=str(finished.folder.path)))
    assert MlflowClient(finished.uri).get_run(finished.run_id).info.status == "FAILED"


def test_a_replay_of_a_moved_folder_makes_no_store_at_its_old_place(quick, tmp_path: Path):
    finished = run_training(PRETRAIN, pretrain_config([*quick, f"output_dir={tmp_path}/old", "run_name=it"]))
    (tmp_path / "old").rename(tmp_path / "new")
    folder = str(tmp_path / "new" / finished.folder.path.relative_to(tmp_path / "old"))
    with pytest.raises(ConfigError, match=f"^uri: found null, but the store that .*{tmp_path}/old/mlflow.db, is not"):
        run_replay(ReplayConfig(folder=folder))
    assert not (tmp_path / "old").exists()
    replayed = run_replay(ReplayConfig(folder=folder, uri=f"sqlite:///{tmp_path}/new/mlflow.db"))
    assert replayed.run_id == finished.run_id


def test_a_folder_without_a_run_cannot_be_replayed(tmp_path: Path):
    with pytest.raises(ConfigError, match="folder: .* holds no run"):
        run_replay(ReplayConfig(folder=str(tmp_path)))


@pytest.mark.slow
def test_runs_that_start_at_once_on_a_fresh_sqlite_file_are_all_tracked(tmp_path: Path):
    code = (
        "import sys\n"
        "from ssl_sec.edges.folder.descriptions import RunIdentity\n"
        "from ssl_sec.edges.tracking.tracker import TrackedRun\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        f"identity = RunIdentity(uri='sqlite:///{tmp_path}/mlflow.db', experiment='e', name='n')\n"
        "TrackedRun.start(identity, {})"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    assert len(client.search_runs([client.get_experiment_by_name("e").experiment_id])) == 3
