"""The configuration of jobs.embed."""

from dataclasses import dataclass, field

from ssl_sec.data.config import DataConfig
from ssl_sec.data.image_set import Split
from ssl_sec.recipes.tracking import Checkpoint, OutputDir, TrackingConfig
from ssl_sec.rules import Count, check
from ssl_sec.settings import Settings
from ssl_sec.training.config import RuntimeConfig


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(Settings):
    """The embeddings of a data set by the encoder of a run, and by its head if embeddings were trained.

    Attributes:
        run: the training's MLflow run id, its name, a prefix of one, or its folder; or a registered model,
            models:/<name>@<alias> or models:/<name>/<version>; or a folder that jobs.export made.
        output: a folder or a URL, for files of rows_per_part images; whole files of the same embeddings are kept.
        data: the data set to embed; None takes that of the run; required for an export, which has none.
            Files of other sets are read at the size that the run was trained at, unless one is given. All images are
            embedded; with `data.num_train_classes`, those of the training classes or of the test classes.
        split: split of the data set.
        checkpoint: the encoder of the run: `last`, `best` (by its held-out score), or the steps of one that was kept.
        rows_per_part: images in a file.
        batch_size: images in a forward pass.
        output_dir: folder of the run, with MLflow's sqlite file unless tracking names a store.
    """

    run: str
    output: OutputDir
    runtime: RuntimeConfig
    data: DataConfig | None = None
    split: Split = "train"
    checkpoint: Checkpoint = "last"
    rows_per_part: Count = 8192
    batch_size: Count = 512
    output_dir: OutputDir = "runs"
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data is not None:
            found, needed = self.data.max_images, "all images of the split are embedded"
            check(found is None, "data.max_images", found, f"null: {needed}")
            check(not self.data.leave_out, "data.leave_out", self.data.leave_out, f"[]: {needed}")
