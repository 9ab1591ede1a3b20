from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ssl_sec.training.optimisers import groups
from ssl_sec.training.optimisers.groups import adam, adamw, lars, parameter_groups, set_learning_rate, sgd

of_pretraining = pytest.mark.parametrize(
    "build", [partial(sgd, momentum=0.9), partial(lars, momentum=0.9), adamw], ids=["sgd", "lars", "adamw"]
)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def names_of(network, parameters):
    return {name for name, p in network.named_parameters() if any(p is other for other in parameters)}


@of_pretraining
def test_weights_decay_and_biases_and_batch_norm_do_not(build):
    model = network()
    decayed, spared = build(parameter_groups([model], 0.1)).param_groups
    assert names_of(model, decayed["params"]) == {"0.weight", "3.weight"}
    assert names_of(model, spared["params"]) == {"0.bias", "1.weight", "1.bias", "3.bias"}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)


def test_with_decay_all_sgd_equals_torchs_without_groups():
    ours, theirs = network(), network()
    optimiser = sgd(parameter_groups([ours], 0.1, decay_all=True), 0.9)
    oracle = torch.optim.SGD(theirs.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)
    set_learning_rate(optimiser, 0.2)
    for _ in range(3):
        for model, steps in ((ours, optimiser), (theirs, oracle)):
            steps.zero_grad()
            model(torch.arange(64.0).view(4, 1, 4, 4)).square().sum().backward()
            steps.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_groups_span_modules_without_frozen_or_empty_parameters():
    encoder, head = nn.Linear(2, 2), nn.Linear(2, 1, bias=False)
    encoder.bias.requires_grad_(False)
    (group,) = parameter_groups([encoder, head, nn.ReLU()], 0.1)
    assert [id(p) for p in group["params"]] == [id(encoder.weight), id(head.weight)]


@of_pretraining
def test_an_optimiser_whose_rate_was_never_set_does_not_train(build):
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimiser = build(parameter_groups([model], 0.1))
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    assert torch.equal(model.weight, before)


@of_pretraining
def test_a_scheduler_of_torch_follows_the_rate_that_was_set_before(build):
    optimiser = build(parameter_groups([network()], 0.1))
    set_learning_rate(optimiser, 0.4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 10)
    for _ in range(5):
        optimiser.step()
        scheduler.step()
    assert [group["lr"] for group in optimiser.param_groups] == pytest.approx([0.2, 0.2])


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


@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_lars_has_the_papers_trust_ratio(decay):
    model = nn.Linear(3, 2).double()
    before, bias = model.weight.detach().clone(), model.bias.detach().clone()
    optimiser = lars(parameter_groups([model], decay), momentum=0.9)
    set_learning_rate(optimiser, 0.5)
    model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    gradient = model.weight.grad.clone()
    optimiser.step()
    trust = 0.001 * before.norm() / (gradient.norm() + decay * before.norm())
    torch.testing.assert_close(
        model.weight.detach(), before - 0.5 * trust * (gradient + decay * before), rtol=1e-6, atol=1e-9
    )
    torch.testing.assert_close(model.bias.detach(), bias - 0.5 * 4, rtol=1e-12, atol=0)


def test_lars_trains_as_lightlys():
    peer = pytest.importorskip("lightly.utils.lars")
    ours, theirs = network().double(), network().double()
    oracle = peer.LARS(parameter_groups([theirs], 0.1), lr=0.0, momentum=0.9)
    optimisers = [lars(parameter_groups([ours], 0.1), 0.9), oracle]
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        images = torch.randn(6, 1, 4, 4, dtype=torch.float64, generator=generator)
        for model, optimiser in zip((ours, theirs), optimisers, strict=True):
            set_learning_rate(optimiser, 0.01 * (step + 1))
            optimiser.zero_grad()
            model(images).square().mean().backward()
            optimiser.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-13)


def test_adamw_trains_as_torchs_with_the_decay_of_weights_alone():
    ours, theirs = (nn.Sequential(network(), nn.LayerNorm(3), nn.Linear(3, 2)).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    weights = [theirs[0][0].weight, theirs[0][3].weight, theirs[2].weight]
    others = [theirs[0][0].bias, *theirs[0][1].parameters(), theirs[0][3].bias, *theirs[1].parameters(), theirs[2].bias]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    oracle = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    generator = torch.Generator().manual_seed(0)
    optimiser = adamw(parameter_groups([ours], 0.1))
    for step in range(20):
        images = torch.randn(6, 1, 4, 4, dtype=torch.float64, generator=generator)
        for model, each in ((ours, optimiser), (theirs, oracle)):
            set_learning_rate(each, 0.01 * (step + 1))
            each.zero_grad()
            model(images).square().mean().backward()
            each.step()
    assert len([*theirs.parameters()]) == len(weights) + len(others)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@of_pretraining
def test_no_step_reads_a_value(build, monkeypatch):
    """On a GPU; on a CPU, Adam reads the number of its own step."""
    monkeypatch.setattr(groups, "_are_on_gpu", lambda found: True)
    model = network()
    optimiser = build(parameter_groups([model], 0.1))
    for group in optimiser.param_groups:
        group["lr"] = torch.tensor(0.1)  # as where steps are recorded
    model(torch.ones(2, 1, 4, 4)).sum().backward()
    with Waits() as waits:
        optimiser.step()
        optimiser.step()
    assert waits.count == 0


@pytest.mark.parametrize(("build", "in_gradient", "apart"), [(adam, 0.1, 0.0), (adamw, 0.0, 0.1)])
def test_adams_decay_is_part_of_the_gradient_and_adamws_is_not(build, in_gradient, apart):
    """Kingma and Ba 2015, Algorithm 1, on gradient + decay · weight; Loshchilov and Hutter 2019, Algorithm 2."""
    model = nn.Linear(1, 1, bias=False).double()
    optimiser = build(parameter_groups([model], 0.1))
    weight, first, second = model.weight.item(), 0.0, 0.0
    for step in range(1, 4):
        set_learning_rate(optimiser, 0.01)
        optimiser.zero_grad()
        model(torch.full((1, 1), 3.0, dtype=torch.float64)).sum().backward()
        optimiser.step()
        gradient = 3.0 + in_gradient * weight
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        weight *= 1 - 0.01 * apart
        weight -= 0.01 * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)) ** 0.5 + 1e-8)
        assert model.weight.item() == pytest.approx(weight, rel=1e-12)


def test_groups_get_their_multiples_of_the_rate():
    backbone, head = nn.Linear(2, 2), nn.Linear(2, 2)
    optimiser = sgd([*parameter_groups([backbone], 0.1, rate_factor=0.5), *parameter_groups([head], 0.1)], 0.9)
    for rate in (0.3, 0.2):
        set_learning_rate(optimiser, rate)
        assert [group["lr"] for group in optimiser.param_groups] == [rate / 2, rate / 2, rate, rate]


def test_adamw_can_be_recorded_on_a_gpu(monkeypatch):
    """torch refuses to record an Adam that is not `capturable`."""
    assert not any(group["capturable"] for group in adamw(parameter_groups([network()], 0.1)).param_groups)
    monkeypatch.setattr(groups, "_are_on_gpu", lambda found: True)
    on_gpu = adamw(parameter_groups([network()], 0.1)).param_groups
    assert [(group["fused"], group["capturable"]) for group in on_gpu] == [(True, True)] * 2
