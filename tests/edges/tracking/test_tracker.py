"""Runs in MLflow."""

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from mlflow.server.security_utils import INVALID_HOST_MSG
from mlflow.tracking import MlflowClient

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.packaging import JOB_ID_VARIABLE
from ssl_sec.edges.tracking.tracker import JOB_ID_TAG, TrackedRun
from ssl_sec.errors import StorageError


@pytest.fixture
def uri(tmp_path) -> str:
    return f"sqlite:///{tmp_path}/mlflow.db"


def test_a_resumed_run_has_the_folder_that_it_was_moved_to_and_its_new_job(uri, monkeypatch):
    tags = {"job": "pretrain", "folder": "/scratch/digits/it"}
    monkeypatch.setenv(JOB_ID_VARIABLE, "first")
    run_id = TrackedRun.start(RunIdentity(uri=uri, experiment="digits", name="it", tags=tags), {}).run_id
    monkeypatch.setenv(JOB_ID_VARIABLE, "second")
    resumed = TrackedRun.reopen(uri, run_id)
    assert resumed is not None
    resumed.log_resume({**tags, "folder": "/shared/digits/it"})
    found = resumed.client.get_run(run_id).data.tags
    assert (found["folder"], found[JOB_ID_TAG]) == ("/shared/digits/it", "second")
    note = found["mlflow.note.content"]
    assert note.count("/shared/digits/it") == 3 and "/scratch" not in note


def test_a_run_that_was_deleted_is_named_with_the_command_that_restores_it(uri):
    run = TrackedRun.start(RunIdentity(uri=uri, experiment="digits", name="it", tags={"job": "pretrain"}), {})
    run.client.delete_run(run.run_id)
    restore = f"mlflow runs restore --run-id {run.run_id}"
    with pytest.raises(StorageError, match=f"run {run.run_id} was deleted in MLflow; restore it with `{restore}`$"):
        TrackedRun.reopen(uri, run.run_id)
    run.client.restore_run(run.run_id)
    assert TrackedRun.reopen(uri, run.run_id) is not None


def test_an_experiment_in_which_the_user_may_create_no_runs_is_named_with_its_key(uri, monkeypatch):
    def forbidden(self, *_, **__):
        raise MlflowException("failed with error code 403", PERMISSION_DENIED)

    monkeypatch.setattr(MlflowClient, "create_run", forbidden)
    with pytest.raises(StorageError, match="^tracking.experiment: found 'digits', in which .* lets this user create"):
        TrackedRun.start(RunIdentity(uri=uri, experiment="digits", name="it", tags={"job": "pretrain"}), {})


def test_a_server_that_refuses_its_host_name_is_not_taken_for_a_lack_of_permission(uri, monkeypatch):
    def refused(self, *_, **__):
        raise MlflowException(f"failed with error code 403. Response body: '{INVALID_HOST_MSG}'", PERMISSION_DENIED)

    monkeypatch.setattr(MlflowClient, "create_run", refused)
    with pytest.raises(StorageError, match="^tracking.uri: MLflow refuses the host of sqlite:.*--allowed-hosts$"):
        TrackedRun.start(RunIdentity(uri=uri, experiment="digits", name="it", tags={"job": "pretrain"}), {})


def test_a_reopened_run_had_ended_unless_it_has_metrics_of_later_steps(uri):
    records = [{"step": step, "metrics": {"train/loss": 1.0}} for step in range(3)]
    run = TrackedRun.start(RunIdentity(uri=uri, experiment="digits", name="it", tags={"job": "pretrain"}), {})
    run(records[:2])
    run.end("FINISHED", end_ms=123_456)
    reopened = TrackedRun.reopen(uri, run.run_id)
    reopened(records[:2])
    assert reopened.earlier_end_ms == 123_456
    reopened(records)
    assert reopened.earlier_end_ms is None
    assert TrackedRun.reopen(uri, run.run_id).earlier_end_ms is None  # it has not ended again
