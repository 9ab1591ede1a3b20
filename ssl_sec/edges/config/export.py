"""The configuration of an export."""

import re
from dataclasses import dataclass, field
from typing import Annotated

from ssl_sec.data.config import DataConfig
from ssl_sec.exporting import FormatName
from ssl_sec.recipes.tracking import Checkpoint, OutputDir, TrackingConfig
from ssl_sec.rules import LocalPath, check
from ssl_sec.settings import Settings

HUB_SCHEME = "hf://"
# One or two names, together at most 96 letters, as the Hub allows them.
_REPOSITORY = re.compile(r"(?=.{1,96}$)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ExportPlace(LocalPath):
    """A folder, or a repository of the Hugging Face Hub."""

    def check(self, key: str, value: str) -> None:
        """Raises a ConfigError that names the key, unless the value is such a place."""
        if not value.startswith(HUB_SCHEME):
            super().check(key, value)
        else:
            fits = _REPOSITORY.fullmatch(value.removeprefix(HUB_SCHEME)) is not None
            check(fits, key, value, "hf://<owner>/<name> or hf://<name>, of letters, digits and _ - .")


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Settings):
    """The export of a run's encoder, with its head if embeddings were trained.

    Attributes:
        run: the training's MLflow run id, its name, a prefix of one, or its folder; or a registered model,
            models:/<name>@<alias> or models:/<name>/<version>.
        format: format of the files; see `ssl_sec.exporting`.
        classifier: whether the classifier of a fine-tuning is exported with its encoder; the output is then a logit for
            each class.
        checkpoint: the encoder of the run: `last`, `best` (by its held-out score), or the steps of one that was kept.
        output: a new folder, or with format=hub a new repository, hf://<owner>/<name>; None, or a repository without a
            token of the Hub, makes a folder in output_dir/exports, or in runs/exports if that is a URL.
        overwrite: whether an existing export is replaced.
        private: whether a new repository of the Hub is private.
        license: license of the weights for the model card, by the Hub's name for it; None leaves it out.
        data: data set of the images for the check, in the shape of the training images, in which files are read unless
            a size is given; None takes that of the run.
        output_dir: folder of the run, with MLflow's sqlite file unless tracking names a store.
    """

    run: str
    format: FormatName
    classifier: bool = False
    checkpoint: Checkpoint = "last"
    output: Annotated[str, ExportPlace()] | None = None
    overwrite: bool = False
    private: bool = True
    license: str | None = None
    data: DataConfig | None = None
    output_dir: OutputDir = "runs"
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output is not None and self.output.startswith(HUB_SCHEME):
            check(self.format == "hub", "format", self.format, "'hub' with output=hf://…")
        if self.classifier:
            check(self.checkpoint == "last", "checkpoint", self.checkpoint, "'last' with classifier=true")
        if self.license is not None:
            fits = re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,60}", self.license) is not None
            check(fits, "license", self.license, "the Hub's name of a license, such as apache-2.0 or cc-by-nc-4.0")
