"""Initial weights of layers."""

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]

from ssl_sec.rules import Range


def he_normal_(backbone: nn.Module) -> None:
    """Draws the weights of every convolution from N(0, 2 / fan-out) (He et al. 2015); biases start at 0."""
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


@torch.no_grad()
def cut_(network: nn.Module, cut: float) -> None:
    """Divides the weights and biases of all convolutions and linear layers (cut-initialisation, Draganov et al. 2025).

    Those of attention are linear layers, too. A weight of several layers is divided once.

    The norms of the embeddings become smaller. Batch norm undoes the cut of a layer before it, whose weights then turn
    faster at the same learning rate.

    Args:
        network: the network with its initial weights; changed in place.
        cut: divisor c > 0; 1 changes nothing.

    Raises:
        ConfigError: `cut` is outside its range.
    """
    Range(gt=0).check("cut", cut)
    layers = [layer for layer in network.modules() if isinstance(layer, _ConvNd | nn.Linear | nn.MultiheadAttention)]
    for weight in {weight for layer in layers for weight in layer.parameters(recurse=False)}:
        weight.div_(cut)


def caffe_xavier_(layer: nn.Conv2d | nn.Linear, bias: float = 0.0) -> None:
    """Draws the weights from U(±√(3 / fan-in)), as Caffe's Xavier uses the fan-in alone; biases start at `bias`."""
    nn.init.kaiming_uniform_(layer.weight, nonlinearity="linear")
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)
