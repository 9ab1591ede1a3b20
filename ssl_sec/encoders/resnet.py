"""ResNets (He et al. 2016) from torchvision's blocks, with its key names.

The CIFAR stem is SimCLR's (appendix B.9): a 3x3 convolution of stride 1 and no pooling, for images of about 32
pixels. The width multiplier scales every layer, for machines that cannot train the full width.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, conv1x1

from ssl_sec.encoders.initialisation import he_normal_

# Blocks of each stage by depth.
LAYERS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
}


def stage_planes(width: float) -> list[int]:
    """Channels inside the blocks of each stage; the stem has as many as the first.

    Args:
        width: multiplies torchvision's, > 0.
    """
    return [max(1, round(64 * width * 2**stage)) for stage in range(4)]


class ResNet(nn.Module):
    """A ResNet without its classifier; parameter names are torchvision's.

    Args:
        depth: 18, 34 or 50.
        stem: "cifar" or "imagenet".
        width: multiplies the number of channels of every layer, > 0.
        num_channels: of the images, 1 or 3.
    """

    def __init__(
        self, depth: int, stem: Literal["cifar", "imagenet"], width: float = 1.0, num_channels: int = 3
    ) -> None:
        super().__init__()
        block, repeats = LAYERS[depth]
        planes = stage_planes(width)
        self.num_features = planes[-1] * block.expansion
        if stem == "cifar":
            self.conv1 = nn.Conv2d(num_channels, planes[0], 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(num_channels, planes[0], 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(planes[0])
        self.relu = nn.ReLU(inplace=True)
        inplanes = [planes[0], *(count * block.expansion for count in planes[:-1])]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            _stage(block, inplanes[stage], planes[stage], repeats[stage], stride=1 if stage == 0 else 2)
            for stage in range(4)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        he_normal_(self)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch features"]:
        """Features after the global average pool."""
        maps = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        maps = self.layer4(self.layer3(self.layer2(self.layer1(maps))))
        return torch.flatten(self.avgpool(maps), 1)


def _stage(
    block: type[BasicBlock] | type[Bottleneck], inplanes: int, planes: int, repeats: int, stride: int
) -> nn.Sequential:
    outplanes = planes * block.expansion
    shortcut = None
    if stride != 1 or inplanes != outplanes:
        shortcut = nn.Sequential(conv1x1(inplanes, outplanes, stride), nn.BatchNorm2d(outplanes))
    rest = [block(outplanes, planes) for _ in range(repeats - 1)]
    return nn.Sequential(block(inplanes, planes, stride, shortcut), *rest)


def resnet(
    depth: int, stem: Literal["cifar", "imagenet"], width: float = 1.0, num_channels: int = 3
) -> tuple[nn.Module, int]:
    """A ResNet backbone and the width of its features; arguments as for `ResNet`."""
    backbone = ResNet(depth, stem, width, num_channels)
    return backbone, backbone.num_features
