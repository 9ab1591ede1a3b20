"""Optimisers over groups of parameters, with learning rates that follow the global step.

They begin with a learning rate of 0, so that nothing trains at a wrong rate: `set_learning_rate` sets it, before every
step, or once for a constant rate and before one of torch's schedulers is made, which follows the rate that it finds.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ssl_sec.losses.generators.base import RatedLayers

ParameterGroup = dict[str, object]


def parameter_groups(
    modules: Iterable[nn.Module],
    weight_decay: float,
    rate_factor: float = 1.0,
    left_out: Iterable[nn.Parameter] = (),
    decay_all: bool = False,
) -> list[ParameterGroup]:
    """Two groups: weights, which decay, and parameters of one dimension (biases and norm layers), which usually do not.

    Layers within the modules that have a learning rate of their own are left out; see `rated_groups`.

    Args:
        modules: the modules whose parameters are trained.
        weight_decay: weight decay of the weights, ≥ 0.
        rate_factor: learning rate of the groups divided by the run's, ≥ 0.
        left_out: parameters that are in other groups.
        decay_all: whether biases and parameters of norm layers decay like weights.
    """
    modules = list(modules)
    rated = [parameter for layers in _rated_layers(modules) for parameter in layers.parameters()]
    elsewhere = set(map(id, [*rated, *left_out]))
    trained = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    parameters = [parameter for parameter in trained if id(parameter) not in elsewhere]
    weights = [parameter for parameter in parameters if parameter.ndim > 1]
    others = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups: list[ParameterGroup] = [
        {"params": weights, "weight_decay": weight_decay, "rate_factor": rate_factor},
        {"params": others, "weight_decay": weight_decay if decay_all else 0.0, "rate_factor": rate_factor},
    ]
    return [group for group in groups if group["params"]]


def rated_groups(modules: Iterable[nn.Module], learning_rate: float) -> list[ParameterGroup]:
    """Groups of the layers that have a learning rate of their own, whose weights do not decay.

    Args:
        modules: modules among whose layers they are searched for.
        learning_rate: learning rate of the run, > 0.
    """
    return [
        group
        for layers in _rated_layers(modules)
        for group in parameter_groups(layers, 0.0, layers.learning_rate / learning_rate)
    ]


def _rated_layers(modules: Iterable[nn.Module]) -> list[RatedLayers]:
    return [layers for module in modules for layers in module.modules() if isinstance(layers, RatedLayers)]


def sgd(groups: list[ParameterGroup], momentum: float, nesterov: bool = False) -> Optimizer:
    """SGD with momentum, as in SEC's contrastive and face runs, or with Nesterov's; on a GPU in one launch."""
    fused = _are_on_gpu(groups) or None
    return SGD(_at_least_one(groups), lr=0.0, momentum=momentum, nesterov=nesterov, fused=fused)


def adamw(groups: list[ParameterGroup]) -> Optimizer:
    """Adam with a weight decay separate from the gradient (Loshchilov and Hutter 2019); on a GPU in one launch.

    β is (0.9, 0.999), as in both papers of Adam and AdamW.
    """
    on_gpu = _are_on_gpu(groups)
    # Where steps are recorded, torch refuses Adam without `capturable`; the fused one computes the same either way.
    return AdamW(_at_least_one(groups), lr=0.0, fused=on_gpu or None, capturable=on_gpu)


def adam(groups: list[ParameterGroup]) -> Optimizer:
    """Adam, the optimiser of SEC's metric-learning runs; the decay is part of the gradient. On a GPU in one launch."""
    return Adam(_at_least_one(groups), lr=0.0, fused=_are_on_gpu(groups) or None)


def lars(groups: list[ParameterGroup], momentum: float) -> Optimizer:
    """LARS (You et al. 2017), for batches of thousands, by timm, which does not wait for norms on a GPU."""
    from timm.optim.lars import Lars  # timm imports all of its models, which takes seconds

    # If the rate is a tensor, timm would otherwise loop over the parameters and wait for the rate.
    foreach = _are_on_gpu(groups) or None
    # By default, timm adapts the rates of those groups alone that decay; biases and batch norm are never adapted.
    adapted = [
        {**group, "always_adapt": any(p.ndim > 1 for p in _parameters(group))} for group in _at_least_one(groups)
    ]
    return Lars(adapted, lr=0.0, momentum=momentum, foreach=foreach)  # pyright: ignore[reportArgumentType]  # an int


@torch.no_grad()
def set_learning_rate(optimiser: Optimizer, learning_rate: float) -> None:
    """Sets the rate of every group, times the group's `rate_factor`; a rate that is a tensor is overwritten."""
    for group in optimiser.param_groups:
        rate = learning_rate * group.get("rate_factor", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _at_least_one(groups: list[ParameterGroup]) -> list[ParameterGroup]:
    """The groups, or an empty one: optimisers refuse an empty list, as for a network without parameters."""
    return groups or [{"params": []}]


def _are_on_gpu(groups: list[ParameterGroup]) -> bool:
    parameters = [parameter for group in groups for parameter in _parameters(group)]
    return bool(parameters) and all(parameter.is_cuda for parameter in parameters)


def _parameters(group: ParameterGroup) -> list[nn.Parameter]:
    return cast(list[nn.Parameter], group["params"])
