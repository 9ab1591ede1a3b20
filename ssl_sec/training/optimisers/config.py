"""The optimisers as values of a run."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import nn
from torch.optim import Optimizer

from ssl_sec.rules import BelowOne, Count, CountOrZero, Positive, Range, Share, check
from ssl_sec.settings import Settings
from ssl_sec.training.class_sharding import template_losses
from ssl_sec.training.optimisers.groups import ParameterGroup, adam, adamw, lars, parameter_groups, rated_groups, sgd
from ssl_sec.training.schedules import Cosine, Polynomial, Schedule, StepDecay

# A rate small enough for float32, also as a divisor of other rates.
Rate = Annotated[float, Range(ge=0, le=10**6)]
PositiveRate = Annotated[float, Range(ge=1e-12, le=10**6)]


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig(Settings, key="optimiser"):
    """What all optimisers have in common.

    Attributes:
        decay_all: whether biases and norm layers decay like the weights, as in torch's optimisers without groups.
        clip_norm: largest norm of the gradient of all weights together, > 0; None for no limit.
    """

    decay_all: bool = False
    clip_norm: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class _WarmedUpOptimiserConfig(OptimiserConfig):
    """An optimiser whose learning rate rises in a warm-up, and then falls to 0 over the run.

    Attributes:
        learning_rate: the largest learning rate, ≥ 0.
        weight_decay: weight decay, ≥ 0.
        warmup_epochs: epochs over which the learning rate rises from 0 to its largest value, ≥ 0.
    """

    learning_rate: Rate
    weight_decay: Rate
    warmup_epochs: CountOrZero

    def build(self, *modules: nn.Module) -> Optimizer:
        """The optimiser over the modules' parameters."""
        return self._build(parameter_groups(modules, self.weight_decay, decay_all=self.decay_all))

    @abstractmethod
    def schedule(self, steps_per_epoch: int, total_steps: int) -> Schedule:
        """The learning rate by global step."""

    @abstractmethod
    def _build(self, groups: list[ParameterGroup]) -> Optimizer: ...


@dataclass(frozen=True, kw_only=True)
class _CosineOptimiserConfig(_WarmedUpOptimiserConfig):
    """An optimiser whose learning rate falls along a cosine."""

    def schedule(self, steps_per_epoch: int, total_steps: int) -> Schedule:
        """The learning rate by global step."""
        return Cosine(self.learning_rate, total_steps, self.warmup_epochs * steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class CosineSGDConfig(_CosineOptimiserConfig):
    """SGD with momentum, or LARS, which adapts its rates to the weights' norms.

    Attributes:
        momentum: momentum, in [0, 1).
    """

    name: Literal["sgd", "lars"] = "sgd"
    learning_rate: Rate = 0.5
    momentum: BelowOne = 0.9
    weight_decay: Rate = 1e-4
    warmup_epochs: CountOrZero = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        adapts_decaying = self.name == "lars" and self.decay_all
        check(not adapts_decaying, "optimiser.decay_all", True, "false with optimiser=lars, which adapts weights alone")

    def usual_rate(self, global_batch_size: int) -> float:
        """For each 256 images 0.3 with LARS (Chen et al. 2020, section 2.3), and 0.5 with SGD, SEC's for 256."""
        return (0.3 if self.name == "lars" else 0.5) * global_batch_size / 256

    def _build(self, groups: list[ParameterGroup]) -> Optimizer:
        return (lars if self.name == "lars" else sgd)(groups, self.momentum)


@dataclass(frozen=True, kw_only=True)
class CosineAdamWConfig(_CosineOptimiserConfig):
    """AdamW for vision transformers, as MoCo v3 sets it: 1.5e-4 for each 256 images, warm-up of 40 epochs.

    The default learning rate is that of 4,096 images. Chen et al. 2021 (arXiv 2104.02057, sections 4 and 5) have all
    values but the weight decay, which is that of their code, where also biases and norm layers decay.
    """

    name: Literal["adamw"] = "adamw"
    learning_rate: Rate = 2.4e-3
    weight_decay: Rate = 0.1
    warmup_epochs: CountOrZero = 40

    def usual_rate(self, global_batch_size: int) -> float:
        """1.5e-4 for each 256 images (Chen et al. 2021, section 4)."""
        return 1.5e-4 * global_batch_size / 256

    def _build(self, groups: list[ParameterGroup]) -> Optimizer:
        return adamw(groups)


CosineOptimiserConfig = CosineSGDConfig | CosineAdamWConfig


@dataclass(frozen=True, kw_only=True)
class _SteppedOptimiserConfig(OptimiserConfig):
    """An optimiser whose learning rates fall at given steps.

    Attributes:
        learning_rate: the initial learning rate of everything but the backbone, > 0.
        backbone_learning_rate: the initial learning rate of the backbone, ≥ 0.
        template_learning_rate: that of the classes' templates, > 0; None for `learning_rate`.
        weight_decay: weight decay, ≥ 0.
        decay_at_steps: steps at which the rates fall.
        decay_factor: factor by which the rates are multiplied at those steps, in (0, 1].
    """

    learning_rate: PositiveRate
    backbone_learning_rate: Rate
    template_learning_rate: PositiveRate | None = None
    weight_decay: Rate = 0.0
    decay_at_steps: tuple[Count, ...] = ()
    decay_factor: Share = 0.1

    def build(self, backbone: nn.Module, *rest: nn.Module) -> Optimizer:
        """The optimiser over the backbone's parameters and the others'."""
        factor = self.backbone_learning_rate / self.learning_rate
        groups = parameter_groups([backbone], self.weight_decay, factor, decay_all=self.decay_all)
        templates = [loss.weight for module in rest for loss in template_losses(module)]
        groups += parameter_groups(rest, self.weight_decay, left_out=templates, decay_all=self.decay_all)
        if templates:
            factor = (self.template_learning_rate or self.learning_rate) / self.learning_rate
            groups.append({"params": templates, "weight_decay": self.weight_decay, "rate_factor": factor})
        return self._build([*groups, *rated_groups(rest, self.learning_rate)])

    def schedule(self, steps_per_epoch: int, total_steps: int) -> Schedule:
        """The learning rate of everything but the backbone by global step."""
        return StepDecay(self.learning_rate, self.decay_at_steps, self.decay_factor)

    @abstractmethod
    def _build(self, groups: list[ParameterGroup]) -> Optimizer: ...


@dataclass(frozen=True, kw_only=True)
class SteppedAdamConfig(_SteppedOptimiserConfig):
    """Adam; SEC's choice for metric learning."""

    name: Literal["adam"] = "adam"

    def _build(self, groups: list[ParameterGroup]) -> Optimizer:
        return adam(groups)


@dataclass(frozen=True, kw_only=True)
class SteppedAdamWConfig(_SteppedOptimiserConfig):
    """AdamW for vision transformers, its rates falling at given steps (Ermolov et al. 2022).

    The values are those of their code with a ViT-S; it can also clip the gradient at a norm of 3.
    """

    name: Literal["adamw"] = "adamw"
    learning_rate: PositiveRate = 3e-5
    backbone_learning_rate: Rate = 3e-5
    weight_decay: Rate = 0.01

    def _build(self, groups: list[ParameterGroup]) -> Optimizer:
        return adamw(groups)


@dataclass(frozen=True, kw_only=True)
class SteppedSGDConfig(_SteppedOptimiserConfig):
    """SGD with momentum in [0, 1); the choice of the angular-loss and SFT papers.

    Attributes:
        momentum: momentum, in [0, 1).
    """

    name: Literal["sgd"] = "sgd"
    momentum: BelowOne = 0.9

    def _build(self, groups: list[ParameterGroup]) -> Optimizer:
        return sgd(groups, self.momentum)


SteppedOptimiserConfig = SteppedAdamConfig | SteppedAdamWConfig | SteppedSGDConfig


@dataclass(frozen=True, kw_only=True)
class EpochSGDConfig(OptimiserConfig):
    """SGD with momentum, its learning rate falling at given epochs (SEC, appendix B.2).

    Attributes:
        learning_rate: the initial learning rate, > 0.
        momentum: momentum, in [0, 1).
        weight_decay: weight decay, ≥ 0.
        decay_at_epochs: epochs at which the rate falls; parts of an epoch are allowed.
        decay_factor: factor by which the rate is multiplied at those epochs, in (0, 1].
    """

    name: Literal["sgd_epochs"] = "sgd_epochs"
    learning_rate: PositiveRate = 0.1
    momentum: BelowOne = 0.9
    weight_decay: Rate = 5e-4
    decay_at_epochs: tuple[Annotated[float, Range(gt=0, le=10**9)], ...] = (10.0, 14.0)
    decay_factor: Share = 0.1

    def build(self, *modules: nn.Module) -> Optimizer:
        """The optimiser over the modules' parameters."""
        return sgd(parameter_groups(modules, self.weight_decay, decay_all=self.decay_all), self.momentum)

    def schedule(self, steps_per_epoch: int, total_steps: int) -> Schedule:
        """The learning rate by global step."""
        at_steps = tuple(round(epoch * steps_per_epoch) for epoch in self.decay_at_epochs)
        return StepDecay(self.learning_rate, at_steps, self.decay_factor)


@dataclass(frozen=True, kw_only=True)
class _PolynomialOptimiserConfig(_WarmedUpOptimiserConfig):
    """An optimiser whose learning rate falls as a power of the share of steps that are left.

    Attributes:
        power: the power, > 0; 1 for a straight line.
    """

    power: Annotated[float, Range(gt=0, le=100)] = 2.0

    def schedule(self, steps_per_epoch: int, total_steps: int) -> Schedule:
        """The learning rate by global step."""
        return Polynomial(self.learning_rate, total_steps, self.warmup_epochs * steps_per_epoch, self.power)


@dataclass(frozen=True, kw_only=True)
class PolynomialSGDConfig(_PolynomialOptimiserConfig):
    """SGD with momentum, its learning rate falling along a parabola, as InsightFace's.

    The default learning rate is that of arcface_torch for 1,024 images; it has 0.4 for 4,096. The power is that of its
    code of 2022, when it published vision transformers; since 2023 it is 1.

    Attributes:
        momentum: momentum, in [0, 1).
    """

    name: Literal["sgd_polynomial"] = "sgd_polynomial"
    learning_rate: Rate = 0.1
    momentum: BelowOne = 0.9
    weight_decay: Rate = 5e-4
    warmup_epochs: CountOrZero = 0

    def _build(self, groups: list[ParameterGroup]) -> Optimizer:
        return sgd(groups, self.momentum)


@dataclass(frozen=True, kw_only=True)
class PolynomialAdamWConfig(_PolynomialOptimiserConfig):
    """AdamW for vision transformers, its learning rate falling along a parabola.

    arcface_torch has the default learning rate for 4,096 images and for 24,576, with a warm-up over a tenth or an
    eighth of the epochs.
    """

    name: Literal["adamw"] = "adamw"
    learning_rate: Rate = 1e-3
    weight_decay: Rate = 0.1
    warmup_epochs: CountOrZero = 2

    def _build(self, groups: list[ParameterGroup]) -> Optimizer:
        return adamw(groups)


FaceOptimiserConfig = EpochSGDConfig | PolynomialSGDConfig | PolynomialAdamWConfig
