"""Runs of a recipe that must be the same: on several workers, and stopped and resumed.

The argument `run` is a function at the top level of a module: `run(folder, machine, state, **changes)` runs the recipe
with changed values, and returns its runtime and its store.
"""

import pytest
import torch

from ssl_sec.collectives import rank, world_size
from ssl_sec.errors import Stopped
from tests.fakes import FakeRuntime, FakeStore, assert_identical
from tests.workers import on_workers


def run_with_fakes(recipe, config, folder, machine=None, state=None):
    machine, store = machine or FakeRuntime(), FakeStore(folder, state)
    recipe(config, machine, store)
    return machine, store


def on_a_worker(run, folder, changes, stop_at=None, state=None):
    """What this worker reported, and its last saved state."""
    runtime = FakeRuntime(rank(), world_size(), stop_at)
    try:
        run(folder, runtime, state, **changes)
    except Stopped:
        assert stop_at is not None
    return [(step, metrics) for step, metrics, _ in runtime.reports], runtime.last_state()


def curve(reports):
    """All metrics that must not depend on the number of workers: all but the speed."""
    return [(step, {name: m[name] for name in sorted(m) if name != "train/images_per_s"}) for step, m, *_ in reports]


def assert_the_same_curve(one, other, rel=1e-8):
    one, other = curve(one), curve(other)
    assert [(step, list(metrics)) for step, metrics in one] == [(step, list(metrics)) for step, metrics in other]
    for (_, mine), (_, theirs) in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, rel=rel)


def assert_the_same_on_workers(
    run, folder, whole, changes, *, num_workers=2, num_of_first=0, rel=1e-8, rtol=1e-7, atol=1e-9
):
    """A run on workers ends as `whole`, the runtime of one; the last `num_of_first` reports are of the first worker."""
    for number, (reports, state) in enumerate(on_workers(num_workers, folder, on_a_worker, run, folder, changes)):
        assert_the_same_curve(reports, whole.reports[: len(whole.reports) - (num_of_first if number else 0)], rel)
        torch.testing.assert_close(state, whole.last_state(), rtol=rtol, atol=atol)


def assert_resumes_bit_equal(run, folder, whole, stop_at, **changes):
    """A run that is stopped and resumed ends as `whole`, the runtime of an uninterrupted one; returns its store."""
    stopped = FakeRuntime(stop_at=stop_at)
    with pytest.raises(Stopped):
        run(folder, stopped, **changes)
    torch.manual_seed(99)
    resumed, store = run(folder, state=stopped.last_state(), **changes)
    assert curve(stopped.reports + resumed.reports) == curve(whole.reports)
    assert_identical(resumed.last_state(), whole.last_state())
    return store
