import pytest
import torch
import torchvision
from torch import nn

from ssl_sec.errors import ConfigError
from ssl_sec.networks import Encoder, googlenet, load_weights
from ssl_sec.networks.backbones.googlenet import GOOGLENET_MEAN, GOOGLENET_STD

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
