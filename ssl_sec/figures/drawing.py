"""Common parts of all figures: colours that are distinct with colour blindness, grids, common bins.

A figure is a matplotlib `Figure` without pyplot or global state; nothing is written.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

# By Okabe and Ito: distinct with every common colour blindness.
BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"

# Colours of the arms of a comparison; with three line styles, a curve shows through the one drawn over it.
_ARM_COLOURS = (VERMILION, BLUE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
NUM_ARM_COLOURS = len(_ARM_COLOURS)
_ARM_STYLES: tuple[Literal["solid", "dashed", "dotted"], ...] = ("solid", "dashed", "dotted")
# Letters that fit above the panel of an arm, or into its legend.
LETTERS_IN_PANEL = 44
# Letters of a line of an arm's name beside its row, and the height of such a line.
LETTERS_BESIDE, LINE_INCHES = 30, 0.16
# A larger legend would cover the curves, as would one that is wider than this share of the figure.
_MOST_ARMS_IN_AXES = 3
_LARGEST_SHARE_IN_AXES = 0.7
_MOST_PANELS_IN_ROW = 4
# Of a legend with letters of 10 points: widths of a letter and of the mark beside a name, in inches; and heights of a
# name, and of each further line of it.
_LETTER_INCHES, _MARK_INCHES = 0.085, 0.75
_NAME_INCHES, _LINE_INCHES = 0.213, 0.178


def arm_look(place: int) -> tuple[str, Literal["solid", "dashed", "dotted"]]:
    """Colour and line style of the arm at a place of a comparison."""
    return _ARM_COLOURS[place % len(_ARM_COLOURS)], _ARM_STYLES[place % len(_ARM_STYLES)]


def verbatim(name: str) -> str:
    """A name that a user has given as matplotlib shows it letter by letter: `$` begins no formula."""
    return name.replace("$", r"\$")


def wrapped(name: str, letters: int) -> str:
    """A name, `verbatim`, in lines of so many letters."""
    return verbatim(textwrap.fill(name, letters))


def legend_label(name: str) -> str:
    """A name as the label of what is drawn: legends leave out labels that begin with an underscore."""
    return f" {name}" if name.startswith("_") else name


def plain(name: str) -> str:
    """A name from the user's data, `verbatim`; long ones are cut."""
    return verbatim(name if len(name) <= LETTERS_IN_PANEL else f"{name[: LETTERS_IN_PANEL - 1]}…")


def draw_distribution(axes: Axes, percentages: Sequence[float], edges: Sequence[float], place: int, label: str) -> None:
    """Draws the outline of an arm's histogram over a light filling, so that others show through.

    Args:
        axes: axes to draw on.
        percentages: share in each bin, percent.
        edges: bounds of the bins, ascending; one more than there are bins.
        place: place of the arm, which decides its colour and line style.
        label: label of the arm in the legend.
    """
    colour, style = arm_look(place)
    axes.stairs(percentages, np.array(edges), color=colour, alpha=0.25, fill=True, linewidth=0)
    axes.stairs(percentages, np.array(edges), color=colour, linestyle=style, linewidth=1.5, label=legend_label(label))


def percentages_between(
    edges: Sequence[float], counts: Sequence[int], new_edges: np.ndarray | Sequence[float]
) -> np.ndarray:
    """A histogram's shares in new bins, in percent, as if each of its bins were evenly filled.

    Args:
        edges: bounds of the histogram's bins, ascending; one more than there are bins.
        counts: number in each bin; not all zero.
        new_edges: bounds of the new bins, ascending.
    """
    below = np.concatenate([[0], np.cumsum(counts)]) / sum(counts)
    return 100 * np.diff(np.interp(new_edges, edges, below))


def add_grid(axes: Axes) -> None:
    """Draws a light grid behind everything, and no frame at the top and the right."""
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def label_steps(axes: Axes) -> None:
    """Labels the horizontal axis as global steps, at whole numbers."""
    axes.set_xlabel("global step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def add_legend(figure: Figure, all_axes: Sequence[Axes]) -> None:
    """Draws a legend of all labels: in the axes if there is one panel with few short ones, else below all panels."""
    found: dict[str, Artist] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    inches = _MARK_INCHES + _LETTER_INCHES * max(map(len, found), default=0)
    is_small = len(found) <= _MOST_ARMS_IN_AXES and inches < _LARGEST_SHARE_IN_AXES * figure.get_size_inches()[0]
    if len(all_axes) == 1 and is_small:
        all_axes[0].legend(list(found.values()), list(map(verbatim, found)), frameon=False)
    else:
        legend_below(figure, found)


def legend_below(figure: Figure, handles: Mapping[str, Artist]) -> None:
    """Draws a legend below all panels; the figure grows by its height, so that the panels keep theirs.

    Args:
        figure: figure with a constrained layout.
        handles: name -> what is drawn beside it; one or more.
    """
    width, height = figure.get_size_inches()
    most_letters = int((width - _MARK_INCHES) / _LETTER_INCHES)
    names = [textwrap.fill(name, most_letters) for name in handles]
    longest = max(len(line) for name in names for line in name.splitlines())
    columns = min(len(names), max(int(width / (longest * _LETTER_INCHES + _MARK_INCHES)), 1))
    height += _NAME_INCHES * (1 + -(-len(names) // columns)) + _LINE_INCHES * sum(name.count("\n") for name in names)
    figure.set_size_inches(width, height)
    figure.legend(
        list(handles.values()), list(map(verbatim, names)), loc="outside lower center", frameon=False, ncols=columns
    )


def arm_panels(arms: Sequence[str], title: str, y_label: str) -> tuple[Figure, Sequence[Axes]]:
    """A panel for each arm, with its name above it, over common axes; at most four in a row.

    Args:
        arms: names of the arms, one or more.
        title: title above all panels.
        y_label: label of the vertical axes, at the first panel of each row.
    """
    columns = min(len(arms), _MOST_PANELS_IN_ROW)
    rows = -(-len(arms) // columns)
    figure = Figure(figsize=(max(4.6 * columns, 6.5), 3.7 * rows + 0.3), layout="constrained")
    figure.suptitle(title)
    every = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panels = list(every.flatten())
    for axes in panels[len(arms) :]:
        axes.remove()
    for axes, arm in zip(panels, arms, strict=False):
        axes.set_title(wrapped(arm, LETTERS_IN_PANEL))
        add_grid(axes)
    for axes in every[:, 0]:
        axes.set_ylabel(y_label)
    for axes in panels[len(arms) - columns : len(arms)]:  # below which there may be no panel
        axes.tick_params(labelbottom=True)
    return figure, panels[: len(arms)]


def small_plots(
    count: int, size_inches: tuple[float, float], least_width: float = 0.0, margin: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """A figure of small plots, three in a row; four are two by two.

    Args:
        count: number of plots.
        size_inches: width and height of each plot.
        least_width: smallest width of the figure, in inches.
        margin: height of the figure beyond that of the plots, in inches.
    """
    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    width, height = size_inches
    figure = Figure(figsize=(max(width * columns, least_width), height * rows + margin), layout="constrained")
    every = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in every[count:]:
        axes.remove()
    return figure, list(every[:count])


def message(text: str) -> Figure:
    """A figure with a text in place of a drawing."""
    figure = Figure(figsize=(5, 2))
    figure.text(0.5, 0.5, text, ha="center", va="center", wrap=True)
    return figure
