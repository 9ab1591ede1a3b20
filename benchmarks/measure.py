"""Time and memory of functions that take turns, and the machine they ran on."""

import argparse
import json
import multiprocessing
import os
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
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

RESULTS = Path(__file__).parent / "results"

# Rows of the matrices and images of the convolution that `peak_rate` takes.
PEAK_SIZES = {"cpu": (2048, 16), "cuda": (8192, 256)}


def command_line(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark's module, none so far; its docstring begins with what it is."""
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").partition("\n")[0])


def in_turn(
    functions: Mapping[str, Callable[[], object]], rounds: int, calls: int = 1, warm_up: bool = True
) -> dict[str, list[float]]:
    """Seconds a call, for each round; within a round each function has its turn, so that drift hits all alike.

    Args:
        functions: by name.
        rounds: how often each has its turn.
        calls: of one turn.
        warm_up: whether each is called once before.
    """
    if warm_up:
        for function in functions.values():
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            wait()
            seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def ratio(peer: list[float], ours: list[float]) -> float:
    """How many times as long the peer took: the median over the rounds."""
    return statistics.median(theirs / own for theirs, own in zip(peer, ours, strict=True))


def peak_memory(function: Callable[[], object]) -> int:
    """Bytes of tensors that a call holds at its height beyond those that were there; measured in a call of its own."""
    if torch.cuda.is_available():
        wait()
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
    held = height = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        height = max(height, held)
    return height


def peak_rate(device: torch.device, precision: str) -> float:
    """Operations a second that the machine reaches at its best: of a big product of matrices or a big convolution."""
    size, maps = PEAK_SIZES[device.type]
    dtype = getattr(torch, precision)
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    images, kernels = torch.randn(maps, 256, 32, 32), torch.randn(256, 256, 3, 3)
    images, kernels = (
        each.to(device, dtype).contiguous(memory_format=torch.channels_last) for each in (images, kernels)
    )
    taken = in_turn(
        {"product": lambda: matrix @ matrix, "convolution": lambda: functional.conv2d(images, kernels, padding=1)},
        rounds=5,
        calls=4,
    )
    operations = {"product": 2 * size**3, "convolution": 2 * maps * 32**2 * 256**2 * 9}
    return max(operations[name] / min(seconds) for name, seconds in taken.items())


def on_workers(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function` returns in each of so many gloo workers, processes of their own that share the cores out.

    Args:
        world_size: how many; one has no process group.
        function: at the top level of a module; what it returns goes through JSON.
        arguments: of the function, the same for every worker.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_worker, args=(rank, world_size, folder, function, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{function.__name__} on {world_size} workers ended early: see above, or out of memory")
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world_size)]


def _worker(rank: int, world_size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    if world_size > 1:
        dist.init_process_group("gloo", f"file://{folder}/meet", world_size=world_size, rank=rank)
    Path(folder, str(rank)).write_text(json.dumps(function(*arguments)))
    if world_size > 1:
        dist.destroy_process_group()


def peak_resident_mib() -> float:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def environment() -> dict[str, Any]:
    """The date, the commit, the machine and the versions."""
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def save(name: str, values: Mapping[str, Any]) -> Path:
    """Writes a benchmark's figures to `results/<name>-<cpu or gpu>.json`; returns the path."""
    path = RESULTS / f"{name}-{'gpu' if torch.cuda.is_available() else 'cpu'}.json"
    write_json(path, values)
    return path


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a file so that a crash leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(values, indent=2) + "\n")
    os.replace(temporary, path)


def table(rows: list[dict[str, str]]) -> str:
    """The rows, aligned; the keys of the first are the heading, and a row may lack some."""
    lines = [list(rows[0]), *([row.get(key, "-") for key in rows[0]] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(rows[0]))]
    heading, *others = (
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )
    return "\n".join([heading, "-" * len(heading), *others])


def told(error: BaseException) -> str:
    """An error in a line, for a cell of a table."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]


@contextmanager
def _without_stderr() -> Iterator[None]:
    """The profiler announces itself there from C++, at every start and stop."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def wait() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _commit() -> str | None:
    """The checkout's, or the one that SSL_SEC_COMMIT names, as a copy may lack the history, and its machine git."""
    if named := os.environ.get("SSL_SEC_COMMIT"):
        return named
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
