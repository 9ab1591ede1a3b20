"""Faults of two gloo workers on Ray Train, which are killed and restarted."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.driver import run_training
from ssl_sec.errors import Stopped, StorageError, UserError
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.training.checkpoint import load_checkpoint
from ssl_sec.training.resuming import agreed_checkpoint
from tests.edges.run.faulty import (
    RUN,
    Once,
    config_of,
    figures,
    folder_of,
    in_one_process,
    kill,
    messages,
    steps_so_far,
)

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine, with four CPUs whatever it has."""
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def whole(cluster, tmp_path_factory) -> RunFolder:
    """The run without a fault."""
    folder = tmp_path_factory.mktemp("whole")
    run_training(PRETRAIN, config_of(folder))
    return folder_of(folder)


def assert_bit_equal(run: RunFolder, whole: RunFolder) -> None:
    """Weights, optimiser, μ and figures, to the last bit."""
    states = [
        load_checkpoint(agreed_checkpoint(each.checkpoints_path).path, torch.device("cpu")) for each in (run, whole)
    ]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    torch.testing.assert_close(load_file(run.encoder_path), load_file(whole.encoder_path), rtol=0, atol=0)
    assert figures(run) == figures(whole)


MOMENTS: dict[str, Callable[[RunFolder], bool]] = {
    "before the first step": lambda run: len(run.workers()) == 2,
    "in mid-epoch": lambda run: steps_so_far(run) >= 3,
    "at an epoch's end": lambda run: (run.checkpoints_path / "step-000000004").exists(),
    "during a save": lambda run: any(run.checkpoints_path.glob(".step-*")),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_worker_changes_nothing(cluster, whole, tmp_path, rank, moment):
    run = folder_of(tmp_path)
    with Once(lambda: MOMENTS[moment](run), lambda: kill(run, rank)) as killing:
        run_training(PRETRAIN, config_of(tmp_path))
    assert killing.happened
    assert len(run.workers()) == 4  # both were started again, once
    assert_bit_equal(run, whole)


def test_a_killed_controller_changes_nothing(cluster, whole, tmp_path):
    run = folder_of(tmp_path)

    def kill_controller() -> None:
        (controller,) = (
            child
            for child in psutil.Process().children(recursive=True)
            if child.cmdline() and child.cmdline()[0].startswith("ray::TrainController")
        )
        controller.kill()

    with Once(lambda: steps_so_far(run) >= 3, kill_controller) as killing:
        run_training(PRETRAIN, config_of(tmp_path))
    assert killing.happened
    assert len(run.workers()) == 4
    assert_bit_equal(run, whole)


def test_a_killed_driver_and_the_same_run_again_change_nothing(whole, tmp_path):
    command = [sys.executable, "-m", "jobs.pretrain", *RUN, f"output_dir={tmp_path}", "run_name=it"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = folder_of(tmp_path)
    driver = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        while not (run.checkpoints_path / "step-000000002").exists():
            assert driver.poll() is None
            time.sleep(0.01)
    finally:
        driver.kill()
        driver.wait()
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "already holds a run; allowed: another run_name, or resume=" in refused.stderr
    again = subprocess.run([*command, "resume=true"], env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert_bit_equal(run, whole)


def stopped_after_two_epochs(folder: Path, *changes: str) -> RunFolder:
    """An unfinished run with the checkpoints of steps 2 and 4."""
    run = folder_of(folder)
    with (
        Once(lambda: (run.checkpoints_path / "step-000000004").exists(), lambda: run.stop_path.touch()) as stopping,
        pytest.raises(Exception, match="stopped; resume it with"),
    ):
        run_training(PRETRAIN, config_of(folder, *changes))
    assert stopping.happened
    return run


def damage(path: Path, kind: str) -> None:
    state = path / "state.pt"
    if kind == "empty":
        state.write_bytes(b"")
    elif kind == "cut":
        os.truncate(state, state.stat().st_size // 2)
    elif kind == "without manifest":
        (path / "manifest.json").unlink()
    else:
        content = bytearray(state.read_bytes())
        content[len(content) // 2] ^= 1
        state.write_bytes(content)


@pytest.mark.parametrize("kind", ["empty", "cut", "bit-flipped", "without manifest"])
def test_a_damaged_checkpoint_is_skipped_and_the_one_before_is_used(cluster, whole, tmp_path, kind, caplog, capsys):
    run = stopped_after_two_epochs(tmp_path)
    newest = agreed_checkpoint(run.checkpoints_path).path
    damage(newest, kind)
    run_training(PRETRAIN, config_of(tmp_path, "resume=true"))
    assert_bit_equal(run, whole)
    assert f"{newest.name}: " in capsys.readouterr().err + caplog.text


def test_damage_to_all_checkpoints_stops_the_run_and_starts_nothing(cluster, tmp_path):
    run = stopped_after_two_epochs(tmp_path)
    for path in run.checkpoints_path.glob("step-*"):
        damage(path, "cut")
    before = len(run.workers())
    with pytest.raises(StorageError, match="no whole checkpoint in .*step-000000004: state.pt has ") as caught:
        run_training(PRETRAIN, config_of(tmp_path, "resume=true"))
    assert caught.value.exit_code == 4
    assert before < len(run.workers()) <= before + 2  # there was no retry; the other worker may have been too late


def test_a_run_that_diverges_stops_on_all_workers_and_is_not_retried(cluster, tmp_path):
    start = time.monotonic()
    message = r"training diverged: .* at step \d.*; (no|the last good) checkpoint.*; a lower optimiser.learning_rate"
    with pytest.raises(UserError, match=message) as caught:
        run_training(PRETRAIN, config_of(tmp_path, "optimiser.learning_rate=1e6", "optimiser.weight_decay=1000"))
    assert caught.value.exit_code == 1
    assert time.monotonic() - start < 60
    outcome = (
        json.loads((folder_of(tmp_path).path / "error.json").read_text()) if folder_of(tmp_path).path.exists() else {}
    )
    assert "\n" not in outcome.get("message", "")


@pytest.mark.timeout(1800)
def test_twenty_kills_at_random_moments_of_one_run_change_nothing(cluster, tmp_path_factory, tmp_path):
    """Failures are counted since the newest checkpoint, so that three in a row suffice for twenty in all."""
    longer = ("epochs=24", "monitor.every_epochs=24")
    undisturbed = tmp_path_factory.mktemp("longer")
    run_training(PRETRAIN, config_of(undisturbed, *longer))
    draws = random.Random(20)
    run = folder_of(tmp_path)
    moments = sorted(draws.sample(range(1, 46), 20))
    kills = zip(itertools.count(1), moments, (draws.randrange(2) for _ in moments), strict=False)

    def twenty_kills() -> None:
        for number, step, rank in kills:
            with Once(
                lambda n=number, s=step: len(run.workers()) == 2 * n and steps_so_far(run) >= s, lambda: None
            ) as due:
                due.join(180)  # a restart takes 10 s, and much longer on a busy machine
            assert due.happened
            time.sleep(draws.uniform(0, 0.1))  # the moment within a step
            kill(run, rank)

    with Once(lambda: True, twenty_kills) as killing:
        run_training(PRETRAIN, config_of(tmp_path, *longer))
    assert killing.happened
    assert len(run.workers()) == 2 * 21
    assert_bit_equal(run, folder_of(undisturbed))


def test_a_worker_that_hangs_is_named_and_the_run_continues(cluster, whole, tmp_path):
    run = folder_of(tmp_path)
    stopped: list[int] = []
    with Once(lambda: steps_so_far(run) >= 3, lambda: stopped.append(kill(run, 1, signal.SIGSTOP))) as hanging:
        run_training(PRETRAIN, config_of(tmp_path, "runtime.timeout_s=10"))
    assert hanging.happened
    assert not Path(f"/proc/{stopped[0]}").exists()
    assert "Timed out waiting" in messages(run)
    assert "worker 1: does not respond; the workers are started again" in messages(run)
    assert "Traceback" in run.failures()[0]["traceback"]
    assert_bit_equal(run, whole)


def test_a_run_that_fails_repeatedly_without_progress_ends(cluster, tmp_path):
    run = folder_of(tmp_path)

    def kill_twice() -> None:
        kill(run, 1)
        with Once(lambda: len(run.workers()) == 4, lambda: kill(run, 0)) as again:
            again.join(60)

    with (
        Once(lambda: steps_so_far(run) >= 1, kill_twice),
        pytest.raises(UserError, match=r"; 2 failures .*checkpoint.*, runtime.max_failures allows 1"),
    ):
        run_training(PRETRAIN, config_of(tmp_path, "runtime.max_failures=1"))
    assert len(run.workers()) == 4
    assert (
        "worker 1: its process died (killed by SIGKILL, or out of memory); the workers are started again"
        in messages(run)
    )


def test_sigterm_saves_stops_and_mlflow_shows_killed(cluster, whole, tmp_path):
    run = folder_of(tmp_path)
    with (
        Once(lambda: steps_so_far(run) >= 3, lambda: os.kill(os.getpid(), signal.SIGTERM)) as terminating,
        pytest.raises(Stopped, match="resume it with: python -m jobs.pretrain resume=.*it"),
    ):
        run_training(PRETRAIN, config_of(tmp_path))
    assert terminating.happened
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = run.run_id_path.read_text()
    assert client.get_run(run_id).info.status == "KILLED"
    run_training(PRETRAIN, config_of(tmp_path, "resume=true"))
    assert_bit_equal(run, whole)
    assert client.get_run(run_id).info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(run_id, "train/loss")] == list(range(8))


def test_a_stopped_run_resumes_with_four_workers(cluster, tmp_path_factory, tmp_path):
    exact = ("runtime.precision=float64",)
    undisturbed = tmp_path_factory.mktemp("exact")
    run_training(PRETRAIN, in_one_process(config_of(undisturbed)))
    run = stopped_after_two_epochs(tmp_path, *exact)
    run_training(PRETRAIN, config_of(tmp_path, *exact, "runtime.num_workers=4", "resume=true"))
    assert [worker["world_size"] for worker in run.workers()] == [2, 2, 4, 4, 4, 4]
    curves = [{(step, name): value for step, name, value in figures(each)} for each in (run, folder_of(undisturbed))]
    assert curves[0] == pytest.approx(curves[1], rel=1e-8)


def test_storage_that_fails_stops_the_run_at_once(cluster, tmp_path):
    """A file in place of the checkpoints' folder, so nothing can be written."""
    run = folder_of(tmp_path)

    def spoil() -> None:
        run.checkpoints_path.write_text("")

    with (
        Once(lambda: len(run.workers()) == 2, spoil) as spoiling,
        pytest.raises(StorageError, match="^checkpoint of step 2: cannot be written to .*checkpoints: ") as caught,
    ):
        run_training(PRETRAIN, config_of(tmp_path))
    assert spoiling.happened
    assert caught.value.exit_code == 4
    assert len(run.workers()) == 2  # there was no retry


def test_a_worker_that_crashes_is_named_with_its_signal_also_in_mlflow(cluster, tmp_path):
    run = folder_of(tmp_path)
    with (
        Once(lambda: steps_so_far(run) >= 3, lambda: kill(run, 1, signal.SIGSEGV)) as killing,
        pytest.raises(
            UserError, match="worker 1: its process was killed by SIGSEGV, a crash in native code; its stack is in"
        ),
    ):
        run_training(PRETRAIN, config_of(tmp_path, "runtime.max_failures=0"))
    assert killing.happened
    run_in_mlflow = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(run.run_id_path.read_text())
    assert run_in_mlflow.info.status == "FAILED"
    assert "killed by SIGSEGV" in run_in_mlflow.data.tags["ended"]


def test_a_removed_folder_fails_the_run_with_one_line(cluster, tmp_path):
    run = folder_of(tmp_path)
    run_ids: list[str] = []

    def remove() -> None:
        run_ids.append(run.run_id_path.read_text())
        shutil.rmtree(run.path, ignore_errors=True)

    with (
        Once(lambda: steps_so_far(run) >= 3, remove) as removing,
        pytest.raises(StorageError, match="output_dir: .*/digits/it was removed during the run") as caught,
    ):
        run_training(PRETRAIN, config_of(tmp_path, "epochs=200"))
    assert removing.happened
    assert caught.value.exit_code == 4
    assert MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(run_ids[0]).info.status == "FAILED"
