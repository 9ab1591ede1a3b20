"""The trials of a search: their values as parallel coordinates, and their metrics in the order of the trials."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ssl_sec.errors import counted
from ssl_sec.figures.drawing import BLUE, VERMILION, add_grid, verbatim, wrapped

# Letters of a line of the name below an axis.
_LETTERS_BELOW = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A key that varies between the trials.

    Attributes:
        name: name of the key.
        values: value of each trial: numbers, or names; a number that is not finite has no position.
        is_log: whether numbers are drawn on a logarithmic scale.
    """

    name: str
    values: Sequence[float | str]
    is_log: bool = False

    def places(self) -> tuple[np.ndarray, list[tuple[float, str]]]:
        """The position of each value, in [0, 1] or NaN, and the labelled positions."""
        if any(isinstance(value, str) for value in self.values):
            names = sorted(set(map(str, self.values)), key=_order)
            at = {name: 0.5 if len(names) == 1 else place / (len(names) - 1) for place, name in enumerate(names)}
            return np.array([at[str(value)] for value in self.values]), [(at[name], name) for name in names]
        numbers = np.array(self.values, dtype=np.float64)
        scaled = np.log(numbers) if self.is_log else numbers
        is_finite = np.isfinite(scaled)
        if not is_finite.any():
            return np.full(len(numbers), np.nan), []
        low, high = scaled[is_finite].min(), scaled[is_finite].max()
        ends = [f"{end:.3g}" for end in (numbers[is_finite].min(), numbers[is_finite].max())]
        if low == high:
            return np.where(is_finite, 0.5, np.nan), [(0.5, ends[0])]
        return np.where(is_finite, (scaled - low) / (high - low), np.nan), [(0.0, ends[0]), (1.0, ends[1])]


def _order(name: str) -> tuple[float, str]:
    """The order of the values of a choice: numbers by their size, then names."""
    try:
        number = float(name)
    except ValueError:
        number = math.inf
    return (number if math.isfinite(number) else math.inf), name


def tuning_figure(
    axes_of_keys: Sequence[Axis], metric: str, figures: Sequence[float], order: Sequence[int], numbers: Sequence[int]
) -> Figure:
    """Draws a line for each trial through its values to its metric, and the metrics over the numbers of the trials.

    Args:
        axes_of_keys: keys that vary, with a value for each trial.
        metric: metric by which the trials are compared.
        figures: metric of each trial; one or more.
        order: places of the trials in these sequences, the best first.
        numbers: number of each trial, ascending; those of trials without a metric are missing.
    """
    scores = np.array(figures, dtype=np.float64)
    axes_drawn = [*axes_of_keys, Axis(name=metric, values=list(figures))]
    figure = Figure(figsize=(max(7.0, 1.8 * len(axes_drawn)), 7.5), layout="constrained")
    lines, history = figure.subplots(2, 1, height_ratios=[3, 2])
    placed = [axis.places() for axis in axes_drawn]
    num_better = np.argsort(order)
    rank = 1 - num_better / max(len(scores) - 1, 1)
    for trial in reversed(order):
        heights = [places[trial] for places, _ in placed]
        is_best = trial == order[0]
        colour = VERMILION if is_best else colormaps["viridis"](0.95 * (1 - rank[trial]))
        lines.plot(heights, color=colour, linewidth=2.5 if is_best else 1.0, alpha=1.0 if is_best else 0.6)
    for place, (_, ticks) in enumerate(placed):
        lines.axvline(place, color="0.3", linewidth=0.8)
        for height, text in ticks:
            box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
            at = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
            lines.annotate(verbatim(text), (place, height), fontsize=8, bbox=box, **at)
    names = [wrapped(axis.name, _LETTERS_BELOW) for axis in axes_drawn]
    lines.set_xticks(range(len(names)), names, fontsize=8)
    lines.set_yticks([])
    lines.set_xlim(-0.1, len(axes_drawn) - 0.6)
    lines.spines[["top", "right", "left", "bottom"]].set_visible(False)
    lines.set_title(
        f"{counted(len(scores), 'trial')}, a line for each: the darker the better, the best in red;\n"
        "those stopped early behind the others",
        fontsize=9,
    )
    so_far = scores[np.array(order)[np.minimum.accumulate(num_better)]]
    history.plot(numbers, scores, "o", color=BLUE, alpha=0.6, markersize=5, label="trial")
    history.step(numbers, so_far, where="post", color=VERMILION, label="best so far")
    history.set(xlabel="trial", ylabel=metric)
    history.xaxis.set_major_locator(MaxNLocator(integer=True))
    history.legend(frameon=False, fontsize="small")
    add_grid(history)
    return figure
