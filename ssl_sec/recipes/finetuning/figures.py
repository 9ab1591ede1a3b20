"""The figures of a fine-tuning."""

import json

from matplotlib.figure import Figure

from ssl_sec.evaluation.classification.scores import confusion_from
from ssl_sec.figures.confusion import confusion_figure
from ssl_sec.figures.robustness import reliability_figure
from ssl_sec.figures.runs import RunRecord, training_figures


def draw(run: RunRecord) -> dict[str, Figure]:
    """Draws curves and norms of the logits, and the confusion matrix and the calibration on the test images."""
    record = json.loads(run.confusion_path.read_text())
    names = tuple(record["class_names"])
    return {
        **training_figures(run),
        "confusion": confusion_figure(confusion_from(record["confusion"], len(names)), names),
        "reliability": reliability_figure(**record["calibration"]),
    }
