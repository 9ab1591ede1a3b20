"""Runs whose folder is in object storage."""

import json
import logging
import re
import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from ssl_sec import load_encoder
from ssl_sec.edges.folder.finding import find_folder
from ssl_sec.edges.folder.names import claim_name
from ssl_sec.edges.folder.stored import StoredFolder
from ssl_sec.edges.run import worker
from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.run.job_values import values_of
from ssl_sec.edges.run.worker import FolderRuntime
from ssl_sec.edges.storage.bucket import Bucket, RefusedError
from ssl_sec.edges.storage.checkpoints import whole_checkpoints
from ssl_sec.edges.storage.lease import this_machine
from ssl_sec.edges.storage.places import local_folder
from ssl_sec.errors import ConfigError, Stopped, StorageError
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.settings import from_values
from tests import jobs
from tests.edges.conftest import QUICK
from tests.edges.run.driver.conftest import pretrain_config
from tests.edges.run.faulty import signalling_at


@pytest.fixture
def stored(s3: str, tmp_path: Path, monkeypatch) -> list[str]:
    """Overrides of a short digits run that is kept in object storage, and tracked here."""
    monkeypatch.chdir(tmp_path)
    return [*QUICK, f"output_dir={s3}", "probe.enabled=false", "log_every_steps=1"]


def on_another_machine(tmp_path: Path, monkeypatch) -> None:
    """The staging folders are gone."""
    shutil.rmtree(tmp_path / "staging")
    monkeypatch.setenv("SSL_SEC_STAGING", str(tmp_path / "staging of another machine"))


def test_a_stopped_run_resumes_on_another_machine_bit_equal(stored, s3, tmp_path: Path, monkeypatch):
    config = pretrain_config([*stored, "run_name=stopped"])
    local = replace(config, run_name="unstopped", output_dir=str(tmp_path / "runs"))
    expected = run_training(PRETRAIN, local)

    with monkeypatch.context() as patch, pytest.raises(Stopped, match="stopped; resume it with: ") as stop:
        patch.setattr(FolderRuntime, "report", signalling_at(3))
        run_training(PRETRAIN, config)
    command = shlex.split(str(stop.value).partition("with: ")[2])
    assert command[3:] == [f"resume={s3}/digits/stopped"]
    assert whole_checkpoints(Bucket(f"{s3}/digits/stopped/checkpoints").files()) == ["step-000000004"]
    assert not list((tmp_path / "staging").rglob("state.pt"))

    on_another_machine(tmp_path, monkeypatch)
    resumed = run_training(PRETRAIN, from_values(PretrainConfig, values_of("pretrain", command[3:])))
    weights, wanted = load_file(resumed.folder.encoder_path), load_file(expected.folder.encoder_path)
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    client = MlflowClient(expected.uri)
    losses = [(point.step, point.value) for point in client.get_metric_history(resumed.run_id, "train/loss")]
    assert losses == [(p.step, p.value) for p in client.get_metric_history(expected.run_id, "train/loss")]
    assert client.get_run(resumed.run_id).info.status == "FINISHED"

    stored_files, local_files = (
        Bucket(f"{s3}/digits/stopped").files().keys(),
        {
            path.relative_to(expected.folder.path).as_posix()
            for path in expected.folder.path.rglob("*")
            if path.is_file()
        },
    )
    assert {name for name in local_files if not name.startswith("launch")} <= stored_files | {"ray"}
    assert {"unclosed", "not_uploaded", ".lease"}.isdisjoint(stored_files)

    on_a_third = tmp_path / "third"
    monkeypatch.setenv("SSL_SEC_STAGING", str(on_a_third))
    again = run_training(PRETRAIN, replace(config, resume=True))  # there is nothing left to do
    assert again.metrics == resumed.metrics


def test_a_run_in_storage_is_probed_exported_loaded_and_uploaded_again(stored, s3, tmp_path: Path, monkeypatch):
    finished = run_training(PRETRAIN, pretrain_config([*stored, "run_name=whole"]))
    url, weights = f"{s3}/digits/whole", load_file(finished.folder.encoder_path)
    assert finished.folder.location == url
    on_another_machine(tmp_path, monkeypatch)

    jobs.probe([f"run={url}", f"output_dir={s3}", "runtime=local", "probe.epochs=2", "probe.decay_at=[]"])
    assert "confusion.json" in Bucket(f"{s3}/digits/whole-probe").files()
    jobs.export([f"run={url}", "format=safetensors", f"output={tmp_path / 'exported'}"])
    exported = load_file(tmp_path / "exported" / "encoder.safetensors")
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    loaded = load_encoder(url).backbone.state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)

    other = f"sqlite:///{tmp_path}/other.db"
    jobs.replay([f"folder={url}", f"uri={other}"])
    runs = MlflowClient(other).search_runs(["1"])
    assert [run.info.status for run in runs] == ["FINISHED"] and runs[0].data.tags["folder"] == url
    # By its name, and by its id.
    assert all(find_folder("folder", word, s3).location == url for word in ("whole", runs[0].info.run_id[:8]))
    with pytest.raises(ConfigError, match="matches 2 runs"):
        find_folder("folder", "who", s3)
    assert not (tmp_path / "runs" / "digits").exists()


def test_a_run_has_one_process_on_any_machine(stored, s3):
    Bucket(f"{s3}/digits/taken").write(
        ".lease", json.dumps({"token": "", "host": "far", "pid": 1, "since": "noon", "expires": 4e9}).encode()
    )
    for resume, refusal in (("false", "^run_name: .*another run_name, or"), ("true", "^resume: .*another run, or")):
        with pytest.raises(ConfigError, match="digits/taken is in use: process 1 on far runs it") as refused:
            run_training(PRETRAIN, pretrain_config([*stored, "run_name=taken", f"resume={resume}"]))
        assert re.search(refusal, str(refused.value))
    assert Bucket(f"{s3}/digits/taken").files().keys() == {".lease"}


@pytest.mark.parametrize("holder", ["another machine", pytest.param("a process that has died", marks=pytest.mark.slow)])
def test_an_interrupted_probe_starts_again_under_its_name_unless_another_process_runs_it(holder, stored, s3):
    run_training(PRETRAIN, pretrain_config([*stored, "run_name=it"]))
    machine, process = ("another", 1) if holder == "another machine" else (this_machine(), 2**22 + 1)
    lease = {"token": "", "host": "far", "machine": machine, "pid": process, "since": "noon", "expires": 4e9}
    probe = Bucket(f"{s3}/digits/it-probe")
    probe.write("config.yaml", b"{}")
    probe.write(".lease", json.dumps(lease).encode())
    config = pretrain_config([*stored, "run_name=it", "probe.enabled=true", "resume=auto"])
    if holder == "another machine":
        with pytest.raises(ConfigError, match="digits/it-probe is in use: process 1 on far runs it"):
            run_training(PRETRAIN, config)
        assert probe.files().keys() == {"config.yaml", ".lease"}
    else:
        assert "probe/top1" in run_training(PRETRAIN, config).metrics
        assert "confusion.json" in probe.files() and probe.read(".lease") is None
    assert {name.partition("/")[0] for name in Bucket(f"{s3}/digits").files()} == {"it", "it-probe"}


def test_a_taken_name_is_refused_and_generated_names_are_free(stored, s3):
    folder = local_folder(s3) / "digits"
    assert [claim_name(folder, "made") for _ in range(3)] == ["made", "made-2", "made-3"]
    Bucket(s3).write("digits/taken/config.yaml", b"recipe: digits")
    with pytest.raises(ConfigError, match=rf"run_name: {s3}/digits/taken already holds a run; allowed: another"):
        run_training(PRETRAIN, pretrain_config([*stored, "run_name=taken"]))
    Bucket(s3).write("digits/photos/cats/1.jpg", b"")
    with pytest.raises(ConfigError, match=rf"run_name: {s3}/digits/photos holds cats, but no run; allowed"):
        run_training(PRETRAIN, pretrain_config([*stored, "run_name=photos"]))
    assert Bucket(f"{s3}/digits/photos").files().keys() == {"cats/1.jpg"}


def test_a_run_that_never_started_leaves_nothing(stored, s3):
    with pytest.raises(ConfigError):
        run_training(PRETRAIN, pretrain_config([*stored, "run_name=impossible", "encoder.mean=[0,0]"]))
    assert Bucket(s3).files() == {}


def test_a_checkpoint_that_cannot_be_uploaded_ends_the_run_with_its_local_path(stored, s3, monkeypatch):
    upload = Bucket.upload

    def full(self, path, name):
        if name.endswith("state.pt"):
            raise PermissionError("QuotaExceeded")
        upload(self, path, name)

    monkeypatch.setattr(Bucket, "upload", full)
    with pytest.raises(StorageError, match=r"^step-000000010 .* QuotaExceeded; it is in .*staging.* on "):
        run_training(PRETRAIN, pretrain_config([*stored, "run_name=full"]))
    folder = find_folder("folder", f"{s3}/digits/full", s3)
    assert isinstance(folder, StoredFolder) and folder.status == "FAILED"


@pytest.mark.parametrize("held_since", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_checkpoint_that_could_not_be_uploaded_is_used_by_a_resume_here(held_since, stored, s3, monkeypatch, caplog):
    bucket, upload, report = Bucket(f"{s3}/digits/full"), Bucket.upload, FolderRuntime.report
    config = pretrain_config([*stored, "run_name=full", "checkpoint.every_epochs=1"])

    def waiting(self, step, metrics, norms=None):  # so that the first checkpoint is sent without the refused record
        deadline = time.monotonic() + 120
        while step == 6 and "step-000000005" not in whole_checkpoints(bucket.folder("checkpoints").files()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        report(self, step, metrics, norms)

    def full(self, path, name):
        if "step-000000010" in name or (name == "metrics.jsonl" and b'"step": 6' in path.read_bytes()):
            raise RefusedError("QuotaExceeded")
        upload(self, path, name)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match=r"^step-000000010 .* QuotaExceeded"):
        patch.setattr(Bucket, "upload", full)
        patch.setattr(FolderRuntime, "report", waiting)
        run_training(PRETRAIN, config)
    assert "step-000000010" not in whole_checkpoints(bucket.folder("checkpoints").files())
    if held_since:
        bucket.write(".holder", b"another process")
    taken: list[int] = []

    def noting(self, step, metrics, norms=None):
        taken.append(step)
        report(self, step, metrics, norms)

    monkeypatch.setattr(FolderRuntime, "report", noting)
    resumed = run_training(PRETRAIN, replace(config, resume=True))
    assert ("step-000000010 is not used: it was not uploaded" in caplog.text) == held_since
    assert (6 in taken) == held_since  # the steps after the last checkpoint that was uploaded
    assert {record["step"] for record in resumed.folder.records()} >= set(range(10))
    assert whole_checkpoints(bucket.folder("checkpoints").files())[-1] == "step-000000010"
    assert not list(local_folder(s3).rglob("state.pt"))


def test_a_checkpoint_that_a_reader_downloads_does_not_stay(stored, s3, tmp_path: Path):
    run_training(PRETRAIN, pretrain_config([*stored, "run_name=it"]))
    jobs.export([f"run={s3}/digits/it", "format=safetensors", "checkpoint=10", f"output={tmp_path / 'exported'}"])
    copies = local_folder(s3, "copies")
    assert [copies in path.parents for path in local_folder(s3).rglob("state.pt")] == [True]  # removed with the process


def test_a_run_taken_over_by_another_process_stops_and_leaves_its_files_alone(stored, s3, monkeypatch, caplog):
    take_over = json.dumps({"token": "other", "host": "far", "pid": 1, "since": "noon", "expires": 4e9}).encode()
    monkeypatch.setattr("ssl_sec.edges.storage.lease._RENEWED_EVERY_S", 0.01)
    bucket, report = Bucket(f"{s3}/digits/lost"), FolderRuntime.report

    def losing(self, step, metrics, norms=None):
        report(self, step, metrics, norms)
        if step == 2:
            while not self._folder.stop_path.exists():
                bucket.write(".lease", take_over)

    monkeypatch.setattr(worker.FolderRuntime, "report", losing)
    with caplog.at_level(logging.ERROR), pytest.raises(Stopped):
        run_training(PRETRAIN, pretrain_config([*stored, "run_name=lost"]))
    assert "another process has taken it over; this one stops" in caplog.text
    assert bucket.read(".lease") == take_over
    assert "outcome" not in bucket.files()
