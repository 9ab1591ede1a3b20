"""What a metric-learning run shows: cosines of pairs, how far directions move, retrieved images, spread of classes.

First the numbers, as frozen dataclasses that JSON can hold, then the figures made of them, as in `diagnostics`.
Everything is about directions f̂ = f / ‖f‖: embeddings may have any norm, but zero and what is not finite have no
direction and are refused with a `DataError`.
"""

import itertools
import logging
from collections.abc import Sequence

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
from ssl_sec.figures.drawing import (
    GREEN,
    VERMILION,
    add_grid,
    draw_distribution,
    message,
    percentages_between,
    small_plots,
)
from ssl_sec.figures.runs import RunRecord, training_figures
from ssl_sec.figures.training import features_figure

logger = logging.getLogger(__name__)


# Of Tol's vibrant set, which a colour-blind reader tells from the green.
_RED = "#CC3311"


def draw(run: RunRecord) -> dict[str, Figure]:
    """Draws what the SEC and SFT papers show of a run: curves, norms, cosines, directions, retrieved images, spread.

    Embeddings are those of the test images; directions move between those of the watched training images.
    """
    saved = torch.load(run.features_path, weights_only=True)
    embeddings, labels = saved["features"], saved["labels"]
    figures = training_figures(run)
    figures["features"] = features_figure(embeddings, labels, tuple(map(str, labels.unique().tolist())), seed=0)
    examples = torch.load(run.examples_path, weights_only=True)
    figures["retrieved"] = retrieved_figure(examples["queries"], examples["neighbours"], examples["correct"])
    try:
        cosines = cosine_distributions(embeddings, labels, seed=0)
        figures["cosines"] = cosine_distributions_figure(cosines, "Test images: cosines of pairs")
        figures["cosine_differences"] = cosine_difference_figure(cosines, "Test images: triplets")
        spread = class_spread(embeddings, labels)
        figures["divergences"] = class_divergences_figure(spread, "Test classes: divergence")
        changes = _direction_changes(run)
        figures["direction_changes"] = direction_changes_figure(changes, "Change of direction of the watched images")
    except DataError as error:  # an embedding of length 0 has no direction
        logger.warning("some pictures cannot be drawn: %s", error)
    return figures


def cosine_distributions_figure(cosines: CosineDistributions, title: str) -> Figure:
    """Cosines of positive and of negative pairs (SEC, Fig. 5b and c).

    Args:
        cosines: their distributions.
        title: written above.
    """
    figure = Figure(figsize=(6.5, 4.0), layout="constrained")
    axes = figure.subplots()
    for place, (kind, pairs) in enumerate((("negative", cosines.negatives), ("positive", cosines.positives))):
        _draw(axes, pairs, pairs.edges, place, f"{kind} pairs{_mean_and_std(pairs)}")
    bounds = _occupied([cosines.positives, cosines.negatives])
    axes.set(xlabel="cosine of the pair (no unit)", ylabel="share of pairs in a bin (%)", title=title, xlim=bounds)
    axes.legend(title="mean ± standard deviation", frameon=False)
    add_grid(axes)
    return figure


def cosine_difference_figure(cosines: CosineDistributions, title: str) -> Figure:
    """The differences cos θ_ap − cos θ_an over triplets, which ought to be above 0 (SEC, Fig. 5d).

    Args:
        cosines: their distributions.
        title: written above.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    share = "no triplet" if cosines.violations is None else f"{100 * cosines.violations:.1f} % not above 0"
    _draw(axes, cosines.differences, cosines.differences.edges, 0, share)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set(
        xlabel=r"$\cos\theta_{ap} - \cos\theta_{an}$ (no unit)",
        ylabel="share of triplets in a bin (%)",
        title=title,
        xlim=_occupied([cosines.differences]),
    )
    axes.legend(frameon=False)
    add_grid(axes)
    return figure


def direction_changes_figure(changes: Sequence[DirectionChanges], title: str, num_bins: int = 40) -> Figure:
    """How far directions moved from one step to another, a panel for each pair of steps (SEC, Fig. 7).

    A panel ends where it holds 99 % of the images, since a few move much farther than the others; the variance is of
    all of them.

    Args:
        changes: those of each pair of steps.
        title: written above all of them.
        num_bins: of a panel.
    """
    if not changes:
        return message("no embeddings of two steps were kept")
    figure, all_axes = small_plots(len(changes), (4.4, 3.0), least_width=6.0, margin=0.4)
    figure.suptitle(title)
    in_thousands = EngFormatter(sep="")
    in_order = sorted(changes, key=lambda one: (one.first_step, one.last_step))
    for axes, one in zip(all_axes, in_order, strict=True):
        edges = np.linspace(one.changes.edges[0], _edge_above(one.changes, 0.99), num_bins + 1)
        variance = "no image" if one.changes.variance is None else f"variance {one.changes.variance:.2g}"
        _draw(axes, one.changes, edges.tolist(), 0, variance)
        axes.set(
            xlabel=r"direction change $1 - \cos\theta$ (no unit), 99 % of images", ylabel="share of images in a bin (%)"
        )
        axes.set_title(f"step {in_thousands(one.first_step)} → {in_thousands(one.last_step)}")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.set_ylim(top=axes.get_ylim()[1] * 1.15)  # room for the legend
        axes.legend(loc="upper right", frameon=False)
        add_grid(axes)
    return figure


def retrieved_figure(
    query_images: UInt8[Tensor, "queries channels height width"],
    retrieved_images: UInt8[Tensor, "queries k channels height width"],
    correct: Bool[Tensor, "queries k"],
) -> Figure:
    """A row for each query: its image and those retrieved for it, nearest first (SEC, Fig. 9).

    An image of the query's class has a green frame and a tick, another a red frame and a cross.

    Args:
        query_images: grey or RGB, 0-255.
        retrieved_images: of each query, nearest first.
        correct: whether a retrieved image has its query's class.
    """
    num_queries, num_retrieved = correct.shape
    if not correct.numel():
        return message("no images were retrieved")
    height, width = query_images.shape[2:]
    cell_inches = 1.35
    size = (cell_inches * (1 + num_retrieved), cell_inches * height / width * num_queries + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(num_queries, 1 + num_retrieved, squeeze=False)
    for row in range(num_queries):
        _show_image(grid[row, 0], query_images[row], "0.35", 1.5)
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


def class_divergences_figure(spread: ClassSpread, title: str, max_classes: int = 100) -> Figure:
    """The divergence of each class, sorted, with their mean; their standard deviation, and r_w (SFT, Fig. 4a, Eq. 8).

    Args:
        spread: of the classes.
        title: written above all of them.
        max_classes: of more than that, every second, third, … one is shown; the other numbers are of all of them.
    """
    if not spread.classes:
        return message("there is no image of any class")
    places = np.arange(0, len(spread.classes), -(-len(spread.classes) // max_classes))
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    figure.suptitle(title)
    class_axes, deviation_axes, energy_axes = figure.subplots(1, 3, width_ratios=(4, 1, 1))
    class_axes.plot(
        places, np.sort(spread.divergences)[places], color=VERMILION, marker="o", markersize=4, linestyle="none"
    )
    mean = float(np.mean(spread.divergences))
    class_axes.axhline(mean, label=f"mean {mean:.2g}", color="0.3", linestyle="dashed", linewidth=1)
    class_axes.legend(frameon=False)
    class_axes.set(xlabel="classes, sorted by divergence", ylabel="divergence (no unit)", ylim=(0, None))
    class_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_grid(class_axes)
    _draw_bar(deviation_axes, float(np.std(spread.divergences)))
    deviation_axes.set(ylabel="standard deviation of the divergences")
    _draw_bar(energy_axes, spread.within_class_energy)
    energy_axes.set(ylabel="$r_w$ (no unit)", ylim=(0, 1.1))
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


def _draw_bar(axes: Axes, value: float) -> None:
    axes.margins(x=0.2, y=0.1)
    axes.bar_label(axes.bar([0], [value], color=VERMILION), fmt="%.2g", padding=2, fontsize=8)
    axes.set_xticks([])
    add_grid(axes)


def _direction_changes(run: RunRecord) -> list[DirectionChanges]:
    changes: list[DirectionChanges] = []
    for earlier, later in itertools.pairwise(run.watched_paths()):
        before, after = (load_file(path)["embeddings"] for path in (earlier, later))
        if before.shape == after.shape:  # others were watched before a resume
            changes.append(direction_changes(before, after, int(earlier.stem), int(later.stem)))
    return changes
