"""Runs in their own processes: killed, on a full disk, several at once, with closed output."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from ssl_sec.edges.folder.folder import RunFolder
from tests.data.files import encode, noise, write_folder
from tests.edges.run.faulty import RUN, folder_of, steps_so_far

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

# Acts as a disk with little space, for the files of one process.
FULL_DISK = """
import resource, sys
from tests.jobs import pretrain
from ssl_sec.edges.command_line import run_job
resource.setrlimit(resource.RLIMIT_FSIZE, (1_300_000, 1_300_000))
sys.exit(run_job("pretrain", pretrain, sys.argv[1:]))
"""


def test_a_disk_that_fills_ends_the_run_without_a_partial_checkpoint(tmp_path):
    arguments = [
        *(argument for argument in RUN if not argument.startswith("runtime")),
        "runtime=local",
        f"output_dir={tmp_path}",
        "run_name=it",
    ]
    ended = subprocess.run([sys.executable, "-c", FULL_DISK, *arguments], capture_output=True, text=True)
    assert ended.returncode == 4, ended.stderr
    last_line = ended.stderr.strip().splitlines()[-1]
    assert last_line.startswith("error: checkpoint of step 2: cannot be written to ")
    assert "File too large" in last_line
    assert not list(folder_of(tmp_path).checkpoints_path.iterdir())


def started_here(folder: Path, *changes: str, **options) -> subprocess.Popen:
    """A run in the driver's own process, as a job."""
    local = [argument for argument in RUN if not argument.startswith("runtime")]
    arguments = [*local, "runtime=local", f"output_dir={folder}", *changes]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.pretrain", *arguments], env=environment, **{**pipes, **options}
    )


def test_a_killed_process_leaves_no_run_shown_as_running(tmp_path):
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")

    def training(name: str) -> tuple[subprocess.Popen, RunFolder]:
        run = RunFolder(tmp_path / "digits" / name)
        process = started_here(tmp_path, f"run_name={name}", "epochs=2000")
        while not steps_so_far(run):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        return process, run

    with_its_supervisor, first = training("first")
    with_its_supervisor.kill()
    with_its_supervisor.communicate()
    assert client.get_run(first.run_id_path.read_text()).info.status == "RUNNING"

    crashing, second = training("second")
    os.kill(second.workers()[0]["pid"], signal.SIGSEGV)
    _, errors = crashing.communicate(timeout=120)
    assert crashing.returncode == 128 + signal.SIGSEGV
    assert errors.splitlines()[-1].endswith("was killed by SIGSEGV, a crash in native code")
    ends = [client.get_run(run.run_id_path.read_text()) for run in (first, second)]
    assert [end.info.status for end in ends] == ["FAILED", "FAILED"]
    assert "ended unexpectedly" in ends[0].data.tags["ended"]
    assert "killed by SIGSEGV" in ends[1].data.tags["ended"]


def ended_together(folder: Path, names: list[str]) -> tuple[list[int], list[str]]:
    """Exit codes and error outputs of runs that start at once in one new folder."""
    processes = [started_here(folder, f"run_name={name}", "epochs=1") for name in names]
    errors = [process.communicate(timeout=1200)[1] for process in processes]
    return [process.returncode for process in processes], errors


def assert_finished(folder: Path, names: list[str]) -> None:
    """MLflow has each run once, as finished."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert sorted(run.info.run_name for run in runs) == names
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert not (folder / ".running").exists()


def test_eight_runs_at_once_in_one_folder_all_finish(tmp_path):
    names = [f"run{number}" for number in range(8)]
    codes, errors = ended_together(tmp_path, names)
    assert codes == [0] * 8, errors
    assert_finished(tmp_path, names)


def test_one_of_two_processes_with_one_run_name_is_refused(tmp_path):
    codes, errors = ended_together(tmp_path, ["it", "it"])
    assert sorted(codes) == [0, 2], errors
    refusal = errors[codes.index(2)].splitlines()[-1]
    assert "it is in use: process" in refusal or "it already holds a run" in refusal
    assert_finished(tmp_path, ["it"])


def test_closed_output_does_not_stop_a_run(tmp_path):
    """As after `2>&1 | head -1`, and with standard streams that are closed from the start (`>&- 2>&-`)."""
    here, there = os.pipe()
    unread = started_here(tmp_path, "run_name=unread", stdout=there, stderr=there)
    os.close(there)
    with os.fdopen(here) as output:
        output.readline()
    closed = started_here(tmp_path, "run_name=closed", preexec_fn=lambda: os.closerange(0, 3))
    assert [unread.wait(1200), closed.wait(1200)] == [0, 0]
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    for name in ("unread", "closed"):
        run = RunFolder(tmp_path / "digits" / name)
        assert run.outcome() == "finished"
        assert run.encoder_path.exists()
        assert client.get_run(run.run_id_path.read_text()).info.status == "FINISHED"


def test_a_narrow_network_on_large_images_trains_on_a_cpu(tmp_path):
    """oneDNN crashes in channels_last in convolutions that are not replaced."""
    for split, count in (("train", 24), ("test", 8)):
        images = {f"{kind}/{number}.png": encode(noise()) for kind in "ab" for number in range(count)}
        write_folder(tmp_path / "images" / split, images)
    arguments = [
        "data=folder",
        f"data.root={tmp_path}/images",
        "data.image_size_px=64",
        "encoder.width=0.125",
        "runtime=local",
        "runtime.device=cpu",
        "runtime.channels_last=true",
        "global_batch_size=16",
        "epochs=2",
        "tracking.system_metrics=false",
        f"output_dir={tmp_path}/runs",
    ]
    ended = subprocess.run([sys.executable, "-m", "jobs.pretrain", *arguments], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
