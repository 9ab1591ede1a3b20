"""Gradients of every convolution of our encoders in channels_last, as on CPUs, against the plain layout.

A separate program, since the error may crash the process. Prints one line for each convolution that is wrong.
"""

import copy
import sys

import torch
from torch import Tensor, nn

from ssl_sec.networks.config import (
    BNInceptionConfig,
    EncoderConfig,
    GoogLeNetConfig,
    IRConfig,
    LightCNNConfig,
    ResNetConfig,
    SphereFaceNetConfig,
)
from ssl_sec.networks.convolutions import lay_out

CPU = torch.device("cpu")

# With maps large enough, and channels few enough, for oneDNN's error.
ENCODERS: list[tuple[EncoderConfig, int]] = [
    (ResNetConfig(name="resnet18", width=0.125), 64),
    (ResNetConfig(name="resnet50", width=0.03125), 64),
    (ResNetConfig(name="resnet18", stem="imagenet", width=0.125), 64),
    (IRConfig(name="ir18", width=0.125), 64),
    (IRConfig(name="se_ir50", width=0.0625), 64),
    (SphereFaceNetConfig(width=0.125), 64),
    (LightCNNConfig(width=0.125), 64),
    (BNInceptionConfig(), 32),
    (GoogLeNetConfig(), 32),
    (GoogLeNetConfig(variant="published"), 32),
]

Case = tuple[nn.Conv2d, nn.Conv2d, tuple[int, ...]]


def convolutions(config: EncoderConfig, image_size_px: int, batch_size: int) -> list[Case]:
    """Each convolution in the plain layout and in channels_last, with the shape of its inputs."""
    encoder = config.build(3, image_size_px)
    laid_out = copy.deepcopy(encoder)
    lay_out(laid_out, CPU, channels_last=True)
    shapes: dict[nn.Module, tuple[int, ...]] = {}
    plain = [module for module in encoder.modules() if isinstance(module, nn.Conv2d)]
    hooks = [module.register_forward_pre_hook(lambda m, args: shapes.update({m: args[0].shape})) for module in plain]
    with torch.no_grad():
        encoder.eval()(torch.rand(2, 3, image_size_px, image_size_px))
    for hook in hooks:
        hook.remove()
    others = [module for module in laid_out.modules() if isinstance(module, nn.Conv2d)]
    pairs = zip(plain, others, strict=True)
    return [(each, other, (batch_size, *shapes[each][1:])) for each, other in pairs if each in shapes]


def results(convolution: nn.Conv2d, images: Tensor, layout: torch.memory_format, dtype: torch.dtype) -> list[Tensor]:
    """What the convolution returns, and its gradients."""
    convolution.zero_grad()
    inputs = images.clone(memory_format=layout).requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        outputs = convolution(inputs)
    cotangents = torch.arange(outputs.numel()).float().cos().view(outputs.shape).to(memory_format=layout)
    (outputs.float() * cotangents).sum().backward()
    assert inputs.grad is not None and convolution.weight.grad is not None
    return [outputs.detach().float(), inputs.grad, convolution.weight.grad.clone()]


def worst_difference(case: Case, dtype: torch.dtype) -> float:
    """The largest relative difference between the layouts, in three tries."""
    plain, laid_out, shape = case
    images = torch.randn(shape)
    expected = results(plain, images, torch.contiguous_format, dtype)
    worst = 0.0
    for _ in range(3):
        for found, wanted in zip(results(laid_out, images, torch.channels_last, dtype), expected, strict=True):
            difference = float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def main() -> int:
    """Checks all of them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tried: set[str] = set()
    wrong = 0
    for config, image_size_px in ENCODERS:
        for case in convolutions(config, image_size_px, batch_size=2):
            # With max-feature-maps, which are no part of the layout, a tie may be broken another way.
            key = f"{case[0]} {case[2]}"
            if key in tried:
                continue
            tried.add(key)
            for dtype, allowed in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
                found = worst_difference(case, dtype)
                if found > allowed:
                    print(f"{config.name}, {key}, {dtype}: {found}")
                    wrong += 1
    print(f"{len(tried)} convolutions, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
