"""Pictures of test images: those that are retrieved for them, and the encoder's last feature maps, of several arms."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ssl_sec.errors import DataError
from ssl_sec.evaluation.feature_maps import FeatureMaps
from ssl_sec.figures.comparing import Drawn
from ssl_sec.figures.drawing import GREEN, message

# From Tol's vibrant set: distinct from the green with colour blindness.
_RED = "#CC3311"
# Of the names of arms, in 10 and in 8 points.
_LETTERS_PER_INCH, _SMALL_LETTERS_PER_INCH = 11, 14


class Retrieved(NamedTuple):
    """The images that a run retrieves for some test images.

    Attributes:
        queries: grey or RGB, 0-255.
        images: of each query, nearest first.
        correct: whether a retrieved image has its query's class.
    """

    queries: UInt8[Tensor, "queries channels height width"]
    images: UInt8[Tensor, "queries k channels height width"]
    correct: Bool[Tensor, "queries k"]


class MappedImages(NamedTuple):
    """Some test images with the strongest of their last feature maps.

    Attributes:
        images: grey or RGB, 0-255.
        found: their maps.
    """

    images: UInt8[Tensor, "images channels height width"]
    found: FeatureMaps


def read_retrieved(path: Path) -> Retrieved:
    """The retrieved images of a run's examples."""
    saved = torch.load(path, weights_only=True)
    return Retrieved(saved["queries"], saved["neighbours"], saved["correct"])


def read_feature_maps(path: Path) -> MappedImages | None:
    """The feature maps of a run's examples; None if its encoder has none, and for version 0.1."""
    saved = torch.load(path, weights_only=True)
    if "maps" not in saved:
        return None
    return MappedImages(saved["queries"][: len(saved["maps"])], FeatureMaps(saved["maps"], saved["channels"]))


def draw_retrieved(arms: Mapping[str, Sequence[Retrieved]], title: str) -> Drawn:
    """Draws the images that one run of each arm retrieves for the same test images."""
    shown = {arm: runs[0] for arm, runs in arms.items()}
    _require_the_same({arm: one.queries for arm, one in shown.items()})
    rows = [
        {"arm": arm, "query": query, "place": place, "correct": correct}
        for arm, one in shown.items()
        for query, places in enumerate(one.correct.tolist(), start=1)
        for place, correct in enumerate(places, start=1)
    ]
    return Drawn(retrieved_figure(shown, title), rows)


def draw_feature_maps(arms: Mapping[str, Sequence[MappedImages]], title: str) -> Drawn:
    """Draws the feature maps of the same test images by one run of each arm."""
    shown = {arm: runs[0] for arm, runs in arms.items()}
    _require_the_same({arm: one.images for arm, one in shown.items()})
    rows = [
        {"arm": arm, "image": image, "place": place, "channel": channel, "mean_activation": mean}
        for arm, one in shown.items()
        for image, (channels, means) in enumerate(
            zip(one.found.channels.tolist(), one.found.maps.mean((2, 3)).tolist(), strict=True), start=1
        )
        for place, (channel, mean) in enumerate(zip(channels, means, strict=True), start=1)
    ]
    return Drawn(feature_maps_figure(shown, title), rows)


def retrieved_figure(arms: Mapping[str, Retrieved], title: str) -> Figure:
    """A row for each query: its image and those that each arm retrieves for it, nearest first (SEC, Fig. 9).

    An image of the query's class has a green frame and a tick, another a red frame and a cross.

    Args:
        arms: of each run, by name; one or more, with the same queries.
        title: written above all of them.
    """
    queries = next(iter(arms.values())).queries
    columns = [one.correct.shape[1] for one in arms.values()]
    if not len(queries) or not min(columns):
        return message("no images were retrieved")
    height, width = queries.shape[2:]
    cell_inches = 1.25
    names = _wrapped(arms, [count * cell_inches for count in columns])
    extra_inches = 0.75 + 0.2 * names[0].count("\n")
    size = (cell_inches * (1.15 + sum(columns)), cell_inches * height / width * len(queries) + extra_inches)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    parts = figure.subfigures(1, 1 + len(arms), squeeze=False, width_ratios=[1.1, *columns])[0]
    parts[0].suptitle("\n" * names[0].count("\n") + " ", fontsize=10)
    asked = parts[0].subplots(len(queries), 1, squeeze=False)[:, 0]
    asked[0].set_title("query")
    for axes, image in zip(asked, queries, strict=True):
        _show_image(axes, image, "0.35", 1.5)
    for part, name, one in zip(parts[1:], names, arms.values(), strict=True):
        part.suptitle(name, fontsize=10)
        grid = part.subplots(*one.correct.shape, squeeze=False)
        for (row, place), is_correct in np.ndenumerate(one.correct.numpy()):
            axes = grid[row, place]
            colour = GREEN if is_correct else _RED
            _show_image(axes, one.images[row, place], colour, 4.0)
            box = {"facecolor": colour, "edgecolor": "none", "boxstyle": "square,pad=0.15"}
            mark = "✓" if is_correct else "✗"
            axes.text(0.97, 0.97, mark, transform=axes.transAxes, ha="right", va="top", color="white", bbox=box)
            if row == 0:
                axes.set_title(f"{place + 1}")
    return figure


def feature_maps_figure(arms: Mapping[str, MappedImages], title: str) -> Figure:
    """For each image, a row of its strongest feature maps by each arm (SEC, Fig. 8).

    The colours of a row range from 0, or its least activation if that is below, to its greatest.

    Args:
        arms: of each run, by name; one or more, with the same images.
        title: written above all of them.
    """
    images = next(iter(arms.values())).images
    columns = max(one.found.channels.shape[1] for one in arms.values())
    cell_inches, name_inches = 1.15, 1.8
    size = (cell_inches * (1 + columns) + name_inches, (cell_inches + 0.2) * len(images) * len(arms) + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(f"{title}\ncolours: from 0 to the greatest activation of a row", fontsize=10)
    blocks = figure.subfigures(len(images), 1, squeeze=False)[:, 0]
    for number, (block, image) in enumerate(zip(blocks, images, strict=True)):
        grid = block.subplots(len(arms), 1 + columns, squeeze=False)
        for axes in grid.flatten():
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        _show_image(grid[0, 0], image, "0.35", 1.0)
        for row, (arm, one) in zip(grid, arms.items(), strict=True):
            maps, channels = one.found.maps[number], one.found.channels[number].tolist()
            low, high = min(float(maps.min()), 0.0), float(maps.max())
            for axes, found, channel in zip(row[1:], maps, channels, strict=False):
                axes.imshow(found.numpy(), cmap="viridis", vmin=low, vmax=max(high, low + 1e-12))
                axes.set_title(f"channel {channel}", fontsize=7, pad=2)
            name = textwrap.fill(arm, int(name_inches * _SMALL_LETTERS_PER_INCH))
            row[1].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    return figure


def _wrapped(names: Mapping[str, object], inches: Sequence[float]) -> list[str]:
    """Names in lines of a width, all of as many lines, so that what is below them is level."""
    lines = [textwrap.wrap(name, int(width * _LETTERS_PER_INCH)) for name, width in zip(names, inches, strict=True)]
    most = max(map(len, lines))
    return ["\n".join([*each, *[" "] * (most - len(each))]) for each in lines]


def _require_the_same(images: Mapping[str, Tensor]) -> None:
    first, *others = images
    for other in others:
        if not torch.equal(images[first], images[other]):
            raise DataError(f"{first} and {other} show different test images; allowed: runs with the same test set")


def _show_image(axes: Axes, image: Tensor, frame: str, frame_points: float) -> None:
    axes.imshow(image.cpu().permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=255)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color=frame, linewidth=frame_points)
