"""The pictures of a run, from what its folder holds."""

import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.errors import DataError
from ssl_sec.evaluation.directions import DirectionChanges, class_spread, cosine_distributions, direction_changes
from ssl_sec.figures.drawing import message
from ssl_sec.figures.training import (
    confusion_figure,
    curves_figure,
    features_figure,
    norm_distributions,
    norm_distributions_figure,
    norm_histograms_figure,
)
from ssl_sec.recipes.face.figures import HardPairs, Verification, hardest_pairs_figure, roc_figure, scores_figure
from ssl_sec.recipes.metric_learning.figures import (
    class_divergences_figure,
    cosine_difference_figure,
    cosine_distributions_figure,
    direction_changes_figure,
    retrieved_figure,
)
from ssl_sec.training.norms import norm_histogram

logger = logging.getLogger(__name__)


def pretraining_pictures(folder: RunFolder) -> list[Path]:
    """Draws curves, norms and features; returns the files."""
    saved = torch.load(folder.features_path, weights_only=True)
    features = features_figure(saved["features"], saved["labels"], folder.data().class_names, seed=0)
    return _save(folder, {**_training_figures(folder), "features": features})


def retrieval_pictures(folder: RunFolder) -> list[Path]:
    """Draws what the SEC and SFT papers show of a run: curves, norms, cosines, directions, retrieved images, spread.

    Embeddings are those of the test images; directions move between those of the watched training images.
    """
    saved = torch.load(folder.features_path, weights_only=True)
    embeddings, labels = saved["features"], saved["labels"]
    name = folder.path.name
    figures = _training_figures(folder)
    figures["features"] = features_figure(embeddings, labels, tuple(map(str, labels.unique().tolist())), seed=0)
    examples = torch.load(folder.examples_path, weights_only=True)
    figures["retrieved"] = retrieved_figure(examples["queries"], examples["neighbours"], examples["correct"])
    try:
        cosines = cosine_distributions(embeddings, labels, seed=0)
        figures["cosines"] = cosine_distributions_figure({name: cosines}, "Test images: cosines of pairs")
        figures["cosine_differences"] = cosine_difference_figure({name: cosines}, "Test images: triplets")
        spread = class_spread(embeddings, labels)
        figures["divergences"] = class_divergences_figure({name: spread}, "Test classes: divergence")
        changes = {name: _direction_changes(folder)}
        figures["direction_changes"] = direction_changes_figure(changes, "Change of direction of the watched images")
    except DataError as error:  # an embedding of length 0 has no direction
        logger.warning("some pictures cannot be drawn: %s", error)
    return _save(folder, figures)


def face_pictures(folder: RunFolder) -> list[Path]:
    """Draws curves and norms, and of the benchmarks of pairs ROCs, scores, norms and the hardest pairs."""
    figures = _training_figures(folder)
    kept = {path.stem: torch.load(path, weights_only=True) for path in folder.benchmark_paths()}
    if kept:
        verified = {title: Verification(one["scores"], one["same"]) for title, one in kept.items()}
        figures["roc"] = roc_figure(verified, "Benchmarks: ROC")
        figures["scores"] = scores_figure(verified, "Benchmarks: cosines of pairs")
        figures["benchmark_norms"] = _benchmark_norms_figure({title: one["norms"] for title, one in kept.items()})
    for title, one in kept.items():
        if "same_first" in one:
            different, same = (
                HardPairs(*(one[f"{kind}_{part}"] for part in ("first", "second", "scores")))
                for kind in ("different", "same")
            )
            figures[f"hardest_{title}"] = hardest_pairs_figure(different, same, f"{title}: the hardest pairs")
    return _save(folder, figures)


def _benchmark_norms_figure(norms: Mapping[str, torch.Tensor]) -> Figure:
    histograms = {
        f"{title}: {values.mean():#.3g} ± {values.std(correction=0):#.2g}": [norm_histogram(values, step=0)]
        for title, values in norms.items()
        if values.isfinite().all()
    }
    if not histograms:
        return message("no benchmark has finite embeddings")
    return norm_distributions_figure(*norm_distributions(histograms), "Benchmarks: norms of the embeddings")


def _direction_changes(folder: RunFolder) -> list[DirectionChanges]:
    changes: list[DirectionChanges] = []
    for earlier, later in itertools.pairwise(folder.watched_paths()):
        before, after = (load_file(path)["embeddings"] for path in (earlier, later))
        if before.shape == after.shape:  # others were watched before a resume
            changes.append(direction_changes(before, after, int(earlier.stem), int(later.stem)))
    return changes


def _training_figures(folder: RunFolder) -> dict[str, Figure]:
    """Curves and norms of any training run."""
    history: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for record in folder.records():
        for key, value in record["metrics"].items():
            # The steps in another unit; single points.
            if key == "train/epoch" or key.startswith(("retrieval/", "face/")):
                continue
            history[key].append((record["step"], value))
    histograms = folder.histograms()
    figures = {"curves": curves_figure(history)}
    if histograms:
        figures["norms"] = norm_histograms_figure(histograms)
    return figures


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
        figure.savefig(paths[-1], dpi=110)
    return paths
