"""Optimisers over groups of parameters, with learning rates that follow the global step."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import SGD, Optimizer


def parameter_groups(modules: Iterable[nn.Module], weight_decay: float) -> list[dict[str, object]]:
    """Weights, which decay, and biases and batch-norm parameters, which do not.

    Args:
        modules: the modules whose parameters are trained.
        weight_decay: coupled L2 decay of the weights, ≥ 0.
    """
    parameters = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def sgd(modules: Iterable[nn.Module], momentum: float, weight_decay: float, nesterov: bool = False) -> Optimizer:
    """SGD with momentum, the optimiser of SEC's contrastive runs."""
    # The rate is set at every step; one that is left unset must not train.
    return SGD(parameter_groups(modules, weight_decay), lr=0.0, momentum=momentum, nesterov=nesterov)


def lars(modules: Iterable[nn.Module], momentum: float, weight_decay: float) -> Optimizer:
    """LARS (You et al. 2017), for batches of thousands, as lightly implements it."""
    from lightly.utils.lars import LARS  # lightly imports Lightning, which takes seconds

    return LARS(parameter_groups(modules, weight_decay), lr=0.0, momentum=momentum)


@torch.no_grad()
def set_learning_rate(optimiser: Optimizer, learning_rate: float) -> None:
    """Sets the rate of every group; a group with a `rate_factor` gets its multiple."""
    for group in optimiser.param_groups:
        group["lr"] = learning_rate * group.get("rate_factor", 1.0)
