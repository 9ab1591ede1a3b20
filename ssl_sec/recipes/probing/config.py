"""The configuration of a linear evaluation."""

from dataclasses import dataclass, field
from typing import Annotated

from ssl_sec.data.config import DataConfig
from ssl_sec.effects import NoEffect
from ssl_sec.errors import ConfigError, nearest
from ssl_sec.evaluation.config import ProbeConfig
from ssl_sec.networks.config import EncoderConfig
from ssl_sec.recipes.config import RunConfig
from ssl_sec.recipes.tracking import Checkpoint, OutputDir, TrackingConfig
from ssl_sec.rules import Name, NotEmpty, Range, check
from ssl_sec.settings import Settings
from ssl_sec.training.config import RuntimeConfig


@dataclass(frozen=True, kw_only=True)
class ProbedRun:
    """The configuration of the run whose encoder a probe measures, as far as the probe needs it.

    Attributes:
        data: the data set that the encoder was trained on.
        encoder: the encoder that was trained.
        probe: how its encoder is probed; None if its configuration does not say.
    """

    data: DataConfig
    encoder: EncoderConfig
    probe: ProbeConfig | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeJobConfig(RunConfig):
    """A probe of the encoder of a run.

    Attributes:
        run: the MLflow run id, its name, the beginning of either, or its folder; or a registered model,
            models:/<name>@<alias> or models:/<name>/<version>.
        checkpoint: the encoder of the run: `last`, `best` (by its held-out score), or the steps of one that was kept.
        data: the data set of the probe; None takes that of the run. Files of another set are read at the size and with
            the channels that the encoder was trained on.
        output_dir: folder in which the run's folder is created.
        run_name: name of the run and its folder; None for that of the probed run with -probe. An interrupted probe of
            this name starts again; one that has finished with these settings and weights is not measured again.
    """

    run: str
    probe: ProbeConfig
    runtime: NoEffect[RuntimeConfig]
    checkpoint: Checkpoint = "last"
    data: DataConfig | None = None
    output_dir: OutputDir = "runs"
    run_name: NoEffect[Name | None] = None
    tracking: NoEffect[TrackingConfig] = field(default_factory=TrackingConfig)

    @property
    def length(self) -> int:
        """Epochs of the run; with all labels, the probe with the chosen rate is trained again on all images."""
        return self.probe.epochs * max(len(self.parts), 1)

    @property
    def parts(self) -> tuple[str, ...]:
        """With all labels, two trainings of as many epochs."""
        return ("choosing the rate", "final") if self.probe.labels_per_class is None else ()


@dataclass(frozen=True, kw_only=True)
class TransferConfig(Settings):
    """Probes of one pretraining on several data sets.

    Attributes:
        run: the pretraining's MLflow run id, its name, the beginning of either, or its folder; or a registered model,
            models:/<name>@<alias> or models:/<name>/<version>.
        sets: the data sets, each a name or a group of the keys of data=<name>: [digits,{name: folder, root: photos}].
        checkpoint: the encoder of the run: `last`, `best` (by its held-out score), or the steps of one that was kept.
        probe: how each set is measured; its images are converted to the size and channels that the encoder was
            trained on, unless probe.image_size_px and probe.num_channels are given.
        mean_per_class: titles of the sets that are measured by the mean of the classes' accuracies.
        test_share: share of each class that is held out for the test, of sets without test images.
        output_dir: folder in which the folders of the sets' runs are created.
        tracking: where metrics are logged.
    """

    run: str
    sets: Annotated[tuple[DataConfig, ...], NotEmpty()]
    probe: ProbeConfig
    runtime: RuntimeConfig
    checkpoint: Checkpoint = "last"
    mean_per_class: tuple[str, ...] = ()
    test_share: Annotated[float, Range(gt=0, lt=1)] = 0.2
    output_dir: OutputDir = "runs"
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        share, measure = self.probe.test_share, self.probe.mean_per_class
        check(share is None, "probe.test_share", share, "null; test_share=<share> holds out test images")
        check(
            not measure, "probe.mean_per_class", measure, "false; mean_per_class=[<titles of sets>] chooses the measure"
        )
        for index, data in enumerate(self.sets):
            found = data.max_images
            check(found is None, f"sets[{index}].max_images", found, "null: all images are measured")
        titles = [data.title for data in self.sets]
        check(len(set(titles)) == len(titles), "sets", titles, "sets with different titles, the names of their files")
        for title in self.mean_per_class:
            if title not in titles:
                raise ConfigError(f"mean_per_class: found {title!r}; {nearest(title, titles)}")


CONFIG = ProbeJobConfig
