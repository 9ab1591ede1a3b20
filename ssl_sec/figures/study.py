"""Figures of a study: differences from a baseline with their intervals, and the curves of its arms."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from ssl_sec.figures.drawing import (
    BLUE,
    LETTERS_BESIDE,
    LINE_INCHES,
    NUM_ARM_COLOURS,
    add_grid,
    add_legend,
    arm_look,
    label_steps,
    legend_label,
    small_plots,
    wrapped,
)
from ssl_sec.metrics import metric_label

_MARKERS = "oDs^vP*"
# Letters of a line of the title of a figure or a panel, or of the label below all panels.
_LETTERS_OF_TITLE, _LETTERS_ABOVE = 95, 60
# Share of an axis between two labelled values.
_LEAST_BETWEEN_LABELS = 0.12


class ArmInterval(NamedTuple):
    """A difference from the baseline.

    Attributes:
        arm: name of the arm.
        mean: mean difference of the pairs.
        half_width: half width of the interval of the mean; NaN if there is none.
        pairs: difference of each pair.
    """

    arm: str
    mean: float
    half_width: float
    pairs: Sequence[float]


def forest_figure(points: Mapping[str, Sequence[ArmInterval]], metric: str, baseline: str) -> Figure:
    """Draws a row for each arm: its mean difference from the baseline, the interval, and each pair as a dot.

    The mean of an arm without an interval is hollow.

    Args:
        points: name of a point -> differences of its arms; one or more.
        metric: metric that is compared, with its unit.
        baseline: arm that the others are compared to.
    """
    num_rows = sum(map(len, points.values()))
    heights = [max(len(rows), 1) for rows in points.values()]
    labels = {row.arm: wrapped(row.arm, LETTERS_BESIDE) for rows in points.values() for row in rows}
    row_inches = 0.2 + LINE_INCHES * max((label.count("\n") + 1 for label in labels.values()), default=1)
    figure = Figure(figsize=(7.5, 1.4 + row_inches * num_rows + 0.4 * len(points)), layout="constrained")
    all_axes = figure.subplots(len(points), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (name, rows) in zip(all_axes, points.items(), strict=True):
        add_grid(axes)
        axes.axvline(0, color="0.3", linewidth=1)
        for place, row in enumerate(rows):
            axes.plot(row.pairs, [place] * len(row.pairs), "o", color="0.65", markersize=3.5)
            half_width, filled = _interval(row.half_width)
            axes.errorbar(
                row.mean, place, xerr=half_width, fmt="D", color=BLUE, capsize=4, markersize=5, fillstyle=filled
            )
        axes.set_yticks(range(len(rows)), [labels[row.arm] for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        if name:
            axes.set_title(wrapped(name, _LETTERS_ABOVE), fontsize=9, loc="left")
    figure.supxlabel(_difference(metric, baseline), fontsize=10)
    return figure


def values_figure(
    keys: Mapping[str, Mapping[str, Sequence[tuple[float, ArmInterval]]]], metric: str, baseline: str
) -> Figure:
    """Draws the differences over the values of each key, a panel for each key, with each pair as a dot.

    All panels have one scale of differences, in which all pairs fit; intervals that are wider are cut off at its ends.
    The marker of a mean without an interval is hollow.

    Args:
        keys: key -> arm -> values of the key with the arm's difference at each; one or more keys.
        metric: metric that is compared, with its unit.
        baseline: arm that the others are compared to.
    """
    figure, all_axes = small_plots(len(keys), (3.6, 3.0), least_width=7.5, margin=0.5)
    figure.suptitle(_difference(metric, baseline), fontsize=10)
    arms_drawn = list(dict.fromkeys(arm for arms in keys.values() for arm in arms))
    every = [entry for arms in keys.values() for entries in arms.values() for entry in entries]
    limit = 1.25 * max(abs(pair) for _, interval in every for pair in interval.pairs) or 1.0
    for axes, (key, arms) in zip(all_axes, keys.items(), strict=True):
        add_grid(axes)
        axes.axhline(0, color="0.3", linewidth=1)
        for arm, entries in arms.items():
            colour, style = arm_look(1 + arms_drawn.index(arm))  # the first colour is the baseline's in the curves
            ordered = sorted(entries, key=lambda entry: entry[0])
            for value, interval in ordered:
                axes.plot([value] * len(interval.pairs), interval.pairs, "o", color="0.65", markersize=3.5)
                half_width, filled = _interval(interval.half_width)
                axes.errorbar(
                    value,
                    interval.mean,
                    yerr=half_width,
                    fmt="D",
                    color=colour,
                    capsize=4,
                    markersize=5,
                    fillstyle=filled,
                )
            means = [interval.mean for _, interval in ordered]
            axes.plot(
                [value for value, _ in ordered],
                means,
                color=colour,
                linestyle=style,
                linewidth=1.3,
                label=legend_label(arm),
            )
        values = [value for entries in arms.values() for value, _ in entries]
        if min(values) > 0:
            axes.set_xscale("log")
            axes.xaxis.set_minor_locator(NullLocator())
        ticks = _apart(values)
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
        axes.margins(x=0.12)
        axes.set_ylim(-limit, limit)
        axes.set_xlabel(key)
    if len(arms_drawn) > 1:
        add_legend(figure, all_axes)
    return figure


def _difference(metric: str, baseline: str) -> str:
    """What the axes of differences show."""
    text = f"{metric}: difference from {baseline}, paired by seed (mean, 95 % interval, each seed)"
    return wrapped(text, _LETTERS_OF_TITLE)


def _apart(values: Sequence[float]) -> list[float]:
    """The values that are labelled on an axis, logarithmic if all are above 0: labels of others would overlap."""
    ordered = sorted(set(values))
    places = np.log(ordered) if ordered[0] > 0 else np.array(ordered)
    least = _LEAST_BETWEEN_LABELS * (places[-1] - places[0])
    kept = [0]
    for number, place in enumerate(places):
        if place - places[kept[-1]] > least:
            kept.append(number)
    return [ordered[number] for number in kept]


def _interval(half_width: float) -> tuple[float | None, Literal["full", "none"]]:
    """The bar of an interval and the filling of its marker, which is hollow without an interval."""
    return (None, "none") if math.isnan(half_width) else (half_width, "full")


class Cause(NamedTuple):
    """An arm's runs compared with those of the baseline, paired by seed.

    Attributes:
        arm: name of the arm.
        point: name of the point of the study; empty if there is only one.
        ratios: name -> ratio to the baseline's, geometric mean over the seeds.
        difference: difference from the baseline, mean over the seeds.
        half_width: half width of the interval of the difference; NaN if there is none.
    """

    arm: str
    point: str
    ratios: Mapping[str, float]
    difference: float
    half_width: float


def causes_figure(arms: Sequence[Cause], labels: Mapping[str, str], metric: str, baseline: str) -> Figure:
    """Draws the arms' differences over what they change in the norms and the steps, a panel for each.

    If one of these is the only cause of the differences, arms that change it equally are level in its panel. The
    marker of an arm without an interval is hollow.

    Args:
        arms: one or more arms; the baseline is drawn beside them, at 1 and 0.
        labels: ratio -> its label; a panel for each.
        metric: metric that is compared, with its unit.
        baseline: arm that the others are compared to.
    """
    figure, all_axes = small_plots(len(labels), (4.2, 3.6), least_width=6.6, margin=0.5)
    figure.suptitle(
        wrapped(f"differences over what the arms change, as multiples of {baseline}", _LETTERS_OF_TITLE), fontsize=10
    )
    names, points = (list(dict.fromkeys(each)) for each in zip(*((arm.arm, arm.point) for arm in arms), strict=True))
    for axes, (name, label) in zip(all_axes, labels.items(), strict=True):
        add_grid(axes)
        axes.axhline(0, color="0.35", linewidth=1)
        axes.plot(1, 0, "k+", markersize=9, label=legend_label(baseline))
        for arm in arms:
            if name not in arm.ratios:
                continue
            half_width, filled = _interval(arm.half_width)
            place = 1 + names.index(arm.arm)  # the first colour is the baseline's in the curves
            marker = points.index(arm.point) + len(points) * (place // NUM_ARM_COLOURS)
            axes.errorbar(
                arm.ratios[name],
                arm.difference,
                yerr=half_width,
                color=arm_look(place)[0],
                marker=_MARKERS[marker % len(_MARKERS)],
                fillstyle=filled,
                capsize=3,
                linestyle="none",
                label=f"{arm.point} {arm.arm}" if len(points) > 1 else legend_label(arm.arm),
            )
        axes.set_xscale("log", base=2)
        ratios = [1.0, *(arm.ratios[name] for arm in arms if name in arm.ratios)]
        if max(ratios) / min(ratios) < 5:  # in which there are few powers of 2
            axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(label)
    all_axes[0].set_ylabel(f"{metric}: difference from {baseline}")
    add_legend(figure, all_axes)
    return figure


def curves_figure(
    arms: Mapping[str, Mapping[str, Sequence[Sequence[tuple[float, float]]]]], title: str
) -> Figure | None:
    """Draws metrics over the steps, a panel for each metric, with the mean over the runs of every arm.

    A run that has ended early, as one that failed, counts up to its last step.

    Args:
        arms: arm -> metric -> the (step, value) pairs of each run, in the order of steps.
        title: title above all panels.

    Returns:
        The figure; None if no arm has a curve.
    """
    metrics = list(dict.fromkeys(name for one in arms.values() for name, runs in one.items() if any(runs)))
    if not metrics:
        return None
    figure, all_axes = small_plots(len(metrics), (4.6, 3.2), margin=0.5)
    figure.suptitle(title, fontsize=10)
    for axes, name in zip(all_axes, metrics, strict=True):
        add_grid(axes)
        for place, (arm, of_arm) in enumerate(arms.items()):
            runs = [run for run in of_arm.get(name, []) if run]
            if not runs:
                continue
            steps, means = _mean_curve(runs)
            colour, style = arm_look(place)
            axes.plot(
                steps,
                means,
                color=colour,
                linestyle=style,
                linewidth=1.3,
                marker="." if len(steps) < 3 else "",
                label=legend_label(arm),
            )
        axes.set_ylabel(metric_label(name))
        if axes is not all_axes[0]:
            axes.sharex(all_axes[0])
        label_steps(axes)
    add_legend(figure, all_axes)
    return figure


def _mean_curve(runs: Sequence[Sequence[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """The steps of the runs, and at each the mean over those runs that have begun and not ended."""
    steps = sorted({step for run in runs for step, _ in run})
    values = [np.interp(steps, [x for x, _ in run], [y for _, y in run]) for run in runs]
    is_outside = [[not run[0][0] <= step <= run[-1][0] for step in steps] for run in runs]
    return steps, np.ma.array(values, mask=is_outside).mean(axis=0).tolist()
