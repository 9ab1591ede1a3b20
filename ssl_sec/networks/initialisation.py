"""Initial weights of layers."""

from torch import nn


def he_normal_(backbone: nn.Module) -> None:
    """Draws the weights of every convolution from N(0, 2 / fan-out) (He et al. 2015); biases start at 0."""
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def caffe_xavier_(layer: nn.Conv2d | nn.Linear, bias: float = 0.0) -> None:
    """Draws the weights from U(±√(3 / fan-in)), as Caffe's Xavier uses the fan-in alone; biases start at `bias`."""
    nn.init.kaiming_uniform_(layer.weight, nonlinearity="linear")
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)
