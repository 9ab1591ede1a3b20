"""Pictures of images: those of the first step with their views, and queries with their nearest images."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from ssl_sec.data.bands import as_picture
from ssl_sec.figures.drawing import GREEN, message, wrapped

# From Tol's vibrant set: distinct from the green with colour blindness.
_RED = "#CC3311"
_GREY = "0.35"
_LETTERS_PER_INCH = 11
_LETTERS_OF_TITLE_PER_INCH = 9

_CELL_INCHES = 1.25
# Largest width of a picture with a column for each view or each retrieved image.
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

    Further arms are below, beside the queries again.

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
    shown = [
        (wrapped(name, int(count * _CELL_INCHES * _LETTERS_PER_INCH)), count, one)
        for (name, one), count in zip(arms.items(), columns, strict=True)
    ]
    rows = _in_rows(shown)
    most_columns = max(sum(count for _, count, _ in row) for row in rows)
    extra_inches = 0.8 + 0.2 * max(name.count("\n") for name, _, _ in shown)
    row_inches = _CELL_INCHES * height / width * len(queries) + extra_inches
    width = _CELL_INCHES * (1.15 + most_columns)
    title = wrapped(title, int(width * _LETTERS_OF_TITLE_PER_INCH))
    size = (width, row_inches * len(rows) + 0.2 * title.count("\n"))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    for part, row in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        counts = [count for _, count, _ in row]
        rest = [most_columns - sum(counts)] if sum(counts) < most_columns else []
        first, *others = part.subplots(1, 1 + len(row) + len(rest), squeeze=False, width_ratios=[1, *counts, *rest])[0]
        _show_grid(first, queries[:, None], ["query"])
        for axes in others[len(row) :]:
            axes.set_axis_off()
        for axes, (name, count, one) in zip(others, row, strict=False):
            _show_grid(axes, one.images, [f"{place + 1}" for place in range(count)], one.correct)
            axes.set_title(name, fontsize=10)
    return figure


def _in_rows(shown: Sequence[tuple[str, int, Retrieved]]) -> list[list[tuple[str, int, Retrieved]]]:
    """The arms, with their numbers of columns, in rows that are no wider than a picture may be."""
    rows: list[list[tuple[str, int, Retrieved]]] = [[]]
    for one in shown:
        num_columns = 1 + sum(count for _, count, _ in rows[-1]) + one[1]
        if rows[-1] and num_columns * _CELL_INCHES > _MOST_INCHES:
            rows.append([])
        rows[-1].append(one)
    return rows


def _show_grid(
    axes: Axes,
    images: UInt8[Tensor, "rows columns channels height width"],
    header: Sequence[str],
    correct: Bool[Tensor, "rows columns"] | None = None,
) -> None:
    """Draws framed images in rows, in one pair of axes: one pair for each would take most of a figure's time."""
    rows, columns, _, height, width = images.shape
    for row, column in np.ndindex(rows, columns):
        left, right, bottom, top = extent = (column - 0.46, column + 0.46, row + 0.46, row - 0.46)
        _draw(axes, images[row, column], extent)
        colour, points = _GREY, 1.5
        if correct is not None:
            colour, points, mark = (GREEN, 4.0, "✓") if correct[row, column] else (_RED, 4.0, "✗")
            box = {"facecolor": colour, "edgecolor": "none", "boxstyle": "square,pad=0.15"}
            axes.text(right - 0.03, top + 0.03, mark, ha="right", va="top", color="white", bbox=box)
        frame = Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour, linewidth=points)
        axes.add_patch(frame)
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), aspect=height / width, anchor="S", yticks=[])
    axes.set_xticks(range(columns), header, fontsize=12)
    axes.tick_params(length=0, top=True, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)


def show_image(axes: Axes, image: UInt8[Tensor, "channels height width"]) -> None:
    """Draws an image, grey or RGB, with a thin grey frame and without ticks."""
    _draw(axes, image)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color=_GREY, linewidth=1.0)


def _draw(axes: Axes, image: Tensor, extent: tuple[float, float, float, float] | None = None) -> None:
    axes.imshow(as_picture(image).cpu().permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=255, extent=extent)
