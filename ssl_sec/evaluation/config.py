"""The options of a linear probe."""

from dataclasses import dataclass
from typing import Annotated

from ssl_sec.settings import (
    BelowOne,
    Count,
    NotEmpty,
    Range,
    Seed,
    Settings,
    check,
)
from ssl_sec.training.config import PositiveRate


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(Settings, key="probe"):
    """Linear evaluation (SEC, appendix B.3).

    Attributes:
        enabled: whether a linear probe follows the pretraining.
        augment: whether the probe trains on freshly augmented images, as SimCLR does, instead of cached features.
        learning_rates: learning rates, all trained at once; one is chosen on a held-out tenth of the training set.
        labels_per_class: labels of each class to train on; None takes all.
        epochs: epochs of the linear classifier's training, ≥ 1.
        batch_size: images in a step of it, ≥ 1.
        momentum: momentum of its SGD, in [0, 1).
        decay_at: shares of the epochs, each in (0, 1), after which the learning rates fall.
        decay_factor: factor by which the learning rates are divided then, ≥ 1.
        seed: seed of the order of the images, the held-out tenth and the few labels.
    """

    enabled: bool = False
    augment: bool = False
    epochs: Count = 100
    batch_size: Count = 256
    learning_rates: Annotated[tuple[PositiveRate, ...], NotEmpty()] = (1.0, 2.0, 5.0, 10.0)
    momentum: BelowOne = 0.9
    decay_at: tuple[Annotated[float, Range(gt=0, lt=1)], ...] = (0.6, 0.75, 0.9)
    decay_factor: Annotated[float, Range(ge=1, le=1000)] = 5.0
    labels_per_class: Count | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        reached = self.epochs > 1 or not self.decay_at
        check(reached, "probe.decay_at", list(self.decay_at), "[] with probe.epochs=1, in which no decay is reached")
