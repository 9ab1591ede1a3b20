"""Common parts of the encoders of face recognition: the scaling of pixels, and the whole last map as features.

A linear layer uses every position of the map, as aligned faces have their eyes and mouth at the same positions. The
number of features depends on the image size, so that a network is built for one size of square images.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_sec.errors import ConfigError

# For pixels in [0, 1]; this is (x - 127.5) / 128 for pixels from 0 to 255.
FACE_MEAN = (127.5 / 255,)
FACE_STD = (128 / 255,)


def map_size_px(image_size_px: int) -> int:
    """Side of the maps after four layers of stride 2, each of which rounds up: 7 for images of 112 pixels."""
    return -(-image_size_px // 16)


def as_features(maps: Float[Tensor, "batch channels height width"], size_px: int) -> Float[Tensor, "batch features"]:
    """Maps as rows, channel by channel.

    Args:
        maps: the last maps of a backbone.
        size_px: side of the maps for which the network was built, pixels.

    Raises:
        ConfigError: for maps of another size.
    """
    _, _, height, width = maps.shape
    if height != size_px or width != size_px:
        raise ConfigError(
            f"encoder.name: found an encoder whose last maps are {size_px} x {size_px}, but those of these images are "
            f"{height} x {width}; allowed: square images, or another encoder"
        )
    return torch.flatten(maps, 1)
