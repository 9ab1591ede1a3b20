"""The configuration of an export."""

from dataclasses import dataclass, field

from ssl_sec.data.config import DataConfig
from ssl_sec.exporting import FormatName
from ssl_sec.recipes.tracking import Checkpoint, OutputDir, TrackingConfig
from ssl_sec.settings import Local, Settings


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Settings):
    """The export of a run's encoder; with its head if embeddings were trained.

    Attributes:
        run: the training's MLflow run id, its name, a prefix of one, or its folder; or a registered model,
            models:/<name>@<alias> or models:/<name>/<version>.
        format: of the files; see `ssl_sec.exporting`.
        checkpoint: which of the run's encoders: `last`, `best` (by its held-out score), or the steps of one
            that was kept.
        output: a new folder; None makes one in output_dir/exports, or in runs/exports if that is a URL.
        overwrite: whether an existing export is replaced.
        data: where the images of the check come from; None takes the data set of the run.
        output_dir: of the run, with MLflow's sqlite file unless tracking names a store.
    """

    run: str
    format: FormatName
    checkpoint: Checkpoint = "last"
    output: Local | None = None
    overwrite: bool = False
    data: DataConfig | None = None
    output_dir: OutputDir = "runs"
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
