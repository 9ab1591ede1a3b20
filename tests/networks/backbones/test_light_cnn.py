import pytest
import torch
import torch.nn.functional as F

from ssl_sec.errors import ConfigError
from ssl_sec.networks import light_cnn, load_weights, save_weights
from ssl_sec.networks.backbones.light_cnn import MFMConv, max_feature_map
from ssl_sec.networks.heads import MaxoutHead
from ssl_sec.training.optimisers.groups import parameter_groups

# Output channels, before the max-feature-map, input channels and side of the authors' convolutions, in their order.
PUBLISHED = {
    "conv1": (96, 1, 5),
    "conv2a": (96, 48, 1),
    "conv2": (192, 48, 3),
    "conv3a": (192, 96, 1),
    "conv3": (384, 96, 3),
    "conv4a": (384, 192, 1),
    "conv4": (256, 192, 3),
    "conv5a": (256, 128, 1),
    "conv5": (256, 128, 3),
}
POOLED = ("conv1", "conv2", "conv3", "conv5")


def test_a_max_feature_map_is_the_elementwise_maximum_of_two_halves():
    torch.manual_seed(0)
    maps = torch.randn(3, 8, 4, 5)
    expected = torch.stack([maps[:, [k, k + 4]].amax(1) for k in range(4)], dim=1)
    assert torch.equal(max_feature_map(maps), expected)


def test_only_the_greater_of_two_maps_has_a_gradient():
    torch.manual_seed(0)
    maps = torch.randn(2, 6, 3, 3, dtype=torch.float64, requires_grad=True)
    max_feature_map(maps).sum().backward()
    assert torch.equal(maps.grad[:, :3] + maps.grad[:, 3:], torch.ones(2, 3, 3, 3, dtype=torch.float64))
    assert torch.equal(maps.grad[:, :3] == 1, maps.detach()[:, :3] > maps.detach()[:, 3:])


def test_layers_are_the_published_ones():
    """The authors' Caffe files; with the linear layer, and without the classifier, 5.48 million parameters."""
    with torch.device("meta"):
        backbone, num_features = light_cnn()
        head = MaxoutHead(num_features, 256)
    expected = {f"{name}.weight": (*shape, shape[-1]) for name, shape in PUBLISHED.items()}
    expected |= {f"{name}.bias": (planes,) for name, (planes, _, _) in PUBLISHED.items()}
    assert {name: tuple(value.shape) for name, value in backbone.state_dict().items()} == expected
    assert num_features == 128 * 8 * 8
    assert sum(p.numel() for module in (backbone, head) for p in module.parameters()) == 5_480_864


def test_the_network_is_the_published_one():
    torch.manual_seed(0)
    backbone = light_cnn(0.1, image_size_px=20)[0].double()
    images = torch.rand(2, 1, 20, 20, dtype=torch.float64)
    maps = images
    for name, (_, _, side) in PUBLISHED.items():
        layer = getattr(backbone, name)
        maps = F.conv2d(maps, layer.weight, layer.bias, padding=side // 2)
        maps = torch.maximum(maps[:, : maps.shape[1] // 2], maps[:, maps.shape[1] // 2 :])
        if name in POOLED:
            rows = maps.shape[-1]
            maps = F.max_pool2d(F.pad(maps, (0, rows % 2, 0, rows % 2), value=-torch.inf), 2)
    assert maps.shape == (2, 13, 2, 2)
    torch.testing.assert_close(backbone(images), maps.flatten(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "side"), [(1, 1), (8, 1), (56, 4), (112, 7), (113, 8), (128, 8)])
@pytest.mark.parametrize("num_channels", [1, 3])
def test_the_number_of_features_follows_the_image_size(size, side, num_channels):
    torch.manual_seed(0)
    backbone, num_features = light_cnn(0.05, num_channels, size)
    features = backbone(torch.rand(2, num_channels, size, size))
    assert features.shape == (2, num_features) == (2, 6 * side**2)
    assert features.isfinite().all() and features.std() > 0


def test_non_square_images_are_refused_in_one_line():
    backbone, _ = light_cnn(0.05, image_size_px=96)
    with pytest.raises(ConfigError, match="^encoder.name: found .* last maps are 6 x 6, but .* 7 x 6; allowed: square"):
        backbone(torch.rand(2, 1, 112, 96))


def test_weights_start_as_in_the_authors_files():
    torch.manual_seed(0)
    backbone, _ = light_cnn()
    for layer in backbone.children():
        assert isinstance(layer, MFMConv)
        fan_in = layer.weight[0].numel()
        assert layer.weight.abs().max().item() == pytest.approx((3 / fan_in) ** 0.5, rel=0.01)
        assert layer.weight.std().item() == pytest.approx((1 / fan_in) ** 0.5, rel=0.05)
        assert (layer.bias == 0.1).all()


def test_saved_weights_can_be_loaded(tmp_path):
    torch.manual_seed(0)
    backbone, _ = light_cnn(0.05, 1, 8)
    save_weights(backbone, tmp_path / "encoder.safetensors")
    torch.manual_seed(1)
    other, _ = light_cnn(0.05, 1, 8)
    load_weights(other, tmp_path / "encoder.safetensors")
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(other(images), backbone(images))


def test_biases_do_not_decay():
    decayed, spared = parameter_groups([light_cnn(0.05)[0]], 0.1)
    assert {p.ndim for p in decayed["params"]} == {4} and len(decayed["params"]) == 9
    assert {p.ndim for p in spared["params"]} == {1} and len(spared["params"]) == 9
