"""A workaround for convolutions that oneDNN computes wrongly on CPUs.

In channels_last, the backward pass of a 1x1 convolution that skips pixels and has fewer input channels than a vector
register has floats writes beyond oneDNN's workspace: the process crashes, or gradients are wrong
(https://github.com/uxlfoundation/oneDNN/issues/6035). torch.compile uses channels_last on CPUs whatever the layout.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Floats in the widest vector register (AVX-512); on other processors the bug occurs below 8 or 4 channels.
_LEAST_CHANNELS = 16


def lay_out(network: nn.Module, device: torch.device, channels_last: bool) -> None:
    """Sets the layout of a network's weights, and on a CPU makes its convolutions safe.

    Unsafe ones take every n-th pixel first, and then convolve with stride 1: the same convolution, with the same
    rounding. Names, parameters and buffers are unchanged.

    Args:
        network: the network, already on the device; changed in place.
        device: the network's device.
        channels_last: whether activations are in the channels_last layout.
    """
    if channels_last:
        network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if device.type != "cpu":
        return
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and _is_unsafe(module):
            module.register_forward_pre_hook(partial(_take_pixels, stride=module.stride))
            module.stride = (1, 1)


def _is_unsafe(convolution: nn.Conv2d) -> bool:
    return (
        convolution.kernel_size == (1, 1)
        and max(convolution.stride) > 1
        and convolution.padding in ((0, 0), 0, "valid")
        and convolution.in_channels // convolution.groups < _LEAST_CHANNELS
    )


def _take_pixels(convolution: nn.Module, inputs: tuple[Any, ...], *, stride: tuple[int, ...]) -> tuple[Tensor, ...]:
    maps, *rest = inputs
    return (maps[..., :: stride[0], :: stride[1]], *rest)
