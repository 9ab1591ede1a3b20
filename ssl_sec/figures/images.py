"""Pictures of images: those of the first step with their views, and queries with their nearest images."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ssl_sec.figures.drawing import GREEN, message

# From Tol's vibrant set: distinct from the green with colour blindness.
_RED = "#CC3311"
_GREY = "0.35"
_LETTERS_PER_INCH = 11

_CELL_INCHES = 1.25
# Largest width of a picture with a column for each view.
_MOST_INCHES = 24.0


class Retrieved(NamedTuple):
    """The images that are nearest to some queries.

    Attributes:
        queries: query images, grey or RGB, 0-255.
        images: images retrieved for each query, nearest first.
        correct: whether each image has its query's class; None without labels.
    """

    queries: UInt8[Tensor, "queries channels height width"]
    images: UInt8[Tensor, "queries k channels height width"]
    correct: Bool[Tensor, "queries k"] | None


def views_figure(
    images: UInt8[Tensor, "images channels height width"], views: Sequence[UInt8[Tensor, "images channels _ _"]]
) -> Figure:
    """A row for each image: itself, then its views.

    Args:
        images: images, grey or RGB, 0-255; one or more.
        views: the first view of each image, the second, …; their sizes may differ from the images' and from each other.
    """
    columns = [images, *views]
    cell_inches = min(_CELL_INCHES, _MOST_INCHES / len(columns))
    size = (cell_inches * len(columns) + 0.2, cell_inches * len(images) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for column, pictures in enumerate(columns):
        for row, picture in enumerate(pictures):
            height, width = picture.shape[1:]
            half_width, half_height = (0.47 * side / max(height, width) for side in (width, height))
            _draw(axes, picture, (column - half_width, column + half_width, row + half_height, row - half_height))
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(images) - 0.5, -0.5), aspect="equal", yticks=[])
    axes.set_xticks(range(len(columns)), ["image", *(f"view {number}" for number in range(1, len(columns)))])
    axes.tick_params(length=0, labelsize=min(10, 9 * cell_inches), top=True, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.axvline(0.5, color="0.7", linewidth=1)
    return figure


def retrieved_figure(arms: Mapping[str, Retrieved], title: str) -> Figure:
    """A row for each query: its image and those that each arm retrieves for it, nearest first (SEC, Fig. 9).

    An image of the query's class has a green frame and a tick, another a red frame and a cross; without labels, all
    have the query's grey frame.

    Args:
        arms: retrieved images of each run, by name; one or more, with the same queries.
        title: title of the figure.
    """
    queries = next(iter(arms.values())).queries
    columns = [one.images.shape[1] for one in arms.values()]
    if not len(queries) or not min(columns):
        return message("no images were retrieved")
    height, width = queries.shape[2:]
    names = _wrapped(arms, [count * _CELL_INCHES for count in columns])
    extra_inches = 0.75 + 0.2 * names[0].count("\n")
    size = (_CELL_INCHES * (1.15 + sum(columns)), _CELL_INCHES * height / width * len(queries) + extra_inches)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    parts = figure.subfigures(1, 1 + len(arms), squeeze=False, width_ratios=[1.1, *columns])[0]
    parts[0].suptitle("\n" * names[0].count("\n") + " ", fontsize=10)
    asked = parts[0].subplots(len(queries), 1, squeeze=False)[:, 0]
    asked[0].set_title("query")
    for axes, image in zip(asked, queries, strict=True):
        show_image(axes, image, _GREY, 1.5)
    for part, name, one in zip(parts[1:], names, arms.values(), strict=True):
        part.suptitle(name, fontsize=10)
        for (row, place), axes in np.ndenumerate(part.subplots(*one.images.shape[:2], squeeze=False)):
            if one.correct is None:
                show_image(axes, one.images[row, place], _GREY, 1.5)
            else:
                _show_answer(axes, one.images[row, place], bool(one.correct[row, place]))
            if row == 0:
                axes.set_title(f"{place + 1}")
    return figure


def show_image(axes: Axes, image: UInt8[Tensor, "channels height width"], frame: str, frame_points: float) -> None:
    """Draws an image, grey or RGB, with a frame and without ticks."""
    _draw(axes, image)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color=frame, linewidth=frame_points)


def _show_answer(axes: Axes, image: Tensor, is_correct: bool) -> None:
    colour, mark = (GREEN, "✓") if is_correct else (_RED, "✗")
    show_image(axes, image, colour, 4.0)
    box = {"facecolor": colour, "edgecolor": "none", "boxstyle": "square,pad=0.15"}
    axes.text(0.97, 0.97, mark, transform=axes.transAxes, ha="right", va="top", color="white", bbox=box)


def _draw(axes: Axes, image: Tensor, extent: tuple[float, float, float, float] | None = None) -> None:
    axes.imshow(image.cpu().permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=255, extent=extent)


def _wrapped(names: Iterable[str], inches: Sequence[float]) -> list[str]:
    """Names wrapped to given widths, all with the same number of lines, so that everything below them is level."""
    lines = [textwrap.wrap(name, int(width * _LETTERS_PER_INCH)) for name, width in zip(names, inches, strict=True)]
    most = max(map(len, lines))
    return ["\n".join([*each, *[" "] * (most - len(each))]) for each in lines]
