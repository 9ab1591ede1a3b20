import contextlib
import errno
import json
import logging
import os
import sys
from pathlib import Path

import pytest
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking import MlflowClient
from sqlalchemy import event

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.packaging import JOB_ID_VARIABLE
from ssl_sec.edges.storage.places import STAGING_VARIABLE
from ssl_sec.edges.tracking.deferred import DeferredRun
from ssl_sec.edges.tracking.runs import RunArchive
from ssl_sec.edges.tracking.store import (
    connect_to_store,
    importing_mlflow_pytorch,
    require_store,
    store_errors,
    tracking_uri,
)
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.errors import ConfigError, StorageError, first_line
from ssl_sec.recipes.tracking import TrackingConfig
from tests.edges.servers import QuietHandler, served
from tests.jobs import pretrain


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:///{folder}/new.db",
        "sqlite:///{folder}/none/new.db",
        "sqlite:///{folder}/empty.db?timeout=5",
        "sqlite://",
        "http://127.0.0.1:5000",
        "https://name:word@mlflow.example",
        "postgresql+psycopg2://name:word@host/database",
        "databricks",
    ],
)
def test_a_possible_address_of_a_store_is_accepted(uri, tmp_path: Path):
    (tmp_path / "empty.db").touch()
    require_store(uri.format(folder=tmp_path), "tracking.uri")


@pytest.mark.parametrize(
    "uri", ["./mlruns", "mlruns", "file:///tmp/mlruns", "ftp://x", "/tmp/mlflow.db", "sqlite:x.db"]
)
def test_an_impossible_address_of_a_store_is_refused(uri):
    with pytest.raises(ConfigError, match=f"^tracking.uri: found '{uri}', must be sqlite:///<file>"):
        require_store(uri, "tracking.uri")


def test_a_store_that_was_moved_is_named_with_the_place_of_its_files(tmp_path: Path, caplog):
    def start(folder: str, name: str) -> TrackedRun:
        identity = RunIdentity(
            uri=f"sqlite:///{tmp_path / folder}/mlflow.db", experiment="photos", name=name, tags={"job": "pretrain"}
        )
        return TrackedRun.start(identity, {})

    run = start("my photos", "one")
    run.client.log_text(run.run_id, "{}", "config.yaml")
    run.end("FINISHED")
    start("my photos", "two")
    assert not caplog.messages
    (tmp_path / "my photos").rename(tmp_path / "moved")
    moved = f"the store was made in {tmp_path}/my photos and is now in {tmp_path}/moved, but MLflow looks"
    archive = RunArchive.open(TrackingConfig(), str(tmp_path / "moved"))
    found = archive.find(run.run_id, "run")
    with pytest.raises(ConfigError, match=f"^run: found 'one', but {moved} .*; or give run=<folder of the run>$"):
        archive.download_network(found, ["pretrain"], tmp_path, "last", "one")
    start("moved", "three")
    (warning,) = caplog.messages
    assert f"mlflow.db: {moved}" in warning
    assert TrackedRun.reopen(f"sqlite:///{tmp_path}/moved/mlflow.db", run.run_id) is not None
    assert caplog.messages == 2 * [warning]
    (tmp_path / "my photos").symlink_to(tmp_path / "moved")
    start("moved", "four")
    assert len(caplog.messages) == 2


def test_a_file_that_is_no_database_is_refused(tmp_path: Path):
    (tmp_path / "text").write_text("a file with other things in it")
    with pytest.raises(StorageError, match="text, which is not an SQLite database"):
        require_store(f"sqlite:///{tmp_path}/text", "tracking.uri")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written_names_the_keys_of_another(number, tmp_path: Path, monkeypatch):
    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    (tmp_path / "mlflow.db").touch()
    monkeypatch.setattr("ssl_sec.edges.tracking.store.locked", refuse)
    reason = f"as {tmp_path} cannot be written: {os.strerror(number)}; allowed: output_dir=<.*; .* run=<its folder>$"
    with pytest.raises(StorageError, match=f"^tracking.uri: MLflow at sqlite:///{tmp_path}/mlflow.db .*{reason}"):
        RunArchive.open(TrackingConfig(), str(tmp_path))


def test_a_database_whose_creation_was_interrupted_is_absent_and_can_be_created_again(tmp_path: Path, monkeypatch):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    (killed := tmp_path / f".mlflow.db.{'0123' * 8}").write_bytes(b"a part")
    (own := tmp_path / ".mlflow.db.bak").write_bytes(b"a copy of the user's")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "search_experiments", interrupted)
        with pytest.raises(KeyboardInterrupt):
            connect_to_store(uri)
    assert own.exists()
    own.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db.lock"]
    assert not killed.exists()
    connect_to_store(uri)
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.db.lock", "mlflow.db"}
    assert [each.name for each in MlflowClient(uri).search_experiments()] == ["Default"]


@pytest.mark.parametrize("name", ["why?", "50%25", "a%2Fb"])
def test_a_path_that_the_address_of_a_database_would_change_is_refused(name, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert run_job("pretrain", pretrain, ["experiment=digits", "runtime=local", f"output_dir={tmp_path / name}"]) == 2
    output = capsys.readouterr().err.strip()
    assert output.startswith(f"error: output_dir: MLflow's database would be at sqlite:///{tmp_path}/{name}/mlflow.db")
    assert "\n" not in output and list(tmp_path.iterdir()) == []
    elsewhere = f"sqlite:///{tmp_path}/mlflow.db?timeout=5"
    assert tracking_uri(TrackingConfig(uri=elsewhere), str(tmp_path / name)) == elsewhere
    with pytest.raises(ConfigError, match=r"^tracking\.uri: MLflow's database would be at .*'%41' does not stand for"):
        require_store(f"sqlite:///{tmp_path}/%41/mlflow.db?timeout=5", "tracking.uri")


def test_an_address_with_a_slash_in_its_password_is_refused_without_the_password():
    with pytest.raises(
        ConfigError, match=r"^tracking\.uri: found an address with a port that is no number.*%2F"
    ) as error:
        require_store("http://user:secret/pw@server:5000", "tracking.uri")
    assert "secret" not in str(error.value)


def test_a_file_is_absolute_and_that_of_a_submitted_job_in_a_bucket_is_in_its_staging_folder(tmp_path, monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", JOB_ID_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(STAGING_VARIABLE, str(tmp_path / "staging"))
    monkeypatch.chdir(tmp_path)
    assert tracking_uri(TrackingConfig(uri="sqlite:///a.db?timeout=5"), "x") == f"sqlite:///{tmp_path}/a.db?timeout=5"
    assert tracking_uri(TrackingConfig(), "s3://bucket/runs") == f"sqlite:///{tmp_path}/runs/mlflow.db"
    monkeypatch.setenv(JOB_ID_VARIABLE, "job")
    assert tracking_uri(TrackingConfig(), "s3://bucket/runs").startswith(f"sqlite:///{tmp_path}/staging/")


def test_a_folder_is_refused_before_the_run_starts(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}")
    assert run_job("pretrain", pretrain, ["runtime=local", f"output_dir={tmp_path / 'runs'}"]) == 4
    output = capsys.readouterr().err.strip()
    assert output.startswith("error: MLFLOW_TRACKING_URI: found sqlite:") and "which is a folder" in output
    assert "\n" not in output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("is_full", [False, True])
def test_a_store_that_fails_while_parameters_are_logged_has_one_run(tmp_path: Path, monkeypatch, is_full: bool):
    """Also if the run's folder cannot keep the id of the run."""
    identity = RunIdentity(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="e", name="n", tags={})
    tracking = DeferredRun(identity, {"seed": 3, "epochs": 9}, RunFolder(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    if is_full:

        def fill(self, text):
            raise OSError(errno.ENOSPC, "No space left on device", str(self))

        monkeypatch.setattr(Path, "write_text", fill)
    log, calls = MlflowClient.log_batch, []

    def fails_twice(*arguments, **more):
        calls.append(more)
        if len(calls) < 3:
            raise MlflowException("not now")
        log(*arguments, **more)

    monkeypatch.setattr(MlflowClient, "log_batch", fails_twice)
    for _ in range(2):
        with pytest.raises((MlflowException, StorageError), match="not now"):
            tracking([])
    tracking([])
    (run,) = MlflowClient(identity.uri).search_runs(["1"])
    assert run.data.params == {"seed": "3", "epochs": "9"}
    assert not [tag for tag in run.data.tags if tag.startswith("resumed")]


def test_a_deleted_experiment_is_named_with_the_command_that_restores_it(tmp_path: Path):
    identity = RunIdentity(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="e", name="n", tags={})
    TrackedRun.start(identity, {})
    MlflowClient(identity.uri).delete_experiment("1")
    restore = "mlflow experiments restore --experiment-id 1"
    with pytest.raises(StorageError, match=f"^tracking.experiment: 'e' was deleted in MLflow; .* `{restore}`, or give"):
        TrackedRun.start(identity, {})


def test_settings_that_a_resume_has_changed_count_for_reports(tmp_path: Path):
    uri, values = f"sqlite:///{tmp_path}/mlflow.db", {"steps": 200, "data": {"train": ["x" * 7000]}, "run_name": None}
    tags = {"job": "metric_learning", "recipe": "r"}
    identity = RunIdentity(uri=uri, experiment="e", name="n", tags=tags)
    run_id = TrackedRun.start(identity, values, lambda _: None).run_id
    for steps in (400, 400, 200, 300):
        tracked = TrackedRun.reopen(uri, run_id)
        assert tracked is not None
        tracked.log_changes({**values, "steps": steps, "run_name": "made"})
        tracked.end("FINISHED")
        (run,) = RunArchive.open(TrackingConfig(uri=uri), str(tmp_path)).finished("r")
        assert run.params["steps"] == run.settings["steps"] == str(steps)
    changed = {tag for tag in MlflowClient(uri).get_run(run_id).data.tags if tag.startswith("resumed.")}
    assert changed == {"resumed.steps"}


class OneRun(QuietHandler):
    """Answers every request as MLflow's server does for a run."""

    def do_GET(self) -> None:
        run = {"info": {"run_id": "abc", "experiment_id": "1", "status": "RUNNING"}, "data": {}}
        body = json.dumps({"run": run}).encode()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


def test_a_password_in_the_address_is_not_printed_when_a_run_ends(capfd):
    with served(OneRun) as address:
        uri = address.replace("//", "//ada:geheim@")
        TrackedRun(MlflowClient(uri), "abc", "1").end("FINISHED")
    assert capfd.readouterr() == ("", "")


def test_a_full_database_is_one_line_without_a_traceback(tmp_path: Path, capfd):
    client = connect_to_store(uri := f"sqlite:///{tmp_path}/mlflow.db")
    run_id = client.create_run("0").info.run_id

    def limit(connection, record, proxy):
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")

    event.listen(engine := SqlAlchemyStore._engine_map[uri], "checkout", limit)
    try:
        with pytest.raises(MlflowException) as caught:
            client.log_batch(run_id, [Metric(f"metric {number}", 1.0, 0, 0) for number in range(1000)])
    finally:
        event.remove(engine, "checkout", limit)
    assert first_line(caught.value) == "database or disk is full"
    assert "Traceback" not in capfd.readouterr().err


def test_a_server_that_does_not_know_the_user_says_so():
    """MLflow's own authentication answers without an error code of MLflow."""
    with pytest.raises(
        StorageError, match=r"^tracking\.uri: MLflow at http://mlflow:5000 does not know the user; .* in ML"
    ):
        with store_errors("http://mlflow:5000"):
            raise MlflowException(
                "API request to endpoint /api/x failed with error code 401 != 200. Response body: 'You'"
            )


def test_a_store_that_is_asked_through_a_proxy_says_so(monkeypatch):
    for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    expected = (
        "tracking.uri: MLflow at http://mlflow:5000 cannot be used; it was asked through the proxy "
        "http://proxy:3128; no_proxy=mlflow asks it directly: API request failed"
    )
    with pytest.raises(StorageError, match=f"^{expected}$"), store_errors("http://mlflow:5000"):
        raise MlflowException("API request failed")


def test_the_root_logger_of_a_notebook_stays_as_it_was(monkeypatch):
    monkeypatch.delitem(sys.modules, "mlflow.pytorch._lightning_autolog", raising=False)
    monkeypatch.setattr(logging.root, "handlers", [])
    level = logging.root.level

    with importing_mlflow_pytorch(), contextlib.suppress(ImportError):
        import mlflow.pytorch._lightning_autolog  # noqa: F401

    assert logging.root.handlers == []
    assert logging.root.level == level
