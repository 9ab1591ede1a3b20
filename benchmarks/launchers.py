"""What Ray Train costs beside torchrun: the same job on two gloo workers, started by one and by the other.

    python -m benchmarks.launchers      # some 5 minutes on two CPU cores

Both start `ssl_sec.edges.worker.work` with one thread a worker, in turn. Epochs a second are those between the end of
the run's second epoch and its last, by the clock of whoever reads the run's figures; the time to the first step is from
the launch. Writes benchmarks/results/launchers-cpu.json.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from benchmarks.measure import command_line, environment, save, table
from ssl_sec.config import PretrainConfig, RayConfig
from ssl_sec.edges.composition import compose
from ssl_sec.edges.run_folder import RunFolder
from ssl_sec.edges.worker import Worker, work
from ssl_sec.settings import from_values, to_values

WORKERS = 2
RECIPE = (
    "experiment=digits",
    "constraint=sec_ema",
    "encoder.width=0.25",
    "epochs=30",
    "log_every_steps=1000",
    "monitor.every_epochs=1000",
    f"runtime.num_workers={WORKERS}",
    "runtime.device=cpu",
)
POLL_S = 0.002


def main() -> None:
    """Measures, prints the table and writes the figures."""
    parser = command_line("launchers", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # how torchrun starts us
    options = parser.parse_args()
    if options.worker is not None:
        _worker(options.worker)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    launchers = {"torchrun": _torchrun, "Ray Train": _ray}
    rates: dict[str, list[float]] = {name: [] for name in launchers}
    starts: dict[str, list[float]] = {name: [] for name in launchers}
    with tempfile.TemporaryDirectory() as folder, _ray_session():
        for turn in range(options.rounds):
            order = [*launchers.items()][:: 1 if turn % 2 else -1]
            for name, launch in order:
                rate, start = _timed(launch, Path(folder) / f"{turn}-{name.split()[0]}")
                rates[name].append(rate)
                starts[name].append(start)
    overheads = [100 * (plain / ours - 1) for plain, ours in zip(rates["torchrun"], rates["Ray Train"], strict=True)]
    rows = [
        {
            "launcher": name,
            "epochs/s": f"{statistics.median(rates[name]):.2f}",
            "s to the first step": f"{statistics.median(starts[name]):.1f}",
        }
        for name in launchers
    ]
    print(table(rows))
    least, most = min(overheads), max(overheads)
    print(f"Ray Train takes {statistics.median(overheads):+.1f} % longer an epoch ({least:+.1f} to {most:+.1f} %)")
    values = {
        "environment": environment(),
        "recipe": RECIPE,
        "epochs_per_s": rates,
        "s_to_first_step": starts,
        "overhead_percent": overheads,
    }
    print(save("launchers", values))


def _timed(launch: Callable[[RunFolder, Mapping[str, Any]], None], path: Path) -> tuple[float, float]:
    """Epochs a second of a run, and seconds to its first step."""
    values = to_values(from_values(PretrainConfig, compose("pretrain", [*RECIPE])))
    folder = RunFolder(path)
    folder.start(values)
    epoch_ends: list[tuple[float, float]] = []
    done = threading.Event()
    reader = threading.Thread(target=_read, args=(folder.metrics_path, epoch_ends, done))
    start = time.perf_counter()
    reader.start()
    try:
        launch(folder, values)
    finally:
        done.set()
        reader.join()
    seconds, epochs = zip(*epoch_ends, strict=True)
    second = next(place for place, epoch in enumerate(epochs) if epoch >= 2)
    return (epochs[-1] - epochs[second]) / (seconds[-1] - seconds[second]), seconds[0] - start


def _read(path: Path, epoch_ends: list[tuple[float, float]], done: threading.Event) -> None:
    """Notes when figures of an epoch appear: (seconds, epoch)."""
    seen = 0
    while not done.wait(POLL_S):
        size = path.stat().st_size if path.exists() else 0
        if size == seen:
            continue
        now, seen = time.perf_counter(), size
        records = RunFolder(path.parent).records()
        if records and (not epoch_ends or records[-1]["metrics"].get("train/epoch", 0) > epoch_ends[-1][1]):
            epoch_ends.append((now, records[-1]["metrics"]["train/epoch"]))


def _ray(folder: RunFolder, values: Mapping[str, Any]) -> None:
    from ssl_sec.edges.ray_runtime import run_with_ray

    config = from_values(PretrainConfig, values)
    assert isinstance(config.runtime, RayConfig)
    run_with_ray("pretrain", values, folder, config.runtime, config.global_batch_size)


def _torchrun(folder: RunFolder, values: Mapping[str, Any]) -> None:
    (folder.path / "values.yaml").write_text(yaml.safe_dump(dict(values)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    subprocess.run([*torchrun, "-m", "benchmarks.launchers", "--worker", str(folder.path)], check=True)


def _worker(path: Path) -> None:
    """A worker that torchrun started."""
    dist.init_process_group("gloo")
    worker = Worker(rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu"))
    work("pretrain", yaml.safe_load((path / "values.yaml").read_text()), str(path), worker)
    dist.destroy_process_group()


@contextlib.contextmanager
def _ray_session() -> Iterator[None]:
    """Ray is started before its first run, as on a cluster that is there."""
    import ray

    from ssl_sec.edges.ray_runtime import connect

    connect(None)
    try:
        yield
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
