"""The last feature maps of an encoder: where in an image its channels respond."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from ssl_sec.augment.views import unit_range
from ssl_sec.modes import evaluating


class FeatureMaps(NamedTuple):
    """Some channels of the last feature maps of each image, the strongest first.

    Attributes:
        maps: activations of the channels.
        channels: numbers of the channels.
    """

    maps: Float[Tensor, "images count height width"]
    channels: Int64[Tensor, "images count"]


@torch.no_grad()
def strongest_feature_maps(
    encoder: nn.Module, images: UInt8[Tensor, "images channels height width"], count: int
) -> FeatureMaps | None:
    """The channels of the last feature maps with the greatest mean activation in each image (SEC, Fig. 8).

    The last feature maps are the last output of any of the encoder's modules that has rows and columns, more than one
    pixel in total; the output of a pooling to one pixel does not count.

    Args:
        encoder: images in [0, 1] -> features; in evaluation mode during the call.
        images: grey or RGB, 0-255.
        count: number of channels for each image; fewer if the encoder has fewer.

    Returns:
        The maps in float32 on the CPU; None if the encoder has none, like a transformer of patches or the pixels.
    """
    last: list[Tensor] = []

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4 and output.shape[2] * output.shape[3] > 1:
            last[:] = [output]

    parameter = next(encoder.parameters(), None)
    if parameter is None:
        return None
    hooks = [module.register_forward_hook(keep) for module in encoder.modules()]
    try:
        with evaluating(encoder):
            encoder(unit_range(images.to(parameter.device)).to(parameter.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    if not last:
        return None
    maps = last[0].float().cpu()
    channels = maps.mean((2, 3)).topk(min(count, maps.shape[1]), dim=1).indices
    return FeatureMaps(maps.gather(1, channels[:, :, None, None].expand(-1, -1, *maps.shape[2:])), channels)
