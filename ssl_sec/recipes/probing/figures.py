"""The figures of a linear evaluation."""

import json

from matplotlib.figure import Figure

from ssl_sec.evaluation.classification.scores import confusion_from
from ssl_sec.figures.confusion import confusion_figure
from ssl_sec.figures.robustness import corruption_figure, reliability_figure
from ssl_sec.figures.runs import RunRecord


def draw(run: RunRecord) -> dict[str, Figure]:
    """Draws the confusion matrix, the calibration, and the accuracy on corrupted images if it was measured."""
    record = json.loads(run.confusion_path.read_text())
    names = tuple(record["class_names"])
    drawn = {"confusion": confusion_figure(confusion_from(record["confusion"], len(names)), names)}
    if calibration := record.get("calibration"):  # old runs have none
        drawn["reliability"] = reliability_figure(**calibration)
    if corrupted := record.get("corrupted_top1"):
        drawn["corruptions"] = corruption_figure(record["clean_top1"], corrupted)
    return drawn
