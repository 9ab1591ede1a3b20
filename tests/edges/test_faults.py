"""What happens when something fails: two gloo workers on Ray Train, killed and started again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ssl_sec.checkpoint import load_checkpoint, newest_checkpoint
from ssl_sec.config import PretrainConfig
from ssl_sec.edges.composition import compose
from ssl_sec.edges.driver import run_pretraining
from ssl_sec.edges.run_folder import RunFolder
from ssl_sec.errors import StorageError, UserError
from ssl_sec.settings import from_values
from tests.edges.conftest import QUICK

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

# Eight steps, two an epoch; SEC-EMA, whose μ a resume must restore.
RUN = (
    *QUICK,
    "constraint=sec_ema",
    "data.max_images=512",
    "epochs=4",
    "log_every_steps=1",
    "monitor.every_epochs=2",
    "checkpoint.every_epochs=1",
    "runtime=ray",
    "runtime.num_workers=2",
    "runtime.cpus_per_worker=1",
    "runtime.max_failures=3",
)


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine, with two CPUs whatever it has."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def config_of(folder: Path, *changes: str) -> PretrainConfig:
    return from_values(PretrainConfig, compose("pretrain", [*RUN, f"output_dir={folder}", "run_name=it", *changes]))


def folder_of(folder: Path) -> RunFolder:
    return RunFolder(folder / "digits" / "it")


@pytest.fixture(scope="module")
def whole(cluster, tmp_path_factory) -> RunFolder:
    """The run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    run_pretraining(config_of(folder))
    return folder_of(folder)


def figures(run: RunFolder) -> list:
    """All figures but the speed, step by step; none may be there twice."""
    taken = [
        (record["step"], name, value)
        for record in run.records()
        for name, value in record["metrics"].items()
        if name != "train/images_per_s"
    ]
    assert len({(step, name) for step, name, _ in taken}) == len(taken)
    return taken


def assert_bit_equal(run: RunFolder, whole: RunFolder) -> None:
    """Weights, optimiser, μ and figures, to the last bit."""
    states = [
        load_checkpoint(newest_checkpoint(each.checkpoints_path).path, torch.device("cpu")) for each in (run, whole)
    ]
    assert states[0]["step"] == 8
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    torch.testing.assert_close(load_file(run.encoder_path), load_file(whole.encoder_path), rtol=0, atol=0)
    assert figures(run) == figures(whole)


class Once(threading.Thread):
    """Does something once, when a condition has come true."""

    def __init__(self, condition: Callable[[], bool], action: Callable[[], None]) -> None:
        super().__init__()
        self.happened = False
        self._condition = condition
        self._action = action
        self._over = threading.Event()

    def run(self) -> None:
        while not self._condition():
            if self._over.wait(0.001):
                return
        self._action()
        self.happened = True

    def __enter__(self) -> "Once":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()


def kill(run: RunFolder, rank: int) -> None:
    (pid,) = [worker["pid"] for worker in run.workers()[-2:] if worker["rank"] == rank]
    os.kill(pid, signal.SIGKILL)


def steps_so_far(run: RunFolder) -> int:
    return len([None for record in run.records() if "train/loss" in record["metrics"]])


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
        run_pretraining(config_of(tmp_path))
    assert killing.happened
    assert len(run.workers()) == 4  # both were started again, once
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
    assert "already holds a run; allowed: another run_name, or resume=true" in refused.stderr
    again = subprocess.run([*command, "resume=true"], env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert_bit_equal(run, whole)


def stopped_after_two_epochs(folder: Path) -> RunFolder:
    """A run whose checkpoints of steps 2 and 4 are there, and which did not come to its end."""
    run = folder_of(folder)
    with (
        Once(lambda: (run.checkpoints_path / "step-000000004").exists(), lambda: run.stop_path.touch()) as stopping,
        pytest.raises(Exception, match="go on with resume=true"),
    ):
        run_pretraining(config_of(folder))
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
    newest = newest_checkpoint(run.checkpoints_path).path
    damage(newest, kind)
    run_pretraining(config_of(tmp_path, "resume=true"))
    assert_bit_equal(run, whole)
    assert f"{newest.name}: " in capsys.readouterr().err + caplog.text


def test_damage_to_all_checkpoints_stops_the_run_and_starts_nothing(cluster, tmp_path):
    run = stopped_after_two_epochs(tmp_path)
    for path in run.checkpoints_path.glob("step-*"):
        damage(path, "cut")
    before = len(run.workers())
    with pytest.raises(StorageError, match="no whole checkpoint in .*step-000000004: state.pt has ") as caught:
        run_pretraining(config_of(tmp_path, "resume=true"))
    assert caught.value.exit_code == 4
    assert before < len(run.workers()) <= before + 2  # nobody tried again


def test_a_run_that_diverges_stops_on_all_workers_and_is_not_tried_again(cluster, tmp_path):
    start = time.monotonic()
    with pytest.raises(UserError, match=r"training diverged: .* at step \d.*; (no|the last good) checkpoint") as caught:
        run_pretraining(config_of(tmp_path, "optimiser.learning_rate=1e25"))
    assert caught.value.exit_code == 1
    assert time.monotonic() - start < 60
    told = (
        json.loads((folder_of(tmp_path).path / "error.json").read_text()) if folder_of(tmp_path).path.exists() else {}
    )
    assert "\n" not in told.get("message", "")
