"""Images of another size or kind than an encoder takes, converted on their device."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

# Weights of red, green and blue in grey (ITU-R BT.601), as in Pillow.
_LUMA = (0.299, 0.587, 0.114)


class Adapted(nn.Module):
    """An encoder that first converts its images.

    As in SimCLR (appendix B.8), the shorter side is resized by a bicubic filter, and the centre is cut out. Grey images
    are repeated for each channel, coloured ones become grey for other numbers of channels, and so do images of other
    channels, which are averaged.

    Args:
        encoder: images in [0, 1] -> features.
        image_size_px: side of the images that the encoder gets; None leaves their size as it is.
        num_channels: number of channels of those images.
    """

    def __init__(self, encoder: nn.Module, image_size_px: int | None, num_channels: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.image_size_px = image_size_px
        self.num_channels = num_channels

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Tensor:
        """The features of converted images."""
        if images.shape[1] != self.num_channels:
            images = _grey(images).expand(-1, self.num_channels, -1, -1)
        return self.encoder(images if self.image_size_px is None else _resized(images, self.image_size_px))


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    return (images * images.new_tensor(_LUMA).view(3, 1, 1)).sum(1, keepdim=True)


def _resized(images: Tensor, size: int) -> Tensor:
    height, width = images.shape[-2:]
    if (height, width) == (size, size):
        return images
    scale = size / min(height, width)
    sides = [max(round(side * scale), size) for side in (height, width)]
    resized = functional.interpolate(images, sides, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = ((side - size) // 2 for side in sides)
    return torch.narrow(torch.narrow(resized, 2, top, size), 3, left, size)
