"""The figures of a pretraining run."""

import torch
from matplotlib.figure import Figure

from ssl_sec.figures.runs import RunRecord, training_figures
from ssl_sec.figures.training import features_figure


def draw(run: RunRecord) -> dict[str, Figure]:
    """Draws curves, norms and features."""
    saved = torch.load(run.features_path, weights_only=True)
    features = features_figure(saved["features"], saved["labels"], run.data().class_names, seed=0)
    return {**training_figures(run), "features": features}
