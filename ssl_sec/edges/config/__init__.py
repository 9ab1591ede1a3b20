"""The configurations of jobs without a registry row, read without torch: ablation, alignment, preview and others."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from ssl_sec.edges.config.study import Distinct, Seeds
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.tracking import OutputDir, TrackingConfig
from ssl_sec.rules import Local, NotEmpty, Processes, Range, check
from ssl_sec.settings import Settings


@dataclass(frozen=True, kw_only=True)
class AblateConfig(Settings):
    """The variations of an ablation.

    Attributes:
        arms: the arms to compare: options of the group constraint; random, which keeps the initial encoder; or
            overrides of any group or key, several joined by +, such as loss=triplet+constraint=sec.
        seeds: each arm runs once with each of these.
        job: the training that is run, such as metric_learning for jobs.metric_learning; null for that of the
            experiment, or pretrain.
    """

    arms: Annotated[tuple[str, ...], NotEmpty(), Distinct("arms")]
    seeds: Seeds
    job: str | None = None


@dataclass(frozen=True, kw_only=True)
class AlignConfig(Settings):
    """Faces cut out of images by five points each; see `ssl_sec.data.faces.alignment`.

    Attributes:
        images: the folder of the images, at any depth.
        landmarks: a CSV file with the columns path, x1, y1, …, x5, y5: eyes, nose and corners of the mouth, in pixels
            of the upright image (as its EXIF orientation turns it); paths are relative to the folder.
        output: folder for the aligned images, under the same paths; images that already exist are kept.
        num_workers: number of processes; 0 aligns in the job's own, None takes one for each core.
    """

    images: Local
    landmarks: Local
    output: Local
    num_workers: Processes | None = None


@dataclass(frozen=True, kw_only=True)
class PreviewConfig(Settings):
    """A picture of some images of a pretraining with their augmented views.

    Attributes:
        output: the PNG file; its folder is created if it is missing.
        num_images: rows of the picture; fewer if a global batch or the set has fewer images.
    """

    output: Local = "preview.png"
    num_images: Annotated[int, Range(ge=1, le=64)] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check(Path(self.output).suffix.lower() == ".png", "output", self.output, "a file named .png")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Settings):
    """The metrics of a run that are missing in MLflow.

    Attributes:
        folder: the folder of a run that has ended; or its name, its id, or the beginning of one.
        uri: MLflow's store; None takes the run's own store.
        output_dir: folder of the runs' folders, where a name or an id is looked for.
    """

    folder: OutputDir
    uri: str | None = None
    output_dir: OutputDir = "runs"


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Settings):
    """A comparison of our results with a paper's, or of two runs; one of table, figure and compare.

    Attributes:
        paper: the paper whose tables and figures are meant.
        table: number of a table of the paper, shown with our results.
        figure: number of a figure of the paper, drawn from our runs.
        compare: two runs, by id, name, or the beginning of one.
        all: whether a comparison also shows what is equal.
        recipes: recipes of the runs in a figure, all of one kind of run; None takes all of the experiment with the
            newest run, and for NormFace's Fig. 8 and SFT's Figs. 5 and 6b the paper's.
        output: folder for the files of the report.
        output_dir: folder of the runs' folders, with their store.
        tracking: the store to read; with `experiment`, only that experiment's runs count.
    """

    paper: str = "sec"
    table: int | None = None
    figure: int | str | None = None
    compare: tuple[str, ...] | None = None
    all: bool = False
    recipes: Annotated[tuple[str, ...], NotEmpty()] | None = None
    output: Local = "report"
    output_dir: OutputDir = "runs"
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [key for key in ("table", "figure", "compare") if getattr(self, key) is not None]
        if len(given) != 1:
            one = "one of table=<number>, figure=<number> or compare=[<run>,<run>]"
            raise ConfigError(f"give {one}{', not ' if given else ''}{' and '.join(given)}")
        if self.compare is not None:
            check(len(self.compare) == 2, "compare", list(self.compare), "two runs: compare <run> <run>")
