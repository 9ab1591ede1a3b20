"""Figures of a metric-learning run, and what reports compare of several: norms, cosines, directions, classes, images.

`measure` computes the numbers, which are kept as JSON; figures of one run and of several are drawn from them.
All of it concerns directions f̂ = f / ‖f‖: embeddings may have any norm, but a zero or non-finite embedding has no
direction.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from safetensors.torch import load_file

from ssl_sec.errors import DataError
from ssl_sec.evaluation.directions import (
    ClassSpread,
    CosineDistributions,
    DirectionChanges,
    DistanceDistributions,
    class_spread,
    cosine_distributions,
    direction_changes,
    distance_distributions,
)
from ssl_sec.figures import NUMBERS
from ssl_sec.figures.comparing import ComparisonFigure, Drawn, draw_norm_panels, draw_norms, from_plain, numbers_of
from ssl_sec.figures.directions import draw_cosine_differences, draw_cosines, draw_direction_changes
from ssl_sec.figures.drawing import add_grid, add_legend, arm_look, legend_label, message, wrapped
from ssl_sec.figures.runs import RunRecord, training_figures
from ssl_sec.figures.training import features_figure
from ssl_sec.recipes.metric_learning.pictures import (
    draw_feature_maps,
    draw_retrieved,
    read_feature_maps,
    read_retrieved,
)
from ssl_sec.recipes.metric_learning.variation_figures import draw_distances, draw_variation
from ssl_sec.training.norms import NormHistogram, norm_histogram

logger = logging.getLogger(__name__)

# Of more classes, some are left out of the figure of their divergences.
_DRAWN_CLASSES = 100
# Letters of a line below their axes.
_LETTERS_BELOW = 60
# Of more arms, the numbers above the bars stand upright.
_MOST_LEVEL_NUMBERS = 3


def draw(run: RunRecord) -> dict[str, Figure]:
    """Draws the figures of the SEC and SFT papers: curves, t-SNE of the test images, and all that reports compare."""
    if not run.features_path.exists():  # the test images were not measured
        return training_figures(run)
    saved = torch.load(run.features_path, weights_only=True)
    embeddings, labels = saved["features"], saved["labels"]
    names = saved.get("class_names")  # not of a run that ended before they were kept
    names = list(map(str, range(int(labels.max()) + 1))) if names is None else names
    figures = training_figures(run)
    figures["features"] = features_figure(embeddings, labels, names, seed=0)
    for name, each in COMPARISONS.items():
        found = each.read(run.path / each.artifact)
        if found is not None:
            figures[name] = each.draw({run.path.name: [found]}, each.about[0].upper() + each.about[1:]).figure
    try:
        figures |= draw_variation(embeddings, labels, names)
    except DataError as error:  # an embedding of length 0 has no direction
        logger.warning("some pictures cannot be drawn: %s", error)
    return figures


def measure(run: RunRecord) -> dict[str, Any]:
    """The numbers of a finished run, by the names of their comparisons, as plain values.

    Embeddings are those of the test images; directions move between those of the watched training images.
    """
    if not run.features_path.exists():  # the test images were not measured
        return {}
    saved = torch.load(run.features_path, weights_only=True)
    embeddings, labels = saved["features"], saved["labels"]
    numbers: dict[str, Any] = {}
    if "training_norms" in saved:  # not of version 0.1
        numbers["training_norms"] = asdict(norm_histogram(saved["training_norms"], step=0))
    try:
        numbers["cosines"] = asdict(cosine_distributions(embeddings, labels, seed=0))
        numbers["distances"] = asdict(distance_distributions(embeddings, labels, seed=0))
        numbers["divergences"] = asdict(class_spread(embeddings, labels))
        numbers["direction_changes"] = [asdict(each) for each in _direction_changes(run)]
    except DataError as error:  # an embedding of length 0 has no direction
        logger.warning("some pictures cannot be drawn: %s", error)
    return numbers


def class_divergences_figure(arms: Mapping[str, ClassSpread], title: str) -> Figure:
    """The divergence of each class, its standard deviation over classes, and r_w (SFT, Fig. 4a and Eq. 8).

    Classes are sorted by their divergence in the first arm, whose mean over classes is a dashed line. Of more than 100,
    every second, third, … is drawn; the other numbers are of all classes.

    Args:
        arms: the class divergences of each run, by name; one or more, all of the same classes.
        title: title of the figure.
    """
    baseline, first = next(iter(arms.items()))
    assert all(one.classes == first.classes for one in arms.values()), "the arms have different classes"
    if not first.classes:
        return message("no class has two images")
    places = np.arange(0, len(first.classes), -(-len(first.classes) // _DRAWN_CLASSES))
    shown = np.argsort(first.divergences, kind="stable")[places]
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    figure.suptitle(title)
    class_axes, deviation_axes, energy_axes = figure.subplots(1, 3, width_ratios=(4, 1, 1))
    for number, (arm, spread) in enumerate(arms.items()):
        look = {"color": arm_look(number)[0], "marker": "o^s"[number % 3], "markersize": 4, "linestyle": "none"}
        class_axes.plot(places, np.array(spread.divergences)[shown], label=legend_label(arm), **look)
    mean_look = {"color": "0.3", "linestyle": "dashed", "linewidth": 1}
    class_axes.axhline(float(np.mean(first.divergences)), label=f"mean, {baseline}", **mean_look)
    sorted_by = wrapped(f"classes, sorted by divergence ({baseline})", _LETTERS_BELOW)
    class_axes.set(xlabel=sorted_by, ylabel="divergence (no unit)", ylim=(0, None))
    class_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_grid(class_axes)
    _draw_bars(deviation_axes, [float(np.std(one.divergences)) for one in arms.values()])
    deviation_axes.set(ylabel="standard deviation of the divergences")
    _draw_bars(energy_axes, [one.within_class_energy for one in arms.values()])
    energy_axes.set(ylabel="$r_w$ (no unit)", ylim=(0, 1.1))
    add_legend(figure, [class_axes, deviation_axes, energy_axes])
    return figure


def _draw_bars(axes: Axes, values: Sequence[float]) -> None:
    """A bar for each arm, in the order and the colours of the legend."""
    axes.margins(x=0.2, y=0.1)
    bars = axes.bar(range(len(values)), values, color=[arm_look(place)[0] for place in range(len(values))])
    axes.bar_label(bars, fmt="%.2g", padding=2, fontsize=8, rotation=90 if len(values) > _MOST_LEVEL_NUMBERS else 0)
    axes.set_xticks([])
    add_grid(axes)


def _draw_divergences(arms: Mapping[str, Sequence[ClassSpread]], title: str) -> Drawn:
    """Draws the mean over the runs of an arm of each class's divergence and of r_w."""
    first = next(iter(arms.values()))[0]
    for arm, runs in arms.items():
        if any(one.classes != first.classes for one in runs):
            raise DataError(f"{arm} has other test classes than {next(iter(arms))}: their divergences are not compared")
    shown = {
        arm: ClassSpread(
            first.classes,
            np.mean([one.divergences for one in runs], axis=0).tolist(),
            float(np.mean([one.within_class_energy for one in runs])),
        )
        for arm, runs in arms.items()
    }
    rows = [
        {"arm": arm, "class": label, "divergence": divergence, "within_class_energy": one.within_class_energy}
        for arm, one in shown.items()
        for label, divergence in zip(one.classes, one.divergences, strict=True)
    ]
    return Drawn(class_divergences_figure(shown, title), rows)


def _direction_changes(run: RunRecord) -> list[DirectionChanges]:
    changes: list[DirectionChanges] = []
    for earlier, later in itertools.pairwise(run.watched_paths()):
        before, after = (load_file(path)["embeddings"] for path in (earlier, later))
        if before.shape == after.shape:  # others were watched before a resume
            changes.append(direction_changes(before, after, int(earlier.stem), int(later.stem)))
    return changes


# Keyed by the names that the figures of `ssl_sec.papers` use.
COMPARISONS: Mapping[str, ComparisonFigure] = {
    "training_norms": ComparisonFigure(
        about="norms of the training images, after training",
        artifact=NUMBERS,
        read=numbers_of("training_norms", partial(from_plain, NormHistogram)),
        draw=draw_norms,
        draw_panels=draw_norm_panels,
    ),
    "cosines": ComparisonFigure(
        about="cosines of pairs of test images",
        artifact=NUMBERS,
        read=numbers_of("cosines", partial(from_plain, CosineDistributions)),
        draw=draw_cosines,
    ),
    "cosine_differences": ComparisonFigure(
        about="differences of cosines in triplets of test images",
        artifact=NUMBERS,
        read=numbers_of("cosines", partial(from_plain, CosineDistributions)),
        draw=draw_cosine_differences,
    ),
    "distances": ComparisonFigure(
        about="distances of pairs of test images",
        artifact=NUMBERS,
        read=numbers_of("distances", partial(from_plain, DistanceDistributions)),
        draw=draw_distances,
    ),
    "divergences": ComparisonFigure(
        about="divergence of the test classes",
        artifact=NUMBERS,
        read=numbers_of("divergences", partial(from_plain, ClassSpread)),
        draw=_draw_divergences,
    ),
    "direction_changes": ComparisonFigure(
        about="changes of direction of the watched images",
        artifact=NUMBERS,
        read=numbers_of("direction_changes", lambda listed: [from_plain(DirectionChanges, one) for one in listed]),
        draw=draw_direction_changes,
    ),
    "feature_maps": ComparisonFigure(
        about="the strongest channels of the last feature maps",
        artifact="examples.pt",
        read=read_feature_maps,
        draw=draw_feature_maps,
        pools_seeds=False,
    ),
    "retrieved": ComparisonFigure(
        about="images retrieved for test images",
        artifact="examples.pt",
        read=read_retrieved,
        draw=draw_retrieved,
        pools_seeds=False,
    ),
}
