"""Measures the time and memory of functions that take turns, and describes the machine."""

import argparse
import json
import multiprocessing
import os
import pickle
import platform
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from ssl_sec.files import replace_text

RESULTS = Path(__file__).parent / "results"

# The number of rows of the matrices and of images of the convolution in `measure_peak_rate`.
PEAK_SIZES = {"cpu": (2048, 16), "cuda": (8192, 256)}


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Makes the parser of a benchmark's command line; the first line of the module's docstring describes it."""
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").partition("\n")[0])


def choose_device() -> torch.device:
    """Returns the GPU if there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def time_in_turns(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int = 1,
    warm_up: bool = True,
    before: Mapping[str, Callable[[], object]] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Measures the seconds per call in each round. In a round each function has one turn, so drift affects all equally.

    Args:
        functions: the functions to measure, by name.
        rounds: the number of turns of each function.
        calls: the number of calls in one turn.
        warm_up: whether to call each function once before.
        before: functions that are called before a function's turn, and not timed.
    """
    if warm_up:
        for function in functions.values():
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            if name in before:
                before[name]()
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            synchronize()
            seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def median_ratio(peer: list[float], ours: list[float]) -> float:
    """Computes the peer's time divided by ours in each round; returns the median."""
    return statistics.median(theirs / own for theirs, own in zip(peer, ours, strict=True))


def measure_peak_memory(function: Callable[[], object]) -> int:
    """Measures the peak of the tensors' bytes in one call, beyond those allocated before it."""
    if torch.cuda.is_available():
        synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - before
    with _without_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def measure_peak_rate(device: torch.device, precision: str) -> float:
    """Measures the machine's best rate, in operations per second, of a large matrix product or a large convolution."""
    size, maps = PEAK_SIZES[device.type]
    dtype = getattr(torch, precision)
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    images, kernels = torch.randn(maps, 256, 32, 32), torch.randn(256, 256, 3, 3)
    images, kernels = (
        each.to(device, dtype).contiguous(memory_format=torch.channels_last) for each in (images, kernels)
    )
    timings = time_in_turns(
        {"product": lambda: matrix @ matrix, "convolution": lambda: functional.conv2d(images, kernels, padding=1)},
        rounds=5,
        calls=4,
    )
    operations = {"product": 2 * size**3, "convolution": 2 * maps * 32**2 * 256**2 * 9}
    return max(operations[name] / min(seconds) for name, seconds in timings.items())


def run_on_workers(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Runs `function` in gloo workers, one process each, which divide the cores; returns each worker's result.

    Args:
        world_size: the number of workers; a single one has no process group.
        function: a function at the top level of a module; its result is pickled.
        arguments: arguments of the function, the same for every worker.

    Raises:
        SystemExit: a worker failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run_worker, args=(rank, world_size, folder, function, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{function.__name__} on {world_size} workers failed: see above, or out of memory")
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]


def _run_worker(
    rank: int, world_size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    if world_size > 1:
        dist.init_process_group("gloo", f"file://{folder}/rendezvous", world_size=world_size, rank=rank)
    Path(folder, str(rank)).write_bytes(pickle.dumps(function(*arguments)))
    if world_size > 1:
        dist.destroy_process_group()


def read_peak_resident_mib() -> float:
    """Returns the peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def describe_environment() -> dict[str, Any]:
    """Returns the date, the commit, the machine and the versions."""
    return {
        "date": date.today().isoformat(),
        "commit": _find_commit(),
        "processor": _find_processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def print_environment(environment: Mapping[str, Any]) -> None:
    """Prints the known part of the environment on one line."""
    print(", ".join(f"{key} {value}" for key, value in environment.items() if value is not None), flush=True)


def save_results(name: str, values: Mapping[str, Any]) -> Path:
    """Writes a benchmark's results to `results/<name>-<cpu or gpu>.json`; returns the path."""
    path = _results_path(name)
    write_json(path, values)
    return path


def read_results(name: str) -> dict[str, Any]:
    """Reads the results that `save_results` wrote; returns nothing if there are none."""
    path = _results_path(name)
    return json.loads(path.read_text()) if path.exists() else {}


def _results_path(name: str) -> Path:
    return RESULTS / f"{name}-{'gpu' if torch.cuda.is_available() else 'cpu'}.json"


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replaces a file atomically: a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(values, indent=2) + "\n")


def format_table(rows: list[dict[str, str]]) -> str:
    """Aligns the rows in columns. The keys of the first row are the header; a missing cell shows as "-"."""
    lines = [list(rows[0]), *([row.get(key, "-") for key in rows[0]] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(rows[0]))]
    header, *others = (
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )
    return "\n".join([header, "-" * len(header), *others])


def describe_error(error: BaseException) -> str:
    """Describes an error in one line, for a cell of a table."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Silences the profiler, which prints to stderr from C++ at every start and stop."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _find_commit() -> str | None:
    """Returns SSL_SEC_COMMIT (a copy of the code may have no git history), else the commit of the checkout."""
    if commit := os.environ.get("SSL_SEC_COMMIT"):
        return commit
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _find_processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
