"""Jobs on a Ray cluster with token authentication, sent as a user sends them."""

import json
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.tracking import MlflowClient

from tests.edges.conftest import QUICK, WHOLE
from tests.edges.servers import free_port

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

TWO_WORKERS = (*QUICK, *WHOLE, "runtime.num_workers=2", "runtime.cpus_per_worker=1", "runtime.max_failures=0")


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A head on loopback that asks for a token; its environment is what a job's driver inherits."""
    folder = tmp_path_factory.mktemp("head")
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",  # no python of ours
    }
    environment.pop("RAY_ADDRESS", None)
    dashboard = free_port()
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2"]
    command += ["--node-ip-address=127.0.0.1", f"--port={free_port()}", f"--dashboard-port={dashboard}"]
    command += [f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}"]
    command += ["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
    # A socket's path has at most 107 characters.
    short = Path("/tmp") / f"ssl_sec-{os.getpid()}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--temp-dir={short}"], env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{dashboard}"
    try:
        deadline = time.monotonic() + 120
        while submit(SimpleNamespace(address=address, environment=environment), "list").returncode != 0:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
        yield SimpleNamespace(address=address, environment=environment, runs=folder / "runs")
    finally:
        process.terminate()
        process.wait(60)


def submit(head, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jobs.submit", *arguments, "--address", head.address]
    return subprocess.run(command, env=head.environment, capture_output=True, text=True)


def listed(head, job_id: str) -> dict[str, dict]:
    """What Ray knows of a job and of its parts."""
    token = Path(head.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
    request = urllib.request.Request(f"{head.address}/api/jobs/", headers={"Authorization": f"Bearer {token}"})
    jobs = json.loads(urllib.request.urlopen(request).read())
    return {job["submission_id"]: job for job in jobs if (job["submission_id"] or "").startswith(job_id)}


def states(head, job_id: str) -> dict[str, str]:
    """The states of a job and of its parts."""
    return {part: job["status"] for part, job in listed(head, job_id).items()}


def runs(head, recipe: str = "digits") -> dict:
    client = MlflowClient(f"sqlite:///{head.runs}/mlflow.db")
    experiment = client.get_experiment_by_name(recipe)
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def wait_for(head, job_id: str, *ends: str) -> str:
    deadline = time.monotonic() + 300
    while (state := states(head, job_id)[job_id]) not in ends:
        assert time.monotonic() < deadline, submit(head, "logs", job_id).stdout
        time.sleep(0.5)
    return state


def test_pretrain_then_probe_followed_to_the_end(head):
    done = submit(
        head, "pretrain", *TWO_WORKERS, f"output_dir={head.runs}", "--name", "chain", "--then", "probe", "--follow"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    job_id = done.stdout.split()[1]
    assert f"dashboard: {head.address}/#/jobs/{job_id}" in done.stdout
    assert "[pretrain] chain: epoch 2.00/2" in done.stdout
    assert "[probe] linear probe top-1 on the test set (%)" in done.stdout
    assert done.stdout.count("[pretrain] folder: ") == 1  # nothing is shown twice
    parts = (job_id, f"{job_id}-1-pretrain", f"{job_id}-1-probe")
    assert states(head, job_id) == dict.fromkeys(parts, "SUCCEEDED")
    assert [listed(head, job_id)[part]["metadata"]["job_name"] for part in parts] == ["chain", "chain", "chain-probe"]
    python = Path(sys.executable).with_name("python")
    assert f"\npython: {python}\n" in done.stdout  # the pipeline's
    assert f"[pretrain] python: {python}\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 1000
    (_, _, *rows) = submit(head, "list").stdout.splitlines()
    assert [row.split()[:2] for row in rows] == [[part, "succeeded"] for part in reversed(parts[1:])] + [
        [job_id, "succeeded"]
    ]
    trained, probed = runs(head)["chain"], runs(head)["chain-probe"]
    assert (trained.info.status, probed.info.status) == ("FINISHED", "FINISHED")
    assert probed.data.tags["mlflow.parentRunId"] == trained.info.run_id
    assert trained.data.tags["ray.job_id"] == f"{job_id}-1-pretrain"
    assert len(trained.data.tags["mlflow.source.git.commit"].removesuffix("-dirty")) == 40
    assert probed.data.params["probe.labels_per_class"] == "10"


@pytest.fixture(scope="module")
def sweep(head) -> str:
    """The job of a sweep whose client has exited."""
    sent = submit(
        head, "pretrain", *TWO_WORKERS, f"output_dir={head.runs}", "constraint.eta=0.1,0.25,0.5", "--name", "sweep"
    )
    assert sent.returncode == 0, sent.stderr
    job_id = sent.stdout.split()[1]
    assert wait_for(head, job_id, "SUCCEEDED", "FAILED") == "SUCCEEDED", submit(head, "logs", job_id).stdout
    return job_id


def test_a_sweep_outlives_its_client_and_is_one_run_with_children(head, sweep):
    found = runs(head)
    parent = found["sweep"]
    assert (parent.info.status, parent.data.params["swept"]) == ("FINISHED", "constraint.eta")
    children = {
        name: run for name, run in found.items() if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    }
    assert {run.data.params["constraint.eta"] for run in children.values()} == {"0.1", "0.25", "0.5"}
    assert sorted(children) == ["sweep-eta0.1", "sweep-eta0.25", "sweep-eta0.5"]
    assert "constraint.eta=0.25  succeeded" in submit(head, "logs", sweep).stdout


def test_the_reports_are_built_from_the_runs(head, sweep, tmp_path):
    def report(*arguments: str) -> str:
        command = [sys.executable, "-m", "jobs.report", *arguments, f"output_dir={head.runs}", f"output={tmp_path}"]
        done = subprocess.run(command, env=head.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    compared = report("compare", "sweep-eta0.1", "sweep-eta0.5")
    assert [line.split()[1:3] for line in compared.splitlines() if line.startswith("constraint.eta")] == [
        ["0.1", "0.5"]
    ]
    report("figure=6", "recipes=[digits]")
    assert "not run" in report("table=5")
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".csv", ".md"}


def figures(head, name: str) -> list[dict]:
    path = head.runs / "digits" / name / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [record for record in records if "metrics" in record]  # not status messages


@contextmanager
def endless(head, name: str, first: str, *more: str) -> Iterator[str]:
    """A job that runs until it is stopped, once its run `first` has reported three times; it does not outlive a test.

    The cluster has room for one: a remaining job would block all that follow.
    """
    ends_never = ("epochs=3000", "log_every_steps=1", "monitor.every_epochs=3000", "checkpoint.every_epochs=3000")
    sent = submit(head, "pretrain", *TWO_WORKERS, *ends_never, *more, f"output_dir={head.runs}", "--name", name)
    job_id = sent.stdout.split()[1]
    try:
        deadline = time.monotonic() + 600  # a busy machine takes minutes to start two workers
        while len(figures(head, first)) < 3:
            assert states(head, job_id)[job_id] in ("PENDING", "RUNNING"), submit(head, "logs", job_id).stdout
            assert time.monotonic() < deadline, submit(head, "logs", job_id).stdout
            time.sleep(0.2)
        yield job_id
    finally:
        if states(head, job_id)[job_id] not in ("SUCCEEDED", "FAILED", "STOPPED"):
            submit(head, "stop", job_id)


def test_a_stopped_job_saves_and_is_no_success(head):
    with endless(head, "endless", "endless") as job_id:
        stopped = submit(head, "stop", job_id)
    assert (stopped.returncode, stopped.stdout.splitlines()[-1]) == (0, f"{job_id}: stopped")
    assert submit(head, "logs", job_id, "--follow").returncode == 130
    assert re.search(
        r"stopped; resume it with: ssl-sec pretrain resume=\S*/endless", submit(head, "logs", job_id).stdout
    )
    assert (head.runs / "digits" / "endless" / "checkpoints" / f"step-{len(figures(head, 'endless')):09d}").is_dir()
    assert runs(head)["endless"].info.status == "KILLED"


def test_a_stopped_sweep_stops_its_jobs_and_starts_no_others(head):
    with endless(head, "two", "two-seed0", "seed=0,1") as job_id:
        submit(head, "stop", job_id)
    assert states(head, job_id) == {job_id: "STOPPED", f"{job_id}-1-pretrain": "STOPPED"}
    assert (runs(head)["two"].info.status, runs(head)["two-seed0"].info.status) == ("KILLED", "KILLED")


def test_a_failed_job_prints_one_line_and_keeps_its_exit_code(head, tmp_path):
    missing = ("data=folder", f"data.root={tmp_path / 'none'}")
    done = submit(head, "pretrain", *TWO_WORKERS, *missing, f"output_dir={head.runs}", "--name", "bad", "--follow")
    assert done.returncode == 3
    assert f"error: {tmp_path / 'none'}: no such folder" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert runs(head)["bad"].info.status == "FAILED"


def test_without_the_token_access_is_refused(head, tmp_path):
    (tmp_path / "token").write_text(secrets.token_hex(32))
    for environment in ({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}, {"RAY_AUTH_MODE": "disabled"}):
        stranger = SimpleNamespace(address=head.address, environment={**head.environment, **environment})
        refused = submit(stranger, "list")
        assert refused.returncode == 2
        assert "needs another token; give the one it was started with" in refused.stderr
        assert refused.stdout == ""


def test_an_unknown_job_is_one_line(head):
    for verb in ("status", "logs", "stop"):
        answer = submit(head, verb, "nobody")
        assert answer.returncode == 2
        assert answer.stderr.startswith("error: job: found 'nobody', which ")
