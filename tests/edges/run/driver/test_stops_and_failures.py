"""Runs that are stopped, refused or fail."""

import errno
import os
import shlex
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from ssl_sec.edges.config import ReplayConfig
from ssl_sec.edges.folder import folder as folder_module
from ssl_sec.edges.folder import logs
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run import execution, running, worker
from ssl_sec.edges.run.driver import run_probe, run_replay, run_training
from ssl_sec.edges.run.job_values import values_of
from ssl_sec.edges.run.signals import interrupt
from ssl_sec.edges.run.uploading import Upload
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.errors import ConfigError, DataError, Stopped, StorageError
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.settings import from_values
from ssl_sec.training.step import Request
from tests.data.files import write_folder
from tests.data.test_fingerprint import write_image
from tests.edges.run.driver.conftest import pretrain_config
from tests.edges.run.faulty import signalling_at
from tests.jobs import embed, export


def test_a_stopped_run_saves_shows_killed_and_resumes_bit_equal(quick, tmp_path: Path, monkeypatch, capfd):
    config = pretrain_config([*quick, "run_name=stopped", "log_every_steps=1"])
    expected = run_training(PRETRAIN, replace(config, run_name="unstopped", resume="auto"))  # there is none: it starts

    with monkeypatch.context() as patch, pytest.raises(Stopped, match="stopped; resume it with: ") as stop:
        patch.setattr(worker.FolderRuntime, "report", signalling_at(3))
        run_training(PRETRAIN, config)
    assert "stopping: what is not saved yet is saved first (Ctrl-C" in capfd.readouterr().err
    run_id = (tmp_path / "runs" / "digits" / "stopped" / "mlflow_run_id").read_text()
    client = MlflowClient(expected.uri)
    killed = client.get_run(run_id)
    assert (killed.info.status, killed.data.tags["ended"]) == ("KILLED", "stopped: on request, after saving")

    command = shlex.split(str(stop.value).partition("with: ")[2])
    assert command[:3] == ["python", "-m", "jobs.pretrain"] and len(command) == 4
    resumed = run_training(PRETRAIN, from_values(PretrainConfig, values_of("pretrain", command[3:])))
    assert resumed.run_id == run_id
    ended = client.get_run(run_id)
    assert (ended.info.status, ended.data.tags["ended"]) == ("FINISHED", "finished")
    assert ended.data.tags["mlflow.note.content"].count("- ended:") == 1
    weights, wanted = load_file(resumed.folder.encoder_path), load_file(expected.folder.encoder_path)
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    losses = [(point.step, point.value) for point in client.get_metric_history(run_id, "train/loss")]
    assert losses == [(p.step, p.value) for p in client.get_metric_history(expected.run_id, "train/loss")]


def test_mlflow_shows_that_a_stop_while_the_workers_start_again_saved_nothing(quick, tmp_path: Path, monkeypatch):
    def end_unsaved(job, values, folder, me):
        folder.log_worker(0, 1, "here")
        folder.write_outcome("unsaved")

    monkeypatch.setattr(execution, "work", end_unsaved)
    with pytest.raises(Stopped, match="stopped; resume it with: "):
        run_training(PRETRAIN, pretrain_config([*quick, "run_name=unsaved"]))
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    run = client.get_run((tmp_path / "runs" / "digits" / "unsaved" / "mlflow_run_id").read_text())
    assert (run.info.status, run.data.tags["ended"]) == ("KILLED", "stopped: on request, without saving")


def test_an_interrupted_run_says_how_it_is_resumed(quick, tmp_path: Path, monkeypatch):
    config = pretrain_config([*quick, "run_name=interrupted"])
    told = r"^interrupted without saving; resume it with: python -m jobs.pretrain resume=\S+/interrupted$"
    with monkeypatch.context() as patch, pytest.raises(Stopped, match=told):
        patch.setattr(execution, "work", interrupt)
        run_training(PRETRAIN, config)
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    run = client.get_run((tmp_path / "runs" / "digits" / "interrupted" / "mlflow_run_id").read_text())
    assert (run.info.status, run.data.tags["ended"]) == ("KILLED", "stopped: interrupted without saving")
    assert run_training(PRETRAIN, replace(config, resume=True)).run_id == run.info.run_id


def test_only_requests_to_the_current_process_are_kept(quick, tmp_path: Path, monkeypatch):
    config = pretrain_config([*quick, "run_name=asked", "resume=auto", "log_every_steps=1"])
    folder = RunFolder(tmp_path / "runs" / "digits" / "asked")
    folder.path.mkdir(parents=True)
    folder.stop_path.touch()
    resume, interrupting = RunFolder.resume, signalling_at(3)

    def interrupted(self, values):
        signal.raise_signal(signal.SIGTERM)
        resume(self, values)

    for name, patched, value in (("report", worker.FolderRuntime, interrupting), ("resume", RunFolder, interrupted)):
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            patch.setattr(patched, name, value)
            run_training(PRETRAIN, config)
        assert 3 <= max(record["step"] for record in folder.records()) <= 5


def test_signals_while_a_run_stops_change_nothing(quick, tmp_path: Path, monkeypatch):
    """SIGTERM twice, SIGHUP, and both ends of a terminal's Ctrl-C: at the save, and while the run ends in MLflow."""

    def signal_all(self, *given, **more):
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        return original(self, *given, **more)

    name = "run_name=stopped-twice"
    for patched in ((worker.FolderRuntime, "save"), (TrackedRun, "end")):
        original = getattr(*patched)
        with monkeypatch.context() as patch, pytest.raises(Stopped, match="resume it with: .*/stopped-twice$"):
            patch.setattr(*patched, signal_all)
            if patched[0] is TrackedRun:
                patch.setattr(worker.FolderRuntime, "request", lambda self: Request.STOP)
            run_training(
                PRETRAIN,
                pretrain_config([*quick, name, "resume=auto", "log_every_steps=1", "checkpoint.every_epochs=1"]),
            )
        folder = RunFolder(tmp_path / "runs" / "digits" / "stopped-twice")
        assert folder.restored_state(torch.device("cpu"))["step"] > 0
        client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
        assert client.get_run(folder.run_id_path.read_text()).info.status == "KILLED"


def test_a_run_stopped_during_its_upload_is_finished_and_probed_by_a_resume(quick, monkeypatch, capfd):
    def stop_and_upload(self, tracked):
        signal.raise_signal(signal.SIGTERM)
        leave(self, tracked)

    leave = Upload.upload_results
    monkeypatch.setattr(sys, "argv", ["/usr/bin/ssl-sec"])
    config = pretrain_config([*quick, "run_name=late", "probe.enabled=true", "resume=auto"])
    probe_it = r"^stopped; late is finished; probe it with: ssl-sec pretrain resume=\S+/digits/late$"
    with monkeypatch.context() as patch, pytest.raises(Stopped, match=probe_it):
        patch.setattr(Upload, "upload_results", stop_and_upload)
        run_training(PRETRAIN, config)
    assert "stopping: the results are uploaded first (Ctrl-C" in capfd.readouterr().err
    client = MlflowClient(f"sqlite:///{config.output_dir}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED"
    assert "probe/top1" in run_training(PRETRAIN, config).metrics


def test_a_stopped_probe_of_a_training_starts_again_by_the_printed_command(quick, tmp_path: Path, monkeypatch):
    def stop_of_a_probe(self):
        return Request.STOP if self._folder.is_probe else Request.NONE

    config = pretrain_config([*quick, "run_name=probed", "probe.enabled=true"])
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="nothing of it is kept; probed is fini") as stop:
        patch.setattr(worker.FolderRuntime, "request", stop_of_a_probe)
        run_training(PRETRAIN, config)
    command = shlex.split(str(stop.value).partition("probe it with: ")[2])
    assert command[:3] == ["python", "-m", "jobs.pretrain"] and len(command) == 4
    ended = run_training(PRETRAIN, from_values(PretrainConfig, values_of("pretrain", command[3:])))
    assert "probe/top1" in ended.metrics
    assert RunFolder(tmp_path / "runs" / "digits" / "probed-probe").is_complete


def test_a_probe_with_a_name_starts_again_after_a_stop_and_is_measured_once(quick, tmp_path: Path, monkeypatch):
    """As the one that `jobs.submit --then probe` starts."""
    run_training(PRETRAIN, pretrain_config([*quick, "run_name=mine", "probe.enabled=false"]))
    given = [f"run={tmp_path}/runs/digits/mine", "runtime=local", "run_name=mine-probe"]
    config = from_values(ProbeJobConfig, values_of("probe", given))
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="; the same command starts it again$"):
        patch.setattr(worker.FolderRuntime, "request", lambda self: Request.STOP)
        run_probe(config)
    first = run_probe(config)
    again = run_probe(config)
    assert (again.run_id, again.metrics) == (first.run_id, first.metrics)
    other = replace(config, probe=replace(config.probe, labels_per_class=1))
    assert run_probe(other).folder.name == "mine-probe-2"
    run_probe(replace(config, run_name="named"))
    for taken in ("named", "mine"):
        with pytest.raises(ConfigError, match=f"{taken} already holds a run; allowed: another run_name"):
            run_probe(replace(other, run_name=taken))


def test_a_run_of_another_process_is_refused(quick, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(running, "_FREE_WITHIN_S", 0.0)
    folder = RunFolder(tmp_path / "runs" / "digits" / "mine")
    holder = f"mine is in use: process {os.getpid()} on .* runs it; allowed: another"
    with running.running(folder):
        for resume, named in (("false", "run_name"), ("true", "resume"), ("auto", "run_name")):
            config = pretrain_config([*quick, "run_name=mine", f"resume={resume}"])
            other = "run_name" if named == "run_name" else "run"
            with pytest.raises(ConfigError, match=f"^{named}: .*{holder} {other}, or waiting for its end"):
                run_training(PRETRAIN, config)
    assert not folder.path.exists()


def test_a_replay_of_a_run_of_another_process_is_refused(quick, monkeypatch):
    monkeypatch.setattr(running, "_FREE_WITHIN_S", 0.0)
    folder = run_training(PRETRAIN, pretrain_config([*quick, "run_name=mine"])).folder
    refusal = "^folder: .*mine is in use: .* runs it; allowed: another run, or waiting for its end"
    with running.running(folder), pytest.raises(ConfigError, match=refusal):
        run_replay(ReplayConfig(folder=str(folder.path)))


def test_a_probe_of_another_process_is_left_alone_and_an_interrupted_one_restarts(quick, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(running, "_FREE_WITHIN_S", 0.0)
    run_training(PRETRAIN, pretrain_config([*quick, "run_name=mine", "probe.enabled=false"]))
    config = pretrain_config([*quick, "run_name=mine", "probe.enabled=true", "resume=auto"])
    probe = RunFolder(tmp_path / "runs" / "digits" / "mine-probe")
    probe.start({})
    probe.append_record({"step": 0, "metrics": {"probe/loss": 1.0}})
    with running.running(probe), pytest.raises(ConfigError, match="mine-probe is in use: process "):
        run_training(PRETRAIN, config)
    assert len(probe.records()) == 1
    metrics = run_training(PRETRAIN, config).metrics
    assert probe.is_complete and probe.last_metrics()["probe/top1"] == metrics["probe/top1"]
    assert sorted(path.name for path in probe.path.parent.iterdir()) == ["mine", "mine-probe"]


def test_a_resume_with_other_settings_of_the_probe_measures_again(quick, tmp_path: Path):
    given = [*quick, "run_name=whole", "probe.enabled=true", "resume=auto"]
    first = run_training(PRETRAIN, pretrain_config(given)).metrics["probe/top1"]
    few = pretrain_config([*given, "probe.labels_per_class=1"])
    found = run_training(PRETRAIN, few).metrics["probe/top1"]
    assert found < first
    names = ["whole", "whole-probe", "whole-probe-2"]
    assert sorted(path.name for path in (tmp_path / "runs" / "digits").iterdir()) == names
    for config, expected in ((few, found), (pretrain_config(given), first)):
        assert run_training(PRETRAIN, config).metrics["probe/top1"] == expected  # found, and not measured again
    assert sorted(path.name for path in (tmp_path / "runs" / "digits").iterdir()) == names


@pytest.mark.parametrize("moment", ["while it trains", "while its artifacts are sent"])
def test_a_removed_folder_fails_the_run_with_one_line(moment, quick, tmp_path: Path, monkeypatch):
    folder = RunFolder(tmp_path / "runs" / "digits" / "gone")
    owner, name = {"while it trains": (worker.FolderRuntime, "report")}.get(moment, (Upload, "upload_results"))
    original, calls = getattr(owner, name), []

    def removing(self, *given, **more):
        calls.append(1)
        if len(calls) == (4 if name == "report" else 1):
            shutil.rmtree(folder.path)
        return original(self, *given, **more)

    monkeypatch.setattr(owner, name, removing)
    config = pretrain_config([*quick, "run_name=gone", "log_every_steps=1", "checkpoint.every_epochs=1"])
    with pytest.raises(StorageError, match="output_dir: .*/digits/gone was removed during the run"):
        run_training(PRETRAIN, config)
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FAILED"
    assert "was removed during the run" in run.data.tags["ended"]
    assert not folder.path.exists()


def test_a_full_disk_fails_the_run_with_one_line(quick, tmp_path: Path, monkeypatch):
    def until_full(write):
        def limited(path, content):
            if len(folder.records()) > 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write(path, content)

        return limited

    folder = RunFolder(tmp_path / "runs" / "digits" / "full")
    for module, name in ((logs, "append_json"), (folder_module, "replace_text")):
        monkeypatch.setattr(module, name, until_full(getattr(module, name)))
    config = pretrain_config([*quick, "run_name=full", "log_every_steps=1"])
    with pytest.raises(StorageError, match="output_dir: .*/digits/full cannot be written: No space left on device"):
        run_training(PRETRAIN, config)
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FAILED"
    assert "No space left on device" in run.data.tags["ended"]


def test_a_resume_ignores_records_damaged_by_a_crash(quick, tmp_path: Path, monkeypatch):
    config = pretrain_config([*quick, "run_name=torn", "log_every_steps=1", "checkpoint.every_epochs=1"])
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(worker.FolderRuntime, "request", lambda self: Request.STOP)
        run_training(PRETRAIN, config)
    folder = RunFolder(tmp_path / "runs" / "digits" / "torn")
    folder.metrics_path.write_bytes(folder.metrics_path.read_bytes() + b"\0\xff\n" + b'{"step": 1, "met')
    (folder.path / "outcome").write_bytes(b"\xff\0")
    (folder.path / "error.json").write_bytes(b"{")
    finished = run_training(PRETRAIN, replace(config, resume=True))
    losses = [record["step"] for record in folder.records() if "train/loss" in record["metrics"]]
    assert losses == list(range(len(losses))) and len(losses) == 10
    points = MlflowClient(finished.uri).get_metric_history(finished.run_id, "train/loss")
    assert [point.step for point in points] == losses


def stopped_run(images: Path, global_batch_size: int, monkeypatch) -> PretrainConfig:
    """The configuration of a run of two epochs, named "grown" and beside the images, that has stopped after a step."""
    overrides = ["data=folder", f"data.root={images}", f"output_dir={images.parent / 'runs'}", "run_name=grown"]
    small = ["encoder.width=0.125", "epochs=2", "monitor.neighbours=2", "log_every_steps=1"]
    small += ["tracking.system_metrics=false", "tracking.register_model=false"]
    config = pretrain_config([*overrides, *small, f"global_batch_size={global_batch_size}"])
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(worker.FolderRuntime, "request", lambda self: Request.STOP)
        run_training(PRETRAIN, config)
    return config


def test_a_resume_with_other_images_is_refused_and_with_the_first_ones_continues(tmp_path: Path, monkeypatch):
    images = tmp_path / "photos"
    for number in range(16):
        write_image(images / f"{number:02d}.png", number)
    config = stopped_run(images, 8, monkeypatch)

    write_image(images / "16.png", 16)
    number = (
        "folder/train: found 17 images, but the run to resume began with 16; allowed: the same images as then, or a new"
    )
    with pytest.raises(DataError, match=number):
        run_training(PRETRAIN, replace(config, resume=True))
    (images / "03.png").unlink()
    with pytest.raises(
        DataError, match="folder/train: found 16 images, but they, their labels or names of files have changed"
    ):
        run_training(PRETRAIN, replace(config, resume=True))
    write_image(images / "03.png", 3)
    (images / "16.png").unlink()
    given = [f"resume={tmp_path}/runs/photos/grown", f"data.root={tmp_path}/others", "checkpoint.keep_last=7"]
    for path in images.iterdir():
        write_image(tmp_path / "others" / path.name, 9)
    with pytest.raises(DataError, match="names of files have changed since the run began"):
        run_training(PRETRAIN, from_values(PretrainConfig, values_of("pretrain", given)))
    # A resume that is refused leaves the settings of the run as they were.
    kept = from_values(PretrainConfig, values_of("pretrain", given[:1]))
    assert kept == replace(config, resume=True, recipe="photos")
    moved = images.rename(tmp_path / "moved")
    given = [f"resume={tmp_path}/runs/photos/grown", f"data.root={moved}"]
    finished = run_training(PRETRAIN, from_values(PretrainConfig, values_of("pretrain", given)))
    assert [record["step"] for record in finished.folder.records() if "train/loss" in record["metrics"]] == [0, 1, 2, 3]


def test_a_resume_with_another_class_is_refused_as_one_with_other_images(tmp_path: Path, monkeypatch, caplog):
    for number in range(8):
        write_image(tmp_path / "photos" / "train" / "ab"[number % 2] / f"{number}.png", number)
    config = stopped_run(tmp_path / "photos", 4, monkeypatch)
    write_image(tmp_path / "photos" / "train" / "c" / "8.png", 8)
    caplog.clear()
    with pytest.raises(DataError, match="folder/train: found 9 images, but the run to resume began with 8; allowed: "):
        run_training(PRETRAIN, replace(config, resume=True))
    assert "online probe" not in caplog.text


def test_a_data_error_leaves_no_folder_and_a_failed_run(tmp_path: Path):
    # As many as a batch: the images are opened only once the run has begun.
    photos = write_folder(tmp_path / "photos", {f"{number}.jpg": b"damaged" for number in range(512)})
    overrides = ["data=folder", f"data.root={photos}", "recipe=missing", f"output_dir={tmp_path / 'runs'}"]
    with pytest.raises(DataError, match=f"^{photos}/0.jpg: "):
        run_training(PRETRAIN, pretrain_config(overrides))
    assert not (tmp_path / "runs" / "missing").exists()
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs'}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("missing").experiment_id])
    assert run.info.status == "FAILED"
    assert run.data.tags["ended"].startswith(f"failed: {photos}/0.jpg: ")
    assert run.data.tags["ended"] in run.data.tags["mlflow.note.content"]


def test_a_run_that_failed_at_its_start_is_no_run_to_resume(quick, tmp_path: Path):
    with pytest.raises(ConfigError, match="^encoder.mean: "):
        run_training(PRETRAIN, pretrain_config([*quick, "run_name=small", "encoder.mean=[0,0]"]))
    said = "run: found 'small', which has failed or was killed before its first checkpoint; allowed: a finished run"
    for job, given in ((export, ["format=safetensors"]), (embed, ["output=x", "runtime=local"])):
        with pytest.raises(ConfigError, match=f"^{said}$"):
            job(["run=small", f"output_dir={tmp_path / 'runs'}", *given])
    with pytest.raises(ConfigError, match="^run: found 'small', which has no encoder; allowed: a finished run of jobs"):
        values_of("finetune", ["run=small", f"output_dir={tmp_path / 'runs'}", "runtime=local"])
