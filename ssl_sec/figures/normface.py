"""Figures of NormFace that show no single run: the bound of its loss, and accuracies by the weight of a second loss."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from ssl_sec.figures.drawing import add_grid, arm_look, legend_below


class AtWeight(NamedTuple):
    """The accuracy with one weight of the second loss.

    Attributes:
        weight: weight of the second loss, ≥ 0; None for runs without one.
        mean: mean accuracy, in percent.
        deviation: standard deviation of the accuracy, in percentage points.
    """

    weight: float | None
    mean: float
    deviation: float


def bounds_figure(squared_norms: Sequence[float], bounds: Mapping[int, Sequence[float]], title: str) -> Figure:
    """The least softmax loss of normalised features and templates over their squared norm (NormFace, Fig. 5).

    Args:
        squared_norms: ℓ², ascending.
        bounds: number of classes -> the bound at each.
        title: title of the figure.
    """
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    for place, (num_classes, values) in enumerate(bounds.items()):
        colour, style = arm_look(place)
        axes.plot(squared_norms, values, color=colour, linestyle=style, linewidth=1.5, label=f"n = {num_classes:,}")
    axes.set(xlabel="squared norm ℓ², the scale s (no unit)", ylabel="lower bound of the loss", title=title)
    axes.set(xlim=(squared_norms[0], squared_norms[-1]), ylim=(0, None))
    axes.legend(title="classes", frameon=False)
    add_grid(axes)
    return figure


def weights_figure(arms: Mapping[str, Sequence[AtWeight]], spread: str, title: str) -> Figure:
    """Accuracies over the weight of the second loss, with error bars (NormFace, Fig. 8).

    Args:
        arms: accuracies by label, ascending by weight; an arm without a second loss has one point, drawn as a
            horizontal line.
        spread: what the deviations are taken over, for example seeds.
        title: title of the figure.
    """
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    for place, (label, points) in enumerate(arms.items()):
        colour, style = arm_look(place)
        weights = [one.weight for one in points if one.weight is not None]
        means, deviations = [one.mean for one in points], [one.deviation for one in points]
        if weights:
            # Arms with the same weights stand side by side.
            shift = 1.03 ** (place - (len(arms) - 1) / 2)
            look = {"color": colour, "linestyle": style, "marker": "o^sDv"[place % 5], "markersize": 5, "capsize": 3}
            axes.errorbar([weight * shift for weight in weights], means, deviations, label=label, linewidth=1.5, **look)
        else:
            axes.axhline(means[0], color=colour, linestyle=style, linewidth=1.5, label=label)
            axes.axhspan(means[0] - deviations[0], means[0] + deviations[0], color=colour, alpha=0.12, linewidth=0)
    shown = sorted({one.weight for points in arms.values() for one in points if one.weight is not None})
    if shown[0] > 0:
        axes.set_xscale("log")
    else:
        axes.set_xscale("symlog", linthresh=min((weight for weight in shown if weight > 0), default=1.0))
    # Labels that are nearer to each other would overlap.
    ticks = [weight for place, weight in enumerate(shown) if not place or weight > 1.5 * shown[place - 1]]
    axes.set_xticks(ticks, [f"{weight:g}" for weight in ticks])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="weight of the second loss (no unit)", ylabel=f"accuracy ± std over {spread} (%)", title=title)
    handles, labels = axes.get_legend_handles_labels()
    legend_below(figure, dict(zip(labels, handles, strict=True)))
    add_grid(axes)
    return figure
