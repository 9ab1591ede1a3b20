"""Convolutions that oneDNN gets wrong on CPUs, computed another way.

In channels_last, the backward pass of a 1x1 convolution that skips pixels and has fewer input channels than a vector
register has floats writes beyond oneDNN's workspace: the process crashes, or gradients are wrong
(https://github.com/uxlfoundation/oneDNN/issues/6035). Torch compiles networks for CPUs in channels_last, too, whatever
layout was asked for.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Floats of the widest vector register, of AVX-512; others are affected below 8 or 4 channels.
_LEAST_CHANNELS = 16


def lay_out(network: nn.Module, device: torch.device, channels_last: bool) -> None:
    """Lays a network's weights out, and on a CPU makes its convolutions safe.

    Those that are not take every n-th pixel first, and then convolve with stride 1: the same convolution, and the same
    in floating point. Names, parameters and buffers stay as they are.

    Args:
        network: on the device; changed in place.
        device: where it computes.
        channels_last: whether activations are laid out so.
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
