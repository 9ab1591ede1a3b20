"""The configuration of a run of face recognition; see `ssl_sec.recipes.config`."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ssl_sec.augment.config import FlipConfig
from ssl_sec.data.config import DataConfig
from ssl_sec.data.faces.config import PairsConfig
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.selection.config import (
    ClassSamplerConfig,
    HeadAndTailConfig,
    NoSplitConfig,
    ShuffledSamplerConfig,
    SplitConfig,
)
from ssl_sec.effects import NoEffect, NoEffectYetKept, local_paths
from ssl_sec.errors import ConfigError, require_path
from ssl_sec.losses.config import (
    ClassLossConfig,
    NoTransformConfig,
    PairLossConfig,
    TransformConfig,
    check_class_sample_rate,
    check_transform,
)
from ssl_sec.recipes.config import CheckpointConfig, TrainingConfig
from ssl_sec.recipes.face.test_set_config import FalseAcceptRate, TestSetConfig
from ssl_sec.rules import BelowOne, Count, Range, Share, check
from ssl_sec.settings import Settings
from ssl_sec.training.optimisers.config import FaceOptimiserConfig


@dataclass(frozen=True, kw_only=True)
class VerificationMonitorConfig(Settings, key="monitor"):
    """Verification while the embedding trains.

    Attributes:
        every_epochs: epochs between two measurements, ≥ 1.
        max_pairs: the largest number of pairs of one person, and of pairs of two, ≥ 10.
        test_sets: titles of the test sets of pairs to measure, too.
    """

    every_epochs: NoEffect[Count] = 1
    max_pairs: Annotated[int, Range(ge=10)] = 3000
    test_sets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FaceEvaluationConfig(Settings, key="evaluation"):
    """How the test sets are measured, once, after the last step.

    Attributes:
        enabled: whether they are measured; the trials of a search look at no test image.
        flips: how an image and its mirror image are combined: "none" embeds the image alone, "sum_of_directions" adds
            the normalised embeddings of both, "sum_of_embeddings" the raw ones.
        pca: number of principal components that embeddings are reduced to, 1 to `head.dim`; None for all. For pairs and
            videos it is fitted on the other folds, for BLUFR on the people whom a trial does not test.
        fars: the false accept rates at which true accept rates are reported, each in (0, 1).
        similarities: whether pairs are also verified by inner products and by Euclidean distances, before and after
            the embeddings are normalised (NormFace, Table 1); without `pca`.
    """

    enabled: bool = True
    flips: Literal["none", "sum_of_directions", "sum_of_embeddings"] = "sum_of_directions"
    pca: Count | None = None
    fars: tuple[FalseAcceptRate, ...] = (1e-3, 1e-2, 1e-1)
    similarities: bool = False


@dataclass(frozen=True, kw_only=True)
class FaceConfig(TrainingConfig):
    """A run of face recognition.

    Attributes:
        split: all people, or some with many and some with few training images, whose other images are classified.
        sampler: the choice of the images in a batch.
        epochs: passes over the training images, or part of one, a step at least; 0 evaluates the initial network.
        test_sets: the test sets to measure at the end, each with its own title.
        leave_out_tested: whether people whom a test set names are left out of the training set.
        held_out_share: share of the people who are watched instead of trained on, in [0, 1); 0 trains on all and
            watches those.
        share_classes_from: number of classes from which their templates are sharded over the workers.
        class_sample_rate: share of the classes that a step compares with, beside the batch's (Partial FC), in (0, 1].
    """

    augment: FlipConfig
    loss: ClassLossConfig | PairLossConfig
    sampler: ShuffledSamplerConfig | ClassSamplerConfig
    optimiser: FaceOptimiserConfig
    epochs: Annotated[float, Range(ge=0, le=10**9)]
    test_sets: tuple[TestSetConfig, ...] = ()
    leave_out_tested: bool = True
    held_out_share: BelowOne = 0.0
    class_sample_rate: Share = 1.0
    share_classes_from: NoEffectYetKept[Annotated[int, Range(ge=2)]] = 50_000
    split: SplitConfig = field(default_factory=NoSplitConfig)
    transform: TransformConfig = field(default_factory=NoTransformConfig)
    monitor: NoEffect[VerificationMonitorConfig] = field(default_factory=VerificationMonitorConfig)
    checkpoint: NoEffect[CheckpointConfig] = field(default_factory=CheckpointConfig)
    evaluation: FaceEvaluationConfig = field(default_factory=FaceEvaluationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_class_sample_rate(self.class_sample_rate, self.loss)
        check_transform(self.transform, self.loss)
        titles = [test_set.shown_title for test_set in self.test_sets]
        for title in titles:
            # A file system that ignores case would keep the figures of both in one file.
            num_alike = sum(other.casefold() == title.casefold() for other in titles)
            check(num_alike == 1, "test_sets.title", title, "another for each test set, without regard to case")
            # MLflow refuses other characters in a metric's name.
            plain = re.fullmatch(r"[\w.\- ]+", title) is not None
            check(plain, "test_sets.title", title, "letters, digits, spaces, and any of _ - .")
        pairs = [test_set.shown_title for test_set in self.test_sets if isinstance(test_set, PairsConfig)]
        for title in self.monitor.test_sets:
            allowed = f"titles of test_sets that are pairs: {', '.join(pairs) or 'there are none'}"
            check(title in pairs, "monitor.test_sets", title, allowed)
        pca, dim = self.evaluation.pca, self.head.dim
        if pca is not None:
            check(pca <= dim, "evaluation.pca", pca, f"1 to {dim}, the dimension of the embeddings (head.dim)")
        if isinstance(self.split, HeadAndTailConfig):
            check(self.held_out_share == 0, "held_out_share", self.held_out_share, "0 with split=head_and_tail")
            allowed = "one with a template for each class with split=head_and_tail, such as 'cosface'"
            has_templates = not isinstance(self.loss, PairLossConfig) and self.loss.has_templates
            check(has_templates, "loss", self.loss.name, allowed)
        if isinstance(self.loss, PairLossConfig) and isinstance(self.sampler, ShuffledSamplerConfig):
            raise ConfigError(
                f"sampler: found 'shuffled', must be 'classes' with loss={self.loss.name}, "
                "which needs two images of a person"
            )

    @property
    def length(self) -> int | float:
        """Epochs of the run."""
        return self.epochs

    def require_files(self) -> None:
        """As for every training, with the files of the test sets."""
        for test_set in self.test_sets:
            for key in sorted(local_paths(type(test_set))):
                if isinstance(path := getattr(test_set, key), str):
                    require_path(f"test_sets.{key} of {test_set.shown_title}", path)
            test_set.require_list()
        super().require_files()

    def open_evaluated(self, data: DataConfig) -> ImageSet:
        """The training images of a data set; the test sets are configured separately."""
        return data.open("train")


CONFIG = FaceConfig
