"""The overhead of saving and tracking in training.

    python -m benchmarks.overhead                                   # about 15 minutes on two CPU cores
    python -m benchmarks.overhead --storage s3://bucket/overhead    # runs in object storage: overhead-storage-cpu.json

Trains the digits recipe as a job does, in one process: without checkpoints and with MLflow on sqlite; with checkpoints
every five epochs (the default) and after every epoch; with an MLflow server that refuses connections, and with one that
accepts them and never answers; or, with --storage, with checkpoints on this machine's disk and in object storage.
Measures how long training waits for saves and reports, and the time from the worker's start to the final encoder
weights. The variants take turns, so that drift of the machine affects all alike. Writes
benchmarks/results/overhead-cpu.json.
"""

import argparse
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

from benchmarks.measure import describe_environment, format_table, median_ratio, save_results

# Set before MLflow is imported: how long each run waits at its end for the server that never answers.
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
NO_CHECKPOINTS = "checkpoint.every_epochs=1000"  # except the one at the end


class TimedRuntime(worker.FolderRuntime):
    """Measures how long training waits for it."""

    waited_s: ClassVar[float] = 0.0

    def report(self, step: int, metrics: Mapping[str, float], norms: NormHistogram | None = None) -> None:
        """Adds a line to the run's metrics."""
        with _measure_wait():
            super().report(step, metrics, norms)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint in the background."""
        with _measure_wait():
            super().save(step, state)

    def close(self) -> None:
        """Waits until everything is written."""
        with _measure_wait():
            super().close()


@contextlib.contextmanager
def _measure_wait() -> Iterator[None]:
    start = time.perf_counter()
    yield
    TimedRuntime.waited_s += time.perf_counter() - start


def main() -> None:
    """Measures, prints the table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", help="a URL; runs are kept below it")
    storage: str | None = parser.parse_args().storage
    logging.disable(logging.WARNING)  # the outages are intended
    torch.set_num_threads(1)  # leaves a core to the threads that write and send, as when a GPU trains
    worker.FolderRuntime = TimedRuntime  # pyright: ignore[reportPrivateImportUsage]
    environment = describe_environment()
    with _start_silent_server() as port, tempfile.TemporaryDirectory() as folder:
        variants: dict[str, tuple[str, ...]] = {
            "no checkpoints, MLflow on sqlite": (NO_CHECKPOINTS,),
            "a checkpoint every 5 epochs": ("checkpoint.every_epochs=5",),
            "a checkpoint every epoch": ("checkpoint.every_epochs=1",),
        }
        if storage is None:
            variants["MLflow refuses connections"] = (NO_CHECKPOINTS, "tracking.uri=http://127.0.0.1:1")
            variants["MLflow never answers"] = (NO_CHECKPOINTS, f"tracking.uri=http://127.0.0.1:{port}")
        else:
            for name in ("a checkpoint every 5 epochs", "a checkpoint every epoch"):
                variants[f"{name}, in object storage"] = (*variants[name], f"tracking.uri=sqlite:///{folder}/mlflow.db")
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        waited: dict[str, list[float]] = {name: [] for name in variants}
        num_bytes = 0
        for turn in range(-1, ROUNDS):
            # The order rotates over the rounds, since the machine drifts within a round too.
            for number, (name, overrides) in enumerate([*variants.items()][turn:] + [*variants.items()][:turn]):
                TimedRuntime.waited_s = 0.0
                place = storage if storage is not None and name.endswith("in object storage") else folder
                training_s, saved = train((*RECIPE, *overrides, f"output_dir={place}/{turn}-{number}"))
                num_bytes = max(num_bytes, saved)
                if turn >= 0:  # the first round is the warm-up
                    seconds[name].append(training_s)
                    waited[name].append(100 * TimedRuntime.waited_s / training_s)
        plain = seconds["no checkpoints, MLflow on sqlite"]
    rows = [
        {
            "variant": name,
            "seconds": rounds,
            "waited_percent": waited[name],
            "times": median_ratio(rounds, plain),
            "least": min(a / b for a, b in zip(rounds, plain, strict=True)),
            "most": max(a / b for a, b in zip(rounds, plain, strict=True)),
        }
        for name, rounds in seconds.items()
    ]
    shown = [
        {
            "variant": str(row["variant"]),
            "seconds": f"{statistics.median(seconds[str(row['variant'])]):.2f}",
            "waiting, %": f"{statistics.median(waited[str(row['variant'])]):.2f}",
            "relative time": f"{row['times']:.3f}",
            "range": f"{row['least']:.3f} to {row['most']:.3f}",
        }
        for row in rows
    ]
    print(f"\n{format_table(shown)}\n(checkpoint size: {num_bytes / 2**20:.1f} MiB)")
    values = {"environment": environment, "recipe": RECIPE, "checkpoint_bytes": num_bytes, "rows": rows}
    print(f"\n{save_results('overhead' if storage is None else 'overhead-storage', values)}")


def train(overrides: tuple[str, ...]) -> tuple[float, int]:
    """Trains a run; returns the seconds of its training and the bytes of its largest checkpoint."""
    with contextlib.redirect_stderr(io.StringIO()):
        finished = run_training(PRETRAIN, from_values(PretrainConfig, compose("pretrain", list(overrides))))
    folder = finished.folder
    seconds = folder.encoder_path.stat().st_mtime - folder.workers_path.stat().st_mtime
    sizes = (path.stat().st_size for path in folder.checkpoints_path.glob("*/state.pt"))
    return seconds, max(sizes, default=0)  # with object storage there are none here


@contextlib.contextmanager
def _start_silent_server() -> Iterator[int]:
    """Starts a server that accepts connections and never answers; yields its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        yield int(server.getsockname()[1])


if __name__ == "__main__":
    main()
