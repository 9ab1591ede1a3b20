"""Light CNN-9 (Wu et al. 2015), which has no batch norm: nine convolutions, each with a max-feature-map.

A max-feature-map (MFM) is the elementwise maximum of the two halves of the channels, so that a convolution of 2n
channels gives n. After the first, of 5x5, come four pairs of a 1x1 and a 3x3 convolution, with max-pooling of stride 2
before the first three pairs and after the last. The tenth layer, linear with an MFM, is the head `maxout`.

Names of parameters and initial weights are those of the authors' Caffe files: Caffe's Xavier, with biases of 0.1.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from ssl_sec.networks.backbones.face_maps import as_features, map_size_px
from ssl_sec.networks.initialisation import caffe_xavier_

# The initial biases.
MFM_BIAS = 0.1

# Channels after the MFM of the first convolution and of each pair's 3x3 one.
_PLANES = (48, 96, 192, 128, 128)


def max_feature_map(values: Float[Tensor, "batch twice_planes *map"]) -> Float[Tensor, "batch planes *map"]:
    """The elementwise maximum of the two halves of the channels (Wu et al. 2015)."""
    return torch.maximum(*values.chunk(2, dim=1))


class MFMConv(nn.Conv2d):
    """A convolution that keeps the size of the maps, then a max-feature-map.

    Args:
        inputs: input channels.
        planes: output channels, after the max-feature-map.
        kernel_size: side of the kernel, odd.
    """

    def __init__(self, inputs: int, planes: int, kernel_size: int) -> None:
        super().__init__(inputs, 2 * planes, kernel_size, padding=kernel_size // 2)
        caffe_xavier_(self, MFM_BIAS)

    def forward(self, input: Float[Tensor, "batch inputs height width"]) -> Float[Tensor, "batch planes height width"]:
        """The greater of two maps for each plane."""
        return max_feature_map(super().forward(input))


class LightCNN(nn.Module):
    """Light CNN-9 up to its last map.

    Args:
        width: multiplies the number of channels of every layer, > 0.
        num_channels: channels of the images.
        image_size_px: side of the square images; 128 as published.
    """

    def __init__(self, width: float = 1.0, num_channels: int = 1, image_size_px: int = 128) -> None:
        super().__init__()
        first, second, third, fourth, last = (max(1, round(planes * width)) for planes in _PLANES)
        self.map_size_px = map_size_px(image_size_px)
        self.num_features = last * self.map_size_px**2
        self.conv1 = MFMConv(num_channels, first, 5)
        self.conv2a, self.conv2 = MFMConv(first, first, 1), MFMConv(first, second, 3)
        self.conv3a, self.conv3 = MFMConv(second, second, 1), MFMConv(second, third, 3)
        self.conv4a, self.conv4 = MFMConv(third, third, 1), MFMConv(third, fourth, 3)
        self.conv5a, self.conv5 = MFMConv(fourth, fourth, 1), MFMConv(fourth, last, 3)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch features"]:
        """The last map as a row.

        Raises:
            ConfigError: for images of another size than the network was built for.
        """
        maps = _pool(self.conv1(images))
        maps = _pool(self.conv2(self.conv2a(maps)))
        maps = _pool(self.conv3(self.conv3a(maps)))
        maps = self.conv4(self.conv4a(maps))
        maps = _pool(self.conv5(self.conv5a(maps)))
        return as_features(maps, self.map_size_px)


def _pool(maps: Float[Tensor, "batch planes height width"]) -> Float[Tensor, "batch planes rows columns"]:
    return max_pool2d(maps, 2, ceil_mode=True)  # Caffe's poolings round up


def light_cnn(width: float = 1.0, num_channels: int = 1, image_size_px: int = 128) -> tuple[nn.Module, int]:
    """A Light CNN backbone and the width of its features; arguments as for `LightCNN`."""
    backbone = LightCNN(width, num_channels, image_size_px)
    return backbone, backbone.num_features
