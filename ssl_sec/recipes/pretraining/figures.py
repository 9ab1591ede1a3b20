"""The figures of a pretraining run."""

import torch
from matplotlib.figure import Figure

from ssl_sec.figures.images import Retrieved, retrieved_figure, views_figure
from ssl_sec.figures.runs import RunRecord, training_figures
from ssl_sec.figures.training import features_figure


def draw(run: RunRecord) -> dict[str, Figure]:
    """Draws curves, norms, features, views, and nearest neighbours; old runs have stored neither of the last two."""
    saved = torch.load(run.features_path, weights_only=True)
    features = features_figure(saved["features"], saved["labels"], run.data().class_names, seed=0)
    figures = {**training_figures(run), "features": features, **draw_at_start(run)}
    if run.examples_path.exists():
        found = torch.load(run.examples_path, weights_only=True)
        retrieved = Retrieved(found["queries"], found["neighbours"], found.get("correct"))
        figures["neighbours"] = retrieved_figure(
            {run.path.name: retrieved}, "training images with the nearest features, by cosine"
        )
    return figures


def draw_at_start(run: RunRecord) -> dict[str, Figure]:
    """Draws the views of some images of the first step, once they are stored."""
    if not run.views_path.exists():
        return {}
    saved = torch.load(run.views_path, weights_only=True)
    return {"views": views_figure(saved["images"], saved["views"])}
