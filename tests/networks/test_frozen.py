import copy

import pytest
import timm
import torch
from torch import nn

from ssl_sec.networks import freeze_batch_norm
from ssl_sec.networks.batch_norm import GlobalBatchNorm, globalise_batch_norm
from ssl_sec.networks.frozen import FrozenBatchNorm, replace_batch_norm
from ssl_sec.training.optimisers.groups import parameter_groups


def network():
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=1e-3)), nn.Flatten(), nn.BatchNorm1d(16, affine=False)
    )
    made(2 + 3 * torch.randn(8, 3, 2, 2))
    with torch.no_grad():
        made[0][1].weight.uniform_(0.5, 2)
        made[0][1].bias.normal_()
    return made


def images(seed=1):
    return torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(seed))


def in_evaluation():
    with torch.no_grad():
        return network().eval()(images())


def frozen_layers(module):
    return [layer for layer in module.modules() if isinstance(layer, FrozenBatchNorm)]


def deep_copied(module):
    return copy.deepcopy(module).train()


def compiled(module):
    return torch.compile(module.train(), backend="eager", fullgraph=True)


def reloaded(module):
    other = freeze_batch_norm(network()).train()
    for value in other.state_dict().values():
        value.zero_()
    other.load_state_dict(module.state_dict())
    return other


ORDEALS = {
    "train": lambda module: module.eval().train(),
    "copy": deep_copied,
    "globalise": lambda module: globalise_batch_norm(module.train()),
    "freeze again": lambda module: freeze_batch_norm(module.train()),
    "globalised before": lambda module: freeze_batch_norm(globalise_batch_norm(network())).train(),
    "compile": compiled,
    "load": reloaded,
}


@pytest.mark.parametrize("ordeal", ORDEALS)
def test_running_statistics_are_used_in_training_too(ordeal):
    module = ORDEALS[ordeal](freeze_batch_norm(network()))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert len(frozen_layers(module)) == 2
    torch.testing.assert_close(module(images()), in_evaluation())
    module(images(2)).sum().backward()
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert all(p.grad is None and not p.requires_grad for layer in frozen_layers(module) for p in layer.parameters())


def test_names_and_values_are_kept():
    plain, module = network(), freeze_batch_norm(network())
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert module[0][0].training and module[0][0].weight.requires_grad


def test_gradients_pass_through():
    module, inputs = freeze_batch_norm(network()), images().requires_grad_()
    module(inputs).square().sum().backward()
    plain, others = network().eval(), images().requires_grad_()
    plain(others).square().sum().backward()
    torch.testing.assert_close(inputs.grad, others.grad)
    torch.testing.assert_close(module[0][0].weight.grad, plain[0][0].weight.grad)


def test_the_optimiser_gets_no_frozen_weight():
    groups = parameter_groups([freeze_batch_norm(network())], weight_decay=0.1)
    assert [len(group["params"]) for group in groups] == [1, 1]


def test_a_single_layer_is_frozen_itself():
    layer = freeze_batch_norm(nn.BatchNorm1d(4)).train()
    assert isinstance(layer, FrozenBatchNorm)
    assert not layer.training


@pytest.mark.parametrize("kind", [FrozenBatchNorm, GlobalBatchNorm])
@pytest.mark.parametrize("model", ["test_efficientnet", "test_resnet"])
def test_other_behaviour_of_timms_batch_norms_is_kept(model, kind):
    """test_efficientnet's hold the activation."""
    torch.manual_seed(0)
    backbone = timm.create_model(model, pretrained=False, num_classes=0).eval()
    pixels = torch.randn(2, 3, 32, 32)
    state = copy.deepcopy(backbone.state_dict())
    with torch.no_grad():
        expected = backbone(pixels)
        replaced = replace_batch_norm(backbone, kind)
        torch.testing.assert_close(replaced(pixels), expected)
    assert any(isinstance(layer, kind) for layer in replaced.modules())
    torch.testing.assert_close(dict(replaced.state_dict()), dict(state), rtol=0, atol=0)


@pytest.mark.parametrize("replace", [freeze_batch_norm, globalise_batch_norm])
def test_a_batch_norm_of_several_places_stays_one_with_its_hooks(replace):
    layer, called = nn.BatchNorm1d(3), []
    layer.register_forward_hook(lambda *_: called.append(1))
    other = nn.Sequential(nn.Linear(3, 3), layer)
    module = nn.ModuleDict({"first": layer, "again": layer, "other": other})
    replace(module)
    assert isinstance(module["first"], FrozenBatchNorm if replace is freeze_batch_norm else GlobalBatchNorm)
    assert module["again"] is module["first"] is module["other"][1]
    module["again"](torch.randn(4, 3))
    assert called == [1]


@pytest.mark.parametrize("replace", [globalise_batch_norm, freeze_batch_norm])
def test_a_lazy_batch_norm_is_replaced_only_once_it_knows_its_channels(replace):
    network = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match="^batch norm 1: found a lazy one without channels; run the network"):
        replace(network)
    network(torch.randn(2, 3, 8, 8))
    assert replace(network)[1].num_features == 4
