"""The residual CNN of SphereFace (Liu et al. 2017, Table 2), which has no batch norm.

A stage is a 3x3 convolution of stride 2 with PReLU, then residual units of two 3x3 convolutions, each with PReLU. The
published depths have (0, 0, 0, 0) units for 4 layers, (0, 1, 2, 0) for 10, (1, 2, 4, 1) for 20, (2, 4, 8, 2) for 36 and
(3, 8, 16, 3) for 64, not counting the linear layer after them, which is the head `fc`. SFT trains (3, 4, 6, 3), which
it calls 34 layers, and (1, 1, 1, 1) for its Table 5.

Initial weights are those of the authors' Caffe files: convolutions of stride 2 by Caffe's Xavier, U(±√(3 / fan-in)),
with biases of 0; those of the units from N(0, 0.01²), without biases.
"""

from jaxtyping import Float
from torch import Tensor, nn

from ssl_sec.networks.backbones.face_maps import as_features, map_size_px
from ssl_sec.networks.backbones.resnet import stage_planes
from ssl_sec.networks.initialisation import caffe_xavier_


class SphereFaceUnit(nn.Module):
    """A residual unit without batch norm; its branch ends in a PReLU.

    Args:
        planes: channels of the maps.
    """

    def __init__(self, planes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.prelu1 = nn.PReLU(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.prelu2 = nn.PReLU(planes)
        for layer in (self.conv1, self.conv2):
            nn.init.normal_(layer.weight, std=0.01)

    def forward(self, maps: Float[Tensor, "batch planes height width"]) -> Float[Tensor, "batch planes height width"]:
        """The branch and the maps, added."""
        return maps + self.prelu2(self.conv2(self.prelu1(self.conv1(maps))))


class SphereFaceNet(nn.Module):
    """SphereFace's network up to its last map.

    Args:
        units: residual units of each of the four stages, ≥ 0.
        width: multiplies the number of channels of every layer, > 0.
        num_channels: channels of the images.
        image_size_px: side of the square images.
    """

    def __init__(
        self, units: tuple[int, ...], width: float = 1.0, num_channels: int = 3, image_size_px: int = 112
    ) -> None:
        super().__init__()
        planes = stage_planes(width)
        self.map_size_px = map_size_px(image_size_px)
        self.num_features = planes[-1] * self.map_size_px**2
        inputs = [num_channels, *planes[:-1]]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            _stage(inputs[stage], planes[stage], units[stage]) for stage in range(4)
        )

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch features"]:
        """The last map as a row.

        Raises:
            ConfigError: for images of another size than the network was built for.
        """
        return as_features(self.layer4(self.layer3(self.layer2(self.layer1(images)))), self.map_size_px)


def _stage(inputs: int, planes: int, units: int) -> nn.Sequential:
    first = nn.Conv2d(inputs, planes, 3, stride=2, padding=1)
    caffe_xavier_(first)
    return nn.Sequential(first, nn.PReLU(planes), *(SphereFaceUnit(planes) for _ in range(units)))


def sphereface_net(
    units: tuple[int, ...], width: float = 1.0, num_channels: int = 3, image_size_px: int = 112
) -> tuple[nn.Module, int]:
    """A SphereFace backbone and the width of its features; arguments as for `SphereFaceNet`."""
    backbone = SphereFaceNet(units, width, num_channels, image_size_px)
    return backbone, backbone.num_features
