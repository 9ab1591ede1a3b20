"""The configuration of a linear evaluation."""

from dataclasses import dataclass, field

from ssl_sec.data.config import DataConfig
from ssl_sec.evaluation.config import ProbeConfig
from ssl_sec.recipes.config import RunConfig
from ssl_sec.recipes.tracking import Checkpoint, OutputDir, TrackingConfig
from ssl_sec.settings import (
    Name,
)
from ssl_sec.training.config import RuntimeConfig


@dataclass(frozen=True, kw_only=True)
class ProbeJobConfig(RunConfig):
    """A probe of a pretraining run.

    Attributes:
        run: the pretraining's MLflow run id, its name, the beginning of either, or its folder.
        checkpoint: which of the run's encoders: `last`, `best` (by its held-out score), or the steps of one
            that was kept.
        data: None takes the data set of that run.
        output_dir: folder in which the run's folder is created.
        run_name: None for one made from the time.
    """

    run: str
    probe: ProbeConfig
    runtime: RuntimeConfig
    checkpoint: Checkpoint = "last"
    data: DataConfig | None = None
    output_dir: OutputDir = "runs"
    run_name: Name | None = None
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def length(self) -> int:
        """Epochs of the run; with all labels, the probe with the chosen rate is trained again on all images."""
        return self.probe.epochs * (2 if self.probe.labels_per_class is None else 1)


CONFIG = ProbeJobConfig
