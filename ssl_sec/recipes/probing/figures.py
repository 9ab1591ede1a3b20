"""The figures of a linear evaluation."""

import json

import torch
from matplotlib.figure import Figure

from ssl_sec.figures.robustness import corruption_figure, reliability_figure
from ssl_sec.figures.runs import RunRecord
from ssl_sec.figures.training import confusion_figure


def draw(run: RunRecord) -> dict[str, Figure]:
    """Draws the confusion matrix, the calibration, and the accuracy on corrupted images if it was measured."""
    record = json.loads(run.confusion_path.read_text())
    drawn = {"confusion": confusion_figure(torch.tensor(record["confusion"]), tuple(record["class_names"]))}
    if calibration := record.get("calibration"):  # old runs have none
        drawn["reliability"] = reliability_figure(**calibration)
    if corrupted := record.get("corrupted_top1"):
        drawn["corruptions"] = corruption_figure(record["clean_top1"], corrupted)
    return drawn
