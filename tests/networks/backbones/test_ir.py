import copy
from typing import get_args

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ssl_sec.collectives import rank
from ssl_sec.errors import ConfigError
from ssl_sec.networks import ir, load_head_weights, load_weights, save_weights
from ssl_sec.networks.backbones.ir import UNITS, IRName, IRUnit, SEIRUnit
from ssl_sec.networks.batch_norm import GlobalBatchNorm, globalise_batch_norm
from ssl_sec.networks.heads import LinearBatchNormHead
from ssl_sec.training.optimisers.groups import parameter_groups
from tests.workers import on_workers

PUBLISHED_UNITS = {"ir18": (2, 2, 2, 2), "ir34": (3, 4, 6, 3), "ir50": (3, 4, 14, 3), "ir100": (3, 13, 30, 3)}
# With the head of 512 dimensions, at 112 pixels.
PUBLISHED_MILLIONS = {"ir18": 24.0, "ir34": 34.1, "ir50": 43.6, "ir100": 65.2}


def on_meta(name):
    with torch.device("meta"):
        backbone, num_features = ir(name)
        return backbone, LinearBatchNormHead(num_features)


def batch_norm_shapes(name, width):
    shapes = {f"{name}.{key}": (width,) for key in ("weight", "bias", "running_mean", "running_var")}
    return shapes | {f"{name}.num_batches_tracked": ()}


def published_shapes(units, width=512):
    """Names and shapes of InsightFace's iresnet, at 112 pixels."""
    shapes = {"conv1.weight": (64, 3, 3, 3), **batch_norm_shapes("bn1", 64), "prelu.weight": (64,)}
    inputs = 64
    for stage, (planes, repeats) in enumerate(zip((64, 128, 256, 512), units, strict=True), start=1):
        for place in range(repeats):
            unit = f"layer{stage}.{place}"
            shapes |= batch_norm_shapes(f"{unit}.bn1", inputs)
            shapes[f"{unit}.conv1.weight"] = (planes, inputs, 3, 3)
            shapes |= batch_norm_shapes(f"{unit}.bn2", planes)
            shapes[f"{unit}.prelu.weight"] = (planes,)
            shapes[f"{unit}.conv2.weight"] = (planes, planes, 3, 3)
            shapes |= batch_norm_shapes(f"{unit}.bn3", planes)
            if place == 0:
                shapes[f"{unit}.downsample.0.weight"] = (planes, inputs, 1, 1)
                shapes |= batch_norm_shapes(f"{unit}.downsample.1", planes)
            inputs = planes
    shapes |= batch_norm_shapes("bn2", 512)
    shapes |= {"fc.weight": (512, 512 * 7 * 7), "fc.bias": (512,)}
    return shapes | batch_norm_shapes("features", 512)


@pytest.mark.parametrize("name", PUBLISHED_UNITS)
def test_names_and_shapes_are_those_of_insightface(name):
    backbone, head = on_meta(name)
    ours = {key: tuple(value.shape) for part in (backbone, head) for key, value in part.state_dict().items()}
    published = published_shapes(PUBLISHED_UNITS[name])
    assert ours == published
    assert list(ours) == list(published)


@pytest.mark.parametrize("name", PUBLISHED_UNITS)
def test_there_are_as_many_parameters_as_published(name):
    count = sum(parameter.numel() for part in on_meta(name) for parameter in part.parameters())
    assert round(count / 1e6, 1) == PUBLISHED_MILLIONS[name]


def test_squeeze_and_excitation_is_added_to_ir50():
    plain, squeezed = dict(on_meta("ir50")[0].state_dict()), dict(on_meta("se_ir50")[0].state_dict())
    added = {name: tuple(squeezed[name].shape) for name in squeezed.keys() - plain.keys()}
    assert {name: squeezed[name].shape for name in plain} == {name: plain[name].shape for name in plain}
    assert len(added) == 24 * 5
    assert {name: shape for name, shape in added.items() if name.startswith("layer4.2.")} == {
        "layer4.2.se.fc1.weight": (32, 512, 1, 1),
        "layer4.2.se.fc1.bias": (32,),
        "layer4.2.se.activation.weight": (32,),
        "layer4.2.se.fc2.weight": (512, 32, 1, 1),
        "layer4.2.se.fc2.bias": (512,),
    }


def test_every_name_has_units():
    assert list(UNITS) == list(get_args(IRName))


def with_random_vectors(module):
    """Scales, shifts and slopes that are not those of a new network."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.3, 1.5)
            if name.endswith("bias"):
                parameter.sub_(1)
    return module


def normalised(layer, maps):
    mean, variance = maps.mean((0, 2, 3), keepdim=True), maps.var((0, 2, 3), correction=0, keepdim=True)
    return (maps - mean) / (variance + 1e-5).sqrt() * layer.weight.view(-1, 1, 1) + layer.bias.view(-1, 1, 1)


def rectified(layer, values):
    return torch.where(values > 0, values, layer.weight.view(-1, 1, 1) * values)


@pytest.mark.parametrize("kind", [IRUnit, SEIRUnit])
@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(32, 32, 1), (16, 32, 2), (32, 32, 2)])
def test_a_unit_is_the_published_one(kind, inputs, outputs, stride):
    torch.manual_seed(0)
    unit = with_random_vectors(kind(inputs, outputs, stride).double())
    maps = 1 + 2 * torch.randn(3, inputs, 5, 5, dtype=torch.float64)
    branch = F.conv2d(normalised(unit.bn1, maps), unit.conv1.weight, padding=1)
    branch = rectified(unit.prelu, normalised(unit.bn2, branch))
    branch = normalised(unit.bn3, F.conv2d(branch, unit.conv2.weight, stride=stride, padding=1))
    if kind is SEIRUnit:
        squeezed = branch.mean((2, 3), keepdim=True)
        squeezed = rectified(unit.se.activation, F.conv2d(squeezed, unit.se.fc1.weight, unit.se.fc1.bias))
        branch = branch / (1 + torch.exp(-F.conv2d(squeezed, unit.se.fc2.weight, unit.se.fc2.bias)))
    if stride == 1:
        shortcut = maps
    else:
        shortcut = normalised(unit.downsample[1], F.conv2d(maps, unit.downsample[0].weight, stride=2))
    torch.testing.assert_close(unit(maps), branch + shortcut, rtol=1e-10, atol=1e-10)


def test_the_features_are_the_normalised_last_map_row_by_row():
    torch.manual_seed(0)
    backbone, num_features = ir("ir18", 0.05, image_size_px=64)
    images = torch.randn(2, 3, 64, 64)
    sizes = []
    for part in (backbone.prelu, backbone.layer1, backbone.layer2, backbone.layer3, backbone.layer4):
        part.register_forward_hook(lambda module, inputs, outputs: sizes.append(tuple(outputs.shape[2:])))
    last = []
    backbone.bn2.register_forward_hook(lambda module, inputs, outputs: last.append(outputs))
    features = backbone(images)
    assert sizes == [(size, size) for size in (64, 32, 16, 8, 4)]
    assert features.shape == (2, num_features) == (2, 26 * 4 * 4)
    assert torch.equal(features[1, 3 * 16 : 4 * 16].view(4, 4), last[0][1, 3])


@pytest.mark.parametrize("name", UNITS)
def test_digits_have_features(name):
    torch.manual_seed(0)
    backbone, num_features = ir(name, 0.05, num_channels=1, image_size_px=8)
    features = backbone(torch.rand(4, 1, 8, 8))
    assert features.shape == (4, num_features) == (4, 26)
    assert features.isfinite().all() and features.std() > 0


@pytest.mark.parametrize(("size", "side"), [(1, 1), (16, 1), (17, 2), (56, 4), (64, 4), (97, 7), (112, 7), (113, 8)])
def test_spatial_sizes_round_up(size, side):
    backbone, num_features = ir("ir18", 0.001, image_size_px=size)
    assert num_features == side**2
    assert backbone.eval()(torch.rand(1, 3, size, size)).shape == (1, side**2)


def test_non_square_images_are_refused_in_one_line():
    backbone, _ = ir("ir18", 0.05, image_size_px=32)
    with pytest.raises(ConfigError, match="^encoder.name: found .* last maps are 2 x 2, but .* 3 x 2; allowed: square"):
        backbone(torch.rand(2, 3, 48, 32))


@pytest.mark.parametrize("width", [0.125, 0.3])
def test_the_width_scales_every_layer(width):
    backbone, num_features = ir("se_ir50", width, image_size_px=16)
    planes = [round(64 * width * factor) for factor in (1, 2, 4, 8)]
    stages = [backbone.layer1, backbone.layer2, backbone.layer3, backbone.layer4]
    assert [stage[-1].conv1.out_channels for stage in stages] == planes
    assert [stage[-1].se.fc1.out_channels for stage in stages] == [max(1, count // 16) for count in planes]
    assert backbone.conv1.out_channels == planes[0]
    assert num_features == planes[-1]


def test_weights_of_insightface_load_into_encoder_and_head(tmp_path):
    """The file has both; its network gives our embeddings."""
    torch.manual_seed(0)
    backbone, num_features = ir("ir18", 0.05, image_size_px=32)
    theirs = with_random_vectors(nn.Sequential(backbone, LinearBatchNormHead(num_features, 5)))
    theirs(torch.randn(8, 3, 32, 32))
    state = {name.split(".", 1)[1]: value for name, value in theirs.state_dict().items()}
    assert {"conv1.weight", "fc.weight", "features.running_var", "features.num_batches_tracked"} <= set(state)
    torch.save(state, tmp_path / "backbone.pth")
    torch.manual_seed(1)
    ours, _ = ir("ir18", 0.05, image_size_px=32)
    head = LinearBatchNormHead(num_features, 5)
    load_weights(ours, tmp_path / "backbone.pth")
    load_head_weights(head, tmp_path / "backbone.pth")
    images = torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(head.eval()(ours.eval()(images)), theirs.eval()(images))


def test_saved_weights_can_be_loaded(tmp_path):
    torch.manual_seed(0)
    backbone, _ = ir("se_ir50", 0.05, image_size_px=8)
    save_weights(with_random_vectors(backbone), tmp_path / "encoder.safetensors")
    torch.manual_seed(1)
    other, _ = ir("se_ir50", 0.05, image_size_px=8)
    load_weights(other, tmp_path / "encoder.safetensors")
    torch.testing.assert_close(dict(other.state_dict()), dict(backbone.state_dict()), rtol=0, atol=0)


def test_nothing_is_drawn_in_training_and_every_weight_is_trained():
    torch.manual_seed(0)
    backbone, _ = ir("se_ir50", 0.1, image_size_px=16)
    images = torch.rand(4, 3, 16, 16)
    features = backbone(images)
    assert torch.equal(backbone(images), features)
    (features * torch.randn_like(features)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in backbone.parameters())


def test_slopes_and_batch_norm_do_not_decay():
    backbone, _ = ir("se_ir50", 0.05, image_size_px=8)
    names = {id(parameter): name for name, parameter in backbone.named_parameters()}
    decayed, spared = ({names[id(p)] for p in group["params"]} for group in parameter_groups([backbone], 0.1))
    assert {"conv1.weight", "layer1.0.downsample.0.weight", "layer1.0.se.fc1.weight"} <= decayed
    assert {"prelu.weight", "layer1.0.prelu.weight", "layer1.0.se.activation.weight", "bn2.weight"} <= spared


def test_convolutions_start_by_the_fan_out_rule_of_he():
    torch.manual_seed(0)
    backbone, _ = ir("ir18", image_size_px=8)
    convolutions = [module for module in backbone.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 1 + 2 * 8 + 4
    for layer in convolutions:
        fan_out = layer.out_channels * layer.kernel_size[0] ** 2
        assert layer.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)


def network(name):
    torch.manual_seed(0)
    backbone, num_features = ir(name, 0.06, num_channels=1, image_size_px=8)
    return with_random_vectors(nn.Sequential(backbone, LinearBatchNormHead(num_features, 6)))


def taken(model, images, weights):
    """Embeddings and gradients of a step."""
    embeddings = model(images)
    (embeddings.square() * weights).sum().backward()
    return embeddings.detach(), [p.grad for p in model.parameters() if p.requires_grad]


def step_on_a_worker(name, rows):
    generator = torch.Generator().manual_seed(1)
    own = rows[rank()] if rows else slice(None)
    images, weights = (torch.randn(shape, generator=generator).double()[own] for shape in ((8, 1, 8, 8), (8, 6)))
    model = network(name).double()
    return *taken(globalise_batch_norm(model) if rows else model, images, weights), model.state_dict()


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ir18", "se_ir50"])
def test_two_workers_equal_one(tmp_path, name):
    parts = on_workers(2, tmp_path, step_on_a_worker, name, (slice(0, 3), slice(3, 8)))
    embeddings, gradients, state = step_on_a_worker(name, ())
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), embeddings, rtol=1e-8, atol=1e-9)
    for place, gradient in enumerate(gradients):
        torch.testing.assert_close(sum(part[1][place] for part in parts), gradient, rtol=1e-6, atol=1e-8)
    for part in parts:
        torch.testing.assert_close(dict(part[2]), dict(state), rtol=1e-8, atol=1e-9)


def test_every_batch_norm_becomes_global():
    model = globalise_batch_norm(network("se_ir50"))
    kinds = {type(module) for module in model.modules() if "BatchNorm" in type(module).__name__}
    assert kinds == {GlobalBatchNorm, LinearBatchNormHead}
    assert not model[1].features.weight.requires_grad


def test_channels_last_changes_no_step():
    images, weights = torch.randn(6, 1, 8, 8, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    plain = network("se_ir50").double()
    other = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    torch.testing.assert_close(taken(other, images, weights), taken(plain, images, weights), rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_the_network_is_one_graph(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # checks of shapes cannot be compiled
    monkeypatch.setitem(UNITS, "se_ir50", (SEIRUnit, (1, 2, 1, 1)))  # the others are like these
    images, weights = torch.randn(6, 1, 8, 8, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    plain = network("se_ir50").double()
    other = torch.compile(copy.deepcopy(plain), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(taken(other, images, weights), taken(plain, images, weights), rtol=1e-8, atol=1e-9)


def test_autocast_computes_in_bfloat16():
    model, images = network("ir18"), torch.randn(6, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        embeddings = model(images)
    assert embeddings.dtype == torch.bfloat16
    cosines = F.cosine_similarity(embeddings.float(), model(images))
    assert cosines.min() > 0.95
    embeddings.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
