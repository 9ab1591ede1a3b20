"""Activations of a backbone's blocks that are computed again in the backward pass (Chen et al. 2016).

A block keeps its input alone; its activations are computed a second time when its gradient is due. That costs one more
forward pass of the blocks, and memory then grows with the number of blocks instead of with that of layers. Everything
else is unchanged: the same operations on the same values, dropout with the same draws, and batch norm, whose running
statistics the second computation leaves alone. Batch norm over several workers exchanges its statistics once more, in
the same order on every worker. torch.compile compiles the blocks with one worker; with several it leaves them out.

A block is a residual unit of a ResNet, an IR network or SphereFace's CNN, an Inception block, a convolution of Light
CNN; of a timm model the smallest items of its lists that have two layers or more, as the blocks of a ViT, or, where it
has no lists, its parts. The stem, single layers between the blocks, and the head keep their activations.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils.checkpoint import checkpoint

from ssl_sec.collectives import world_size
from ssl_sec.networks.backbones.bn_inception import BNInception
from ssl_sec.networks.backbones.ir import IRUnit
from ssl_sec.networks.backbones.light_cnn import MFMConv
from ssl_sec.networks.backbones.sphereface import SphereFaceUnit
from ssl_sec.rules import check


def recompute_blocks(backbone: nn.Module) -> None:
    """Makes the blocks of a backbone compute their activations again in the backward pass.

    Names, parameters, buffers and results are unchanged. In evaluation nothing is recomputed.

    Args:
        backbone: backbone whose batch norms are final; changed in place.

    Raises:
        ConfigError: if it has no blocks.
    """
    if isinstance(backbone, BNInception):
        backbone.run_block = partial(_compute, backbone.run_block, backbone)
        return
    blocks = _blocks(backbone)
    check(bool(blocks), "runtime.recompute", True, "false: this encoder has no blocks")
    for block in blocks:
        block.forward = partial(_compute, block.forward, block)


def _blocks(backbone: nn.Module) -> Sequence[nn.Module]:
    if type(backbone).__module__.startswith("timm."):
        return _list_items(backbone) or [child for child in backbone.children() if _num_layers(child) > 1]
    from torchvision.models.googlenet import Inception  # torchvision takes two seconds to import
    from torchvision.models.resnet import BasicBlock, Bottleneck

    kinds = (IRUnit, MFMConv, SphereFaceUnit, Inception, BasicBlock, Bottleneck)
    return [module for module in backbone.modules() if isinstance(module, kinds)]


def _list_items(module: nn.Module) -> list[nn.Module]:
    """The innermost items of a module's lists that have two layers with weights or more."""
    found: list[nn.Module] = []
    for child in module.children():
        inner = _list_items(child)
        is_item = isinstance(module, (nn.Sequential, nn.ModuleList)) and not isinstance(
            child, (nn.Sequential, nn.ModuleList)
        )
        found += inner if inner or not is_item or _num_layers(child) < 2 else [child]
    return found


def _num_layers(module: nn.Module) -> int:
    return sum(any(True for _ in layer.parameters(recurse=False)) for layer in module.modules())


def _compute(compute: Callable[..., Any], module: nn.Module, *inputs: Any, **options: Any) -> Any:
    if not module.training:
        return compute(*inputs, **options)
    if torch.compiler.is_compiling() and world_size() == 1:
        # A compiled graph moves the statistics once, whatever it recomputes.
        return checkpoint(compute, *inputs, use_reentrant=False, **options)
    return _compute_uncompiled(compute, module, *inputs, **options)


@torch.compiler.disable(reason="what workers send each other is in no compiled graph")
def _compute_uncompiled(compute: Callable[..., Any], module: nn.Module, *inputs: Any, **options: Any) -> Any:
    return checkpoint(compute, *inputs, use_reentrant=False, context_fn=partial(_contexts, module), **options)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first computation and of the second."""
    return nullcontext(), _kept_statistics(module)


@contextmanager
def _kept_statistics(module: nn.Module) -> Iterator[None]:
    """Batch norms in a module move copies of their running statistics, which are dropped."""
    layers = [each for each in module.modules() if isinstance(each, _BatchNorm) and each.training]
    kept = [(layer, name, buffer) for layer in layers for name, buffer in layer.named_buffers(recurse=False)]
    for layer, name, buffer in kept:
        setattr(layer, name, buffer.clone())
    try:
        yield
    finally:
        for layer, name, buffer in kept:
            setattr(layer, name, buffer)
