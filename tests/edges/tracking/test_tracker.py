"""Runs in MLflow."""

import pytest

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.packaging import JOB_ID_VARIABLE
from ssl_sec.edges.tracking.tracker import JOB_ID_TAG, TrackedRun


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
