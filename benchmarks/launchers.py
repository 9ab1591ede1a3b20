"""What Ray Train costs beside torchrun: the same job on gloo workers, started by one and by the other.

    python -m benchmarks.launchers      # six minutes on two CPU cores: two workers, then one

Both start `ssl_sec.edges.run.worker.work` with one thread a worker, and train on while they are measured: one runs for
some seconds while all processes of the other are halted, Ray's services too, and so in turn. How fast a shared machine
is changes from minute to minute, by more than what is looked for; between two neighbouring turns it changes less. With
as many workers as cores Ray's services take their time from the workers; with fewer they have a core to themselves. The
time to the first step is from the launch, Ray's own start with it. Writes benchmarks/results/launchers-cpu.json.
"""

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

from benchmarks.measure import command_line, environment, save, table
from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.spec import RunSpec
from ssl_sec.edges.run.worker import Worker, work
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
SECONDS_A_TURN = 5.0
SETTLED_AFTER_STEPS = 10
START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 60.0
POLL_S = 0.002
HERE = [sys.executable, "-m", "benchmarks.launchers"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LAUNCHERS = ("torchrun", "Ray Train")


def main() -> None:
    """Measures, prints the table and writes the figures."""
    parser = command_line("launchers", __doc__)
    parser.add_argument("--rounds", type=int, default=12, help="two or more")
    parser.add_argument("--workers", nargs="+", type=int, default=WORKERS)
    for role in ("--worker", "--driver"):  # how torchrun and we ourselves start us
        parser.add_argument(role, type=Path, help="the folder of a run that is measured; for the benchmark itself")
    options = parser.parse_args()
    if options.worker is not None:
        _worker(options.worker)
    elif options.driver is not None:
        _driver(options.driver)
    else:
        measured = [measure(workers, options.rounds) for workers in options.workers]
        print(save("launchers", {"environment": environment(), "recipe": RECIPE, "rows": measured}))


def measure(workers: int, rounds: int) -> dict[str, Any]:
    """The rates of both, and how much longer an epoch takes on Ray."""
    rates: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    runs: dict[str, _Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in LAUNCHERS:
                runs[name] = _Run(name, workers, Path(folder) / name.split()[0])
                runs[name].settle()
                runs[name].halt()
            for turn in range(rounds):
                for name in LAUNCHERS[:: 1 if turn % 2 else -1]:
                    runs[name].go_on()
                    rates[name].append(runs[name].rate())
                    runs[name].halt()
        finally:
            for run in runs.values():
                run.end()
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
    least, middle, most = statistics.quantiles(overheads)
    print(table(rows))
    print(f"Ray Train takes {middle:+.1f} % longer an epoch (quartiles {least:+.1f} and {most:+.1f} %)\n", flush=True)
    return {
        "workers": workers,
        "epochs_per_s": rates,
        "s_to_first_step": {name: run.s_to_first_step for name, run in runs.items()},
        "overhead_percent": {"quartiles": [least, middle, most], "each": overheads},
    }


class _Run:
    """A run with all of its processes."""

    def __init__(self, launcher: str, workers: int, path: Path) -> None:
        self._folder = RunFolder(path)
        config = from_values(PretrainConfig, compose("pretrain", [*RECIPE, f"runtime.num_workers={workers}"]))
        self._folder.start(to_values(config))
        torchrun = [*TORCHRUN, f"--nproc-per-node={workers}", "-m", "benchmarks.launchers", "--worker"]
        command = torchrun if launcher == "torchrun" else [*HERE, "--driver"]
        self._launched = time.perf_counter()
        self._root = psutil.Popen([*command, str(path)], env={**os.environ, "OMP_NUM_THREADS": "1"})

    def settle(self) -> None:
        """Waits until the first steps are taken."""
        self._await_steps(1)
        self.s_to_first_step = time.perf_counter() - self._launched
        self._await_steps(SETTLED_AFTER_STEPS)

    def halt(self) -> None:
        """Takes all processes off the cores."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):  # one that has just ended
                process.suspend()

    def go_on(self) -> None:
        """Lets them go on."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def rate(self) -> float:
        """Epochs a second, between two ends of steps; the first step after a halt does not count."""
        first, begin = self._await_steps(2)
        time.sleep(SECONDS_A_TURN)
        last, end = self._await_steps(1)
        return (last - first) / (end - begin)

    def end(self) -> None:
        """Has the run stop as a user would, and none of its processes outlive it."""
        self.go_on()
        processes = self._processes()
        self._folder.stop_path.touch()
        _, left = psutil.wait_procs(processes, timeout=END_TIMEOUT_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _processes(self) -> list[psutil.Process]:
        return [] if self._root.poll() is not None else [self._root, *self._root.children(recursive=True)]

    def _await_steps(self, count: int) -> tuple[float, float]:
        """Waits for so many more steps: (epochs so far, seconds on the clock)."""
        size, deadline = self._size(), time.monotonic() + START_TIMEOUT_S
        for _ in range(count):
            while (now := self._size()) == size:
                if self._root.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("a run ended early, or takes no steps: see above")
                time.sleep(POLL_S)
            size = now
        seconds = time.perf_counter()
        return self._folder.records()[-1]["metrics"]["train/epoch"], seconds

    def _size(self) -> int:
        return self._folder.metrics_path.stat().st_size if self._folder.metrics_path.exists() else 0


def _driver(path: Path) -> None:
    """The driver of a run on a Ray of its own."""
    from ssl_sec.edges.run.on_ray.runtime import run_with_ray

    config = from_values(PretrainConfig, yaml.safe_load(RunFolder(path).config_path.read_text()))
    run_with_ray(RunSpec(recipe=PRETRAIN, config=config, folder=RunFolder(path), identity=RunIdentity()))


def _worker(path: Path) -> None:
    """A worker that torchrun started."""
    dist.init_process_group("gloo")
    worker = Worker(rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu"))
    work("pretrain", yaml.safe_load(RunFolder(path).config_path.read_text()), str(path), worker)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
