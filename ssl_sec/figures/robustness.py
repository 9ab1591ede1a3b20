"""The reliability of a classifier's confidence, and its accuracy on corrupted images."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from ssl_sec.figures.drawing import BLUE, VERMILION, add_grid, arm_look


def reliability_figure(counts: Sequence[int], confidences: Sequence[float], accuracies: Sequence[float]) -> Figure:
    """The accuracy in each bin of the confidence (Guo et al. 2017, Fig. 1), and the share of the images there.

    Args:
        counts: number of images in each of the equal bins over [0, 1].
        confidences: mean confidence in each bin, in [0, 1].
        accuracies: accuracy in each bin, in [0, 1].
    """
    edges = np.linspace(0, 100, len(counts) + 1)
    shares = np.array(counts) / max(sum(counts), 1)
    percent_sure, percent_right = 100 * np.array(confidences), 100 * np.array(accuracies)
    error = float((shares * np.abs(percent_right - percent_sure)).sum())
    filled = np.array(counts) > 0
    figure = Figure(figsize=(5.2, 5.6), layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    axes.stairs(percent_right, edges, fill=True, color=BLUE, alpha=0.35)
    axes.plot(percent_sure[filled], percent_right[filled], "o-", color=BLUE, markersize=4)
    axes.plot([0, 100], [0, 100], color="0.35", linestyle="dashed", linewidth=1)
    title = f"expected calibration error {error:.1f} %"
    axes.set(ylabel="accuracy (%)", title=title, xlim=(0, 100), ylim=(0, 100))
    below.stairs(100 * shares, edges, fill=True, color=VERMILION, alpha=0.5)
    below.set(xlabel="confidence (%)", ylabel="images (%)")
    for each in (axes, below):
        add_grid(each)
    return figure


def corruption_figure(clean_top1: float, corrupted_top1: Mapping[str, Sequence[float]]) -> Figure:
    """The accuracy over the strength of each kind of corruption; strength 0 is the clean images.

    Args:
        clean_top1: accuracy on the clean images, in [0, 1].
        corrupted_top1: accuracies in [0, 1] by kind of corruption, from the weakest strength to the strongest.
    """
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, (kind, values) in enumerate(corrupted_top1.items()):
        colour, style = arm_look(place)
        percentages = [100 * value for value in (clean_top1, *values)]
        axes.plot(range(len(percentages)), percentages, marker="o", color=colour, linestyle=style, label=kind)
    axes.set(xlabel="strength", ylabel="top-1 accuracy (%)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    add_grid(axes)
    return figure
