"""Pictures of test images: those that are retrieved for them, and the encoder's last feature maps, of several arms."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import UInt8
from matplotlib.figure import Figure
from torch import Tensor

from ssl_sec.errors import DataError
from ssl_sec.evaluation.feature_maps import FeatureMaps
from ssl_sec.figures.comparing import Drawn
from ssl_sec.figures.images import Retrieved, retrieved_figure, show_image

# Letters per inch in the names of arms, at 8 points.
_SMALL_LETTERS_PER_INCH = 14


class MappedImages(NamedTuple):
    """Some test images with the strongest of their last feature maps.

    Attributes:
        images: grey or RGB, 0-255.
        found: the strongest feature maps of each image.
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
        for query, places in enumerate([] if one.correct is None else one.correct.tolist(), start=1)
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


def feature_maps_figure(arms: Mapping[str, MappedImages], title: str) -> Figure:
    """For each image, a row of its strongest feature maps by each arm (SEC, Fig. 8).

    The colours of a row range from 0, or its least activation if that is below, to its greatest.

    Args:
        arms: the images and maps of each run, by name; one or more, all with the same images.
        title: title of the figure.
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
        show_image(grid[0, 0], image)
        for row, (arm, one) in zip(grid, arms.items(), strict=True):
            maps, channels = one.found.maps[number], one.found.channels[number].tolist()
            low, high = min(float(maps.min()), 0.0), float(maps.max())
            for axes, found, channel in zip(row[1:], maps, channels, strict=False):
                axes.imshow(found.numpy(), cmap="viridis", vmin=low, vmax=max(high, low + 1e-12))
                axes.set_title(f"channel {channel}", fontsize=7, pad=2)
            name = textwrap.fill(arm, int(name_inches * _SMALL_LETTERS_PER_INCH))
            row[1].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    return figure


def _require_the_same(images: Mapping[str, Tensor]) -> None:
    first, *others = images
    for other in others:
        if not torch.equal(images[first], images[other]):
            raise DataError(f"{first} and {other} show different test images; allowed: runs with the same test set")
