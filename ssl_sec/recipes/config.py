"""The part of a run's configuration that all recipes share."""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import torch

from ssl_sec.data.config import DataConfig
from ssl_sec.data.crops import Crop
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.samplers import check_batch_size, worker_counts
from ssl_sec.effects import NoEffect
from ssl_sec.errors import MissingDataError
from ssl_sec.evaluation.config import ProbeConfig
from ssl_sec.losses import PAIR_LOSSES, Loss
from ssl_sec.losses.angular import DisjointLoss
from ssl_sec.losses.config import ClassLossConfig, PairLossConfig, TeacherLossConfig
from ssl_sec.networks import Encoder
from ssl_sec.networks.config import EncoderConfig, HeadConfig, PixelsConfig, TimmConfig
from ssl_sec.networks.weights import require_backbone_weights, require_head_weights, require_weights
from ssl_sec.recipes.tracking import OutputDir, TrackingConfig
from ssl_sec.rules import Count, Name, Range, Seed, check
from ssl_sec.settings import Settings
from ssl_sec.training.config import ConstraintConfig, RayConfig, RuntimeConfig
from ssl_sec.training.optimisers.config import CosineOptimiserConfig, FaceOptimiserConfig, SteppedOptimiserConfig
from ssl_sec.training.optimisers.layer_rates import LayeredOptimiserConfig

# What a share of test images must be if the encoder has learned from their labels; of the set with that title.
UNLEARNED = "null: the encoder has learned from the labels of images of {!r}"

# A size that every encoder takes, except for some timm models.
_ANY_SIZE_PX = 224

# The name of the constraint of a network that is not trained.
UNTRAINED = "random"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Settings, key="checkpoint"):
    """When checkpoints are saved, and how many are kept.

    Attributes:
        every_epochs: epochs between two checkpoints; one is also saved at the end.
        keep_last: how many of the newest are kept; older ones are deleted.
    """

    every_epochs: Count = 5
    keep_last: Count = 2


@dataclass(frozen=True, kw_only=True)
class StepCheckpointConfig(Settings, key="checkpoint"):
    """When checkpoints are saved, and how many are kept.

    Attributes:
        every_steps: steps between two checkpoints; one is also saved at the end.
        keep_last: how many of the newest are kept; older ones are deleted.
    """

    every_steps: Count = 500
    keep_last: Count = 2


class RunConfig(Settings, is_base=True):
    """The options of every run of a recipe; its dataclass declares these fields.

    Attributes:
        runtime: the workers and devices of the run.
        run_name: name of the run and its folder; None for a generated one.
        output_dir: folder in which run folders are created, or a URL of object storage, such as s3://bucket/runs.
        tracking: where metrics are logged.
    """

    runtime: RuntimeConfig
    run_name: str | None
    output_dir: str
    tracking: TrackingConfig

    @property
    @abstractmethod
    def length(self) -> int | float:
        """Epochs or steps of the run."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of equally long parts of the run that are counted each by itself; none if the run is one."""
        return ()

    @property
    def kept_checkpoints(self) -> int:
        """How many of the newest checkpoints are kept."""
        return 1


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(RunConfig, is_base=True):
    """The options of every training run.

    Attributes:
        recipe: names the experiment in MLflow, the folder of its runs and the registered model; None takes the name of
            the data set.
        run_name: name of the run and its folder; None for data set, encoder, loss unless NT-Xent, constraint, seed.
        output_dir: folder in which run folders are created, or a URL of object storage, such as s3://bucket/runs.
        resume: true resumes the run of this name where it stopped; auto starts it if there is none. On a command
            line, resume=<folder, name or id> takes the run's own configuration.
        seed: seed of weights, order and augmentation, ≥ 0.
        global_batch_size: images of all workers together in a step.
        log_every_steps: steps between two reports of the loss, ≥ 1; None for 50 on GPUs, where a report waits for the
            device, and 10 on CPUs.
    """

    recipe: Name | None = None
    data: DataConfig
    encoder: EncoderConfig
    head: HeadConfig
    loss: PairLossConfig | ClassLossConfig | TeacherLossConfig
    constraint: ConstraintConfig
    optimiser: CosineOptimiserConfig | FaceOptimiserConfig | SteppedOptimiserConfig | LayeredOptimiserConfig
    checkpoint: NoEffect[CheckpointConfig | StepCheckpointConfig]
    runtime: NoEffect[RuntimeConfig]
    global_batch_size: Annotated[int, Range(ge=2, le=2**20)]
    seed: Seed = 0
    run_name: NoEffect[Name | None] = None
    output_dir: OutputDir = "runs"
    resume: NoEffect[bool | Literal["auto"]] = False
    log_every_steps: NoEffect[Count | None] = None
    tracking: NoEffect[TrackingConfig] = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume:
            check(self.run_name is not None, "resume", self.resume, "given together with the run_name to resume")
        if isinstance(self.runtime, RayConfig):
            self.runtime.check_shares(self.global_batch_size, self.worker_counts)
        if issubclass(PAIR_LOSSES.get(self.loss.name, Loss), DisjointLoss):
            for group, needed in (("sampler", "triplets"), ("transform", "none")):  # generated rows are no triplets
                found = getattr(getattr(self, group, None), "name", None)
                check(found is not None, "loss", self.loss.name, "another; only metric learning samples triplets")
                check(found == needed, group, found, f"{needed!r} with loss={self.loss.name}")

    @property
    def worker_counts(self) -> list[int]:
        """The numbers of workers that can share a batch equally, ascending."""
        return worker_counts(self.global_batch_size)

    @property
    def kept_checkpoints(self) -> int:
        """How many of the newest checkpoints are kept."""
        return self.checkpoint.keep_last

    @property
    def recipe_name(self) -> str:
        """The recipe's name, or the data set's if it has none."""
        return self.recipe or self.data.title

    @property
    def name_parts(self) -> tuple[str, ...]:
        """The parts of a generated run name between the encoder and the seed."""
        return (*([] if self.loss.name == "ntxent" else [self.loss.name]), self.constraint_name)

    @property
    def constraint_name(self) -> str:
        """The constraint's name, or that of a random network if nothing is trained."""
        return self.constraint.name if self.length > 0 else UNTRAINED

    @property
    def more_tags(self) -> dict[str, str]:
        """Tags of the run, in addition to those of every training run."""
        return {}

    @property
    def learned_sets(self) -> tuple[str, ...]:
        """The titles of the data sets from whose labels the encoder learns; its own, unless a recipe says otherwise."""
        return (self.data.title,)

    def has_learned(self, data: DataConfig, test_share: float | None, seed: int) -> bool:
        """Whether the encoder learns from the labels of test images that are held out of a training split.

        Data sets are recognised by their titles.

        Args:
            data: the data set that they are held out of.
            test_share: share of each class that is held out; None for test images of their own.
            seed: seed of the draw.
        """
        return test_share is not None and data.title in self.learned_sets

    @property
    def linear_probe(self) -> ProbeConfig | None:
        """How the encoder is probed; None if the encoders of this recipe are not probed."""
        return None

    @property
    def reads_test_images(self) -> bool:
        """Whether the run, or the probe after it, reads the test images of its data set."""
        probe = self.linear_probe
        return probe is not None and probe.enabled and probe.test_share is None

    def require_files(self) -> None:
        """Checks that the files which the run reads exist on this machine, and can be read as far as they are small.

        Raises:
            ConfigError: a batch has more images than a set whose number is known at once, or a network without weights
                is given some.
            DataError: one does not exist, or a list of images that are left out cannot be read.
            StorageError: a file of weights cannot be read as such, or has those of another encoder or head.
        """
        self.data.require_places(with_test=self.reads_test_images)
        if self.encoder.weights is not None:
            has_some = not isinstance(self.encoder, PixelsConfig)
            check(has_some, "encoder.weights", self.encoder.weights, "null: the pixels have no weights")
            self._require_encoder_weights(Path(self.encoder.weights).expanduser())
        if self.head.weights is not None:
            check(self.head.name != "identity", "head.weights", self.head.weights, "null: head=identity has none")
            self._require_head_weights(Path(self.head.weights).expanduser())
        if self.data.max_images is not None:
            check_batch_size(self.global_batch_size, self.data.max_images)
        if self.data.opens_at_once(self.global_batch_size):
            check_batch_size(self.global_batch_size, self.num_trained_on(self.data.listed().open("train")))

    def num_trained_on(self, image_set: ImageSet) -> int:
        """How many images of a training split the run trains on, at most."""
        return len(image_set)

    def _require_encoder_weights(self, path: Path) -> None:
        if isinstance(self.encoder, TimmConfig):  # whose layers may depend on the size of the images
            require_weights("encoder.weights", path)
            return
        require_backbone_weights(self._encoder_without_values(_ANY_SIZE_PX).backbone, path)

    def _require_head_weights(self, path: Path) -> None:
        num_features = self._num_features()
        if num_features is None or self.head.dim is None:  # the number of classes, before the data is opened
            require_weights("head.weights", path)
            return
        with torch.device("meta"):
            head = replace(self.head, weights=None).build(num_features, self.seed)
        require_head_weights(head, path)

    def _num_features(self) -> int | None:
        """The width of the encoder's features; None if it depends on a size of images that is not known yet."""
        if isinstance(self.encoder, TimmConfig):
            return None
        size_px = self.data.read_size_px if self.evaluated_crop is None else None
        widths = {
            self._encoder_without_values(each).num_features
            for each in ((_ANY_SIZE_PX, 2 * _ANY_SIZE_PX) if size_px is None else (size_px,))
        }
        return widths.pop() if len(widths) == 1 else None

    def _encoder_without_values(self, image_size_px: int) -> Encoder:
        with torch.device("meta"):
            return replace(self.encoder, weights=None, freeze_batch_norm=False).build(self.data.channels, image_size_px)

    @property
    def evaluated_crop(self) -> Crop | None:
        """The crop of evaluated images; None if all have one size."""
        return None

    def crop_of(self, image_shape: tuple[int, ...] | None) -> Crop | None:
        """The crop of evaluated images of other sets; None if the training images had one size already.

        Args:
            image_shape: channels, height and width of the images that the run was trained on; None if unknown.
        """
        crop = self.evaluated_crop
        if crop is None or image_shape is None or image_shape[1:] == (crop.size_px, crop.size_px):
            return crop
        return None

    def size_px_of(self, image_shape: tuple[int, ...] | None) -> int | None:
        """The side at which files of other sets are read, that of the training images; None if a crop decides it.

        Args:
            image_shape: as for `crop_of`; if it is unknown and the run's data set has no size, so is the side.
        """
        size_px = self.data.read_size_px
        if size_px is None and image_shape is not None and self.crop_of(image_shape) is None:
            return min(image_shape[1:])
        return size_px

    def open_evaluated(self, data: DataConfig) -> ImageSet:
        """The images of a data set, prepared for evaluation."""
        return data.open("test")

    def open_examples(self, data: DataConfig) -> ImageSet:
        """Images as the network gets them in evaluation: of the training split if there is no test split."""
        try:
            return self.open_evaluated(data)
        except MissingDataError:
            return data.open("train", self.evaluated_crop)

    def tied_to_the_length(self) -> list[str]:
        """The keys whose schedule depends on the length of the run."""
        rate = "optimiser.learning_rate (it falls over the whole run)"
        schedules = {rate: self.optimiser.schedule, "constraint.ramp": self.constraint.weight}
        return [key for key, schedule in schedules.items() if schedule(1, 2) != schedule(1, 3)]

    def steps_between_reports(self, device: torch.device) -> int:
        """Steps between two reports of the loss on a device."""
        return self.log_every_steps or (50 if device.type == "cuda" else 10)
