"""GoogLeNet (Szegedy et al. 2015): torchvision's variant, with batch norm, and the published one, without.

torchvision's has batch norm after each convolution, and 3x3 convolutions in place of 5x5. Its weights expect
(x - 0.5) / 0.5; its `transform_input` computes that from pixels that were scaled by ImageNet's mean and standard
deviation. Here `GOOGLENET_MEAN` and `GOOGLENET_STD` scale them directly.

The published one (Table 1, Fig. 3) has convolutions with biases, 5x5 ones among them, and two local response
normalisations, of Caffe's values. Its names of parameters are torchvision's too.
"""

from torch import Tensor, nn

from ssl_sec.networks.backbones.bn_inception import check_image_size
from ssl_sec.networks.initialisation import he_normal_

GOOGLENET_MEAN = (0.5,)
GOOGLENET_STD = (0.5,)

# Smaller images have empty maps before the last pooling.
_SMALLEST_PX = 15
_SMALLEST_PUBLISHED_PX = 31


def googlenet(num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
    """Torchvision's GoogLeNet without its classifiers, and the width of its features; key names are torchvision's.

    Args:
        num_channels: channels of the images.
        image_size_px: shorter side of the images, ≥ 15; the network was published for 224.

    Raises:
        ConfigError: for smaller images.
    """
    from torchvision.models.googlenet import BasicConv2d, GoogLeNet  # torchvision takes two seconds to import

    check_image_size("googlenet", image_size_px, _SMALLEST_PX)
    backbone = GoogLeNet(aux_logits=False, init_weights=False)
    if num_channels != 3:
        backbone.conv1 = BasicConv2d(num_channels, 64, kernel_size=7, stride=2, padding=3)
    return _without_classifier(backbone)


def published_googlenet(num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
    """The published GoogLeNet without its classifiers and without batch norm, and the width of its features.

    Args:
        num_channels: channels of the images.
        image_size_px: shorter side of the images, ≥ 31; the network was published for 224.

    Raises:
        ConfigError: for smaller images.
    """
    from torchvision.models.googlenet import GoogLeNet, Inception, InceptionAux

    check_image_size("googlenet", image_size_px, _SMALLEST_PUBLISHED_PX)

    def inception(*channels: int) -> nn.Module:
        block = Inception(*channels, conv_block=_ConvReLU)
        block.branch3[1] = _ConvReLU(channels[4], channels[5], kernel_size=5, padding=2)
        return block

    backbone = GoogLeNet(aux_logits=False, init_weights=False, blocks=[_ConvReLU, inception, InceptionAux])
    backbone.conv1 = _ConvReLU(num_channels, 64, kernel_size=7, stride=2, padding=3)
    for name, layers in (
        ("maxpool1", (backbone.maxpool1, _local_response_norm())),
        ("maxpool2", (_local_response_norm(), backbone.maxpool2)),
        ("maxpool4", (nn.MaxPool2d(3, stride=2, ceil_mode=True),)),
    ):
        backbone.add_module(name, nn.Sequential(*layers))
    return _without_classifier(backbone)


class _ConvReLU(nn.Module):
    """A convolution with biases and a ReLU; arguments as for `nn.Conv2d`."""

    def __init__(self, inputs: int, outputs: int, *, kernel_size: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel_size, stride, padding)

    def forward(self, maps: Tensor) -> Tensor:
        return nn.functional.relu(self.conv(maps), inplace=True)


def _local_response_norm() -> nn.Module:
    return nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=1.0)


def _without_classifier(backbone: nn.Module) -> tuple[nn.Module, int]:
    """The backbone with initial weights and without its last layer, and the width of its features."""
    num_features = backbone.get_submodule("fc").in_features
    for name in ("dropout", "fc"):  # the dropout is the classifier's
        backbone.add_module(name, nn.Identity())
    he_normal_(backbone)
    assert isinstance(num_features, int)
    return backbone, num_features
