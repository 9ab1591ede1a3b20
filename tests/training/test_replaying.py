"""A replayed function equals the called one, and computes once per call."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from ssl_sec.errors import Stopped
from ssl_sec.networks import Network
from ssl_sec.networks.dropout import GlobalDropout
from ssl_sec.training.optimisers.groups import adamw, parameter_groups
from ssl_sec.training.replaying import WARM_UP_CALLS, Replayed
from tests.fakes import FakeRuntime
from tests.training.fake_graphs import FakeGraphs, use_fake_graphs
from tests.training.test_step import STEPS, fused_sgd, recipe, run


@pytest.fixture
def graphs(monkeypatch):
    return use_fake_graphs(monkeypatch)


def growing():
    """Adds its input to a total, and returns the double of that."""
    total = torch.zeros(3)

    def add(values):
        total.add_(values)
        return total * 2

    return total, add


def test_every_call_computes_once():
    graphs, (total, add) = FakeGraphs(), growing()
    replayed = Replayed(add, graphs)
    for call in range(1, 3 * WARM_UP_CALLS):
        doubled = replayed(torch.full((3,), float(call)))
        assert total.tolist() == [call * (call + 1) / 2] * 3
        assert doubled.tolist() == [call * (call + 1)] * 3
    assert len(graphs.recorded) == 1 and graphs.replays == 2 * WARM_UP_CALLS - 1


def test_the_inputs_are_not_kept():
    _, add = growing()
    replayed = Replayed(add, FakeGraphs())
    given = [torch.full((3,), float(call)) for call in range(6)]
    for values in given:
        replayed(values)
    assert [values[0].item() for values in given] == list(range(6))


def test_an_input_of_another_shape_is_refused():
    replayed = Replayed(lambda values: values * 2, FakeGraphs())
    for _ in range(WARM_UP_CALLS + 1):
        replayed(torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        replayed(torch.ones(4))


def test_functions_that_cannot_be_recorded_are_called(caplog):
    graphs, (total, add) = FakeGraphs(fails=True), growing()
    replayed = Replayed(add, graphs)
    for _ in range(6):
        replayed(torch.ones(3))
    assert total.tolist() == [6.0] * 3 and graphs.replays == 0
    assert [each.getMessage() for each in caplog.records] == ["the steps are not recorded as CUDA graphs: no memory"]


def test_where_memory_is_short_no_copy_of_the_inputs_is_kept():
    class Short(FakeGraphs):
        def record(self, function):
            function()
            raise torch.OutOfMemoryError("no memory")

    seen = []
    replayed = Replayed(lambda values: seen.append(weakref.ref(values)), Short())
    given = [torch.ones(3) for _ in range(WARM_UP_CALLS + 1)]
    for values in given:
        replayed(values)
    assert [ref() is not None for ref in seen] == [True, True, True, False, True]


def test_replayed_steps_keep_the_entries_that_are_drawn_for_each(graphs):
    def trained(**changes):
        torch.manual_seed(1)
        made = recipe(head=nn.Sequential(GlobalDropout(0.5, 6, seed=2), nn.Linear(6, 4)), **changes)
        network = Network(made.encoder, made.head).double()
        made = replace(made, model=network, optimiser=fused_sgd(parameter_groups([network], 1e-3)))
        return run(made).series("train/loss")

    expected = trained()
    assert trained(graphed=True) == pytest.approx(expected, rel=1e-12)
    assert graphs.replays == len(expected) - WARM_UP_CALLS


def with_adamw(as_on_gpu, **changes):
    """Its own state has the number of the step, which each replay has to count."""
    made = recipe(**changes)
    groups = parameter_groups([made.model], 0.1)
    return replace(made, optimiser=adamw([{**group, "fused": as_on_gpu, "capturable": as_on_gpu} for group in groups]))


def test_replayed_steps_of_adamw_equal_called_steps(graphs):
    runtime, called, of_cpu = run(with_adamw(True, graphed=True)), run(with_adamw(True)), run(with_adamw(False))
    assert graphs.replays == STEPS - WARM_UP_CALLS
    for expected, tolerance in ((called, 1e-12), (of_cpu, 1e-9)):
        assert runtime.series("train/loss") == pytest.approx(expected.series("train/loss"), rel=tolerance)
        torch.testing.assert_close(runtime.last_state()["encoder"], expected.last_state()["encoder"])
    optimiser = runtime.last_state()["optimiser"]
    torch.testing.assert_close(optimiser, called.last_state()["optimiser"], rtol=1e-10, atol=1e-12, check_dtype=True)
    assert {float(each["step"]) for each in optimiser["state"].values()} == {STEPS}


@pytest.mark.parametrize("stopped_on_gpu", [True, False])
def test_a_run_with_adamw_resumes_on_another_device(graphs, stopped_on_gpu):
    whole = run(with_adamw(False)).last_state()
    stopped = FakeRuntime(stop_at=7)
    with pytest.raises(Stopped):
        run(with_adamw(stopped_on_gpu, graphed=stopped_on_gpu), runtime=stopped)
    resumed = with_adamw(not stopped_on_gpu, graphed=not stopped_on_gpu)
    end = run(resumed, first_step=resumed.restore(stopped.last_state())).last_state()
    assert graphs.replays == (7 if stopped_on_gpu else STEPS - 7) - WARM_UP_CALLS
    torch.testing.assert_close(end["encoder"], whole["encoder"], rtol=1e-7, atol=1e-8)
    assert {float(each["step"]) for each in end["optimiser"]["state"].values()} == {STEPS}
