"""The figures of a fine-tuning."""

import json

import torch
from matplotlib.figure import Figure

from ssl_sec.figures.robustness import reliability_figure
from ssl_sec.figures.runs import RunRecord, training_figures
from ssl_sec.figures.training import confusion_figure


def draw(run: RunRecord) -> dict[str, Figure]:
    """Draws curves and norms of the logits, and the confusion matrix and the calibration on the test images."""
    record = json.loads(run.confusion_path.read_text())
    return {
        **training_figures(run),
        "confusion": confusion_figure(torch.tensor(record["confusion"]), tuple(record["class_names"])),
        "reliability": reliability_figure(**record["calibration"]),
    }
