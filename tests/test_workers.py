import os

import pytest
import torch

from ssl_sec.collectives import rank
from tests import workers
from tests.workers import on_workers


def fails_on_one():
    if rank() == 1:
        raise LookupError("here")
    return rank()


@pytest.mark.slow
@pytest.mark.distributed
def test_workers_that_could_not_join_are_restarted(tmp_path, monkeypatch):
    answers, tries = workers._answers, []

    def refused_once(started):
        tries.append([worker.pid for worker in started])
        answered = answers(started)
        return None if len(tries) == 1 else answered

    monkeypatch.setattr(workers, "_answers", refused_once)
    assert on_workers(2, tmp_path, rank) == [0, 1]
    first, second, *_ = tries  # a busy machine may refuse them again
    assert not set(first) & set(second)


@pytest.mark.distributed
def test_an_error_names_its_worker(tmp_path):
    with pytest.raises(AssertionError, match=r"^worker 1: Traceback(.|\n)*LookupError: here"):
        on_workers(2, tmp_path, fails_on_one)


def test_the_number_of_threads_is_that_of_the_environment():
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
