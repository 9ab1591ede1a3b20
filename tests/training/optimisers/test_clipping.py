"""Gradients are clipped by the norm of all of them together."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from ssl_sec.errors import Stopped
from ssl_sec.losses import NTXentLoss
from ssl_sec.training.optimisers.clipping import clip_gradients
from ssl_sec.training.optimisers.groups import parameter_groups, sgd
from ssl_sec.training.replaying import WARM_UP_CALLS
from ssl_sec.training.step import train_step
from tests.fakes import FakeRuntime, assert_identical
from tests.training.fake_graphs import use_fake_graphs
from tests.training.optimisers.test_groups import Waits, network
from tests.training.test_step import STEPS, fused_sgd, recipe, run

NORM = "train/weight_gradient_norm"
CLIP = 0.05


def with_gradients():
    """A network of two groups, and its optimiser."""
    model = network().double()
    images = torch.randn(5, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model(images).square().sum().backward()
    return model, sgd(parameter_groups([model], 0.1), 0.9)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 1e3])
def test_the_gradients_are_those_that_torch_clips(clip_norm):
    model, optimiser = with_gradients()
    peer, _ = with_gradients()
    norm = clip_gradients(optimiser, clip_norm)
    expected = torch.nn.utils.clip_grad_norm_(peer.parameters(), clip_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(gradients(model), gradients(peer), rtol=1e-12, atol=0)
    after = math.sqrt(sum(float(each.square().sum()) for each in gradients(model)))
    assert after == pytest.approx(min(clip_norm, float(norm)), rel=1e-2)
    assert 1e-3 < float(norm) < 1e3


def test_parameters_without_a_gradient_stay_without_one():
    model, optimiser = with_gradients()
    model[3].weight.grad = None
    expected = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    assert float(clip_gradients(optimiser, 1e-3)) == pytest.approx(expected, rel=1e-12)
    assert model[3].weight.grad is None


@pytest.mark.parametrize("names", [["3.weight"], ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]])
def test_the_parameters_that_one_worker_holds_count_as_the_others(names):
    model, optimiser = with_gradients()
    peer, of_peer = with_gradients()
    held = [parameter for name, parameter in model.named_parameters() if name in names]
    norm = clip_gradients(optimiser, 0.01, held)
    assert float(norm) == pytest.approx(float(clip_gradients(of_peer, 0.01)), rel=1e-14)
    torch.testing.assert_close(gradients(model), gradients(peer), rtol=1e-13, atol=0)


@pytest.mark.parametrize("spoiled", [math.nan, math.inf, 1e300])
def test_gradients_whose_norm_is_not_finite_become_nan(spoiled):
    """Finite ones of 1e300, whose norm is infinite, would otherwise become 0 without a word."""
    model, optimiser = with_gradients()
    model[0].weight.grad[0, 0, 0, 0] = spoiled
    assert not clip_gradients(optimiser, 1.0).isfinite()
    assert all(each.isnan().all() for each in gradients(model))


def test_no_value_is_read():
    _, optimiser = with_gradients()
    with Waits() as waits:
        clip_gradients(optimiser, 0.1)
    assert waits.count == 0


def test_a_step_is_that_of_torch_with_clipping():
    ours, theirs = recipe(clip_norm=CLIP), recipe()
    views, labels = torch.randn(16, 1, 3, 3, dtype=torch.float64), torch.arange(8).repeat(2)
    for step in range(3):
        taken = train_step(ours, views, labels, step)
        for group in theirs.optimiser.param_groups:
            group["lr"] = theirs.learning_rate(step)
        theirs.optimiser.zero_grad()
        embeddings = theirs.model(views).embeddings
        eta = theirs.objective.eta(step)
        (NTXentLoss(0.5)(embeddings, labels) + eta * theirs.objective.constraint(embeddings)).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.model.parameters(), CLIP)
        theirs.optimiser.step()
        assert float(taken.gradient_norm) == pytest.approx(float(norm), rel=1e-12) and norm > 2 * CLIP
        torch.testing.assert_close(
            dict(ours.model.state_dict()), dict(theirs.model.state_dict()), rtol=1e-11, atol=1e-14
        )


def test_the_norm_before_clipping_is_reported_and_no_norm_is_without_it():
    norms = run(recipe(clip_norm=CLIP)).series(NORM)
    assert list(norms) == list(range(STEPS)) and min(norms.values()) > CLIP
    unlimited = run(recipe(clip_norm=1e9))
    assert_identical(unlimited.last_state(), run(recipe()).last_state())
    assert run(recipe()).series(NORM) == {}


def test_a_stopped_and_resumed_run_with_clipping_ends_bit_equal():
    whole = run(recipe(clip_norm=CLIP)).last_state()
    stopped = FakeRuntime(stop_at=5)
    with pytest.raises(Stopped):
        run(recipe(clip_norm=CLIP), runtime=stopped)
    resumed = recipe(clip_norm=CLIP)
    end = run(resumed, first_step=resumed.restore(stopped.last_state()))
    assert_identical(end.last_state(), whole)


def test_replayed_steps_are_clipped_as_called_ones(monkeypatch):
    graphs = use_fake_graphs(monkeypatch)

    def trained(**changes):
        made = recipe(clip_norm=CLIP, **changes)
        return run(replace(made, optimiser=fused_sgd(parameter_groups([made.model], 1e-3))))

    replayed, called = trained(graphed=True), trained()
    assert graphs.replays == STEPS - WARM_UP_CALLS
    assert replayed.series(NORM) == pytest.approx(called.series(NORM), rel=1e-10)
    assert len({*called.series(NORM).values()}) == STEPS
    torch.testing.assert_close(replayed.last_state(), called.last_state(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spoiled", [math.nan, math.inf, 1e300])
def test_a_gradient_that_is_not_finite_ends_the_run_as_without_clipping(spoiled):
    training, backwards = recipe(clip_norm=CLIP), []

    def spoil(parameter):
        backwards.append(None)
        if len(backwards) == 4:
            parameter.grad[0, 0] = spoiled

    training.head.weight.register_post_accumulate_grad_hook(spoil)
    with pytest.raises(FloatingPointError, match="^the objective is nan at step 4 "):
        run(training)


def test_a_network_of_frozen_weights_and_a_trained_bias():
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    layer(torch.ones(1, 2)).sum().backward()
    assert float(clip_gradients(sgd(parameter_groups([layer], 0.1), 0.9), 1.0)) == pytest.approx(math.sqrt(2))
    torch.testing.assert_close(layer.bias.grad, torch.full((2,), 1 / math.sqrt(2)))
