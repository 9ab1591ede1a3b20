import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

from ssl_sec.networks import Encoder
from ssl_sec.networks.config import ResNetConfig
from ssl_sec.networks.heads import LinearClassifier
from ssl_sec.networks.stages import freeze_all_but, stages_of
from ssl_sec.training.optimisers.groups import set_learning_rate
from ssl_sec.training.optimisers.layer_rates import AdamWConfig, NesterovConfig


def rates_of(optimiser, network):
    """The rate of each parameter that is trained, by name."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    return {names[id(parameter)]: group["lr"] for group in optimiser.param_groups for parameter in group["params"]}


def test_the_rate_of_a_stage_falls_with_its_distance_from_the_head():
    encoder = ResNetConfig(name="resnet18", width=0.125).build(1, 8)
    network = nn.ModuleDict({"encoder": encoder, "head": LinearClassifier(encoder.num_features, 10)})
    optimiser = NesterovConfig(learning_rate=0.4, layer_decay=0.5, weight_decay=0.1).build(encoder, network["head"])
    set_learning_rate(optimiser, 0.4)
    rates = rates_of(optimiser, network)
    assert rates.keys() == {name for name, _ in network.named_parameters()}
    for distance, names in enumerate(reversed(stages_of(encoder.backbone)), start=1):
        assert {rates[f"encoder.backbone.{name}"] for name in names} == {0.4 * 0.5**distance}
    assert {rates[name] for name in rates if name.startswith("head.")} == {0.4}
    for group in optimiser.param_groups:
        assert all((parameter.ndim > 1) == (group["weight_decay"] == 0.1) for parameter in group["params"])


@pytest.mark.parametrize("config", [NesterovConfig, AdamWConfig])
def test_biases_and_norms_decay_if_all_parameters_do(config):
    encoder = ResNetConfig(name="resnet18", width=0.125).build(1, 8)
    optimiser = config(weight_decay=0.1, decay_all=True).build(encoder, LinearClassifier(encoder.num_features, 10))
    assert {group["weight_decay"] for group in optimiser.param_groups} == {0.1}
    assert any(parameter.ndim == 1 for group in optimiser.param_groups for parameter in group["params"])


@pytest.mark.parametrize("config", [NesterovConfig, AdamWConfig])
def test_the_rate_rises_in_the_warmup_and_then_falls_to_0(config):
    rate = config(learning_rate=1.0, warmup_epochs=2).schedule(steps_per_epoch=5, total_steps=100)
    assert [rate(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert rate(9) > rate(50) > rate(99) > 0
    assert config(learning_rate=1.0).schedule(5, 100)(0) == 1.0


def test_frozen_stages_are_in_no_group():
    encoder = ResNetConfig(name="resnet18", width=0.125).build(1, 8)
    freeze_all_but(encoder.backbone, 1, key="trained_stages")
    optimiser = AdamWConfig(layer_decay=0.5).build(encoder)
    assert {group["rate_factor"] for group in optimiser.param_groups} == {0.5}
    names = rates_of(optimiser, encoder.backbone)
    assert names and all(name.startswith("layer4.") for name in names)


@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "deit_tiny_patch16_224"])
def test_vision_transformers_have_the_rates_of_timm(model):
    """Whose groups are of a network with its classifier, the last layer."""
    whole = timm.create_model(model, num_classes=10, img_size=32)
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    theirs = {
        names[id(parameter)]: (group["lr_scale"], group["weight_decay"])
        for group in param_groups_layer_decay(whole, weight_decay=0.05, layer_decay=0.75)
        for parameter in group["params"]
    }
    backbone = timm.create_model(model, num_classes=0, img_size=32)
    optimiser = AdamWConfig(weight_decay=0.05, layer_decay=0.75).build(Encoder(backbone, 192))
    names = {id(parameter): name for name, parameter in backbone.named_parameters()}
    ours = {
        names[id(parameter)]: (group["rate_factor"], group["weight_decay"])
        for group in optimiser.param_groups
        for parameter in group["params"]
    }
    assert len(ours) > 100
    for name, (rate, decay) in ours.items():
        assert rate == pytest.approx(theirs[name][0], rel=1e-12), name
        if name not in ("cls_token", "pos_embed"):  # which have two dimensions or more
            assert decay == theirs[name][1], name
    assert theirs["head.weight"][0] == 1.0


def test_nesterovs_momentum_is_that_of_its_equations():
    """v ← m v + g, w ← w − α (g + m v)."""
    encoder = Encoder(nn.Sequential(nn.Linear(2, 1, bias=False)), 1)
    optimiser = NesterovConfig(learning_rate=0.1, momentum=0.9).build(encoder)
    weight = encoder.backbone[0].weight
    expected, velocity = weight.detach().clone(), torch.zeros(1, 2)
    for step in range(3):
        gradient = torch.tensor([[1.0, -2.0]]) * (step + 1)
        weight.grad = gradient.clone()
        set_learning_rate(optimiser, 0.1)
        optimiser.step()
        velocity = 0.9 * velocity + gradient
        expected -= 0.1 * (gradient + 0.9 * velocity)
    torch.testing.assert_close(weight.detach(), expected)
