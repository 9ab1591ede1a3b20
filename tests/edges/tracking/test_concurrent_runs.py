"""Many runs at once on one store: every point of every run is there once."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tests.edges.servers import free_port, mlflow_server

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("postgres.sh")
STEPS = 60

# Writes metrics as a run does, some at a time, and follows them into the store; several runs in one process.
RUNS = """
import json, sys, threading, time
from pathlib import Path
from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.tracking.deferred import DeferredRun
from ssl_sec.edges.tracking.following import Follower

uri, folder, first, count, steps = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])

def run(number):
    mine = folder / str(number)
    mine.mkdir()
    tags = {"job": "pretrain"}
    identity = RunIdentity(uri=uri, experiment="many", name=f"run-{number}", tags=tags)
    tracking = DeferredRun(identity, {"seed": number}, RunFolder(mine))
    with Follower(mine / "metrics.jsonl", tracking, interval_s=0.05, retry_s=0.2):
        for step in range(steps):
            with (mine / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "metrics": {"a": step + number, "b": -step}}) + "\\n")
            time.sleep(0.02)
    tracking.connect().end("FINISHED")

threads = [threading.Thread(target=run, args=(first + k,)) for k in range(count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def run_at_once(uri: str, folder: Path, num_processes: int, runs_each: int) -> None:
    folder.mkdir()
    command = [sys.executable, "-c", RUNS, uri, str(folder)]
    processes = [
        subprocess.Popen([*command, str(number * runs_each), str(runs_each), str(STEPS)])
        for number in range(num_processes)
    ]
    assert [process.wait(300) for process in processes] == [0] * num_processes


def assert_nothing_is_lost(uri: str, num_runs: int) -> None:
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("many")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == sorted(f"run-{number}" for number in range(num_runs))
    for number in range(num_runs):
        run = runs[f"run-{number}"]
        assert (run.info.status, run.data.params["seed"]) == ("FINISHED", str(number))
        for key, values in {
            "a": [step + number for step in range(STEPS)],
            "b": [-step for step in range(STEPS)],
        }.items():
            points = client.get_metric_history(run.info.run_id, key)
            assert [(point.step, point.value) for point in points] == list(enumerate(values))


def test_eight_runs_at_once_on_sqlite_lose_no_point(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run_at_once(uri, tmp_path / "runs", num_processes=8, runs_each=1)
    assert_nothing_is_lost(uri, 8)


@pytest.fixture
def postgres(tmp_path_factory):
    """The URI of a PostgreSQL server that the script has started."""
    if not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        pytest.skip("no PostgreSQL on this machine: apt-get install postgresql")
    folder = Path(tmp_path_factory.mktemp("postgres"))
    # The server's user must reach it.
    for closed in itertools.takewhile(lambda path: not path.stat().st_mode & 0o001, (folder, *folder.parents)):
        closed.chmod(0o755)
    started = subprocess.run([SCRIPT, "start", folder, str(free_port())], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr + (folder / "log").read_text()
    yield started.stdout.strip()
    stopped = subprocess.run([SCRIPT, "stop", folder], capture_output=True, text=True)
    assert stopped.returncode == 0, stopped.stderr + (folder / "data" / "server.log").read_text()


@pytest.fixture
def server(postgres, tmp_path):
    """The address of an MLflow server on that database."""
    options = ("--artifacts-destination", str(tmp_path / "artifacts"), "--workers", "2")
    store = {"MLFLOW_BACKEND_STORE_URI": postgres}
    with mlflow_server("server", *options, log=tmp_path / "server.log", environment=store) as address:
        yield address


def test_thirty_two_runs_at_once_on_postgresql_lose_no_point(server, tmp_path):
    run_at_once(server, tmp_path / "runs", num_processes=4, runs_each=8)
    assert_nothing_is_lost(server, 32)
