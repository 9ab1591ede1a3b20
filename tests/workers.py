"""Functions run in several gloo processes at once."""

import gc
import multiprocessing.connection
import os
import pickle
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 120
RENDEZVOUS_TRIES = 3
NOT_JOINED = "not joined"


class NotJoinedError(Exception):
    """A worker could not join the others."""


# Two workers in every run of the tests, four in the slow ones.
two_and_four = pytest.mark.parametrize("num_workers", [2, pytest.param(4, marks=pytest.mark.slow)])

_warm: list[subprocess.Popen] = []


def on_workers(world_size: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What each of `world_size` workers returns, in the order of their ranks.

    The processes stay warm from one call to the next. They are no children of `multiprocessing`, which other tests
    count.

    Args:
        world_size: how many.
        folder: where they find each other.
        function: at the top level of a module; it runs in every worker, inside of a process group.
        arguments: of the function, the same for every worker.
    """
    call = pickle.dumps((function, arguments))
    for _ in range(RENDEZVOUS_TRIES):
        rendezvous = folder / f"rendezvous-{uuid.uuid4().hex}"
        workers = [_worker(rank) for rank in range(world_size)]
        for rank, worker in enumerate(workers):
            pickle.dump((rank, world_size, str(rendezvous), call), worker.stdin)
            worker.stdin.flush()
        answers = _answers(workers)
        if answers is not None:
            break
        # gloo sometimes closes a new connection; the other workers would wait until their timeout.
        _kill_workers()
    else:
        raise AssertionError("the workers did not find each other")
    errors = [f"worker {rank}: {error}" for rank, (error, _) in enumerate(answers) if error]
    assert not errors, "\n".join(errors)
    return [pickle.loads(result) for _, result in answers]


def _answers(workers: list[subprocess.Popen]) -> list[tuple[str | None, bytes | None]] | None:
    """The answer of each worker; None as soon as one could not join the others."""
    answers = {}
    waiting = {worker.stdout: rank for rank, worker in enumerate(workers)}
    while waiting:
        for stream in multiprocessing.connection.wait(list(waiting)):
            error, result = pickle.load(stream)
            if error == NOT_JOINED:
                return None
            answers[waiting.pop(stream)] = error, result
    return [answers[rank] for rank in range(len(workers))]


def _kill_workers() -> None:
    while _warm:
        worker = _warm.pop()
        worker.kill()
        worker.communicate()


def end_workers() -> None:
    """Ends the processes, by a message: a process forked meanwhile may hold the other end of their input."""
    while _warm:
        worker = _warm.pop()
        pickle.dump(None, worker.stdin)
        worker.communicate()


def _worker(rank: int) -> subprocess.Popen:
    while rank >= len(_warm):
        _warm.append(_started())
    return _warm[rank]


def _started() -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.workers"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _serve() -> None:
    import tests.conftest  # noqa: F401  # the same checks of shapes as in the tests' process

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not mix with the answers
    while (task := _task()) is not None:
        try:
            answer = None, pickle.dumps(_work(*task))
        except NotJoinedError:
            answer = NOT_JOINED, None
        except Exception:
            answer = traceback.format_exc(), None
        pickle.dump(answer, answers)
        answers.flush()
        gc.collect()
        gc.freeze()  # what was imported stays
    os._exit(0)  # Python's own end takes seconds


def _task() -> tuple[int, int, str, bytes] | None:
    """The next message; None at the end, even if the process of the tests was killed."""
    try:
        return pickle.load(sys.stdin.buffer)
    except EOFError:
        return None


def _work(rank: int, world_size: int, rendezvous: str, call: bytes) -> Any:
    import torch.distributed as dist

    timeout = timedelta(seconds=TIMEOUT_S)
    try:
        dist.init_process_group("gloo", f"file://{rendezvous}", timeout, world_size=world_size, rank=rank)
    except RuntimeError as error:
        raise NotJoinedError from error
    try:
        function, arguments = pickle.loads(call)
        return function(*arguments)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _serve()
