"""BN-Inception (Ioffe and Szegedy 2015, Figure 5) in the variant of its widely used ImageNet weights.

Those weights were trained in Caffe and are distributed as bn_inception-52deb4733.pth, with the key names used here.
They expect blue, green and red from 0 to 255 less (104, 117, 123); an `Encoder` that scales by `CAFFE_MEAN` and
`CAFFE_STD` gives the same values in the order red, green, blue, and the network reverses that order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ssl_sec.errors import ConfigError
from ssl_sec.networks.initialisation import he_normal_

# Means of red, green and blue in [0, 1].
CAFFE_MEAN = (123 / 255, 117 / 255, 104 / 255)
CAFFE_STD = (1 / 255,)

# Smaller images have empty maps before the first block.
_SMALLEST_PX = 7


def _halve(maps: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch channels rows columns"]:
    """Maxima of 3x3 windows with stride 2, as many as the outputs of a convolution of stride 2.

    For maps of an even size that is Caffe's pooling, which rounds up. The maps come from a ReLU, so that the zeros
    that pad the last window do not change a maximum.
    """
    return F.max_pool2d(F.pad(maps, (0, 2, 0, 2)), 3, stride=2)


_mean_3x3 = partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1)
_max_3x3 = partial(F.max_pool2d, kernel_size=3, stride=1, padding=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """Channels of an Inception block: its 1x1 convolution, its other branches, and the projection after its pooling.

    A block of stride 2 has no 1x1 convolution, and no projection after its pooling.
    """

    single: int | None = None
    triple: tuple[int, int]
    double: tuple[int, int]
    pool: Callable[[Tensor], Tensor] = _mean_3x3
    projection: int | None = None
    stride: int = 1


_BLOCKS = {
    "3a": _Block(single=64, triple=(64, 64), double=(64, 96), projection=32),
    "3b": _Block(single=64, triple=(64, 96), double=(64, 96), projection=64),
    "3c": _Block(triple=(128, 160), double=(64, 96), pool=_halve, stride=2),
    "4a": _Block(single=224, triple=(64, 96), double=(96, 128), projection=128),
    "4b": _Block(single=192, triple=(96, 128), double=(96, 128), projection=128),
    "4c": _Block(single=160, triple=(128, 160), double=(128, 160), projection=128),
    "4d": _Block(single=96, triple=(128, 192), double=(160, 192), projection=128),
    "4e": _Block(triple=(128, 192), double=(192, 256), pool=_halve, stride=2),
    "5a": _Block(single=352, triple=(192, 320), double=(160, 224), projection=128),
    "5b": _Block(single=352, triple=(192, 320), double=(192, 224), pool=_max_3x3, projection=128),
}


class BNInception(nn.Module):
    """BN-Inception without its classifier; parameter names are those of the published weights.

    Args:
        num_channels: channels of the images.
    """

    def __init__(self, num_channels: int = 3) -> None:
        super().__init__()
        self._add("conv1_7x7_s2", num_channels, 64, 7, stride=2)
        self._add("conv2_3x3_reduce", 64, 64, 1)
        self._add("conv2_3x3", 64, 192, 3)
        self.num_features = 192
        for name, block in _BLOCKS.items():
            self.num_features = self._add_block(f"inception_{name}", self.num_features, block)
        he_normal_(self)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch features"]:
        """Features after the global average pool.

        Args:
            images: red, green and blue; the published weights expect them scaled by `CAFFE_MEAN` and `CAFFE_STD`.
        """
        maps = F.max_pool2d(self._layer("conv1_7x7_s2", images.flip(1)), 3, stride=2, ceil_mode=True)
        maps = self._layer("conv2_3x3", self._layer("conv2_3x3_reduce", maps))
        maps = F.max_pool2d(maps, 3, stride=2, ceil_mode=True)
        for name in _BLOCKS:
            maps = self.run_block(name, maps)
        return maps.mean((2, 3))

    def run_block(self, name: str, maps: Tensor) -> Tensor:
        """The maps after an Inception block.

        Args:
            name: name of the block, such as 3a.
            maps: maps before the block.
        """
        block, name = _BLOCKS[name], f"inception_{name}"
        single = [self._layer(f"{name}_1x1", maps)] if block.single is not None else []
        triple = self._layer(f"{name}_3x3", self._layer(f"{name}_3x3_reduce", maps))
        double = self._layer(f"{name}_double_3x3_1", self._layer(f"{name}_double_3x3_reduce", maps))
        double = self._layer(f"{name}_double_3x3_2", double)
        pooled = block.pool(maps)
        if block.projection is not None:
            pooled = self._layer(f"{name}_pool_proj", pooled)
        return torch.cat([*single, triple, double, pooled], 1)

    def _add(self, name: str, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        self.add_module(name, nn.Conv2d(inputs, outputs, size, stride, padding=size // 2))
        self.add_module(f"{name}_bn", nn.BatchNorm2d(outputs))

    def _layer(self, name: str, maps: Tensor) -> Tensor:
        return F.relu(getattr(self, f"{name}_bn")(getattr(self, name)(maps)), inplace=True)

    def _add_block(self, name: str, inputs: int, block: _Block) -> int:
        """Adds a block's layers; returns the number of its output channels."""
        if block.single is not None:
            self._add(f"{name}_1x1", inputs, block.single, 1)
        inside, outside = block.triple
        self._add(f"{name}_3x3_reduce", inputs, inside, 1)
        self._add(f"{name}_3x3", inside, outside, 3, block.stride)
        inside, outside = block.double
        self._add(f"{name}_double_3x3_reduce", inputs, inside, 1)
        self._add(f"{name}_double_3x3_1", inside, outside, 3)
        self._add(f"{name}_double_3x3_2", outside, outside, 3, block.stride)
        if block.projection is not None:
            self._add(f"{name}_pool_proj", inputs, block.projection, 1)
        return (block.single or 0) + block.triple[1] + block.double[1] + (block.projection or inputs)


def bn_inception(num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
    """A BN-Inception backbone and the width of its features.

    Args:
        num_channels: channels of the images.
        image_size_px: shorter side of the images, ≥ 7; the network was published for 224.

    Raises:
        ConfigError: for smaller images.
    """
    check_image_size("bn_inception", image_size_px, _SMALLEST_PX)
    backbone = BNInception(num_channels)
    return backbone, backbone.num_features


def check_image_size(name: str, image_size_px: int, smallest_px: int) -> None:
    """Raises a ConfigError if images are too small for an encoder."""
    if image_size_px < smallest_px:
        raise ConfigError(
            f"encoder.name: found {name!r}, which needs images of {smallest_px} pixels or more; "
            f"these have {image_size_px}"
        )
