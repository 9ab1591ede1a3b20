import torch
from torch import nn

from ssl_sec.augment.views import unit_range
from ssl_sec.evaluation.feature_maps import strongest_feature_maps


class Plain(nn.Module):
    """Two convolutions, a pooling to one pixel, and a convolution of that pixel."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3, stride=2, padding=1)
        self.norm, self.top = nn.BatchNorm2d(5), nn.Conv2d(5, 7, 1)

    def forward(self, images):
        maps = self.norm(self.last(self.first(images).relu()))
        return self.top(maps.mean((2, 3), keepdim=True)).flatten(1)


def images(count=3):
    return torch.randint(0, 256, (count, 3, 8, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_the_channels_with_the_greatest_means_come_first():
    encoder = Plain().train()
    maps, channels = strongest_feature_maps(encoder, images(), 2)
    assert encoder.training and encoder.norm.num_batches_tracked == 0
    assert not any(module._forward_hooks for module in encoder.modules())
    encoder.eval()
    expected = encoder.norm(encoder.last(encoder.first(unit_range(images())).relu())).detach()
    assert maps.shape == (3, 2, 4, 3) and not maps.requires_grad
    for image in range(3):
        means = [float(expected[image, channel].mean()) for channel in range(5)]
        order = sorted(range(5), key=lambda channel: -means[channel])
        assert channels[image].tolist() == order[:2]
        assert torch.equal(maps[image], expected[image, order[:2]])


def test_an_encoder_with_fewer_channels_has_fewer_maps():
    maps = strongest_feature_maps(Plain().double(), images(), 9).maps
    assert maps.shape == (3, 5, 4, 3) and maps.dtype == torch.float32


def test_maps_may_have_one_column():
    assert strongest_feature_maps(nn.Conv2d(3, 2, (1, 6)), images(), 1).maps.shape == (3, 1, 8, 1)


def test_an_encoder_without_feature_maps_has_none():
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(144, 5))
    assert strongest_feature_maps(encoder, images(), 2) is None
    assert strongest_feature_maps(nn.Flatten(), images(), 2) is None  # the pixels
