"""What saving and tracking cost the training.

    python -m benchmarks.overhead        # some 15 minutes on two CPU cores

Trains the digits recipe as a job does, in one process: without checkpoints and with MLflow on sqlite; with checkpoints
every five epochs (the default) and after every epoch; with an MLflow server that refuses every call, and with one that
takes them and never answers. Measured is how long the training waited for saves and reports, and beside it the time
from the worker's start to the encoder's last weights, in turn, so that the machine's drift hits all alike. Writes
benchmarks/results/overhead-cpu.json.
"""

import contextlib
import io
import logging
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from benchmarks.measure import environment, ratio, save, table

# Before MLflow is imported: how long it waits for the server that never answers, at the end of each run.
os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "2"
os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"

from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.run import worker
from ssl_sec.edges.run.driver import run_training
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.settings import from_values
from ssl_sec.training.norms import NormHistogram

ROUNDS = 3
RECIPE = (
    "experiment=digits",
    "constraint=sec_ema",
    "epochs=80",
    "monitor.every_epochs=1000",
    "tracking.register_model=false",
    "tracking.system_metrics=false",
    "runtime=local",
    "runtime.device=cpu",
)
NO_CHECKPOINTS = "checkpoint.every_epochs=1000"  # but for the one at the end


class TimedRuntime(worker.FolderRuntime):
    """Keeps how long training waited for it."""

    waited_s: ClassVar[float] = 0.0

    def report(self, step: int, metrics: Mapping[str, float], norms: NormHistogram | None = None) -> None:
        """Adds a line to the run's figures."""
        with _waiting():
            super().report(step, metrics, norms)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint in the background."""
        with _waiting():
            super().save(step, state)

    def close(self) -> None:
        """Waits until all is written."""
        with _waiting():
            super().close()


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    start = time.perf_counter()
    yield
    TimedRuntime.waited_s += time.perf_counter() - start


def main() -> None:
    """Measures, prints the table and writes the figures."""
    logging.disable(logging.WARNING)  # the outages are ours
    torch.set_num_threads(1)  # a core is left to who writes and sends, as where a GPU trains
    worker.FolderRuntime = TimedRuntime  # pyright: ignore[reportPrivateImportUsage]
    where = environment()
    with _silent_server() as port, tempfile.TemporaryDirectory() as folder:
        variants = {
            "no checkpoints, MLflow on sqlite": (NO_CHECKPOINTS,),
            "a checkpoint every 5 epochs": ("checkpoint.every_epochs=5",),
            "a checkpoint every epoch": ("checkpoint.every_epochs=1",),
            "MLflow refuses every call": (NO_CHECKPOINTS, "tracking.uri=http://127.0.0.1:1"),
            "MLflow never answers": (NO_CHECKPOINTS, f"tracking.uri=http://127.0.0.1:{port}"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        waited: dict[str, list[float]] = {name: [] for name in variants}
        num_bytes = 0
        for turn in range(-1, ROUNDS):
            # Each has each place in a round once, as the machine drifts within one too.
            for number, (name, overrides) in enumerate([*variants.items()][turn:] + [*variants.items()][:turn]):
                TimedRuntime.waited_s = 0.0
                taken, num_bytes = trained((*RECIPE, *overrides, f"output_dir={folder}/{turn}-{number}"))
                if turn >= 0:  # the first one warms up
                    seconds[name].append(taken)
                    waited[name].append(100 * TimedRuntime.waited_s / taken)
        plain = seconds["no checkpoints, MLflow on sqlite"]
    rows = [
        {
            "variant": name,
            "seconds": taken,
            "waited_percent": waited[name],
            "times": ratio(taken, plain),
            "least": min(a / b for a, b in zip(taken, plain, strict=True)),
            "most": max(a / b for a, b in zip(taken, plain, strict=True)),
        }
        for name, taken in seconds.items()
    ]
    shown = [
        {
            "variant": str(row["variant"]),
            "seconds": f"{statistics.median(seconds[str(row['variant'])]):.2f}",
            "waited %": f"{statistics.median(waited[str(row['variant'])]):.2f}",
            "times as long": f"{row['times']:.3f}",
            "least to most": f"{row['least']:.3f} to {row['most']:.3f}",
        }
        for row in rows
    ]
    print(f"\n{table(shown)}\n(a checkpoint has {num_bytes / 2**20:.1f} MiB)")
    values = {"environment": where, "recipe": RECIPE, "checkpoint_bytes": num_bytes, "rows": rows}
    print(f"\n{save('overhead', values)}")


def trained(overrides: tuple[str, ...]) -> tuple[float, int]:
    """Seconds of the training of a run, and the bytes of its last checkpoint."""
    with contextlib.redirect_stderr(io.StringIO()):
        finished = run_training(PRETRAIN, from_values(PretrainConfig, compose("pretrain", list(overrides))))
    folder = finished.folder
    seconds = folder.encoder_path.stat().st_mtime - folder.workers_path.stat().st_mtime
    return seconds, max(path.stat().st_size for path in folder.checkpoints_path.glob("*/state.pt"))


@contextlib.contextmanager
def _silent_server() -> Iterator[int]:
    """The port of a server that takes calls and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        yield int(server.getsockname()[1])


if __name__ == "__main__":
    main()
