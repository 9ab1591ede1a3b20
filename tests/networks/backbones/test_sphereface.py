import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ssl_sec.errors import ConfigError
from ssl_sec.networks import load_weights, save_weights, sphereface_net
from ssl_sec.networks.backbones.sphereface import SphereFaceUnit
from ssl_sec.training.optimisers.groups import parameter_groups

# Convolutions of Table 2 without the linear layer.
PUBLISHED_UNITS = {4: (0, 0, 0, 0), 10: (0, 1, 2, 0), 20: (1, 2, 4, 1), 36: (2, 4, 8, 2), 64: (3, 8, 16, 3)}
SFT_34 = (3, 4, 6, 3)
SFT_TABLE_5 = (1, 1, 1, 1)


def rectified(layer, maps):
    return torch.where(maps > 0, maps, layer.weight.view(-1, 1, 1) * maps)


def test_a_unit_is_the_published_one():
    torch.manual_seed(0)
    unit = SphereFaceUnit(4).double()
    with torch.no_grad():
        for parameter in unit.parameters():
            parameter.normal_()
    maps = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    branch = rectified(unit.prelu1, F.conv2d(maps, unit.conv1.weight, padding=1))
    branch = rectified(unit.prelu2, F.conv2d(branch, unit.conv2.weight, padding=1))
    torch.testing.assert_close(unit(maps), maps + branch, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("depth", PUBLISHED_UNITS)
def test_the_depth_is_the_number_of_convolutions(depth):
    with torch.device("meta"):
        backbone, num_features = sphereface_net(PUBLISHED_UNITS[depth])
    convolutions = [module for module in backbone.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == depth
    assert num_features == 512 * 7 * 7
    assert not any("BatchNorm" in type(module).__name__ for module in backbone.modules())


@pytest.mark.parametrize("units", [SFT_34, SFT_TABLE_5, (0, 1, 2, 0)])
def test_a_stage_is_a_convolution_of_stride_2_and_its_units(units):
    with torch.device("meta"):
        backbone, _ = sphereface_net(units)
    inputs = 3
    for stage, (planes, repeats) in enumerate(zip((64, 128, 256, 512), units, strict=True), start=1):
        own = {
            name: tuple(value.shape)
            for name, value in backbone.state_dict().items()
            if name.startswith(f"layer{stage}.")
        }
        expected = {
            f"layer{stage}.0.weight": (planes, inputs, 3, 3),
            f"layer{stage}.0.bias": (planes,),
            f"layer{stage}.1.weight": (planes,),
        }
        for place in range(2, 2 + repeats):
            for layer in (1, 2):
                expected[f"layer{stage}.{place}.conv{layer}.weight"] = (planes, planes, 3, 3)
                expected[f"layer{stage}.{place}.prelu{layer}.weight"] = (planes,)
        assert own == expected
        assert getattr(backbone, f"layer{stage}")[0].stride == (2, 2)
        inputs = planes


@pytest.mark.parametrize(("size", "side"), [(1, 1), (8, 1), (56, 4), (64, 4), (112, 7), (113, 8)])
@pytest.mark.parametrize("num_channels", [1, 3])
def test_features_are_the_last_map_as_a_row(size, side, num_channels):
    torch.manual_seed(0)
    backbone, num_features = sphereface_net(SFT_TABLE_5, 0.05, num_channels, size)
    last = []
    backbone.layer4.register_forward_hook(lambda module, inputs, outputs: last.append(outputs))
    features = backbone(torch.rand(2, num_channels, size, size))
    assert features.shape == (2, num_features) == (2, 26 * side**2)
    assert torch.equal(features.view(2, 26, side, side), last[0])
    assert features.isfinite().all() and features.std() > 0


def test_non_square_images_are_refused_in_one_line():
    backbone, _ = sphereface_net(SFT_TABLE_5, 0.05, image_size_px=96)
    with pytest.raises(ConfigError, match="^encoder.name: found .* last maps are 6 x 6, but .* 7 x 6; allowed: square"):
        backbone(torch.rand(2, 3, 112, 96))


def test_weights_start_as_in_the_authors_files():
    torch.manual_seed(0)
    backbone, _ = sphereface_net(SFT_TABLE_5)
    for stage in (backbone.layer1, backbone.layer2, backbone.layer3, backbone.layer4):
        fan_in = stage[0].in_channels * 9
        assert stage[0].weight.abs().max().item() == pytest.approx((3 / fan_in) ** 0.5, rel=0.01)
        assert stage[0].weight.std().item() == pytest.approx((1 / fan_in) ** 0.5, rel=0.05)
        assert not stage[0].bias.any()
        for layer in (stage[2].conv1, stage[2].conv2):
            assert layer.bias is None
            assert layer.weight.std().item() == pytest.approx(0.01, rel=0.05)
            assert layer.weight.abs().max() > 0.03  # a normal distribution's tail
        assert (stage[1].weight == 0.25).all()


def test_saved_weights_can_be_loaded(tmp_path):
    torch.manual_seed(0)
    backbone, _ = sphereface_net((0, 1, 2, 0), 0.05, 1, 8)
    save_weights(backbone, tmp_path / "encoder.safetensors")
    torch.manual_seed(1)
    other, _ = sphereface_net((0, 1, 2, 0), 0.05, 1, 8)
    load_weights(other, tmp_path / "encoder.safetensors")
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(other(images), backbone(images))


def test_slopes_and_biases_do_not_decay():
    backbone, _ = sphereface_net(SFT_TABLE_5, 0.05)
    decayed, spared = parameter_groups([backbone], 0.1)
    assert {p.ndim for p in decayed["params"]} == {4} and len(decayed["params"]) == 12
    assert {p.ndim for p in spared["params"]} == {1} and len(spared["params"]) == 12 + 4
