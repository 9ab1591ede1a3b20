"""The figures of a linear evaluation."""

import json

import torch
from matplotlib.figure import Figure

from ssl_sec.figures.runs import RunRecord
from ssl_sec.figures.training import confusion_figure


def draw(run: RunRecord) -> dict[str, Figure]:
    """Draws the confusion matrix."""
    record = json.loads(run.confusion_path.read_text())
    return {"confusion": confusion_figure(torch.tensor(record["confusion"]), tuple(record["class_names"]))}
