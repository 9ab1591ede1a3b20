import pytest
import torch
from lightly.utils.lars import LARS
from torch import nn

from ssl_sec.optimisers import adam, lars, parameter_groups, set_learning_rate, sgd


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def names_of(network, parameters):
    return {name for name, p in network.named_parameters() if any(p is other for other in parameters)}


@pytest.mark.parametrize("build", [sgd, lars])
def test_weights_decay_and_biases_and_batch_norm_do_not(build):
    model = network()
    decayed, spared = build(parameter_groups([model], 0.1), momentum=0.9).param_groups
    assert names_of(model, decayed["params"]) == {"0.weight", "3.weight"}
    assert names_of(model, spared["params"]) == {"0.bias", "1.weight", "1.bias", "3.bias"}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)


def test_groups_span_modules_and_leave_out_what_is_frozen_or_empty():
    encoder, head = nn.Linear(2, 2), nn.Linear(2, 1, bias=False)
    encoder.bias.requires_grad_(False)
    (group,) = parameter_groups([encoder, head, nn.ReLU()], 0.1)
    assert [id(p) for p in group["params"]] == [id(encoder.weight), id(head.weight)]


@pytest.mark.parametrize("build", [sgd, lars])
def test_an_optimiser_whose_rate_was_never_set_does_not_train(build):
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimiser = build(parameter_groups([model], 0.1), momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    assert torch.equal(model.weight, before)


def test_sgd_decays_before_its_momentum():
    model = nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(5.0)
    optimiser = sgd(parameter_groups([model], 0.1), momentum=0.9)
    weight, bias, velocity, bias_velocity = 2.0, 5.0, 0.0, 0.0
    for step in range(3):
        rate = 0.1 * (step + 1)
        set_learning_rate(optimiser, rate)
        optimiser.zero_grad()
        model(torch.full((1, 1), 3.0, dtype=torch.float64)).sum().backward()
        optimiser.step()
        gradient = 3.0 + 0.1 * weight
        velocity, bias_velocity = 0.9 * velocity + gradient, 0.9 * bias_velocity + 1.0
        weight -= rate * velocity
        bias -= rate * bias_velocity
        assert model.weight.item() == pytest.approx(weight, rel=1e-13)
        assert model.bias.item() == pytest.approx(bias, rel=1e-13)


def test_lars_is_lightlys_with_its_trust_ratio():
    model = nn.Linear(3, 2).double()
    before, bias = model.weight.detach().clone(), model.bias.detach().clone()
    optimiser = lars(parameter_groups([model], 0.1), momentum=0.9)
    assert isinstance(optimiser, LARS)
    set_learning_rate(optimiser, 0.5)
    model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    gradient = model.weight.grad.clone()
    optimiser.step()
    trust = 0.001 * before.norm() / (gradient.norm() + 0.1 * before.norm())
    torch.testing.assert_close(
        model.weight.detach(), before - 0.5 * trust * (gradient + 0.1 * before), rtol=1e-6, atol=1e-9
    )
    torch.testing.assert_close(model.bias.detach(), bias - 0.5 * 4, rtol=1e-12, atol=0)


def test_adams_decay_is_part_of_the_gradient():
    """Kingma and Ba 2015, Algorithm 1, on gradient + decay · weight."""
    model = nn.Linear(1, 1, bias=False).double()
    optimiser = adam(parameter_groups([model], 0.1))
    weight, first, second = model.weight.item(), 0.0, 0.0
    for step in range(1, 4):
        set_learning_rate(optimiser, 0.01)
        optimiser.zero_grad()
        model(torch.full((1, 1), 3.0, dtype=torch.float64)).sum().backward()
        optimiser.step()
        gradient = 3.0 + 0.1 * weight
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        weight -= 0.01 * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)) ** 0.5 + 1e-8)
        assert model.weight.item() == pytest.approx(weight, rel=1e-12)


def test_groups_get_their_multiples_of_the_rate():
    backbone, head = nn.Linear(2, 2), nn.Linear(2, 2)
    optimiser = sgd([*parameter_groups([backbone], 0.1, rate_factor=0.5), *parameter_groups([head], 0.1)], 0.9)
    for rate in (0.3, 0.2):
        set_learning_rate(optimiser, rate)
        assert [group["lr"] for group in optimiser.param_groups] == [rate / 2, rate / 2, rate, rate]
