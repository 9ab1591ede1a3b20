"""Shared by the tests of faults: a short run, and a way to make something happen during it."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.worker import FolderRuntime
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.training.config import LocalConfig
from tests.edges.conftest import QUICK
from tests.jobs import configured

# Eight steps, two per epoch; SEC-EMA, whose μ a resume must restore.
RUN = (
    *QUICK,
    "constraint=sec_ema",
    "data.max_images=512",
    "global_batch_size=256",
    "epochs=4",
    "log_every_steps=1",
    "monitor.every_epochs=2",
    "checkpoint.every_epochs=1",
    "runtime=ray",
    "runtime.num_workers=2",
    "runtime.cpus_per_worker=1",
    "runtime.max_failures=3",
)


def config_of(folder: Path, *changes: str) -> PretrainConfig:
    return configured("pretrain", [*RUN, f"output_dir={folder}", "run_name=it", *changes])


def in_one_process(config: PretrainConfig) -> PretrainConfig:
    """The same without Ray, exactly."""
    return replace(config, runtime=LocalConfig(precision="float64"))


def folder_of(folder: Path) -> RunFolder:
    return RunFolder(folder / "digits" / "it")


def figures(run: RunFolder) -> list:
    """All metrics but the speed, by step; none may occur twice."""
    taken = [
        (record["step"], name, value)
        for record in run.records()
        for name, value in record["metrics"].items()
        if name != "train/images_per_s"
    ]
    assert len({(step, name) for step, name, _ in taken}) == len(taken)
    return taken


def kill(run: RunFolder, rank: int, number: signal.Signals = signal.SIGKILL) -> int:
    """Sends a signal to one of two workers; returns its process number."""
    (pid,) = [worker["pid"] for worker in run.workers()[-2:] if worker["rank"] == rank]
    os.kill(pid, number)
    return pid


def steps_so_far(run: RunFolder) -> int:
    return len([None for record in run.records() if "train/loss" in record["metrics"]])


def messages(run: RunFolder) -> str:
    """The messages of the run."""
    return "\n".join(line for line in run.metrics_path.read_text().splitlines() if '"message"' in line)


def signalling_at(step: int) -> Callable[..., None]:
    """In place of `FolderRuntime.report`: sends this process a SIGTERM once it has reported a step of training."""
    report = FolderRuntime.report

    def signalling(self, now, metrics, norms=None):
        report(self, now, metrics, norms)
        if now == step and "train/loss" in metrics:
            signal.raise_signal(signal.SIGTERM)

    return signalling


class Once(threading.Thread):
    """Does something once, when a condition has come true."""

    def __init__(self, condition: Callable[[], bool], action: Callable[[], object]) -> None:
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
