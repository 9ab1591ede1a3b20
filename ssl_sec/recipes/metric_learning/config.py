"""The configuration of a run of deep metric learning."""

from dataclasses import dataclass, field
from typing import Annotated

from ssl_sec.augment.config import CropConfig
from ssl_sec.data.config import DataConfig
from ssl_sec.data.crops import Crop
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.selection.config import SamplerConfig, ShuffledSamplerConfig
from ssl_sec.effects import NoEffect, NoEffectYetKept
from ssl_sec.errors import ConfigError
from ssl_sec.losses.config import (
    ClassLossConfig,
    GeneratorConfig,
    NoTransformConfig,
    PairLossConfig,
    TransformConfig,
    check_class_sample_rate,
    check_transform,
)
from ssl_sec.recipes.config import StepCheckpointConfig, TrainingConfig
from ssl_sec.rules import BelowOne, Count, CountOrZero, NotEmpty, Range, Share, check
from ssl_sec.settings import Settings
from ssl_sec.training.optimisers.config import SteppedOptimiserConfig


@dataclass(frozen=True, kw_only=True)
class RetrievalMonitorConfig(Settings, key="monitor"):
    """Recall@1 and norms while the embedding trains.

    Attributes:
        every_steps: steps between two measurements, ≥ 1.
        max_images: the largest number of watched images to evaluate, ≥ 2.
        test_classes: whether Recall@1 of all test images is measured too, as `test/recall_at_1`, for a curve such as
            SEC's Fig. 4; nothing is chosen by it.
    """

    every_steps: Count = 1000  # not marked: it is part of the protocols that registered scores have stored
    max_images: Annotated[int, Range(ge=2)] = 10_000
    test_classes: bool = False


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig(Settings, key="evaluation"):
    """The measures on the test classes, once, after the last step.

    Attributes:
        enabled: whether they are measured; the trials of a search look at no test image.
        ks: the K of Recall@K, each ≥ 1.
        clustering: whether k-means, NMI and F1 are computed; In-Shop reports none.
        kmeans_starts: initial centres that k-means starts from, ≥ 1; the best start counts.
        kmeans_iterations: the largest number of its iterations from each start, ≥ 1.
        neighbours: images that the figure of retrieved images shows for each query, in [1, 100].
        seed: seed of k-means.
    """

    enabled: bool = True
    ks: Annotated[tuple[Count, ...], NotEmpty()] = (1, 2, 4, 8)
    clustering: bool = True
    kmeans_starts: Count = 1
    kmeans_iterations: Count = 20
    neighbours: NoEffect[Annotated[int, Range(ge=1, le=100)]] = 4
    seed: Annotated[int, Range(ge=0, lt=2**32)] = 0


@dataclass(frozen=True, kw_only=True)
class MetricLearningConfig(TrainingConfig):
    """A run of deep metric learning.

    Attributes:
        transform: the feature transform that generates rows, or none.
        sampler: the choice of the images in a batch.
        steps: steps of training; 0 evaluates the initial encoder.
        held_out_share: share of the training classes that are watched instead of trained on, in [0, 1); 0 trains on all
            of them, as the papers do, and watches those.
        share_classes_from: number of classes from which their templates are sharded over the workers.
        class_sample_rate: share of the classes that a step compares with, beside the batch's (Partial FC), in (0, 1].
        evaluation: the measures on the test classes.
    """

    augment: CropConfig
    loss: PairLossConfig | ClassLossConfig
    sampler: SamplerConfig | ShuffledSamplerConfig
    optimiser: SteppedOptimiserConfig
    steps: CountOrZero
    held_out_share: BelowOne = 0.1
    class_sample_rate: Share = 1.0
    share_classes_from: NoEffectYetKept[Annotated[int, Range(ge=2)]] = 50_000
    transform: TransformConfig | GeneratorConfig = field(default_factory=NoTransformConfig)
    monitor: NoEffect[RetrievalMonitorConfig] = field(default_factory=RetrievalMonitorConfig)
    checkpoint: NoEffect[StepCheckpointConfig] = field(default_factory=StepCheckpointConfig)
    evaluation: RetrievalConfig = field(default_factory=RetrievalConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_class_sample_rate(self.class_sample_rate, self.loss)
        check_transform(self.transform, self.loss)
        if isinstance(self.loss, PairLossConfig):
            of_pairs = not isinstance(self.sampler, ShuffledSamplerConfig)
            needed = f"'classes' or 'triplets' with loss={self.loss.name}, which needs two images of a class"
            check(of_pairs, "sampler", self.sampler.name, needed)
        elif isinstance(self.transform, GeneratorConfig):
            needed = f"'none', 'sft', 'sftd' or 'ftl' with loss={self.loss.name}, which has a template for each class"
            raise ConfigError(f"transform: found {self.transform.name!r}, must be {needed}")
        if isinstance(self.loss, PairLossConfig) or not self.loss.has_templates:
            rate = self.optimiser.template_learning_rate
            check(rate is None, "optimiser.template_learning_rate", rate, f"null with loss={self.loss.name}")

    @property
    def length(self) -> int | float:
        """Steps of the run."""
        return self.steps

    @property
    def reads_test_images(self) -> bool:
        """Whether the test classes are not those that the training leaves out."""
        return self.data.num_train_classes is None

    @property
    def evaluated_crop(self) -> Crop:
        """The central crop of an image."""
        return self.augment.centre_crop()

    def open_evaluated(self, data: DataConfig) -> ImageSet:
        """The images of the test classes, cropped to their centres."""
        return data.open_by_class("test", self.evaluated_crop)


CONFIG = MetricLearningConfig
