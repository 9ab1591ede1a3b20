"""The configuration of a pretraining run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

from torch import Tensor

from ssl_sec.augment.config import AugmentConfig
from ssl_sec.data.config import DataConfig
from ssl_sec.data.crops import row_draws
from ssl_sec.effects import NoEffect
from ssl_sec.errors import DataError
from ssl_sec.evaluation.config import ProbeConfig
from ssl_sec.losses import ORDERED_LOSSES
from ssl_sec.losses.config import PairLossConfig, TeacherLossConfig
from ssl_sec.losses.geometry import GradScaleBy
from ssl_sec.recipes.config import CheckpointConfig, TrainingConfig
from ssl_sec.rules import Count, CountOrZero, Range, check
from ssl_sec.settings import Settings
from ssl_sec.training.optimisers.config import CosineOptimiserConfig

# The metrics of the monitor; the first ones need labelled images, those of `monitor.data` if it is given.
OF_LABELS = ("val/knn_top1", "val/probe_top1")
MONITORED = (*OF_LABELS, "val/rankme", "val/alpha_req", "val/alignment", "val/uniformity")
LOWER_IS_BETTER = ("val/alignment", "val/uniformity")


@dataclass(frozen=True, kw_only=True)
class MonitorConfig(Settings, key="monitor"):
    """Figures of the encoder on training images while it trains; test images are not used.

    With labels, the accuracies of kNN and of a linear probe. Always RankMe and α-ReQ of the features, and alignment and
    uniformity of the embeddings.

    Attributes:
        data: another data set, whose training images are labelled and have the size and the channels of the run's own;
            kNN and a linear probe, with the settings of `probe`, are trained and measured on them. None for the run's
            own images.
        online_probe: whether a linear probe is trained on the features of every step, without a gradient to the
            encoder, if the run's own images have labels and no other data set is given.
        every_epochs: epochs between two measurements, ≥ 1.
        max_images: the largest number of training images to evaluate, ≥ 20; a tenth of them are the queries, on which
            no probe is trained.
        neighbours: k of the kNN classifier, ≥ 1.
    """

    data: DataConfig | None = None
    online_probe: NoEffect[bool] = True
    every_epochs: NoEffect[Count] = 10
    max_images: Annotated[int, Range(ge=20)] = 10_000
    neighbours: Count = 200


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainingConfig):
    """A pretraining run.

    Attributes:
        epochs: passes over the training images; 0 keeps the encoder as it was initialised.
        check_images: how many images of your files are read before the training, to count duplicates and unreadable
            ones; of a set that is read by blocks, at most a window; 0 for none.
        positives: the rows that are positives of each other: "views" of one image, or images of one class ("classes"),
            which is supervision by labels (Khosla et al. 2020).
        grad_scale: p ≥ 0: in the backward pass the gradient of each embedding f is multiplied by ‖f‖^p (GradScale,
            Draganov et al. 2025); 0 changes nothing. The gradient of a constraint is not multiplied.
        grad_scale_by: the norm of each row, "rows", or the mean norm of the global batch, "batch".
        cut_init: c > 0, by which the initial weights of encoder and head are divided (cut-initialisation, Draganov et
            al. 2025); 1 changes nothing.
    """

    augment: AugmentConfig
    loss: PairLossConfig | TeacherLossConfig
    optimiser: CosineOptimiserConfig
    epochs: CountOrZero
    check_images: NoEffect[CountOrZero] = 100_000
    positives: Literal["views", "classes"] = "views"
    grad_scale: Annotated[float, Range(ge=0, le=8)] = 0.0
    grad_scale_by: GradScaleBy = "rows"
    cut_init: Annotated[float, Range(ge=1e-3, le=1e3)] = 1.0
    monitor: NoEffect[MonitorConfig] = field(default_factory=MonitorConfig)
    checkpoint: NoEffect[CheckpointConfig] = field(default_factory=CheckpointConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment.from_original:
            allowed = "false without data.image_size_px, at which images are measured"
            check(self.data.read_size_px is not None, "augment.from_original", True, allowed)
        if self.loss.name == "npair_normalized":
            allowed = "with loss=npair_normalized, which takes two views of an image"
            check(self.augment.num_views == 2, "augment.num_views", self.augment.num_views, f"2 {allowed}")
            check(self.augment.small_views == 0, "augment.small_views", self.augment.small_views, f"0 {allowed}")
        if self.positives == "classes":
            allowed = f"views with loss={self.loss.name}, which pairs rows by their order"
            check(self.loss.name not in ORDERED_LOSSES, "positives", "classes", allowed)
            share, allowed = self.probe.test_share, "null with positives=classes, which learns from all labels"
            check(share is None, "probe.test_share", share, allowed)
        if self.cut_init != 1:
            for part, is_trained in (("encoder", self.encoder.has_weights), ("head", self.head.weights is not None)):
                check(not is_trained, "cut_init", self.cut_init, f"1 with trained weights of the {part}")

    @property
    def trained_data(self) -> DataConfig:
        """The data set; one whose images are decoded whenever they are read, if crops are cut out of the originals."""
        return self.data.undecoded() if self.augment.from_original else self.data

    def draws(self, seed: int, batch_size: int) -> Callable[[int], Tensor] | None:
        """Random numbers for the crops of a step's images, as a function of the step; None if nothing crops them."""
        return partial(row_draws, seed, global_batch_size=batch_size) if self.augment.from_original else None

    @property
    def name_parts(self) -> tuple[str, ...]:
        """The parts of a generated run name between the encoder and the seed."""
        by = "" if self.grad_scale_by == "rows" else "batch"
        power = [f"gradscale{by}{self.grad_scale:g}"] if self.grad_scale else []
        cut = [f"cut{self.cut_init:g}"] if self.cut_init != 1 else []
        return (*super().name_parts, *([] if self.positives == "views" else ["supervised"]), *power, *cut)

    @property
    def length(self) -> int | float:
        """Epochs of the run."""
        return self.epochs

    @property
    def learned_sets(self) -> tuple[str, ...]:
        """The titles of the data sets from whose labels the encoder learns."""
        return super().learned_sets if self.positives == "classes" else ()

    def require_files(self) -> None:
        """As for every training, with the images of the monitor."""
        super().require_files()
        if self.monitor.data is not None:
            try:
                self.monitor.data.require_places(with_test=False)
            except DataError as error:
                prefix = "monitor." if str(error).startswith("data.") else "monitor.data: "
                raise type(error)(f"{prefix}{error}") from error

    @property
    def linear_probe(self) -> ProbeConfig | None:
        """How the encoder is probed."""
        return self.probe


CONFIG = PretrainConfig
