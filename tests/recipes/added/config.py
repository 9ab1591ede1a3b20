from dataclasses import dataclass, field

from ssl_sec.augment.config import FlipConfig
from ssl_sec.losses.config import ClassLossConfig
from ssl_sec.recipes.config import CheckpointConfig, TrainingConfig
from ssl_sec.rules import CountOrZero
from ssl_sec.training.optimisers.config import CosineOptimiserConfig


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(TrainingConfig):
    """A classification."""

    augment: FlipConfig
    loss: ClassLossConfig
    optimiser: CosineOptimiserConfig
    epochs: CountOrZero
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def length(self) -> int | float:
        return self.epochs


CONFIG = ClassifyConfig
