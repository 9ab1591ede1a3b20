import pytest
import torch
from torch import nn

from ssl_sec.networks import Encoder


@pytest.mark.parametrize(
    ("mean", "std"), [((0.5,), (0.25,)), ((0.1, 0.2, 0.3), (0.5, 1.0, 2.0)), ((0.1, 0.2, 0.3), (2.0,))]
)
def test_pixels_are_scaled_channel_by_channel(mean, std):
    images = torch.rand(2, 3, 4, 4)
    features = Encoder(nn.Flatten(), 48, mean, std)(images).view(2, 3, 4, 4)
    for channel in range(3):
        m, s = mean[channel % len(mean)], std[channel % len(std)]
        torch.testing.assert_close(features[:, channel], (images[:, channel] - m) / s)


def test_pixels_are_not_scaled_by_default():
    images = torch.rand(2, 3, 4, 4)
    assert torch.equal(Encoder(nn.Flatten(), 48)(images), images.flatten(1))


def test_the_scaling_is_not_in_the_state_dict():
    encoder = Encoder(nn.Linear(3, 2), 2, (0.5,), (0.25,))
    assert list(encoder.state_dict()) == ["backbone.weight", "backbone.bias"]
    assert encoder.double().mean.dtype == torch.float64


@pytest.mark.usefixtures("unchecked_types")
def test_pixels_from_0_to_255_are_refused():
    with pytest.raises(TypeError, match=r"^images: found torch.uint8, must be floats in \[0, 1\], as images.float\(\)"):
        Encoder(nn.Flatten(), 48)(torch.zeros(2, 3, 4, 4, dtype=torch.uint8))
