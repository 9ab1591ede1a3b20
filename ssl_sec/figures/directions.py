"""Figures of cosines and of changes of direction, of one run or of several.

Everything is about directions f̂ = f / ‖f‖: embeddings may have any norm.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from ssl_sec.evaluation.directions import CosineDistributions, DirectionChanges, Distribution, PairCosines, pooled
from ssl_sec.figures.comparing import Drawn, Rows, bins
from ssl_sec.figures.drawing import (
    LETTERS_IN_PANEL,
    add_grid,
    add_legend,
    arm_look,
    arm_panels,
    draw_distribution,
    legend_below,
    message,
    percentages_between,
    small_plots,
    verbatim,
)

# Arms whose variances fit into a panel.
_MOST_NOTES = 6


def cosine_distributions_figure(arms: Mapping[str, PairCosines], title: str) -> Figure:
    """Cosines of positive and of negative pairs, a panel for each arm over common axes (SEC, Fig. 5b and c).

    Args:
        arms: the distributions of each run, by name; one or more.
        title: title above all panels.
    """
    figure, all_axes = arm_panels(list(arms), title, "share of pairs in a bin (%)")
    for axes, cosines in zip(all_axes, arms.values(), strict=True):
        for place, (pairs, shown) in enumerate((("negative", cosines.negatives), ("positive", cosines.positives))):
            _draw(axes, shown, shown.edges, place, f"{pairs} pairs{_mean_and_std(shown)}")
        axes.set(xlabel="cosine of the pair (no unit)")
        axes.legend(title="mean ± standard deviation", loc="upper left", frameon=False)
    shown = [pairs for one in arms.values() for pairs in (one.positives, one.negatives)]
    all_axes[0].set(xlim=_occupied(shown))
    all_axes[0].set_ylim(0, all_axes[0].get_ylim()[1] * 1.3)  # room for the legends
    return figure


def cosine_difference_figure(arms: Mapping[str, CosineDistributions], title: str) -> Figure:
    """The differences cos θ_ap − cos θ_an over triplets, which should be above 0, for several arms (SEC, Fig. 5d).

    Args:
        arms: the distributions of each run, by name; one or more.
        title: title of the figure.
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
        ylim=(0, axes.get_ylim()[1] * 1.3),  # room for the legend of a few arms
    )
    add_legend(figure, [axes])
    add_grid(axes)
    return figure


def direction_changes_figure(arms: Mapping[str, Sequence[DirectionChanges]], title: str, num_bins: int = 40) -> Figure:
    """How far directions moved from one step to another, a panel for each pair of steps (SEC, Fig. 7).

    A panel ends where it holds 99 % of each arm's images, since a few move much farther than the others; the
    variance, which it names for up to six arms, is of all of them.

    Args:
        arms: the changes of each run, by name; a panel shows the arms that have its two steps.
        title: title above all panels.
        num_bins: number of common bins of the arms in a panel.
    """
    panels = sorted({(one.first_step, one.last_step) for changes in arms.values() for one in changes})
    if not panels:
        return message("no embeddings of two steps were kept")
    figure, all_axes = small_plots(len(panels), (4.4, 3.0), least_width=6.0, margin=0.4)
    figure.suptitle(title)
    in_thousands = EngFormatter(sep="")
    is_few = len(arms) <= _MOST_NOTES
    fits = is_few and max(map(len, arms)) <= LETTERS_IN_PANEL - len(": variance 0.0001")
    for axes, panel in zip(all_axes, panels, strict=True):
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
            _draw(axes, one, edges.tolist(), place, f"{verbatim(arm)}: {note}" if fits else note)
        axes.set(
            xlabel=r"direction change $1 - \cos\theta$ (no unit), 99 % of images", ylabel="share of images in a bin (%)"
        )
        axes.set_title("step " + " → ".join(in_thousands(step) for step in panel))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        if is_few:
            axes.set_ylim(top=axes.get_ylim()[1] * (1.05 + 0.15 * len(shown)))  # room for the legend
            axes.legend(loc="upper right", frameon=False, fontsize="small").set_in_layout(False)  # long names fit
        add_grid(axes)
    if not fits:
        looks = map(arm_look, range(len(arms)))
        lines = [Line2D([], [], color=colour, linestyle=style) for colour, style in looks]
        legend_below(figure, dict(zip(arms, lines, strict=True)))
    return figure


def _mean_and_std(distribution: Distribution) -> str:
    if distribution.mean is None or distribution.variance is None:
        return ": none"
    return f": {distribution.mean:z.2f} ± {distribution.variance**0.5:.2f}"


def _draw(axes: Axes, distribution: Distribution, edges: Sequence[float], place: int, label: str) -> None:
    percentages = np.zeros(len(edges) - 1)
    if any(distribution.counts):
        percentages = percentages_between(distribution.edges, distribution.counts, edges)
    draw_distribution(axes, percentages.tolist(), edges, place, label)


def _edge_above(distribution: Distribution, share: float) -> float:
    """The smallest edge with at least a share of the values below it; the last edge if there are no values."""
    below = np.cumsum(distribution.counts)
    return (
        distribution.edges[1 + int(np.searchsorted(below, share * below[-1]))] if below[-1] else distribution.edges[-1]
    )


def _occupied(distributions: Sequence[Distribution]) -> tuple[float, float]:
    """Bounds of the occupied bins, with one bin more on each side; the distributions have the same edges."""
    edges = distributions[0].edges
    held = np.flatnonzero(np.sum([one.counts for one in distributions], axis=0))
    if not len(held):
        return edges[0], edges[-1]
    return edges[max(held[0] - 1, 0)], edges[min(held[-1] + 2, len(edges) - 1)]


def draw_cosines(arms: Mapping[str, Sequence[PairCosines]], title: str) -> Drawn:
    """Draws the cosines of pairs, of all runs of an arm together."""
    shown = {arm: _pairs(runs) for arm, runs in arms.items()}
    rows = [
        row
        for arm, one in shown.items()
        for pairs, distribution in (("positive", one.positives), ("negative", one.negatives))
        for row in _bins(arm, distribution, pairs=pairs)
    ]
    return Drawn(cosine_distributions_figure(shown, title), rows)


def draw_cosine_differences(arms: Mapping[str, Sequence[CosineDistributions]], title: str) -> Drawn:
    """Draws the differences of cosines, of all runs of an arm together."""
    shown: dict[str, CosineDistributions] = {}
    rows: Rows = []
    for arm, runs in arms.items():
        triplets = [(sum(one.differences.counts), one.violations) for one in runs if one.violations is not None]
        total = sum(count for count, _ in triplets)
        violations = sum(count * share for count, share in triplets) / total if total else None
        pairs, differences = _pairs(runs), pooled([one.differences for one in runs])
        shown[arm] = CosineDistributions(pairs.positives, pairs.negatives, differences, violations)
        rows += _bins(arm, differences, violations_percent=None if violations is None else 100 * violations)
    return Drawn(cosine_difference_figure(shown, title), rows)


def draw_direction_changes(arms: Mapping[str, Sequence[Sequence[DirectionChanges]]], title: str) -> Drawn:
    """Draws changes of direction, of all runs of an arm together."""
    shown: dict[str, list[DirectionChanges]] = {}
    for arm, runs in arms.items():
        steps: dict[tuple[int, int], list[Distribution]] = {}
        for one in (one for changes in runs for one in changes):
            steps.setdefault((one.first_step, one.last_step), []).append(one.changes)
        shown[arm] = [DirectionChanges(*between, pooled(found)) for between, found in sorted(steps.items())]
    rows = [
        row
        for arm, changes in shown.items()
        for one in changes
        for row in _bins(
            arm, one.changes, first_step=one.first_step, last_step=one.last_step, variance=one.changes.variance
        )
    ]
    return Drawn(direction_changes_figure(shown, title), rows)


def _pairs(runs: Sequence[PairCosines]) -> PairCosines:
    return PairCosines(pooled([one.positives for one in runs]), pooled([one.negatives for one in runs]))


def _bins(arm: str, shown: Distribution, **more: Any) -> Rows:
    total = max(sum(shown.counts), 1)
    return bins(arm, shown.edges, [100 * count / total for count in shown.counts], **more)
