"""The records from which the figures of a finished run are drawn, and the figures of every training run."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from matplotlib.figure import Figure

from ssl_sec.figures.training import curves_figure, norm_histograms_figure
from ssl_sec.metrics import RESULT_GROUPS
from ssl_sec.training.norms import NormHistogram


@runtime_checkable
class DrawnData(Protocol):
    """The data of a run."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes' names, by label."""
        ...


@runtime_checkable
class RunRecord(Protocol):
    """The files of a finished run.

    Attributes:
        path: folder of the run, named after the run.
        features_path: file of the features of some training images, or of the embeddings of the test images.
        views_path: file of some images of the first step and their views, which pretraining writes at its start.
        examples_path: file of some images and their neighbours.
        confusion_path: file of a probe's confusion matrix.
    """

    path: Path
    features_path: Path
    views_path: Path
    examples_path: Path
    confusion_path: Path

    def records(self) -> Sequence[dict[str, Any]]:
        """The reported metrics."""
        ...

    def histograms(self) -> list[NormHistogram]:
        """Histograms of the norms of the embeddings."""
        ...

    def data(self) -> DrawnData:
        """The training set."""
        ...

    def watched_paths(self) -> list[Path]:
        """Files of the embeddings of the watched images, in the order of the steps."""
        ...

    def test_set_paths(self) -> list[Path]:
        """Files of the results on face test sets, in the order of their titles."""
        ...


def training_figures(run: RunRecord) -> dict[str, Figure]:
    """Curves and norms of any training run; the metric loss is left out where it is the total loss."""
    history: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for record in run.records():
        for key, value in record["metrics"].items():
            # The epoch repeats the steps; the others are single points.
            if key == "train/epoch" or key.partition("/")[0] in RESULT_GROUPS:
                continue
            history[key].append((record["step"], value))
    if history["train/metric_loss"] == history["train/loss"]:
        del history["train/metric_loss"]
    histograms = run.histograms()
    figures = {"curves": curves_figure(history)}
    if histograms:
        figures["norms"] = norm_histograms_figure(histograms)
    return figures
