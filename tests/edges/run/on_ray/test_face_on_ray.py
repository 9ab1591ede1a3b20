"""Face recognition as users run it: `python -m jobs.face` on Ray, its faults, and its messages about bad input."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.driver import run_training
from ssl_sec.recipes.face.config import FaceConfig
from ssl_sec.recipes.registry import FACE
from ssl_sec.training.checkpoint import load_checkpoint
from ssl_sec.training.config import LocalConfig
from ssl_sec.training.resuming import agreed_checkpoint
from tests.data.files import write_digit_pairs
from tests.edges.conftest import QUICK_FACE, WHOLE_FACE
from tests.edges.run.faulty import Once, figures, folder_of, kill, steps_so_far
from tests.jobs import configured, face

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

# The templates are sharded over the workers.
RUN = (
    *QUICK_FACE,
    *WHOLE_FACE,
    "run_name=it",
    "share_classes_from=10",
    "runtime=ray",
    "runtime.num_workers=2",
    "runtime.cpus_per_worker=1",
)
EXACT = "runtime.precision=float64"


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine, with two CPUs whatever it has."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def config_of(folder: Path, *changes: str) -> FaceConfig:
    return configured("face", [*RUN, f"output_dir={folder}", *changes])


@pytest.fixture(scope="module")
def whole(cluster, digit_pairs, tmp_path_factory) -> RunFolder:
    """The run without a fault."""
    return run_training(FACE, config_of(tmp_path_factory.mktemp("whole"), digit_pairs, EXACT)).folder


@pytest.fixture(scope="module")
def alone(digit_pairs, tmp_path_factory) -> RunFolder:
    """The same in one process, without Ray; it holds all templates."""
    config = config_of(tmp_path_factory.mktemp("alone"), digit_pairs)
    return run_training(FACE, replace(config, runtime=LocalConfig(device="cpu", precision="float64"))).folder


def assert_equal(run: RunFolder, other: RunFolder) -> None:
    """All figures at all steps, and the final weights."""
    curves = [{(step, name): value for step, name, value in figures(each)} for each in (run, other)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-8)
    for path in ("encoder_path", "head_path"):
        weights = [load_file(getattr(each, path)) for each in (run, other)]
        torch.testing.assert_close(weights[0], weights[1], rtol=1e-8, atol=1e-10)


def assert_bit_equal(run: RunFolder, other: RunFolder) -> None:
    """Weights, templates, optimiser, μ and figures, to the last bit."""
    states = [
        load_checkpoint(agreed_checkpoint(each.checkpoints_path).path, torch.device("cpu"), held=slice(0, 10))
        for each in (run, other)
    ]
    assert states[0]["objective"]["loss.weight"].shape == (10, 16)
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    for path in ("encoder_path", "head_path"):
        weights = [load_file(getattr(each, path)) for each in (run, other)]
        torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert figures(run) == figures(other)


def test_two_workers_with_sharded_classes_equal_one_process(whole, alone):
    checkpoint = agreed_checkpoint(whole.checkpoints_path).path
    assert len(list(checkpoint.glob("rows-*.safetensors"))) == 2
    assert {name for _, name, _ in figures(whole)} >= {"train/verification_accuracy", "face/digits_accuracy"}
    assert_equal(whole, alone)


MOMENTS: dict[str, Callable[[RunFolder], bool]] = {
    "in mid-epoch": lambda run: steps_so_far(run) >= 6,
    "while templates are saved": lambda run: any(run.checkpoints_path.glob(".parts-*")),
    "after the last step": lambda run: steps_so_far(run) == 8,
}


@pytest.mark.parametrize(("moment", "rank"), list(zip(MOMENTS, (1, 0, 1), strict=True)))
def test_a_killed_worker_changes_nothing(cluster, digit_pairs, whole, tmp_path, moment, rank):
    run = folder_of(tmp_path)
    with Once(lambda: MOMENTS[moment](run), lambda: kill(run, rank)) as killing:
        run_training(FACE, config_of(tmp_path, digit_pairs, EXACT))
    assert killing.happened
    assert len(run.workers()) == 4  # both were started again, once
    assert_bit_equal(run, whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_stops_the_run_and_one_worker_resumes_the_state_of_two(number, digit_pairs, alone, tmp_path):
    command = [sys.executable, "-m", "jobs.face", *RUN, digit_pairs, EXACT, f"output_dir={tmp_path}"]
    run = folder_of(tmp_path)
    # A terminal sends Ctrl-C to all processes of the command, as `timeout` and service managers send SIGTERM.
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while steps_so_far(run) < 2:
            assert driver.poll() is None
            time.sleep(0.01)
        os.killpg(driver.pid, number)
        output = driver.communicate(timeout=120)[1]
    finally:
        driver.kill()
        driver.wait()
    assert driver.returncode == 130, output
    assert output.splitlines()[-1].startswith("stopped; resume it with: python -m jobs.face resume=")
    (checkpoint,) = run.checkpoints_path.glob("step-*")
    assert len(list(checkpoint.glob("rows-*.safetensors"))) == 2
    again = subprocess.run(
        [*command, "runtime.num_workers=1", "resume=true"], capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0, again.stderr
    assert "digits accuracy (%): " in again.stdout
    assert [worker["world_size"] for worker in run.workers()] == [2, 2, 1]
    assert_equal(run, alone)


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (["evaluation.pca=17"], 2, "evaluation.pca: found 17, must be 1 to 16, the dimension of the embeddings"),
        (["runtime.num_workers=3"], 2, "runtime.num_workers: found 3, but the cluster has 2 CPUs; allowed: 1 to 2"),
        ([], 3, "pairs.csv line 762: no image 'digit 0/none.png' in "),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(cluster, tmp_path, capfd, changes, code, message):
    table, images = write_digit_pairs(tmp_path)
    with table.open("a") as file:
        file.write("digit 0/none.png,digit 0/0.png,1,0\n")
    test_set = f"test_sets=[{{name:pairs,pairs:{table},images:{images}}}]"
    assert run_job("face", face, [*RUN, test_set, f"output_dir={tmp_path / 'runs'}", *changes]) == code
    (line,) = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("INFO: ")]
    assert line.startswith("error: ") and message in line
    assert not folder_of(tmp_path / "runs").path.exists()


def test_a_training_set_that_has_grown_is_refused_on_resume(cluster, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # paths are relative to where the job is started, for the workers too
    _, images = write_digit_pairs(tmp_path)
    images.rename(tmp_path / "train")
    arguments = [*RUN, "output_dir=runs", "data=folder", "data.root=.", "data.num_channels=1"]
    arguments += ["global_batch_size=40", "epochs=1"]
    assert run_job("face", face, arguments) == 0
    (tmp_path / "runs" / "digits" / "it" / "outcome").unlink()  # a finished run would not be resumed
    (tmp_path / "train" / "someone").mkdir()
    shutil.copy(next((tmp_path / "train" / "digit 0").iterdir()), tmp_path / "train" / "someone")
    assert run_job("face", face, [*arguments, "resume=true"]) == 3
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith(("it: ", "INFO: "))] == [lines[-1]]
    assert "images, but the run to resume began with " in lines[-1]
