"""ResNets (He et al. 2016) from torchvision's blocks, with its key names.

The CIFAR stem is SimCLR's (appendix B.9): a 3x3 convolution of stride 1 and no pooling, for images of about 32
pixels. The width multiplier scales every layer, for machines that cannot train the full width.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_sec.errors import check_option
from ssl_sec.networks.initialisation import he_normal_
from ssl_sec.rules import check

Stem = Literal["cifar", "imagenet"]

# Depth -> torchvision's block, and the number of blocks in each stage.
LAYERS: dict[int, tuple[Literal["BasicBlock", "Bottleneck"], tuple[int, int, int, int]]] = {
    18: ("BasicBlock", (2, 2, 2, 2)),
    34: ("BasicBlock", (3, 4, 6, 3)),
    50: ("Bottleneck", (3, 4, 6, 3)),
}


def stage_planes(width: float) -> list[int]:
    """Channels inside the blocks of each stage; the stem has as many as the first.

    Args:
        width: factor on torchvision's numbers of channels, > 0.
    """
    return [max(1, round(64 * width * 2**stage)) for stage in range(4)]


class ResNet(nn.Module):
    """A ResNet without its classifier; parameter names are torchvision's.

    Args:
        depth: 18, 34 or 50.
        stem: "cifar" or "imagenet".
        width: multiplies the number of channels of every layer, > 0.
        num_channels: channels of the images.
    """

    def __init__(self, depth: int, stem: Stem, width: float = 1.0, num_channels: int = 3) -> None:
        from torchvision.models.resnet import BasicBlock, Bottleneck  # torchvision takes two seconds to import

        super().__init__()
        check(depth in LAYERS, "depth", depth, "18, 34 or 50")
        check_option("stem", stem, Stem)
        name, repeats = LAYERS[depth]
        block = BasicBlock if name == "BasicBlock" else Bottleneck
        planes = stage_planes(width)
        outplanes = [count * block.expansion for count in planes]
        self.num_features = outplanes[-1]
        if stem == "cifar":
            self.conv1 = nn.Conv2d(num_channels, planes[0], 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(num_channels, planes[0], 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(planes[0])
        self.relu = nn.ReLU(inplace=True)
        channels = zip([planes[0], *outplanes[:-1]], planes, outplanes, strict=True)
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            _stage(block, *numbers, repeats[stage], stride=1 if stage == 0 else 2)
            for stage, numbers in enumerate(channels)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        he_normal_(self)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch features"]:
        """Features after the global average pool."""
        maps = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        maps = self.layer4(self.layer3(self.layer2(self.layer1(maps))))
        return torch.flatten(self.avgpool(maps), 1)


def _stage(
    block: type[nn.Module], inplanes: int, planes: int, outplanes: int, repeats: int, stride: int
) -> nn.Sequential:
    shortcut = None
    if stride != 1 or inplanes != outplanes:
        convolution = nn.Conv2d(inplanes, outplanes, 1, stride, bias=False)
        shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outplanes))
    rest = [block(outplanes, planes) for _ in range(repeats - 1)]
    return nn.Sequential(block(inplanes, planes, stride, shortcut), *rest)


def resnet(depth: int, stem: Stem, width: float = 1.0, num_channels: int = 3) -> tuple[nn.Module, int]:
    """A ResNet backbone and the width of its features; arguments as for `ResNet`."""
    backbone = ResNet(depth, stem, width, num_channels)
    return backbone, backbone.num_features
