import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssl_sec.losses.averages import Averages
from ssl_sec.settings import ConfigError


def figures(*numbers):
    return [torch.tensor(number, dtype=torch.float64) for number in numbers]


@given(batches=st.lists(st.tuples(*[st.floats(-1e6, 1e6)] * 2), min_size=1, max_size=5), rho=st.floats(0.01, 1.0))
def test_the_averages_are_those_of_the_slow_loop(batches, rho):
    averages, expected = Averages(rho, "first", "second"), None
    for batch in batches:
        old = batch if expected is None else expected
        expected = tuple((1 - rho) * before + rho * now for before, now in zip(old, batch, strict=True))
        found = averages.average(*figures(*batch))
        assert [value.item() for value in found] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert [averages.first.item(), averages.second.item()] == [value.item() for value in found]


@pytest.mark.parametrize("still", ["evaluation", "generated"])
def test_they_are_the_figures_until_a_batch_has_set_them_and_then_stay(still):
    averages = Averages(0.5, "only")
    for moves, figure, expected in [(False, 3.0, 3.0), (True, 4.0, 4.0), (False, 3.0, 4.0), (True, 2.0, 3.0)]:
        averages.train(moves or still == "generated")
        averages.moves = moves or still == "evaluation"
        assert averages.average(*figures(figure)) == (expected,)
    assert averages.only == 3.0


def test_a_batch_that_overflowed_moves_none():
    averages = Averages(0.5, "first", "second")
    for broken in [(math.inf, 1.0), (1.0, math.nan)]:
        averages.average(*figures(*broken))
        assert not averages.started
    averages.average(*figures(2.0, 3.0))
    assert averages.average(*figures(math.nan, 1.0)) == (2.0, 3.0)
    assert averages.started


@pytest.mark.parametrize("convert", [torch.nn.Module.half, torch.nn.Module.double, torch.nn.Module.bfloat16])
def test_they_stay_in_float64(convert):
    averages = convert(Averages(0.01, "only"))
    assert (averages.only.dtype, averages.started.dtype) == (torch.float64, torch.bool)


@pytest.mark.parametrize("rho", [0.0, -0.1, 1.1, math.nan])
def test_a_weight_out_of_range_is_refused(rho):
    with pytest.raises(ConfigError, match=r"rho: found .*, must be in \(0, 1\]"):
        Averages(rho, "only")


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float64])
def test_they_move_to_another_device_with_the_model(dtype):
    averages = Averages(0.01, "only").to("meta", dtype)
    assert {(name, buffer.device.type, buffer.dtype) for name, buffer in averages.named_buffers()} == {
        ("only", "meta", torch.float64),
        ("started", "meta", torch.bool),
    }


def test_no_gradient_passes_through_them():
    averages = Averages(0.5, "only")
    for figure in (1.0, 3.0):
        (found,) = averages.average(torch.tensor(figure, requires_grad=True))
    assert found == 2.0 and not found.requires_grad and not averages.only.requires_grad


def test_they_show_the_weight_of_a_batch():
    assert repr(Averages(0.25, "only")) == "Averages(rho=0.25)"
