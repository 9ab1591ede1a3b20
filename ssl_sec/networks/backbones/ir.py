"""Improved residual networks (IR) of face recognition (ArcFace, Deng et al. 2019).

A unit is batch norm, 3x3 convolution, batch norm, PReLU, 3x3 convolution, batch norm; the shortcut of the first of a
stage is a 1x1 convolution of stride 2 with batch norm. In SE-IR-50, which SEC calls SE-ResNet50E-IR, channels of the
branch are weighted before it joins the shortcut (Hu et al. 2018). The stem keeps the resolution of 112 pixels.

The published output E is dropout, linear layer, batch norm on the whole last map; the head `fc_bn` is this output.
"""

from functools import partial
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from ssl_sec.networks.backbones.face_maps import as_features, map_size_px
from ssl_sec.networks.backbones.resnet import stage_planes
from ssl_sec.networks.initialisation import he_normal_

IRName = Literal["ir18", "ir34", "ir50", "ir100", "se_ir50"]

_SQUEEZE_REDUCTION = 16


class IRUnit(nn.Module):
    """A residual unit that begins with batch norm.

    Args:
        inputs: input channels.
        outputs: output channels; they may differ from `inputs` only with stride 2.
        stride: stride of the second convolution, 1 or 2.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.prelu = nn.PReLU(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Identity()
        if stride != 1:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, maps: Float[Tensor, "batch inputs height width"]) -> Float[Tensor, "batch outputs rows columns"]:
        """The branch and the shortcut, added."""
        return self._branch(maps) + self.downsample(maps)

    def _branch(self, maps: Tensor) -> Tensor:
        maps = self.prelu(self.bn2(self.conv1(self.bn1(maps))))
        return self.bn3(self.conv2(maps))


class SEIRUnit(IRUnit):
    """A unit whose branch is weighted channel by channel (squeeze and excitation); arguments as for `IRUnit`."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        from torchvision.ops import SqueezeExcitation  # torchvision takes two seconds to import

        super().__init__(inputs, outputs, stride)
        squeezed = max(1, outputs // _SQUEEZE_REDUCTION)
        self.se = SqueezeExcitation(outputs, squeezed, activation=partial(nn.PReLU, squeezed))

    def _branch(self, maps: Tensor) -> Tensor:
        return self.se(super()._branch(maps))


# Kind of unit and number of units in each stage, by name.
UNITS: dict[IRName, tuple[type[IRUnit], tuple[int, int, int, int]]] = {
    "ir18": (IRUnit, (2, 2, 2, 2)),
    "ir34": (IRUnit, (3, 4, 6, 3)),
    "ir50": (IRUnit, (3, 4, 14, 3)),
    "ir100": (IRUnit, (3, 13, 30, 3)),
    "se_ir50": (SEIRUnit, (3, 4, 14, 3)),
}


class IRNet(nn.Module):
    """An IR network up to its last map; parameter names are those of InsightFace's iresnet, `se` is added.

    Args:
        name: name of the network.
        width: multiplies the number of channels of every layer, > 0.
        num_channels: channels of the images.
        image_size_px: side of the square images; 112 as published.
    """

    def __init__(self, name: IRName, width: float = 1.0, num_channels: int = 3, image_size_px: int = 112) -> None:
        super().__init__()
        unit, repeats = UNITS[name]
        planes = stage_planes(width)
        self.map_size_px = map_size_px(image_size_px)
        self.num_features = planes[-1] * self.map_size_px**2
        self.conv1 = nn.Conv2d(num_channels, planes[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes[0])
        self.prelu = nn.PReLU(planes[0])
        inputs = [planes[0], *planes[:-1]]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            _stage(unit, inputs[stage], planes[stage], repeats[stage]) for stage in range(4)
        )
        self.bn2 = nn.BatchNorm2d(planes[-1])
        he_normal_(self)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch features"]:
        """The last map after its batch norm, as a row.

        Raises:
            ConfigError: for images of another size than the network was built for.
        """
        maps = self.prelu(self.bn1(self.conv1(images)))
        maps = self.layer4(self.layer3(self.layer2(self.layer1(maps))))
        return as_features(self.bn2(maps), self.map_size_px)


def _stage(unit: type[IRUnit], inputs: int, outputs: int, repeats: int) -> nn.Sequential:
    rest = [unit(outputs, outputs, stride=1) for _ in range(repeats - 1)]
    return nn.Sequential(unit(inputs, outputs, stride=2), *rest)


def ir(name: IRName, width: float = 1.0, num_channels: int = 3, image_size_px: int = 112) -> tuple[nn.Module, int]:
    """An IR backbone and the width of its features; arguments as for `IRNet`."""
    backbone = IRNet(name, width, num_channels, image_size_px)
    return backbone, backbone.num_features
