"""Runs that are killed or stopped at moments drawn at random, and continued, against one that ran through."""

import os
import random
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from ssl_sec.edges.folder.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

# The same command starts, resumes and probes.
RUN = ["experiment=digits", "epochs=3", "probe.enabled=true", "runtime=local", "run_name=it", "resume=auto"]
# Of one that runs through.
NUM_LINES = 48


def started(output_dir: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.pretrain", *RUN, f"output_dir={output_dir}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A process that a shell has started in the background ignores SIGINT, and those that it starts do, too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def killed(output_dir: Path, after_lines: int, number: signal.Signals, whole_group: bool) -> int:
    """The exit code of a run that gets a signal once it has printed some lines."""
    job = started(output_dir)
    printed = [*islice(job.stderr, after_lines)]
    if len(printed) == after_lines:
        (os.killpg if whole_group else os.kill)(job.pid, number)
    _, rest = job.communicate(timeout=300)
    assert "Traceback" not in "".join([*printed, rest])
    return job.returncode


def outcome(output_dir: Path) -> dict[str, object]:
    """The weights, and all that MLflow shows of the training and its probe but how fast they were."""
    folders = [RunFolder(output_dir / "digits" / name) for name in ("it", "it-probe")]
    client = MlflowClient(f"sqlite:///{output_dir}/mlflow.db")
    curves = {}
    for folder in folders:
        for key in client.get_run(folder.run_id).data.metrics:
            if not key.startswith("system/") and "images_per_s" not in key:
                history = client.get_metric_history(folder.run_id, key)
                curves[folder.name, key] = sorted({(point.step, point.value) for point in history})
    return {"weights": [folder.encoder_path.read_bytes() for folder in folders], "curves": curves}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, object]:
    output_dir = tmp_path_factory.mktemp("whole")
    _, printed = (job := started(output_dir)).communicate(timeout=300)
    assert job.returncode == 0, printed
    assert 40 < len(printed.splitlines()) <= NUM_LINES
    return outcome(output_dir)


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_is_killed_anywhere_ends_as_one_that_ran_through(whole, seed, tmp_path):
    draw = random.Random(seed)
    for _ in range(3):
        number = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        code = killed(tmp_path, draw.randint(1, NUM_LINES), number, whole_group=draw.random() < 0.5)
        assert code in (0, 130, -signal.SIGKILL)
    _, printed = (job := started(tmp_path)).communicate(timeout=300)
    assert job.returncode == 0, printed
    assert outcome(tmp_path) == whole
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    ended = [run.info.run_name for run in runs if run.info.status == "FINISHED"]
    assert sorted(ended) == ["it", "it-probe"]
    assert not [run.info.run_name for run in runs if run.info.status == "RUNNING"]
