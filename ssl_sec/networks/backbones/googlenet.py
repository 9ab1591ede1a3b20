"""GoogLeNet (Szegedy et al. 2015) as torchvision has it: with batch norm, and 3x3 convolutions in place of 5x5.

torchvision's weights expect (x - 0.5) / 0.5; its `transform_input` computes that from pixels that were scaled by
ImageNet's mean and standard deviation. Here `GOOGLENET_MEAN` and `GOOGLENET_STD` scale them directly.
"""

from torch import nn

from ssl_sec.networks.backbones.bn_inception import check_image_size
from ssl_sec.networks.initialisation import he_normal_

GOOGLENET_MEAN = (0.5,)
GOOGLENET_STD = (0.5,)

# Smaller images have empty maps before the last pooling.
_SMALLEST_PX = 15


def googlenet(num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
    """A GoogLeNet backbone without its classifiers, and the width of its features; key names are torchvision's.

    Args:
        num_channels: of the images, 1 or 3.
        image_size_px: of their shorter side; the network takes any from 15 up, and was published for 224.

    Raises:
        ConfigError: for smaller images.
    """
    from torchvision.models.googlenet import BasicConv2d, GoogLeNet  # torchvision takes two seconds to import

    check_image_size("googlenet", image_size_px, _SMALLEST_PX)
    backbone = GoogLeNet(aux_logits=False, init_weights=False)
    num_features = backbone.fc.in_features
    if num_channels != 3:
        backbone.conv1 = BasicConv2d(num_channels, 64, kernel_size=7, stride=2, padding=3)
    for name in ("dropout", "fc"):  # the dropout is the classifier's
        backbone.add_module(name, nn.Identity())
    he_normal_(backbone)
    return backbone, num_features
