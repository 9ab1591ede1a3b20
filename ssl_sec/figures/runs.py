"""What a finished run is drawn from, and the figures that every training run has."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from matplotlib.figure import Figure

from ssl_sec.figures.training import curves_figure, norm_histograms_figure
from ssl_sec.training.norms import NormHistogram


@runtime_checkable
class DrawnData(Protocol):
    """The data of a run."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """By label."""
        ...


@runtime_checkable
class RunRecord(Protocol):
    """What a finished run left.

    Attributes:
        path: the run's folder, which has its name.
        features_path: features of some training images, or embeddings of the test images.
        examples_path: some test images and their neighbours.
        confusion_path: how a probe confuses the classes.
    """

    path: Path
    features_path: Path
    examples_path: Path
    confusion_path: Path

    def records(self) -> Sequence[dict[str, Any]]:
        """The figures, as they were reported."""
        ...

    def histograms(self) -> list[NormHistogram]:
        """Of the norms of the embeddings."""
        ...

    def data(self) -> DrawnData:
        """What was trained on."""
        ...

    def watched_paths(self) -> list[Path]:
        """Embeddings of the watched images, by steps."""
        ...

    def test_set_paths(self) -> list[Path]:
        """What figures of face test sets are drawn from, by their titles."""
        ...


def training_figures(run: RunRecord) -> dict[str, Figure]:
    """Curves and norms of any training run."""
    history: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for record in run.records():
        for key, value in record["metrics"].items():
            # The steps in another unit; single points.
            if key == "train/epoch" or key.startswith(("retrieval/", "face/")):
                continue
            history[key].append((record["step"], value))
    histograms = run.histograms()
    figures = {"curves": curves_figure(history)}
    if histograms:
        figures["norms"] = norm_histograms_figure(histograms)
    return figures
