import pytest
import torch
import torchvision
from torch import nn

from ssl_sec.errors import ConfigError
from ssl_sec.networks import resnet

NUM_FEATURES = {18: 512, 34: 512, 50: 2048}


def shapes(module):
    return {name: tuple(value.shape) for name, value in module.state_dict().items() if not name.startswith("fc.")}


@pytest.mark.parametrize("depth", [18, 34, 50])
def test_names_shapes_and_outputs_are_torchvisions(depth):
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, f"resnet{depth}")(weights=None)
    theirs.fc = nn.Identity()
    ours, num_features = resnet(depth, "imagenet")
    assert shapes(ours) == shapes(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert num_features == NUM_FEATURES[depth]
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours(images), theirs(images))
    assert torch.equal(ours.eval()(images), theirs.eval()(images))


@pytest.mark.parametrize(("stem", "sizes"), [("cifar", [32, 32, 16, 8, 4]), ("imagenet", [8, 8, 4, 2, 1])])
def test_the_stem_decides_the_resolution_of_every_stage(stem, sizes):
    backbone, _ = resnet(18, stem, width=0.05)
    seen = []
    for stage in (backbone.maxpool, backbone.layer1, backbone.layer2, backbone.layer3, backbone.layer4):
        stage.register_forward_hook(lambda module, inputs, outputs: seen.append(tuple(outputs.shape[2:])))
    backbone(torch.randn(2, 3, 32, 32))
    assert seen == [(size, size) for size in sizes]


def test_the_cifar_stem_is_a_small_convolution_without_pooling():
    backbone, _ = resnet(18, "cifar")
    assert tuple(backbone.conv1.weight.shape) == (64, 3, 3, 3)
    assert backbone.conv1.stride == (1, 1)
    names = set(torchvision.models.resnet18(weights=None).state_dict()) - {"fc.weight", "fc.bias"}
    assert set(backbone.state_dict()) == names


@pytest.mark.parametrize(("depth", "expansion"), [(18, 1), (50, 4)])
@pytest.mark.parametrize("width", [0.125, 0.3])
def test_the_width_scales_every_layer(depth, expansion, width):
    backbone, num_features = resnet(depth, "cifar", width)
    planes = [round(64 * width * factor) for factor in (1, 2, 4, 8)]
    stages = [backbone.layer1, backbone.layer2, backbone.layer3, backbone.layer4]
    assert [stage[-1].conv1.out_channels for stage in stages] == planes
    assert backbone.conv1.out_channels == planes[0]
    assert num_features == planes[-1] * expansion
    assert backbone(torch.randn(2, 3, 8, 8)).shape == (2, num_features)


def test_no_layer_vanishes():
    backbone, num_features = resnet(18, "cifar", width=0.001)
    assert num_features == 1
    assert backbone(torch.randn(2, 3, 8, 8)).shape == (2, 1)


def test_grey_images_have_one_channel():
    backbone, _ = resnet(18, "cifar", 0.1, num_channels=1)
    assert backbone.conv1.in_channels == 1
    assert backbone(torch.randn(2, 1, 8, 8)).shape == (2, 51)


def test_convolutions_start_by_the_fan_out_rule_of_he():
    torch.manual_seed(0)
    backbone, _ = resnet(18, "cifar")
    convolutions = [module for module in backbone.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 20
    for layer in convolutions:
        fan_out = layer.out_channels * layer.kernel_size[0] ** 2
        assert layer.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("depth", "stem", "message"),
    [
        (18, "cifar10", r"stem: found 'cifar10'; did you mean 'cifar'\? allowed: cifar, imagenet"),
        (101, "cifar", "depth: found 101, must be 18, 34 or 50"),
    ],
)
def test_an_unknown_depth_or_stem_is_refused(depth, stem, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        resnet(depth, stem)
