"""What is uploaded at the end of a run."""

from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure
from mlflow.tracking import MlflowClient

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.run.uploading import Upload, save_figures
from ssl_sec.edges.tracking.deferred import DeferredRun
from ssl_sec.edges.tracking.scores import PROTOCOL_TAG
from ssl_sec.edges.tracking.tracker import TrackedRun
from tests.edges.conftest import half_a_picture
from tests.jobs import configured


def test_a_full_disk_leaves_no_half_plot(tmp_path, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", half_a_picture)
    with pytest.raises(OSError, match="No space left"):
        save_figures(tmp_path, {"curves": Figure()})
    assert list((tmp_path / "plots").iterdir()) == []


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_probe_of_a_run_that_was_deleted_in_mlflow_lacks_nothing(is_removed, tmp_path, caplog):
    """A replay could upload no more; `mlflow gc` removes the run for good."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    trained = "0" * 32 if is_removed else MlflowClient(uri).create_run("0").info.run_id
    tags = {"job": "probe", PROTOCOL_TAG: "all labels (aaaaaaaa)"}
    identity = RunIdentity(uri=uri, experiment="digits", name="a-probe", parent_run_id=trained, tags=tags)
    probe = TrackedRun.start(identity, {})
    if not is_removed:
        probe.client.delete_run(trained)
    folder: Any = SimpleNamespace(location="runs/digits/a-probe", probed=lambda: SimpleNamespace(probe=None))
    spec: Any = SimpleNamespace(config=configured("probe", [f"run={trained}"]), folder=folder, identity=identity)
    upload = Upload(spec, DeferredRun(identity, {}, folder))
    upload._try(lambda: upload._compare(probe))
    assert upload.missing is None
    named = [f"`mlflow runs restore --run-id {trained}` it gets them" in message for message in caplog.messages]
    assert named == ([] if is_removed else [True])
