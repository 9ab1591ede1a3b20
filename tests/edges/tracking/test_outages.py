"""Training neither waits for a failing tracking database nor fails with it, and a replay sends the rest."""

import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking import MlflowClient

from ssl_sec.edges.config import ReplayConfig
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.driver import run_replay
from ssl_sec.edges.tracking.store import connect_to_store
from tests.edges.conftest import QUICK, WHOLE
from tests.edges.run.faulty import folder_of, steps_so_far

pytestmark = pytest.mark.slow

ANSWER_S = 3.0

# A run that stops waiting while MLflow makes its tables leaves half of them, so there is time for a busy machine.
TABLES_S = 30.0

# MLflow itself tries for 150 s and more; a busy machine draws the pictures in less.
WAITED_S = 100

# Prints when it began, after the imports, and when it ended.
RUN = f"""
import sys, time
from tests.jobs import pretrain
from ssl_sec.edges.run import uploading
from ssl_sec.edges.command_line import run_job
uploading.ANSWER_S = {ANSWER_S}
began = time.time()
code = run_job("pretrain", pretrain, sys.argv[1:])
print("times", began, time.time())
sys.exit(code)
"""

# Each connection to the database may add a few pages of 4 KiB to it.
FULL = """
from sqlalchemy import event
from sqlalchemy.engine import Engine

@event.listens_for(Engine, "connect")
def limit(connection, record):
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 8}")
"""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A store with its tables, which this process has opened by another name and closed."""
    uri = f"sqlite:///{tmp_path}/./mlflow.db"
    connect_to_store(uri)
    SqlAlchemyStore._engine_map[uri].dispose()
    return tmp_path / "mlflow.db"


def started(folder: Path, code: str = RUN) -> subprocess.Popen:
    given = ["runtime=local", "epochs=40", "log_every_steps=1", f"output_dir={folder}", "run_name=it"]
    command = [sys.executable, "-c", code, *QUICK, *WHOLE, *given]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lock(database: Path) -> sqlite3.Connection:
    """Holds the database for itself, as a process that hangs does."""
    other = sqlite3.connect(database, timeout=60, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    return other


def wait_for_steps(process: subprocess.Popen, run: RunFolder) -> None:
    while steps_so_far(run) < 5 or not run.run_id_path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def assert_trained_to_its_end(process: subprocess.Popen, run: RunFolder) -> str:
    """Returns the one warning that names the command for the rest."""
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    began, ended = map(float, output.splitlines()[-1].split()[1:])
    assert run.workers_path.stat().st_mtime - began < WAITED_S
    assert ended - (run.path / "outcome").stat().st_mtime < WAITED_S
    assert steps_so_far(run) == 200 and run.outcome() == "finished"
    warnings = [line for line in errors.splitlines() if line.startswith("WARNING")]
    last = warnings[-1]
    assert last.endswith(f": python -m jobs.replay folder={run.path}")
    assert sum("jobs.replay" in line for line in warnings) == 1
    assert len(warnings) <= 2  # the outage itself, once
    return last


def assert_replayed(run: RunFolder, uri: str) -> None:
    """Every figure is in MLflow once, and the run's state is right."""
    replayed = run_replay(ReplayConfig(folder=str(run.path)))
    client = MlflowClient(uri)
    assert client.get_run(replayed.run_id).info.status == "FINISHED"
    for name in ("train/loss", "val/knn_top1"):
        expected = [(r["step"], r["metrics"][name]) for r in run.records() if name in r["metrics"]]
        points = client.get_metric_history(replayed.run_id, name)
        assert sorted((point.step, point.value) for point in points) == expected
    assert "encoder.safetensors" in {file.path for file in client.list_artifacts(replayed.run_id)}


def test_a_database_locked_from_the_start_delays_nothing(tmp_path, database):
    run, other = folder_of(tmp_path), lock(database)
    last = assert_trained_to_its_end(started(tmp_path), run)
    assert f"MLflow did not answer for {ANSWER_S:g} s; upload what is missing with: " in last
    other.close()
    assert_replayed(run, f"sqlite:///{database}")


def test_a_database_locked_in_mid_run_delays_nothing(tmp_path, database):
    run, process = folder_of(tmp_path), started(tmp_path)
    wait_for_steps(process, run)
    other = lock(database)
    last = assert_trained_to_its_end(process, run)
    assert f"MLflow did not answer for {ANSWER_S:g} s" in last
    other.close()
    assert_replayed(run, f"sqlite:///{database}")


def test_a_database_full_in_mid_run_does_not_fail_the_run(tmp_path, database):
    run = folder_of(tmp_path)
    last = assert_trained_to_its_end(started(tmp_path, FULL + RUN), run)
    assert "records of metrics; upload what is missing with: " in last
    assert_replayed(run, f"sqlite:///{database}")


def test_a_database_deleted_in_mid_run_does_not_fail_the_run(tmp_path, database):
    run, process = folder_of(tmp_path), started(tmp_path, RUN.replace(f"{ANSWER_S}", f"{TABLES_S}"))
    wait_for_steps(process, run)
    database.unlink()
    assert_trained_to_its_end(process, run)
    assert_replayed(run, f"sqlite:///{database}")
