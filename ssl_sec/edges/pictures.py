"""The pictures of a run, from what its folder holds."""

import json
from collections import defaultdict
from pathlib import Path

import torch
from matplotlib.figure import Figure

from ssl_sec.diagnostics import (
    confusion_figure,
    curves_figure,
    features_figure,
    norm_histograms_figure,
)
from ssl_sec.edges.run_folder import RunFolder


def pretraining_pictures(folder: RunFolder) -> list[Path]:
    """Draws curves, norms and features; returns the files."""
    history: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for record in folder.records():
        for key, value in record["metrics"].items():
            if key == "train/epoch":  # the steps again, in another unit
                continue
            history[key].append((record["step"], value))
    histograms = folder.histograms()
    figures: dict[str, Figure] = {"curves": curves_figure(history)}
    if histograms:
        figures["norms"] = norm_histograms_figure(histograms)
    saved = torch.load(folder.features_path, weights_only=True)
    figures["features"] = features_figure(saved["features"], saved["labels"], folder.data().class_names, seed=0)
    return _save(folder, figures)


def probe_pictures(folder: RunFolder) -> list[Path]:
    """Draws the confusion matrix; returns the files."""
    told = json.loads((folder.path / "confusion.json").read_text())
    return _save(folder, {"confusion": confusion_figure(torch.tensor(told["confusion"]), tuple(told["class_names"]))})


def _save(folder: RunFolder, figures: dict[str, Figure]) -> list[Path]:
    plots = folder.path / "plots"
    plots.mkdir(exist_ok=True)
    paths: list[Path] = []
    for name, figure in figures.items():
        paths.append(plots / f"{name}.png")
        figure.savefig(paths[-1], dpi=110, bbox_inches="tight")
    return paths
