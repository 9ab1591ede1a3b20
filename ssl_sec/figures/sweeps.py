"""Metrics of several runs, over one setting or by arm, as points with bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from ssl_sec.figures.drawing import (
    BLUE,
    LETTERS_BESIDE,
    LINE_INCHES,
    VERMILION,
    add_grid,
    add_legend,
    arm_look,
    legend_label,
    small_plots,
    wrapped,
)
from ssl_sec.metrics import metric_label

# Letters that fit side by side below a panel.
_LETTERS_BELOW = 48


class SweepPoint(NamedTuple):
    """A mean over runs.

    Attributes:
        x: the setting, or the place of a category.
        mean: mean of the metric.
        deviation: sample standard deviation of the metric; None for one run.
        num_seeds: number of runs.
    """

    x: float
    mean: float
    deviation: float | None
    num_seeds: int


@dataclass(frozen=True)
class Panel:
    """A plot of several arms.

    Attributes:
        x_label: the setting that varies, with its unit.
        y_label: the metric, with its unit.
        arms: the points of each arm, by its label.
        levels: values that do not vary, as horizontal lines.
        categories: names of the places 0, 1, … if the setting is no number.
    """

    x_label: str
    y_label: str
    arms: Mapping[str, Sequence[SweepPoint]]
    levels: Mapping[str, SweepPoint]
    categories: tuple[str, ...] = ()


def panels_figure(panels: Sequence[Panel], title: str) -> Figure:
    """Draws small plots, with error bars where there are several seeds; an arm looks the same in all of them.

    Args:
        panels: one or more panels.
        title: title above all panels.
    """
    figure, all_axes = small_plots(len(panels), (5.2, 4.1), least_width=6.5, margin=0.3)
    figure.suptitle(title)
    arms = list(dict.fromkeys(arm for panel in panels for arm in panel.arms))
    for axes, panel in zip(all_axes, panels, strict=True):
        for arm, points in panel.arms.items():
            place = arms.index(arm)
            colour, style = arm_look(place)
            ordered = sorted(points)
            of_seeds = any(point.deviation is not None for point in ordered)
            axes.errorbar(
                [point.x for point in ordered],
                [point.mean for point in ordered],
                yerr=[point.deviation or 0.0 for point in ordered] if of_seeds else None,
                color=colour,
                linestyle="none" if panel.categories else style,
                marker="o^s"[place % 3],
                markersize=5,
                capsize=3,
                label=legend_label(arm),
            )
        for name, level in panel.levels.items():
            axes.axhline(level.mean, color="0.35", linestyle="dashdot", linewidth=1, label=name)
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
        if panel.categories:
            letters = max(int(_LETTERS_BELOW / len(panel.categories)), 1)
            axes.set_xticks(range(len(panel.categories)), [wrapped(name, letters) for name in panel.categories])
            axes.set_xlim(-0.5, len(panel.categories) - 0.5)
            axes.set_ylim(bottom=0)
        add_grid(axes)
    add_legend(figure, all_axes)
    return figure


def arms_figure(results: Mapping[str, Sequence[Mapping[str, float]]], names: Sequence[str]) -> Figure:
    """Draws each run as a point, and each arm's mean with its standard deviation.

    Args:
        results: arm -> the last metrics of each of its runs.
        names: metrics, one or more, which some runs may lack; a plot each.
    """
    labels = [wrapped(arm, LETTERS_BESIDE) for arm in results]
    row_inches = 0.29 + LINE_INCHES * max(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(2 + 4 * len(names), 1.5 + row_inches * len(labels)), layout="constrained")
    figure.suptitle("each run, and the mean ± standard deviation of each arm", fontsize=9)
    for place, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), place + 1)
        add_grid(axes)
        for row, runs in enumerate(results.values()):
            values = [run[name] for run in runs if name in run]
            if not values:
                continue
            axes.plot(values, [row] * len(values), "o", color=BLUE, alpha=0.5, markersize=6)
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            axes.errorbar(float(np.mean(values)), row, xerr=spread, fmt="D", color=VERMILION, capsize=4, markersize=5)
        axes.set_yticks(range(len(labels)), labels if place == 0 else [""] * len(labels))
        axes.set_ylim(len(results) - 0.5, -0.5)
        axes.set_xlabel(metric_label(name))
    return figure
