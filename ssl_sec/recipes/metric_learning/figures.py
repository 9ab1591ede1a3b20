"""Figures of a metric-learning run: cosines of pairs, changes of directions, retrieved images, spread of classes.

First the numbers, as frozen dataclasses for JSON, then the figures of them.
Everything is about directions f̂ = f / ‖f‖: embeddings may have any norm, but zero and what is not finite have no
direction and are refused with a `DataError`.
"""

import itertools
import logging
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from safetensors.torch import load_file
from torch import Tensor

from ssl_sec.errors import DataError
from ssl_sec.evaluation.directions import (
    ClassSpread,
    CosineDistributions,
    DirectionChanges,
    Distribution,
    class_spread,
    cosine_distributions,
    direction_changes,
)
from ssl_sec.figures.drawing import GREEN, add_grid, arm_look, draw_distribution, message, percentages_between
from ssl_sec.figures.runs import RunRecord, training_figures
from ssl_sec.figures.training import features_figure
from ssl_sec.recipes.metric_learning.variation_figures import draw_variation

logger = logging.getLogger(__name__)


# From Tol's vibrant set: distinct from the green with colour blindness.
_RED = "#CC3311"


def draw(run: RunRecord) -> dict[str, Figure]:
    """Draws the figures of the SEC and SFT papers: curves, norms, cosines, directions, retrieved images, spread.

    Embeddings are those of the test images; directions move between those of the watched training images.
    """
    saved = torch.load(run.features_path, weights_only=True)
    embeddings, labels = saved["features"], saved["labels"]
    name = run.path.name
    figures = training_figures(run)
    figures["features"] = features_figure(embeddings, labels, tuple(map(str, labels.unique().tolist())), seed=0)
    examples = torch.load(run.examples_path, weights_only=True)
    figures["retrieved"] = retrieved_figure(examples["queries"], examples["neighbours"], examples["correct"])
    try:
        cosines = cosine_distributions(embeddings, labels, seed=0)
        figures["cosines"] = cosine_distributions_figure({name: cosines}, "Test images: cosines of pairs")
        figures["cosine_differences"] = cosine_difference_figure({name: cosines}, "Test images: triplets")
        spread = class_spread(embeddings, labels)
        figures["divergences"] = class_divergences_figure({name: spread}, "Test classes: divergence")
        figures |= draw_variation(embeddings, labels)
        changes = {name: _direction_changes(run)}
        figures["direction_changes"] = direction_changes_figure(changes, "Change of direction of the watched images")
    except DataError as error:  # an embedding of length 0 has no direction
        logger.warning("some pictures cannot be drawn: %s", error)
    return figures


def cosine_distributions_figure(arms: Mapping[str, CosineDistributions], title: str) -> Figure:
    """Cosines of positive and of negative pairs, a panel for each arm over common axes (SEC, Fig. 5b and c).

    Args:
        arms: the distributions of each run, by name; one or more.
        title: written above all of them.
    """
    figure = Figure(figsize=(max(4.6 * len(arms), 6.5), 4.0), layout="constrained")
    figure.suptitle(title)
    all_axes = figure.subplots(1, len(arms), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (arm, cosines) in zip(all_axes, arms.items(), strict=True):
        for place, (pairs, shown) in enumerate((("negative", cosines.negatives), ("positive", cosines.positives))):
            _draw(axes, shown, shown.edges, place, f"{pairs} pairs{_mean_and_std(shown)}")
        axes.set(xlabel="cosine of the pair (no unit)", title=arm)
        axes.legend(title="mean ± standard deviation", frameon=False)
        add_grid(axes)
    shown = [pairs for one in arms.values() for pairs in (one.positives, one.negatives)]
    all_axes[0].set(ylabel="share of pairs in a bin (%)", xlim=_occupied(shown))
    return figure


def cosine_difference_figure(arms: Mapping[str, CosineDistributions], title: str) -> Figure:
    """The differences cos θ_ap − cos θ_an over triplets, which ought to be above 0, of several arms (SEC, Fig. 5d).

    Args:
        arms: the distributions of each run, by name; one or more.
        title: written above.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, (arm, cosines) in enumerate(arms.items()):
        note = "no triplet" if cosines.violations is None else f"{100 * cosines.violations:.1f} % not above 0"
        _draw(axes, cosines.differences, cosines.differences.edges, place, f"{arm}: {note}")
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set(
        xlabel=r"$\cos\theta_{ap} - \cos\theta_{an}$ (no unit)",
        ylabel="share of triplets in a bin (%)",
        title=title,
        xlim=_occupied([one.differences for one in arms.values()]),
    )
    axes.legend(frameon=False)
    add_grid(axes)
    return figure


def direction_changes_figure(arms: Mapping[str, Sequence[DirectionChanges]], title: str, num_bins: int = 40) -> Figure:
    """How far directions moved from one step to another, a panel for each pair of steps (SEC, Fig. 7).

    A panel ends where it holds 99 % of each arm's images, since a few move much farther than the others; the
    variance is of all of them.

    Args:
        arms: the changes of each run, by name; a panel shows the arms that have its two steps.
        title: written above all of them.
        num_bins: common bins of the arms in a panel.
    """
    panels = sorted({(one.first_step, one.last_step) for changes in arms.values() for one in changes})
    if not panels:
        return message("no embeddings of two steps were kept")
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(4.4 * columns, 6.0), 3.0 * rows + 0.4), layout="constrained")
    figure.suptitle(title)
    all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
    in_thousands = EngFormatter(sep="")
    for axes, panel in zip(all_axes, panels, strict=False):
        shown = {
            place: (arm, one.changes)
            for place, (arm, changes) in enumerate(arms.items())
            for one in changes
            if (one.first_step, one.last_step) == panel
        }
        low = min(one.edges[0] for _, one in shown.values())
        high = max(_edge_above(one, 0.99) for _, one in shown.values())
        edges = np.linspace(low, high, num_bins + 1)
        for place, (arm, one) in shown.items():
            note = "no image" if one.variance is None else f"variance {one.variance:.2g}"
            _draw(axes, one, edges.tolist(), place, f"{arm}: {note}")
        axes.set(
            xlabel=r"direction change $1 - \cos\theta$ (no unit), 99 % of images", ylabel="share of images in a bin (%)"
        )
        axes.set_title("step " + " → ".join(in_thousands(step) for step in panel))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.set_ylim(top=axes.get_ylim()[1] * (1.05 + 0.1 * len(shown)))  # room for the legend
        axes.legend(loc="upper right", frameon=False, fontsize="small").set_in_layout(False)  # long names fit
        add_grid(axes)
    for axes in all_axes[len(panels) :]:
        axes.remove()
    return figure


def retrieved_figure(
    query_images: UInt8[Tensor, "queries channels height width"],
    retrieved_images: UInt8[Tensor, "queries k channels height width"],
    correct: Bool[Tensor, "queries k"],
    query_names: Sequence[str] | None = None,
) -> Figure:
    """A row for each query: its image and those retrieved for it, nearest first (SEC, Fig. 9).

    An image of the query's class has a green frame and a tick, another a red frame and a cross.

    Args:
        query_images: grey or RGB, 0-255.
        retrieved_images: of each query, nearest first.
        correct: whether a retrieved image has its query's class.
        query_names: written beside each query, for example its class.
    """
    num_queries, num_retrieved = correct.shape
    assert query_names is None or len(query_names) == num_queries, f"{num_queries} queries, {query_names} as names"
    if not correct.numel():
        return message("no images were retrieved")
    height, width = query_images.shape[2:]
    cell_inches = 1.35
    names_inches = 0.0 if query_names is None else 1.4
    size = (cell_inches * (1 + num_retrieved) + names_inches, cell_inches * height / width * num_queries + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(num_queries, 1 + num_retrieved, squeeze=False)
    for row in range(num_queries):
        _show_image(grid[row, 0], query_images[row], "0.35", 1.5)
        if query_names is not None:
            label = {"rotation": 0, "ha": "right", "va": "center", "fontsize": 9}
            grid[row, 0].set_ylabel(textwrap.fill(query_names[row], 18), **label)
        for place in range(num_retrieved):
            axes, is_correct = grid[row, 1 + place], bool(correct[row, place])
            colour = GREEN if is_correct else _RED
            _show_image(axes, retrieved_images[row, place], colour, 4.0)
            box = {"facecolor": colour, "edgecolor": "none", "boxstyle": "square,pad=0.15"}
            mark = "✓" if is_correct else "✗"
            axes.text(0.97, 0.97, mark, transform=axes.transAxes, ha="right", va="top", color="white", bbox=box)
    grid[0, 0].set_title("query")
    for place in range(num_retrieved):
        grid[0, 1 + place].set_title(f"{place + 1}")
    return figure


def class_divergences_figure(arms: Mapping[str, ClassSpread], title: str, max_classes: int = 100) -> Figure:
    """The divergence of each class, its standard deviation over classes, and r_w (SFT, Fig. 4a and Eq. 8).

    Classes are sorted by their divergence in the first arm, whose mean over classes is a dashed line.

    Args:
        arms: the spread of each run's classes, by name; one or more, all of the same classes.
        title: written above all of them.
        max_classes: of more than that, every second, third, … one is shown; the other numbers are of all of them.
    """
    baseline, first = next(iter(arms.items()))
    assert all(one.classes == first.classes for one in arms.values()), "the arms have different classes"
    if not first.classes:
        return message("there is no image of any class")
    places = np.arange(0, len(first.classes), -(-len(first.classes) // max_classes))
    shown = np.argsort(first.divergences, kind="stable")[places]
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    figure.suptitle(title)
    class_axes, deviation_axes, energy_axes = figure.subplots(1, 3, width_ratios=(4, 1, 1))
    for number, (arm, spread) in enumerate(arms.items()):
        look = {"color": arm_look(number)[0], "marker": "o^s"[number % 3], "markersize": 4, "linestyle": "none"}
        class_axes.plot(places, np.array(spread.divergences)[shown], label=arm, **look)
    mean_look = {"color": "0.3", "linestyle": "dashed", "linewidth": 1}
    class_axes.axhline(float(np.mean(first.divergences)), label=f"mean, {baseline}", **mean_look)
    class_axes.set(xlabel=f"classes, sorted by divergence ({baseline})", ylabel="divergence (no unit)", ylim=(0, None))
    class_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_grid(class_axes)
    _draw_bars(deviation_axes, [float(np.std(one.divergences)) for one in arms.values()])
    deviation_axes.set(ylabel="standard deviation of the divergences")
    _draw_bars(energy_axes, [one.within_class_energy for one in arms.values()])
    energy_axes.set(ylabel="$r_w$ (no unit)", ylim=(0, 1.1))
    figure.legend(loc="outside lower center", frameon=False, ncols=min(len(arms) + 1, 4))
    return figure


def _mean_and_std(distribution: Distribution) -> str:
    if distribution.mean is None or distribution.variance is None:
        return ": none"
    return f": {distribution.mean:.2f} ± {distribution.variance**0.5:.2f}"


def _draw(axes: Axes, distribution: Distribution, edges: Sequence[float], place: int, label: str) -> None:
    percentages = np.zeros(len(edges) - 1)
    if any(distribution.counts):
        percentages = percentages_between(distribution.edges, distribution.counts, edges)
    draw_distribution(axes, percentages.tolist(), edges, place, label)


def _edge_above(distribution: Distribution, share: float) -> float:
    """The smallest edge with at least a share of the values below it; the last one without a value."""
    below = np.cumsum(distribution.counts)
    return (
        distribution.edges[1 + int(np.searchsorted(below, share * below[-1]))] if below[-1] else distribution.edges[-1]
    )


def _occupied(distributions: Sequence[Distribution]) -> tuple[float, float]:
    """Bounds of the bins that hold anything, and one bin more on each side; the distributions have the same edges."""
    edges = distributions[0].edges
    held = np.flatnonzero(np.sum([one.counts for one in distributions], axis=0))
    if not len(held):
        return edges[0], edges[-1]
    return edges[max(held[0] - 1, 0)], edges[min(held[-1] + 2, len(edges) - 1)]


def _show_image(axes: Axes, image: Tensor, frame: str, frame_points: float) -> None:
    axes.imshow(image.cpu().permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=255)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=frame, linewidth=frame_points)


def _draw_bars(axes: Axes, values: Sequence[float]) -> None:
    """A bar for each arm, in the order and the colours of the legend."""
    axes.margins(x=0.2, y=0.1)
    bars = axes.bar(range(len(values)), values, color=[arm_look(place)[0] for place in range(len(values))])
    axes.bar_label(bars, fmt="%.2g", padding=2, fontsize=8)
    axes.set_xticks([])
    add_grid(axes)


def _direction_changes(run: RunRecord) -> list[DirectionChanges]:
    changes: list[DirectionChanges] = []
    for earlier, later in itertools.pairwise(run.watched_paths()):
        before, after = (load_file(path)["embeddings"] for path in (earlier, later))
        if before.shape == after.shape:  # others were watched before a resume
            changes.append(direction_changes(before, after, int(earlier.stem), int(later.stem)))
    return changes
