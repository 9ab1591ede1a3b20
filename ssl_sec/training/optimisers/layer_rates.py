"""Optimisers whose rates fall from the head towards the pixels, for networks that were trained before.

The head has the run's rate α, and the stage at distance d from it, 1 for the last one, has α · decay^d (layer-wise
decay; Clark et al. 2020, section 3, and for vision transformers Bao et al. 2022). Stages are those of
`ssl_sec.networks.stages`.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from ssl_sec.networks import Encoder
from ssl_sec.networks.stages import stages_of
from ssl_sec.rules import BelowOne, CountOrZero, Share
from ssl_sec.training.optimisers.config import OptimiserConfig, PositiveRate, Rate
from ssl_sec.training.optimisers.groups import ParameterGroup, adamw, parameter_groups, sgd
from ssl_sec.training.schedules import Cosine, Schedule


def layered_groups(
    backbone: nn.Module, weight_decay: float, layer_decay: float, *, decay_all: bool = False
) -> list[ParameterGroup]:
    """The groups of a backbone's parameters that are not frozen, two for each stage; see `parameter_groups`.

    Args:
        backbone: backbone whose stages have rates of their own.
        weight_decay: weight decay, ≥ 0.
        layer_decay: learning rate of a stage divided by that of the next one, in (0, 1].
        decay_all: whether biases and norms decay like weights.
    """
    parameters = dict(backbone.named_parameters())
    stages = [nn.ParameterList(parameters[name] for name in names) for names in stages_of(backbone)]
    return [
        group
        for distance, stage in enumerate(reversed(stages), start=1)
        for group in parameter_groups([stage], weight_decay, layer_decay**distance, decay_all=decay_all)
    ]


@dataclass(frozen=True, kw_only=True)
class _LayeredOptimiserConfig(OptimiserConfig):
    """An optimiser with a rate for each stage, all cosines over the run.

    Attributes:
        learning_rate: the largest learning rate of the head, > 0.
        layer_decay: learning rate of a stage of the encoder divided by that of the next stage, in (0, 1]; the head
            comes after the last stage.
        weight_decay: weight decay, ≥ 0.
        warmup_epochs: epochs over which the learning rates rise from 0 to their largest values, ≥ 0.
    """

    learning_rate: PositiveRate
    layer_decay: Share = 1.0
    weight_decay: Rate = 0.0
    warmup_epochs: CountOrZero = 0

    def build(self, encoder: nn.Module, *rest: nn.Module) -> Optimizer:
        """The optimiser over the encoder's parameters and the others'."""
        assert isinstance(encoder, Encoder)
        groups = layered_groups(encoder.backbone, self.weight_decay, self.layer_decay, decay_all=self.decay_all)
        return self._build([*groups, *parameter_groups(rest, self.weight_decay, decay_all=self.decay_all)])

    def schedule(self, steps_per_epoch: int, total_steps: int) -> Schedule:
        """The learning rate of the head by global step."""
        return Cosine(self.learning_rate, total_steps, self.warmup_epochs * steps_per_epoch)

    @abstractmethod
    def _build(self, groups: list[ParameterGroup]) -> Optimizer: ...


@dataclass(frozen=True, kw_only=True)
class NesterovConfig(_LayeredOptimiserConfig):
    """SGD with Nesterov's momentum, as SimCLR fine-tunes.

    Attributes:
        momentum: momentum, in [0, 1).
    """

    name: Literal["nesterov"] = "nesterov"
    learning_rate: PositiveRate = 0.05
    momentum: BelowOne = 0.9

    def _build(self, groups: list[ParameterGroup]) -> Optimizer:
        return sgd(groups, self.momentum, nesterov=self.momentum > 0)


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(_LayeredOptimiserConfig):
    """AdamW, as vision transformers are fine-tuned."""

    name: Literal["adamw"] = "adamw"
    learning_rate: PositiveRate = 1e-3
    weight_decay: Rate = 0.05

    def _build(self, groups: list[ParameterGroup]) -> Optimizer:
        return adamw(groups)


LayeredOptimiserConfig = NesterovConfig | AdamWConfig
