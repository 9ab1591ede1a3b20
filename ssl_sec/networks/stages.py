"""The stages of a backbone, from the pixels to the features: which are trained, and at which rates.

A ResNet has five: its stem and four groups of blocks. A vision transformer has one for its patches and positions and
one for each block. Norms after a stage belong to it.
"""

import contextlib
import re
from collections.abc import Collection, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from ssl_sec.errors import ConfigError
from ssl_sec.networks.frozen import FrozenBatchNorm, replace_batch_norm

# Parts of timm models without a grouping of their own that hold a stage or a block each.
_LISTS = ("stages", "dense_stages", "blocks", "layers", "transformers")
# Layers of BN-Inception and of the Light CNN that are parts of one stage: the common beginning of their names.
_PARTS = re.compile(r"inception_\d\w|conv\d+")


def stages_of(backbone: nn.Module) -> list[list[str]]:
    """The names of a backbone's parameters, stage by stage, from the pixels to the features.

    Args:
        backbone: one of ours, or a timm model. timm's grouping is used, but norms belong to the stage before.
    """
    parameters = dict(backbone.named_parameters())
    stages: list[list[str]] = []
    last = ""
    for part, names in _parts(backbone):
        is_norm = all(parameters[name].ndim <= 1 for name in names)  # one of its own after the last block
        if stages and (is_norm or part == last):
            stages[-1] += names
        else:
            stages.append(names)
            last = part
    # Class tokens and position embeddings of some models belong to none of their parts.
    found = {name for names in stages for name in names}
    left = [name for name in parameters if name not in found]
    return [[*left, *stages[0]], *stages[1:]] if left and stages else stages


def _parts(backbone: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """The parts of a backbone from the pixels to the features: the stage that each belongs to, and its parameters."""
    if hasattr(backbone, "group_matcher"):
        from timm.models import group_parameters  # timm imports all of its models, which takes seconds

        with contextlib.suppress(AssertionError):  # a model without such a grouping
            grouped = group_parameters(backbone, backbone.group_matcher(coarse=True))  # pyright: ignore[reportCallIssue]
            yield from ((str(number), list(grouped[number])) for number in sorted(grouped))
            return
    is_of_timm = type(backbone).__module__.startswith("timm.")
    for child, module in backbone.named_children():
        listed = is_of_timm and child in _LISTS and isinstance(module, nn.Sequential | nn.ModuleList)
        found = None if is_of_timm else _PARTS.match(child)
        within = {f"{child}.{name}": each for name, each in module.named_children()} if listed else {child: module}
        for name, each in within.items():
            if names := [f"{name}.{parameter}" for parameter, _ in each.named_parameters()]:
                yield (name if found is None else found[0]), names


def freeze_all_but(backbone: nn.Module, num_stages: int, key: str) -> None:
    """Freezes all but a backbone's last stages: no gradients, and batch norms use their running statistics.

    Args:
        backbone: changed in place; parameters and buffers keep their names.
        num_stages: number of last stages that are trained, ≥ 0.
        key: key of `num_stages`, for messages.

    Raises:
        ConfigError: it has fewer stages.
    """
    stages = stages_of(backbone)
    if num_stages > len(stages):
        raise ConfigError(f"{key}: found {num_stages}, must be 0 to {len(stages)}, the stages of the encoder, or all")
    _freeze(backbone, {name for names in stages[: len(stages) - num_stages] for name in names})


def _freeze(backbone: nn.Module, names: Collection[str]) -> None:
    for name, parameter in backbone.named_parameters():
        if name in names:
            parameter.requires_grad_(False)
    for name, layer in backbone.named_modules():
        if isinstance(layer, _BatchNorm) and f"{name}.weight" in names:
            replace_batch_norm(layer, FrozenBatchNorm)
