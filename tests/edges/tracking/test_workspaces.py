"""Workspaces of MLflow's server, and the store of a resumed run."""

import pytest
from mlflow import set_workspace
from mlflow.tracking import MlflowClient

from ssl_sec.edges.config import ReplayConfig
from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.driver import run_probe, run_replay, run_training
from ssl_sec.edges.run.summary import ui_instructions
from ssl_sec.edges.submit.orders import passed_environment
from ssl_sec.edges.tracking.identity import require_workspace
from ssl_sec.edges.tracking.pages import run_page, runs_page, scores_page
from ssl_sec.edges.tracking.runs import beside, on_its_server
from ssl_sec.edges.tracking.store import workspace_of
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.recipes.tracking import TrackingConfig
from tests.edges.conftest import QUICK
from tests.edges.servers import mlflow_server
from tests.jobs import configured

SERVER, FILE = "http://mlflow.lab:5000", "sqlite:////lab/mlflow.db"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("MLFLOW_WORKSPACE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def test_the_pages_are_those_of_the_workspace(monkeypatch):
    assert run_page("1", "a0") == "/#/experiments/1/runs/a0?workflowType=machine_learning"
    monkeypatch.setenv("MLFLOW_WORKSPACE", "team-a")
    workspace = "workflowType=machine_learning&workspace=team-a"
    assert run_page("1", "a0") == f"/#/experiments/1/runs/a0?{workspace}"
    assert runs_page("1", "tags.a = 'b'") == f"/#/experiments/1/runs?{workspace}&searchFilter=tags.a+%3D+%27b%27"
    assert scores_page("1") == f"/#/experiments/1/runs?{workspace}&viewStateShareKey=scores"


def test_a_submitted_job_gets_the_workspace(monkeypatch):
    assert "MLFLOW_WORKSPACE" not in passed_environment(is_local=True)
    monkeypatch.setenv("MLFLOW_WORKSPACE", "team-a")
    assert passed_environment(is_local=True)["MLFLOW_WORKSPACE"] == "team-a"


@pytest.mark.parametrize(
    ("uri", "kept", "given", "is_allowed"),
    [
        (SERVER, "team-a", "team-a", True),
        (SERVER, "team-a", None, False),
        (SERVER, "team-a", "team-b", False),
        (SERVER, None, "team-a", True),  # runs of earlier versions have none
        (FILE, None, "team-a", True),
    ],
)
def test_another_workspace_than_that_of_a_run_is_refused(uri, kept, given, is_allowed, monkeypatch, tmp_path):
    if given is not None:
        monkeypatch.setenv("MLFLOW_WORKSPACE", given)
    identity = RunIdentity(uri=uri, workspace=kept, name="small")
    folder = RunFolder(tmp_path)
    folder.start({})
    folder.write_identity(identity)
    assert folder.identity == identity
    if is_allowed:
        require_workspace(identity)
        assert beside(str(tmp_path), TrackingConfig()).uri == uri
        return
    found = "null" if given is None else "'team-b'"
    message = f"^MLFLOW_WORKSPACE: found {found}, but run small is in a workspace of {uri}; allowed: .*=team-a$"
    for refused in (lambda: require_workspace(identity), lambda: beside(str(tmp_path), TrackingConfig())):
        with pytest.raises(ConfigError, match=message):
            refused()
    assert beside(str(tmp_path), TrackingConfig(uri=FILE)).uri == FILE


def test_only_a_server_has_workspaces(monkeypatch):
    monkeypatch.setenv("MLFLOW_WORKSPACE", "team-a")
    assert (workspace_of(SERVER), workspace_of(FILE)) == ("team-a", None)
    monkeypatch.setenv("MLFLOW_WORKSPACE", "")
    assert workspace_of(SERVER) is None


@pytest.mark.parametrize(
    ("kept", "given", "from_environment", "expected"),
    [
        (SERVER, None, None, SERVER),
        ("postgresql://lab/mlflow", None, None, "postgresql://lab/mlflow"),
        (SERVER, FILE, None, FILE),
        (SERVER, None, FILE, None),
        (FILE, None, None, None),  # the folder may have been copied with its file
        ("postgresql://me:***@lab/mlflow", None, None, None),
    ],
)
def test_a_run_is_resumed_on_its_server(kept, given, from_environment, expected, monkeypatch, tmp_path):
    if from_environment is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", from_environment)
    folder = RunFolder(tmp_path)
    folder.start({})
    folder.write_identity(RunIdentity(uri=kept))
    assert on_its_server(folder, TrackingConfig(uri=given)).uri == expected


@pytest.mark.slow
def test_a_run_its_probe_and_its_resume_are_in_one_workspace(monkeypatch, tmp_path):
    options = (
        *("--enable-workspaces", "--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"),
        *("--artifacts-destination", str(tmp_path / "artifacts")),
    )
    overrides = [*QUICK, "runtime=local", f"output_dir={tmp_path}/runs", "run_name=small"]
    with mlflow_server("server", *options, log=tmp_path / "log") as uri:
        MlflowClient(uri)._get_workspace_client().create_workspace("team-a")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.setenv("MLFLOW_WORKSPACE", "team-a")
        finished = run_training(PRETRAIN, configured("pretrain", overrides))
        assert f"{uri}/#/experiments/" in ui_instructions(finished) and "workspace=team-a" in ui_instructions(finished)

        monkeypatch.delenv("MLFLOW_TRACKING_URI")
        monkeypatch.delenv("MLFLOW_WORKSPACE")
        folder = finished.folder.path
        for refused in (
            lambda: run_probe(configured("probe", [f"run={folder}", "runtime=local"])),
            lambda: run_replay(ReplayConfig(folder=str(folder))),
        ):
            with pytest.raises(ConfigError, match="^MLFLOW_WORKSPACE: found null, but run small is in a workspace of"):
                refused()
        monkeypatch.setenv("MLFLOW_WORKSPACE", "team-a")
        (folder / "unclosed").touch()  # as of a driver that was killed before the upload
        resumed = run_training(PRETRAIN, configured("pretrain", [*overrides, "resume=true"]))
        assert resumed.uri == uri and resumed.run_id == finished.run_id
        assert [each.name for each in MlflowClient(uri).search_experiments()] == [finished.folder.path.parent.name]
        set_workspace(None)
        assert [each.name for each in MlflowClient(uri).search_experiments()] == ["Default"]
