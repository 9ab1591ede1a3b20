import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from ssl_sec.errors import ConfigError
from ssl_sec.networks import Encoder, googlenet, load_weights, published_googlenet
from ssl_sec.networks.architecture import OwnNetwork, TorchvisionGoogLeNet
from ssl_sec.networks.backbones.googlenet import GOOGLENET_MEAN, GOOGLENET_STD
from ssl_sec.networks.config import GoogLeNetConfig

IMAGENET = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[..., None, None]


@pytest.fixture(scope="module")
def theirs():
    """torchvision's network, built as for its published weights, with its auxiliary classifiers."""
    torch.manual_seed(0)
    network = torchvision.models.GoogLeNet(aux_logits=True, transform_input=True, init_weights=False)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    network.fc, network.dropout = nn.Identity(), nn.Identity()
    return network


@pytest.fixture
def ours(theirs, tmp_path):
    state = {**theirs.state_dict(), "fc.weight": torch.ones(1000, 1024), "fc.bias": torch.ones(1000)}
    assert any(name.startswith("aux1.") for name in state) and any(name.startswith("aux2.") for name in state)
    torch.save(state, tmp_path / "googlenet.pth")
    backbone, num_features = googlenet(3, 224)
    assert num_features == 1024
    load_weights(backbone, tmp_path / "googlenet.pth")
    return backbone


def test_names_are_torchvisions_without_its_classifiers(theirs, ours):
    names = [name for name in theirs.state_dict() if not name.startswith("aux")]
    assert list(ours.state_dict()) == names
    assert len(names) == 57 * 6


def test_scaled_pixels_give_the_features_of_torchvisions_own_preprocessing(theirs, ours):
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs.eval()((images - IMAGENET[0]) / IMAGENET[1])
        features = Encoder(ours, 1024, GOOGLENET_MEAN, GOOGLENET_STD).eval()(images)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)


def test_training_gives_plain_features(ours):
    images = torch.rand(4, 3, 32, 32)
    features = ours.train()(images)
    assert features.shape == (4, 1024)
    assert torch.equal(features, ours(images))  # nothing is dropped
    features.square().sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


def test_grey_images_have_one_channel():
    backbone, num_features = googlenet(1, 15)
    assert backbone.conv1.conv.in_channels == 1
    assert backbone.eval()(torch.rand(2, 1, 15, 15)).shape == (2, num_features)


def test_smaller_images_are_refused():
    with pytest.raises(
        ConfigError, match="^encoder.name: found 'googlenet', which needs images of 15 pixels or more; these have 14$"
    ):
        googlenet(3, 14)


def test_convolutions_start_by_the_fan_out_rule_of_he():
    torch.manual_seed(0)
    backbone, _ = googlenet(3, 32)
    for layer in backbone.modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 3000:
            fan_out = layer.out_channels * layer.kernel_size[0] ** 2
            assert layer.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)


# Szegedy et al. 2015, Table 1: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5 and pool projection of each block, and its weights
# in units of 1024, which differ from the sums of its own layers by up to 7 % (4c and 5a; the others by 2 %).
TABLE_1 = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
TABLE_1_WEIGHTS = {"3a": 159, "3b": 380, "4a": 364, "4b": 437, "4c": 463, "4d": 580, "4e": 840, "5a": 1072, "5b": 1388}


def published(image_size_px=32, dtype=torch.float64):
    torch.manual_seed(0)
    return published_googlenet(3, image_size_px)[0].to(dtype)


def test_the_published_network_has_the_parameters_of_its_table():
    backbone, num_features = published_googlenet(3, 224)
    shapes = {name: tuple(parameter.shape) for name, parameter in backbone.named_parameters()}
    expected = {"conv1": (3, 64, 7), "conv2": (64, 64, 1), "conv3": (64, 192, 3)}
    inputs = 192
    for name, (single, inside, triple, reduced, five, projection) in TABLE_1.items():
        layers = {
            "branch1": (inputs, single, 1),
            "branch2.0": (inputs, inside, 1),
            "branch2.1": (inside, triple, 3),
            "branch3.0": (inputs, reduced, 1),
            "branch3.1": (reduced, five, 5),
            "branch4.1": (inputs, projection, 1),
        }
        expected |= {f"inception{name}.{layer}": sizes for layer, sizes in layers.items()}
        weights = sum(i * o * size**2 for i, o, size in layers.values()) / 1024
        assert weights == pytest.approx(TABLE_1_WEIGHTS[name], rel=0.08 if name in ("4c", "5a") else 0.02)
        inputs = single + triple + five + projection
    assert num_features == inputs == 1024
    wanted = {f"{name}.conv.weight": (o, i, size, size) for name, (i, o, size) in expected.items()}
    assert shapes == wanted | {f"{name}.conv.bias": (o,) for name, (_, o, _) in expected.items()}
    # With the classifier of 1,000 classes, and without the auxiliary ones, 6,998,552.
    assert sum(parameter.numel() for parameter in backbone.parameters()) == 6_998_552 - 1025 * 1000
    assert not list(backbone.buffers())


def test_the_published_network_is_its_equations():
    """Layer by layer, as Fig. 3 has it, on maps of uneven sizes."""
    backbone = published().eval()
    state = dict(backbone.named_parameters())

    def conv(name, maps, **options):
        weight = state[f"{name}.conv.weight"]
        padding = weight.shape[-1] // 2
        return F.conv2d(maps, weight, state[f"{name}.conv.bias"], padding=padding, **options).clamp(min=0)

    def normalise(maps):
        squares = F.pad(maps.square(), (0, 0, 0, 0, 2, 2))
        total = sum(squares[:, i : i + maps.shape[1]] for i in range(5))
        return maps / (1 + 1e-4 / 5 * total) ** 0.75

    def pool(maps):
        return F.max_pool2d(maps, 3, 2, ceil_mode=True)

    def block(name, maps):
        first, second, third, fourth = (f"inception{name}.branch{i}" for i in (1, 2, 3, 4))
        pooled = F.max_pool2d(maps, 3, 1, 1)
        branches = [conv(f"{second}.1", conv(f"{second}.0", maps)), conv(f"{third}.1", conv(f"{third}.0", maps))]
        return torch.cat([conv(first, maps), *branches, conv(f"{fourth}.1", pooled)], 1)

    images = 100 * torch.rand(2, 3, 47, 75, dtype=torch.float64)
    maps = normalise(pool(conv("conv1", images, stride=2)))
    maps = pool(normalise(conv("conv3", conv("conv2", maps))))
    for name in TABLE_1:
        maps = block(name, pool(maps) if name in ("4a", "5a") else maps)
    torch.testing.assert_close(backbone(images), maps.mean((2, 3)), rtol=1e-9, atol=1e-11)


def taken(network, images):
    features = network.train()(images)
    features.square().sum().backward()
    return features.detach(), [parameter.grad for parameter in network.parameters()]


def test_channels_last_changes_no_step_of_the_published_network():
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    other = published().to(memory_format=torch.channels_last)
    torch.testing.assert_close(
        taken(other, images.to(memory_format=torch.channels_last)), taken(published(), images), rtol=1e-9, atol=1e-10
    )


@pytest.mark.slow
def test_the_published_network_is_one_graph():
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    other = torch.compile(published(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(taken(other, images), taken(published(), images), rtol=1e-9, atol=1e-10)


def test_frozen_batch_norm_of_the_published_network_is_refused():
    with pytest.raises(ConfigError, match="^encoder.freeze_batch_norm: found true, must be false: the published Goog"):
        GoogLeNetConfig(variant="published", weights="x", freeze_batch_norm=True)


@pytest.mark.parametrize(("variant", "kind"), [("torchvision", TorchvisionGoogLeNet), ("published", OwnNetwork)])
def test_the_variant_is_chosen_by_its_name(variant, kind):
    config = GoogLeNetConfig(variant=variant)
    has_batch_norm = any(isinstance(module, nn.BatchNorm2d) for module in config.build(3, 32).modules())
    assert has_batch_norm == (variant == "torchvision")
    assert isinstance(config.architecture(3, 32), kind)
