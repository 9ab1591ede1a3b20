"""Figures of a run: curves, the distribution of norms, the features in two dimensions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

from ssl_sec.errors import counted
from ssl_sec.figures.drawing import (
    BLUE,
    VERMILION,
    add_grid,
    add_legend,
    arm_look,
    draw_distribution,
    label_steps,
    legend_below,
    message,
    percentages_between,
    plain,
    small_plots,
    verbatim,
)
from ssl_sec.metrics import metric_label
from ssl_sec.seeding import derived_seed
from ssl_sec.training.norms import NormHistogram

# Tol's muted set with a darker grey: distinct with every common colour blindness. Two markers for each colour are
# enough for 20 classes.
_CLASS_COLOURS = (
    "#332288",
    "#CC6677",
    "#117733",
    "#88CCEE",
    "#DDCC77",
    "#882255",
    "#44AA99",
    "#AA4499",
    "#999933",
    "#777777",
)
_CLASS_MARKERS = ("o", "^")
_MOST_NAMED_CLASSES = len(_CLASS_COLOURS) * len(_CLASS_MARKERS)
# A curve of more points has no markers; without them, a single point, or one between two gaps, would not show.
_MOST_MARKED = 12


@dataclass(frozen=True)
class Curve:
    """A metric over the steps, of one run or as the mean of several.

    Attributes:
        steps: global steps, ascending.
        values: value at each step; not finite where there is a gap.
        deviations: standard deviation over the runs at each step; None for a single run.
    """

    steps: list[int]
    values: list[float]
    deviations: list[float] | None = None

    def __post_init__(self) -> None:
        assert len(self.steps) == len(self.values), "a curve has one value for each step"


def curves_figure(history: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """A small plot for each metric over the global steps.

    A mean, as `train/norm_mean`, is drawn with its standard deviation, `train/norm_std`, as a band around it, cut at 0.

    Args:
        history: the points (step, value) of each metric; a metric without points is left out, and a value
            that is not finite leaves a gap.
    """
    shown = {name: dict(points) for name, points in history.items() if points}
    means = [name for name in shown if name.endswith("_mean") and _deviation_of(name) in shown]
    deviations = {name: shown.pop(_deviation_of(name)) for name in means}
    if not shown:
        return message("no metric was recorded")
    figure, all_axes = small_plots(len(shown), (4.2, 2.8))
    for axes, (name, points) in zip(all_axes, shown.items(), strict=True):
        steps = np.array(sorted(points))
        values = np.array([points[step] for step in steps])
        axes.plot(steps, values, color=BLUE, label="mean", **_line(len(steps)))
        if not np.isfinite(values).any():
            axes.text(0.5, 0.5, "no value is finite", ha="center", va="center", transform=axes.transAxes)
            axes.set_yticks([])
        if name in deviations:
            band = np.array([deviations[name].get(step, np.nan) for step in steps])
            # Norms and turns are never below 0.
            low, high = np.maximum(values - band, 0), values + band
            axes.fill_between(steps, low, high, color=BLUE, alpha=0.25, linewidth=0, label="± std")
            axes.legend(frameon=False)
        axes.set_ylabel(metric_label(name))
        if axes is not all_axes[0]:
            axes.sharex(all_axes[0])
        label_steps(axes)
        add_grid(axes)
    return figure


def _line(num_points: int) -> Mapping[str, Any]:
    """The look of a curve, beside its colour and style."""
    return {"marker": "o" if num_points <= _MOST_MARKED else None, "markersize": 3.5, "linewidth": 1.5}


def _deviation_of(mean: str) -> str:
    return f"{mean.removesuffix('_mean')}_std"


def norm_histograms_figure(histograms: Sequence[NormHistogram], num_bins: int = 80) -> Figure:
    """How the distribution of the embeddings' norms changes during training.

    Left, a heat map over steps and norms; right, the first and the last distribution. The recorded histograms have
    their own bins and are converted to common ones, as if evenly filled.

    Args:
        histograms: histograms in any order; the later of two with the same step is used.
        num_bins: number of common bins between the smallest and the largest edge.
    """
    by_step = {histogram.step: histogram for histogram in histograms if sum(histogram.counts)}
    if not by_step:
        return message("no norms were recorded")
    steps = sorted(by_step)
    edges = np.linspace(
        min(histogram.edges[0] for histogram in by_step.values()),
        max(histogram.edges[-1] for histogram in by_step.values()),
        num_bins + 1,
    )
    percentages = np.stack([percentages_between(by_step[step].edges, by_step[step].counts, edges) for step in steps])
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    heat_axes, outline_axes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))

    # The square root keeps a wide distribution visible next to a narrow one, which the constraint makes.
    mesh = heat_axes.pcolormesh(
        _cell_bounds(steps),
        edges,
        np.ma.masked_equal(percentages.T, 0),
        cmap="viridis_r",
        norm=PowerNorm(0.5, vmin=0),
        rasterized=True,
    )
    # Between the two, its label would read as that of the right plot.
    figure.colorbar(mesh, ax=(heat_axes, outline_axes), label="share of embeddings in a bin (%)")
    label_steps(heat_axes)
    heat_axes.set_ylabel("embedding norm (L2)")

    ends = {steps[0]: VERMILION, steps[-1]: BLUE}
    for step, colour in ends.items():
        outline_axes.stairs(
            percentages[steps.index(step)],
            edges,
            orientation="horizontal",
            color=colour,
            linewidth=1.5,
            label=f"step {step:,}",
        )
    outline_axes.set_xlabel("share in a bin (%)")
    outline_axes.legend(frameon=False)
    add_grid(outline_axes)
    return figure


def norm_distributions(
    arms: Mapping[str, Sequence[NormHistogram]], num_bins: int = 80
) -> tuple[list[float], dict[str, list[float]]]:
    """The distributions of several arms over common bins, in percent, each the mean over the runs of the arm.

    Args:
        arms: the histograms of each arm's runs, one or more, none empty.
        num_bins: number of common bins between the smallest and the largest edge.

    Returns:
        The edges of the bins, and the share in each bin of every arm (%).
    """
    everything = [histogram for histograms in arms.values() for histogram in histograms]
    low, high = min(one.edges[0] for one in everything), max(one.edges[-1] for one in everything)
    edges = np.linspace(low, high, num_bins + 1)
    shares = {
        arm: np.mean([percentages_between(one.edges, one.counts, edges) for one in histograms], axis=0).tolist()
        for arm, histograms in arms.items()
    }
    return edges.tolist(), shares


def draw_norms_on(axes: Axes, edges: Sequence[float], shares: Mapping[str, Sequence[float]], title: str) -> None:
    """Draws the distributions of the norms of several arms; see `norm_distributions_figure`."""
    for place, (arm, values) in enumerate(shares.items()):
        draw_distribution(axes, values, edges, place, arm)
    axes.set(xlabel="embedding norm (L2)", ylabel="share of embeddings in a bin (%)", title=title)
    add_grid(axes)


def norm_distributions_figure(edges: Sequence[float], shares: Mapping[str, Sequence[float]], title: str) -> Figure:
    """The distributions of the norms of several arms (SEC, Figs. 1 and 5a).

    Args:
        edges: bounds of the bins, ascending; one more than there are bins.
        shares: share of each arm in each bin, in percent.
        title: title of the figure.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    draw_norms_on(axes, edges, shares, title)
    add_legend(figure, [axes])
    return figure


def compared_curves_figure(panels: Mapping[str, Mapping[str, Curve]], title: str, metric: str | None = None) -> Figure:
    """A small plot for each metric, with a curve for each arm and its standard deviation over runs as a band.

    Args:
        panels: metric -> arm -> curve; a metric without curves is left out.
        title: title of the figure.
        metric: metric of all panels, whose keys are then their titles; None if the keys are metrics.
    """
    shown = {panel: curves for panel, curves in panels.items() if curves}
    if not shown:
        return message("the runs have no curves")
    arms = list(dict.fromkeys(arm for curves in shown.values() for arm in curves))
    figure, all_axes = small_plots(len(shown), (4.2, 2.8), least_width=6.0, margin=0.3)
    figure.suptitle(title)
    handles = {}
    for axes, (panel, curves) in zip(all_axes, shown.items(), strict=True):
        for arm, curve in curves.items():
            colour, style = arm_look(arms.index(arm))
            look = {"color": colour, "linestyle": style, **_line(len(curve.steps))}
            (handles[arm],) = axes.plot(curve.steps, curve.values, **look)
            if curve.deviations is not None:
                values, deviations = np.array(curve.values), np.array(curve.deviations)
                band = (values - deviations, values + deviations)
                axes.fill_between(curve.steps, *band, color=colour, alpha=0.2, linewidth=0)
        axes.set_ylabel(metric_label(metric or panel))
        if metric is not None:
            axes.set_title(verbatim(panel))
        label_steps(axes)
        add_grid(axes)
    legend_below(figure, {arm: handles[arm] for arm in arms})
    return figure


def features_figure(
    features: Float[Tensor, "images dim"],
    labels: Int64[Tensor, " images"],
    class_names: Sequence[str],
    seed: int,
    max_points: int = 2000,
) -> Figure:
    """The directions of the features in two dimensions by t-SNE, coloured by class.

    With more than 20 classes a colour bar over the labels replaces the legend. With fewer than five images, a single
    dimension, or features that are equal or not finite, the figure has a message instead.

    Args:
        features: one row for each image, of any norm.
        labels: class of each image.
        class_names: name of each class; none for images without labels, which have one colour.
        seed: seed of t-SNE and of the choice of the images shown.
        max_points: the largest number of images shown.
    """
    generator = torch.Generator().manual_seed(derived_seed(seed, "t-SNE"))
    chosen = torch.randperm(len(labels), generator=generator)[:max_points]
    directions = functional.normalize(features.detach().cpu()[chosen].float(), dim=1).numpy()
    point_labels = labels.cpu()[chosen].numpy()
    if len(chosen) < 5 or directions.shape[1] < 2:
        return message(
            f"{counted(len(chosen), 'image')} of {counted(directions.shape[1], 'feature')}: too few for t-SNE"
        )
    if not np.isfinite(directions).all() or directions.std(axis=0).max() < 1e-6:
        return message("the features are not finite, or all have the same direction")
    from sklearn.manifold import TSNE  # scikit-learn takes a second to import

    # Half of scikit-learn's default of iterations: a run waits for this figure at its end, and it hardly changes.
    points = TSNE(
        perplexity=min(30.0, (len(chosen) - 1) / 3),
        init="pca",
        learning_rate="auto",
        max_iter=500,
        random_state=seed % 2**32,
    ).fit_transform(directions)

    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    if class_names:
        title = f"{counted(len(chosen), 'image')} of {counted(len(np.unique(point_labels)), 'class')}"
        scatter_classes(figure, axes, points, point_labels, class_names)
    else:
        title = f"{counted(len(chosen), 'image')} without labels"
        axes.scatter(*points.T, s=14, color=BLUE, linewidth=0, alpha=0.6)
    axes.set(xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)", aspect="equal", adjustable="datalim")
    axes.set_title(title)
    add_grid(axes)
    return figure


def scatter_classes(
    figure: Figure, axes: Axes, points: np.ndarray, labels: np.ndarray, class_names: Sequence[str]
) -> None:
    """Draws points in the colours of their classes, with a legend beside them, or a colour bar for many classes.

    Args:
        figure: figure of the axes, with a constrained layout.
        axes: axes to draw on.
        points: coordinates, with shape [images, 2].
        labels: class of each point.
        class_names: name of each class.
    """
    if len(class_names) > _MOST_NAMED_CLASSES:
        dots = axes.scatter(*points.T, s=14, c=labels, cmap="viridis", linewidth=0)
        figure.colorbar(dots, ax=axes, label="number of the class")
        return
    dots = [
        axes.scatter(
            *points[labels == label].T,
            s=14,
            color=_CLASS_COLOURS[label % len(_CLASS_COLOURS)],
            marker=_CLASS_MARKERS[label // len(_CLASS_COLOURS)],
            linewidth=0,
            alpha=0.8,
        )
        for label in range(len(class_names))
    ]
    # As labels of the points, names that begin with an underscore would be left out.
    names = list(map(plain, class_names))
    figure.legend(dots, names, loc="outside right center", frameon=False, markerscale=2)


def _cell_bounds(steps: Sequence[int]) -> np.ndarray:
    """Bounds of cells around `steps`: halfway between neighbours, and as far beyond the first and last."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (np.array(steps[:-1]) + np.array(steps[1:])) / 2
    return np.array([2 * steps[0] - middles[0], *middles, 2 * steps[-1] - middles[-1]])
