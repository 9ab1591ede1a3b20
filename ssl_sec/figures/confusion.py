"""Which classes a classifier takes for which."""

import textwrap
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ssl_sec.figures.drawing import BLUE, add_grid, message, plain

# Classes up to which the cells of a matrix have numbers.
_MOST_WRITTEN = 20

# Pairs of classes that are shown where there are too many for a matrix.
_MOST_PAIRS = 30

_MOST_LETTERS = 40


def confusion_figure(confusion: Int64[Tensor, "classes classes"], class_names: Sequence[str]) -> Figure:
    """The confusion matrix, in percent of each true class; for a sparse one, the pairs that are confused most often.

    With up to 20 classes the cells show their percentages, except those that round to 0.

    Args:
        confusion: number of images by true class (row) and predicted class (column).
        class_names: name of each class.
    """
    num_classes = len(confusion)
    assert len(class_names) == num_classes, f"{len(class_names)} names for {num_classes} classes"
    if confusion.is_sparse:
        return _most_confused_figure(confusion, class_names)
    counts = confusion.cpu().numpy()
    percentages = 100 * counts / counts.sum(axis=1, keepdims=True).clip(min=1)
    side_inches = min(max(0.55 * num_classes, 5.0), 15.0)
    figure = Figure(figsize=(side_inches + 1, side_inches), layout="constrained")
    axes = figure.subplots()
    # The square root shows confusions of a few percent next to a diagonal near 100.
    image = axes.imshow(percentages, cmap="Blues", norm=PowerNorm(0.5, vmin=0, vmax=100), interpolation="nearest")
    figure.colorbar(image, ax=axes, label="share of the true class (%)", shrink=0.8, aspect=30)
    named = range(0, num_classes, -(-num_classes // 100))
    font_size = 9 if num_classes <= _MOST_WRITTEN else 6
    names = [plain(class_names[label]) for label in named]
    axes.set_xticks(named, names, rotation=90, fontsize=font_size)
    axes.set_yticks(named, names, fontsize=font_size)
    axes.set(xlabel="predicted class", ylabel="true class")
    if num_classes <= _MOST_WRITTEN:
        for row, column in np.argwhere(percentages >= 0.5):
            share = percentages[row, column]
            colour = "white" if share > 35 else "black"
            axes.text(column, row, f"{share:.0f}", ha="center", va="center", color=colour, fontsize=9)
    return figure


def _most_confused_figure(confusion: Int64[Tensor, "classes classes"], class_names: Sequence[str]) -> Figure:
    """The pairs of a true and another predicted class with the most images."""
    (true, predicted), counts = confusion.indices().numpy(), confusion.values().numpy()
    in_class = np.bincount(true, counts, minlength=len(class_names))
    num_right = int(counts[true == predicted].sum())
    wrong = np.flatnonzero(true != predicted)
    shown = wrong[np.argsort(-counts[wrong], kind="stable")][:_MOST_PAIRS]
    if not len(shown):
        return message("no image was classified wrongly")
    right = f"{num_right:,} of {int(counts.sum()):,} images are right"
    figure = Figure(figsize=(9.0, 1.6 + 0.28 * len(shown)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(range(len(shown)), counts[shown], color=BLUE)
    shares = [f"{100 * counts[place] / in_class[true[place]]:.0f} %" for place in shown]
    axes.bar_label(bars, shares, padding=4, fontsize=8)
    names = [
        f"{_short(class_names[int(true[place])])} → {_short(class_names[int(predicted[place])])}" for place in shown
    ]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    # Above the figure, which is wider than the axes.
    figure.suptitle(f"most frequent mistakes, true class → predicted; {right}", fontsize=10)
    axes.set(
        xlabel="images, and their share of the true class",
        xlim=(0, 1.15 * counts[shown].max()),  # room for the shares
        ylim=(len(shown) - 0.4, -0.6),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_grid(axes)
    return figure


def _short(name: str) -> str:
    return plain(textwrap.shorten(name, _MOST_LETTERS, placeholder=" …"))
