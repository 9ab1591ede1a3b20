"""The configuration of a fine-tuning."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self

import torch
from torch import Tensor

from ssl_sec.augment.config import CropConfig
from ssl_sec.data.config import DataConfig, same_set
from ssl_sec.data.crops import Crop
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.samplers import worker_counts
from ssl_sec.effects import NoEffect
from ssl_sec.evaluation.splits import (
    labelled_share,
    labelled_subset,
    require_held_out,
    stratified_split,
    with_test_images,
)
from ssl_sec.losses.config import CrossEntropyConfig
from ssl_sec.networks.config import ClassifierConfig
from ssl_sec.recipes.config import UNLEARNED, CheckpointConfig, TrainingConfig
from ssl_sec.recipes.tracking import Checkpoint
from ssl_sec.rules import BelowOne, Count, CountOrZero, Range, Share, check
from ssl_sec.settings import Settings
from ssl_sec.training.config import NoConstraintConfig
from ssl_sec.training.optimisers.layer_rates import LayeredOptimiserConfig

# Seed of the draw of the test images.
TEST_SEED = 0
# Settings of a data set that leave its images and their labels as they are.
_READING = frozenset(("image_size_px", "num_channels", "max_images"))


@dataclass(frozen=True, kw_only=True)
class FinetuneMonitorConfig(Settings, key="monitor"):
    """Accuracy while the network trains; test images are not used.

    Attributes:
        every_epochs: epochs between two measurements, ≥ 1; of these epochs, the best one is chosen.
    """

    every_epochs: Count = 1


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TrainingConfig):
    """A fine-tuning.

    Attributes:
        recipe: names the experiment in MLflow, the folder of its runs and the registered model; None takes the name of
            the data set with _finetuned.
        run_name: name of the run and its folder; None for one made of data set, encoder, finetuned or scratch, labels
            and seed.
        run: the run whose encoder is trained further: its MLflow run id, its name, the beginning of either, or its
            folder; or the address of a registered model, models:/<name>@<alias> or models:/<name>/<version>. None
            trains the same network from random weights, or from `encoder.weights`.
        run_checkpoint: the encoder of that run: `last`, `best` (by its held-out score), or the steps of one that was
            kept; `last` for a registered model.
        data: the labelled images; None takes the data set of that run. Files are read at the size and with the channels
            that the run was trained on, unless their size or a crop's is given.
        encoder: the encoder; that of the run if one is given.
        epochs: passes over the labelled training images; 0 measures the network as it starts.
        labels_share: share of the training images of each class that are labelled, at least one of each class, drawn by
            the seed, in (0, 1].
        labels_per_class: number of labelled images of each class instead; None for the share.
        held_out_share: share of the training images of each class that are not trained on, whether labelled or not, by
            which the best epoch is chosen, in [0, 1); 0 trains on all labelled images and keeps the last epoch.
        test_share: share of each class of the training split that is held out as the test images, the same ones for
            every `seed`, and those of a probe with `probe.seed=0`; None takes the test split of the data set.
        start_labels: titles of the data sets from whose labels `encoder.weights` have learned, out of which no test
            images are held. Those of `run` are found in its configuration, except for this run's own set if that run
            has held out these test images, too.
        trained_stages: how many of the encoder's last stages are trained, ≥ 0; the others keep their weights, and their
            batch norms the running statistics. `all` for all of them.
        mixup: α of the mixing of two images and their labels, ≥ 0; 0 mixes none.
        balanced: whether all classes count alike, however many labelled images each has: in the loss, which becomes
            the balanced softmax (Ren et al. 2020), and in the choice of the best epoch, by the mean of the classes'
            held-out accuracies.
        evaluated: the network that is measured on the test images and saved: that of the epoch with the highest
            held-out accuracy (the first of equal ones), or that of the last epoch.
    """

    augment: CropConfig
    head: ClassifierConfig
    loss: CrossEntropyConfig
    optimiser: LayeredOptimiserConfig
    epochs: CountOrZero
    run: str | None = None
    run_checkpoint: Checkpoint = "last"
    labels_share: Share = 1.0
    labels_per_class: Count | None = None
    held_out_share: BelowOne = 0.1
    test_share: Annotated[float, Range(gt=0, lt=1)] | None = None
    start_labels: NoEffect[tuple[str, ...]] = ()
    trained_stages: CountOrZero | Literal["all"] = "all"
    mixup: Annotated[float, Range(ge=0, le=100)] = 0.0
    balanced: bool = False
    evaluated: Literal["best", "last"] = "best"
    constraint: NoConstraintConfig = field(default_factory=NoConstraintConfig)
    monitor: FinetuneMonitorConfig = field(default_factory=FinetuneMonitorConfig)
    checkpoint: NoEffect[CheckpointConfig] = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels_per_class is not None:
            check(self.labels_share == 1, "labels_share", self.labels_share, "left out with labels_per_class")
        if self.test_share is not None:
            title = self.data.title
            check(title not in self.start_labels, "test_share", self.test_share, UNLEARNED.format(title))
        if self.held_out_share == 0:
            check(self.evaluated == "last", "evaluated", self.evaluated, "'last' with held_out_share=0")
        if self.mixup > 0:
            even = self.global_batch_size % 2 == 0
            check(even, "global_batch_size", self.global_batch_size, "even with mixup, which mixes pairs of images")

    def started_from(self, start: TrainingConfig) -> Self:
        """This run with the data sets from whose labels its start has learned.

        Args:
            start: configuration of the run whose encoder it starts from.

        Raises:
            ConfigError: if the start has learned from the labels of images that this run holds out for its test.
        """
        own, share = self.data.title, self.test_share
        is_unseen = share is not None and not start.has_learned(self.data, share, TEST_SEED)
        return replace(self, start_labels=tuple(title for title in start.learned_sets if title != own or not is_unseen))

    @property
    def learned_sets(self) -> tuple[str, ...]:
        """The titles of the data sets from whose labels the encoder learns, or has learned before."""
        return tuple(dict.fromkeys((*self.start_labels, *super().learned_sets)))

    def has_learned(self, data: DataConfig, test_share: float | None, seed: int) -> bool:
        """As for every training, but test images that this run holds out, too, are not learned from.

        They are nested: those of a smaller share are among those of a larger one.
        """
        are_among_ours = seed == TEST_SEED and (test_share or 0.0) <= (self.test_share or 0.0)
        is_whole = self.data.max_images is None and data.max_images is None and data.leave_out == self.data.leave_out
        if are_among_ours and is_whole and same_set(data, self.data, _READING):
            return test_share is not None and data.title in self.start_labels
        return super().has_learned(data, test_share, seed)

    def divided(self, image_set: ImageSet) -> tuple[Tensor, Tensor | None]:
        """The positions of the labelled images, int64 [labelled], and of the held-out ones, int64 [held_out] or None.

        Both are drawn by the seed. Held-out images are the same for any number of labels. The share of labels refers to
        all training images; if fewer images remain beside the held-out ones, as with a share of 1, all of them are
        labelled.

        Args:
            image_set: all training images.

        Raises:
            ConfigError: a class has fewer images than labels.
            DataError: no image can be held out.
        """
        labels, kept, held_out = image_set.labels.cpu(), torch.arange(len(image_set)), None
        if self.held_out_share > 0:
            kept, held_out = stratified_split(labels, self.held_out_share, self.seed)
            require_held_out(held_out, image_set.name)
        left = labels[kept]
        if self.labels_per_class is not None:
            chosen = labelled_subset(left, self.labels_per_class, self.seed, key="labels_per_class")
        else:
            chosen = labelled_share(left, self.labels_share, self.seed, of=labels.bincount())
        return kept[chosen], held_out

    def num_trained_on(self, image_set: ImageSet) -> int:
        """How many images of a training split are labelled."""
        if self.test_share is not None:
            image_set, _ = with_test_images(image_set, self.test_share, TEST_SEED)
        return len(self.divided(image_set)[0])

    @property
    def worker_counts(self) -> list[int]:
        """The numbers of workers that can share a batch equally, with mixup in pairs of images, ascending."""
        return worker_counts(self.global_batch_size // 2 if self.mixup > 0 else self.global_batch_size)

    @property
    def length(self) -> int | float:
        """Epochs of the run."""
        return self.epochs

    @property
    def recipe_name(self) -> str:
        """The recipe's name, or one made of the data set's if it has none."""
        return self.recipe or f"{self.data.title}_finetuned"

    @property
    def labels(self) -> str:
        """How many images are labelled, in words."""
        few = self.labels_per_class
        return f"{100 * self.labels_share:g} %" if few is None else f"{few} per class"

    @property
    def name_parts(self) -> tuple[str, ...]:
        """The parts of the run's name between the encoder and the seed."""
        return "scratch" if self.run is None else "finetuned", self.labels.replace(" %", "pct").replace(" ", "_")

    @property
    def more_tags(self) -> dict[str, str]:
        """Tags of the run, in addition to those of every training run."""
        return {"labels": self.labels, "start": "random weights" if self.run is None else self.run}

    @property
    def reads_test_images(self) -> bool:
        """Whether the test images are not held out of the training images."""
        return self.test_share is None

    @property
    def evaluated_crop(self) -> Crop:
        """The central crop of an image."""
        return self.augment.centre_crop()

    def open_evaluated(self, data: DataConfig) -> ImageSet:
        """The test images of a data set, cropped to their centres."""
        return data.open("test", self.evaluated_crop)


CONFIG = FinetuneConfig
