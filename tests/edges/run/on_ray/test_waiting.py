"""Stops while a run waits for room in the cluster."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from mlflow.tracking import MlflowClient

from tests.edges.run.faulty import RUN, folder_of, steps_so_far

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@ray.remote(num_cpus=1)
class OtherJob:
    """Keeps a CPU."""

    def is_running(self) -> bool:
        return True


@pytest.fixture
def other() -> Iterator[Any]:
    """A job that has one of the two CPUs of a cluster."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    other = OtherJob.remote()
    assert ray.get(other.is_running.remote())
    yield other
    ray.shutdown()


def stopped_while_it_waits(command: list[str], number: signal.Signals, log: Path) -> str:
    """The output of a job that a signal stops."""
    with log.open("w") as output:
        job = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 120
        while "until other jobs leave room for 2 workers with 1 CPU each; free: 1 CPU\n" not in log.read_text():
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        job.send_signal(number)
        assert job.wait(30) == 130
    finally:
        job.kill()
        job.wait()
    return log.read_text()


def test_a_stop_ends_the_wait_for_room_and_the_run_is_resumed(other, tmp_path):
    address = f"runtime.address={ray.get_runtime_context().gcs_address}"
    command = [sys.executable, "-m", "jobs.pretrain", *RUN, f"output_dir={tmp_path}", "run_name=it", address]
    run = folder_of(tmp_path)
    printed = stopped_while_it_waits(command, signal.SIGINT, tmp_path / "log")
    assert "stopping: no worker trains, so nothing is saved (Ctrl-C" in printed
    assert f"stopped; resume it with: python -m jobs.pretrain resume={run.path}" in printed
    stopped_while_it_waits([*command, "resume=true"], signal.SIGTERM, tmp_path / "log")
    assert not run.workers()
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    in_mlflow = client.get_run(run.run_id_path.read_text())
    assert in_mlflow.info.status == "KILLED"
    assert in_mlflow.data.tags["ended"] == "stopped: on request, without saving"
    ray.kill(other)
    subprocess.run([*command, "resume=true"], check=True, capture_output=True, timeout=240)
    assert steps_so_far(run) == 8
