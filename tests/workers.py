"""Functions run in several gloo processes at once."""

import functools
import multiprocessing
import pickle
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

MAX_WORKERS = 4
TIMEOUT_S = 120


def on_workers(world_size: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What each of `world_size` workers returns, in the order of their ranks.

    The processes stay warm from one call to the next.

    Args:
        world_size: at most `MAX_WORKERS`.
        folder: where they find each other.
        function: at the top level of a module; it runs in every worker, inside of a process group.
        arguments: of the function, the same for every worker.
    """
    assert world_size <= MAX_WORKERS
    rendezvous = str(folder / f"rendezvous-{uuid.uuid4().hex}")
    # Pickled here: torch would pass tensors through shared memory, which must outlive the sender.
    call = pickle.dumps((function, arguments))
    futures = [_processes().submit(_work, rank, world_size, rendezvous, call) for rank in range(world_size)]
    return [pickle.loads(future.result(timeout=2 * TIMEOUT_S)) for future in futures]


@functools.cache
def _processes() -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(MAX_WORKERS, mp_context=context, initializer=_prepare)


def _prepare() -> None:
    import tests.conftest  # noqa: F401  # the same checks of shapes as in this process

    torch.set_num_threads(1)


def _work(rank: int, world_size: int, rendezvous: str, call: bytes) -> bytes:
    # Every task waits here for the others, so that no process takes two of them.
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", f"file://{rendezvous}", timeout, world_size=world_size, rank=rank)
    try:
        function, arguments = pickle.loads(call)
        return pickle.dumps(function(*arguments))
    finally:
        dist.destroy_process_group()
