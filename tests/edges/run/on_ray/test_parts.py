"""Parts of a job on the workers of a cluster, without the cluster."""

import os
import pickle

import numpy as np
import pytest

from ssl_sec.edges.run.on_ray import parts
from ssl_sec.errors import ConfigError, DataError


@pytest.fixture
def worker(monkeypatch):
    """Makes a worker whose work starts with a function."""
    monkeypatch.setattr(parts.ray, "get", lambda reference: reference)
    return lambda start: parts._Worker(start, False, os.getcwd())


def done(worker, part):
    """The rows of a part, or the error that the driver raises."""
    found = worker({"part": np.array([part])})
    (rows,), (mistake,) = found["rows"], found["mistake"]
    return pickle.loads(mistake) if mistake else rows


def test_a_worker_starts_once(worker):
    devices = []
    one = worker(lambda device, on_images: devices.append(device.type) or (lambda part: 10 * part))
    assert [done(one, part) for part in (3, 1)] == [30, 10] and devices == ["cpu"]


@pytest.mark.parametrize("where", ["start", "part"])
def test_an_error_of_the_user_is_a_value(worker, where):
    """Ray would wrap one that is raised into a traceback of a hundred lines, in particular one of a start."""

    def fail(*_):
        raise DataError("data.root: /images does not exist")

    error = done(worker(fail if where == "start" else lambda device, on_images: fail), 0)
    assert isinstance(error, DataError) and str(error) == "data.root: /images does not exist"


def test_a_lack_of_memory_is_an_error_of_the_user_and_another_error_is_none(worker):
    def fail(part):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB" if part else "a bug")

    one = worker(lambda device, on_images: fail)
    assert isinstance(done(one, 1), ConfigError) and str(done(one, 1)).startswith("not enough memory for 2 GiB at once")
    with pytest.raises(RuntimeError, match="^a bug$"):
        done(one, 0)


def test_a_gpu_that_cannot_be_used_is_an_error_of_the_user(worker, monkeypatch):
    def unusable(device):
        assert device.type == "cpu"  # that of the worker
        raise ConfigError("runtime.device: found a GPU that cannot be used")

    monkeypatch.setattr(parts, "require_usable", unusable)
    one = worker(lambda device, on_images: pytest.fail("it starts"))
    assert str(done(one, 0)) == "runtime.device: found a GPU that cannot be used"
