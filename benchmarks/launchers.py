"""The overhead of Ray Train compared with torchrun: the same job on gloo workers, started by each.

    python -m benchmarks.launchers      # six minutes on two CPU cores: two workers, then one

Both start `ssl_sec.edges.run.worker.work` with one thread per worker. They take turns of a few seconds: while one
trains, all processes of the other are suspended, including Ray's services. The speed of a shared machine drifts by more
than the overhead, but less between neighbouring turns. With as many workers as cores, Ray's services compete with the
workers; with fewer workers they have a core of their own. The time to the first step starts at the launch and includes
Ray's start. Writes benchmarks/results/launchers-cpu.json.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import yaml

from benchmarks.measure import describe_environment, format_table, make_parser, save_results
from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.spec import RunSpec
from ssl_sec.edges.run.worker import Worker, work
from ssl_sec.edges.tracking.deferred import DeferredRun
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.settings import from_values, to_values

WORKERS = (2, 1)
RECIPE = (
    "experiment=digits",
    "constraint=sec_ema",
    "encoder.width=0.25",
    "epochs=100000",
    "log_every_steps=1",
    "monitor.every_epochs=100000",
    "checkpoint.every_epochs=100000",
    "runtime.device=cpu",
)
SECONDS_PER_TURN = 5.0
WARM_UP_STEPS = 10
START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 60.0
POLL_S = 0.002
THIS_MODULE = [sys.executable, "-m", "benchmarks.launchers"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LAUNCHERS = ("torchrun", "Ray Train")


def main() -> None:
    """Measures, prints the table and writes the results."""
    parser = make_parser("launchers", __doc__)
    parser.add_argument("--rounds", type=int, default=12, help="turns of each launcher, two or more")
    parser.add_argument("--workers", nargs="+", type=int, default=WORKERS, help="numbers of workers")
    for role in ("--worker", "--driver"):  # the processes that are measured
        parser.add_argument(role, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        _run_worker(options.worker)
    elif options.driver is not None:
        _run_driver(options.driver)
    else:
        rows = [measure(workers, options.rounds) for workers in options.workers]
        print(save_results("launchers", {"environment": describe_environment(), "recipe": RECIPE, "rows": rows}))


def measure(workers: int, rounds: int) -> dict[str, Any]:
    """Measures the rates of both launchers, and how much longer an epoch takes on Ray."""
    rates: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    runs: dict[str, _Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in LAUNCHERS:
                runs[name] = _Run(name, workers, Path(folder) / name.split()[0])
                runs[name].warm_up()
                runs[name].suspend()
            for turn in range(rounds):
                for name in LAUNCHERS[:: 1 if turn % 2 else -1]:
                    runs[name].resume()
                    rates[name].append(runs[name].measure_rate())
                    runs[name].suspend()
        finally:
            for run in runs.values():
                run.stop()
    overheads = [100 * (plain / ours - 1) for plain, ours in zip(rates["torchrun"], rates["Ray Train"], strict=True)]
    rows = [
        {
            "launcher": name,
            "workers": f"{workers}",
            "epochs/s": f"{statistics.median(rates[name]):.2f}",
            "s to the first step": f"{runs[name].s_to_first_step:.1f}",
        }
        for name in LAUNCHERS
    ]
    lower, median, upper = statistics.quantiles(overheads)
    print(format_table(rows))
    print(f"Ray Train: {median:+.1f} % time per epoch (quartiles {lower:+.1f} and {upper:+.1f} %)\n", flush=True)
    return {
        "workers": workers,
        "epochs_per_s": rates,
        "s_to_first_step": {name: run.s_to_first_step for name, run in runs.items()},
        "overhead_percent": {"quartiles": [lower, median, upper], "each": overheads},
    }


class _Run:
    """A run with all of its processes."""

    def __init__(self, launcher: str, workers: int, path: Path) -> None:
        self._folder = RunFolder(path)
        config = from_values(PretrainConfig, compose("pretrain", [*RECIPE, f"runtime.num_workers={workers}"]))
        self._folder.start(to_values(config))
        torchrun = [*TORCHRUN, f"--nproc-per-node={workers}", "-m", "benchmarks.launchers", "--worker"]
        command = torchrun if launcher == "torchrun" else [*THIS_MODULE, "--driver"]
        self._launched = time.perf_counter()
        self._root = psutil.Popen([*command, str(path)], env={**os.environ, "OMP_NUM_THREADS": "1"})

    def warm_up(self) -> None:
        """Waits for the first steps."""
        self._await_steps(1)
        self.s_to_first_step = time.perf_counter() - self._launched
        self._await_steps(WARM_UP_STEPS)

    def suspend(self) -> None:
        """Suspends all processes."""
        for process in self._find_processes():
            with suppress(psutil.NoSuchProcess):  # the process has just ended
                process.suspend()

    def resume(self) -> None:
        """Resumes all processes."""
        for process in self._find_processes():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def measure_rate(self) -> float:
        """Measures the epochs per second; the first step after a suspension does not count."""
        first, start = self._await_steps(2)
        time.sleep(SECONDS_PER_TURN)
        last, end = self._await_steps(1)
        return (last - first) / (end - start)

    def stop(self) -> None:
        """Stops the run as a user would, and kills the processes that are left."""
        self.resume()
        processes = self._find_processes()
        self._folder.stop_path.touch()
        _, left = psutil.wait_procs(processes, timeout=END_TIMEOUT_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _find_processes(self) -> list[psutil.Process]:
        return [] if self._root.poll() is not None else [self._root, *self._root.children(recursive=True)]

    def _await_steps(self, count: int) -> tuple[float, float]:
        """Waits for `count` more steps; returns the epochs so far and the clock's seconds."""
        size, deadline = self._read_size(), time.monotonic() + START_TIMEOUT_S
        records, seconds = self._folder.records(), time.perf_counter()
        last = len(records) + count
        while len(records) < last:
            while (now := self._read_size()) == size:
                if self._root.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("a run failed, or takes no steps: see above")
                time.sleep(POLL_S)
            size, seconds = now, time.perf_counter()
            records = self._folder.records()  # the file also has messages
        return records[-1]["metrics"]["train/epoch"], seconds

    def _read_size(self) -> int:
        return self._folder.metrics_path.stat().st_size if self._folder.metrics_path.exists() else 0


def _run_driver(path: Path) -> None:
    """Runs the driver of a run, which starts its own Ray."""
    from ssl_sec.edges.run.on_ray.runtime import run_with_ray

    config = from_values(PretrainConfig, yaml.safe_load(RunFolder(path).config_path.read_text()))
    folder, identity = RunFolder(path), RunIdentity(tags={"recipe": config.recipe_name})
    untracked = DeferredRun(identity, {}, folder, system_metrics=False)
    run_with_ray(RunSpec(recipe=PRETRAIN, config=config, folder=folder, identity=identity), untracked)


def _run_worker(path: Path) -> None:
    """Runs a worker that torchrun started."""
    dist.init_process_group("gloo")
    worker = Worker(rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu"))
    folder = RunFolder(path)
    work("pretrain", yaml.safe_load(folder.config_path.read_text()), folder, worker)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
