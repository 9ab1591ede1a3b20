"""What a run of face recognition is; see `ssl_sec.config`."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from ssl_sec.augment import FlipAugmentation
from ssl_sec.config import CheckpointConfig, ClassSamplerConfig, PositiveRate, Rate, TrainingConfig
from ssl_sec.data.samplers import Sampler, ShuffledBatches
from ssl_sec.errors import ConfigError
from ssl_sec.face_benchmark_config import BenchmarkConfig, FalseAcceptRate
from ssl_sec.loss_config import ClassLossConfig, NoTransformConfig, PairLossConfig, TransformConfig
from ssl_sec.optimisers import parameter_groups, sgd
from ssl_sec.schedules import Schedule, StepDecay
from ssl_sec.settings import BelowOne, Count, Probability, Range, Settings, Share, check
from ssl_sec.training import Views


@dataclass(frozen=True, kw_only=True)
class FlipConfig(Settings, key="augment"):
    """A horizontal flip with some probability in [0, 1], the only augmentation of the papers.

    Attributes:
        flip_probability: probability of the flip, in [0, 1].
    """

    flip_probability: Probability = 0.5

    def build(self, seed: int) -> Views:
        """The augmentation."""
        return FlipAugmentation(seed=seed, flip_probability=self.flip_probability)


@dataclass(frozen=True, kw_only=True)
class ShuffledSamplerConfig:
    """Every image once an epoch, in an order that the seed decides."""

    name: Literal["shuffled"] = "shuffled"

    def build(self, labels: Tensor, global_batch_size: int, seed: int) -> Sampler:
        """The sampler over the images of these classes."""
        return ShuffledBatches(num_images=len(labels), global_batch_size=global_batch_size, seed=seed)


@dataclass(frozen=True, kw_only=True)
class EpochSGDConfig(Settings, key="optimiser"):
    """SGD with momentum, its learning rate falling at given epochs (SEC, appendix B.2).

    Attributes:
        learning_rate: the learning rate at the start, > 0.
        momentum: momentum, in [0, 1).
        weight_decay: weight decay, ≥ 0; biases and batch norm do not decay.
        decay_at_epochs: epochs at which the rate falls; parts of an epoch are allowed.
        decay_factor: what the rate is multiplied by there, in (0, 1].
    """

    name: Literal["sgd_epochs"] = "sgd_epochs"
    learning_rate: PositiveRate = 0.1
    momentum: BelowOne = 0.9
    weight_decay: Rate = 5e-4
    decay_at_epochs: tuple[Annotated[float, Range(gt=0, le=10**9)], ...] = (10.0, 14.0)
    decay_factor: Share = 0.1

    def build(self, *modules: nn.Module) -> Optimizer:
        """The optimiser over the modules' parameters."""
        return sgd(parameter_groups(modules, self.weight_decay), self.momentum)

    def schedule(self, steps_per_epoch: int) -> Schedule:
        """The learning rate by global step."""
        at_steps = tuple(round(epoch * steps_per_epoch) for epoch in self.decay_at_epochs)
        return StepDecay(self.learning_rate, at_steps, self.decay_factor)


@dataclass(frozen=True, kw_only=True)
class VerificationMonitorConfig(Settings, key="monitor"):
    """Verification while the embedding trains; the benchmarks are never looked at.

    Attributes:
        every_epochs: epochs between two measurements, ≥ 1.
        max_pairs: so many pairs of one person are watched, and as many of two, ≥ 10.
    """

    every_epochs: Count = 1
    max_pairs: Annotated[int, Range(ge=10)] = 3000


@dataclass(frozen=True, kw_only=True)
class FaceEvaluationConfig(Settings, key="evaluation"):
    """How the benchmarks are measured, once, after the last step.

    Attributes:
        flips: an image's embedding is that of itself alone ("none"), or with that of its mirror image the sum of their
            directions ("sum_of_directions": each is normalised before) or of the raw two ("sum_of_embeddings").
        pca: to how many components embeddings of pairs are reduced, fitted on the other folds, 1 to `head.dim`; None
            for all.
        fars: the false accept rates at which true accept rates are reported, each in (0, 1).
    """

    flips: Literal["none", "sum_of_directions", "sum_of_embeddings"] = "sum_of_directions"
    pca: Count | None = None
    fars: tuple[FalseAcceptRate, ...] = (1e-3, 1e-2, 1e-1)


@dataclass(frozen=True, kw_only=True)
class FaceConfig(TrainingConfig):
    """A run of face recognition.

    Attributes:
        sampler: which images make up a batch.
        epochs: passes over the training images, parts of one allowed; 0 evaluates the network as it starts.
        benchmarks: what is measured at the end, each with a title of its own.
        leave_out_tested: true: people whom a benchmark names are left out of the training set.
        held_out_share: share of the people who are watched instead of trained on, in [0, 1); 0 trains on all and
            watches those.
        share_classes_from: so many classes or more are shared out among the workers, each with the templates of some.
    """

    augment: FlipConfig
    loss: ClassLossConfig | PairLossConfig
    sampler: ShuffledSamplerConfig | ClassSamplerConfig
    optimiser: EpochSGDConfig
    epochs: Annotated[float, Range(ge=0, le=10**9)]
    benchmarks: tuple[BenchmarkConfig, ...] = ()
    leave_out_tested: bool = True
    held_out_share: BelowOne = 0.0
    share_classes_from: Annotated[int, Range(ge=2)] = 50_000
    transform: TransformConfig = field(default_factory=NoTransformConfig)
    monitor: VerificationMonitorConfig = field(default_factory=VerificationMonitorConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: FaceEvaluationConfig = field(default_factory=FaceEvaluationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        titles = [benchmark.figures_title for benchmark in self.benchmarks]
        for title in titles:
            check(titles.count(title) == 1, "benchmarks.title", title, "another for each benchmark")
            # What else stands in a figure's name, MLflow refuses.
            plain = re.fullmatch(r"[\w.\- ]+", title) is not None
            check(plain, "benchmarks.title", title, "letters, digits, spaces, and any of _ - .")
        pca, dim = self.evaluation.pca, self.head.dim
        if pca is not None:
            check(pca <= dim, "evaluation.pca", pca, f"1 to {dim}, the dimension of the embeddings (head.dim)")
        if isinstance(self.loss, PairLossConfig) and isinstance(self.sampler, ShuffledSamplerConfig):
            raise ConfigError(
                f"sampler: found 'shuffled', must be 'classes' with loss={self.loss.name}, "
                "which needs two images of a person"
            )
