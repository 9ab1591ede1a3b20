"""Figures of SFT's paper: classes in three dimensions and their covariances, distances of pairs, rotations.

All of them concern directions f̂ = f / ‖f‖ of the test images' embeddings.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ssl_sec.errors import counted
from ssl_sec.evaluation.directions import DistanceDistributions, Distribution, checked_directions, pooled
from ssl_sec.evaluation.variation import (
    ClassCovariances,
    RotationShifts,
    class_covariances,
    relative_deviation,
    rotation_shifts,
)
from ssl_sec.figures.comparing import Drawn, bins
from ssl_sec.figures.drawing import (
    BLUE,
    VERMILION,
    add_grid,
    arm_look,
    arm_panels,
    draw_distribution,
    legend_below,
    message,
)


def draw_variation(
    embeddings: Float[Tensor, "images dim"], labels: Int64[Tensor, " images"], class_names: Sequence[str]
) -> dict[str, Figure]:
    """SFT's Figs. 2, 6a and 6c of one run, by the names of their files.

    Args:
        embeddings: embeddings of the test images, of any norm.
        labels: class of each image.
        class_names: name of each class.

    Raises:
        DataError: for a row without a direction.
    """
    covariances = class_covariances(embeddings, labels)
    return {
        "class_covariances": class_covariances_figure(embeddings, labels, covariances, class_names),
        "rotation_shifts": rotation_shifts_figure(rotation_shifts(embeddings, labels, seed=0)),
    }


def class_covariances_figure(
    embeddings: Float[Tensor, "images dim"],
    labels: Int64[Tensor, " images"],
    covariances: ClassCovariances,
    class_names: Sequence[str],
) -> Figure:
    """Directions in three dimensions, and the diagonals and eigenvalues of some classes' covariances (SFT, Fig. 2).

    Args:
        embeddings: embeddings of all images, of any norm.
        labels: class of each image.
        covariances: covariances of the classes to show; images of the other classes are grey.
        class_names: name of each class.
    """
    if not covariances.classes:
        return message("no class has two images")
    figure = Figure(figsize=(12.5, 4.4), layout="constrained")
    space = figure.add_subplot(1, 3, 1, projection="3d")
    points, shares = _principal_components(checked_directions(embeddings))
    labels = labels.cpu()
    others = ~torch.isin(labels, torch.tensor(covariances.classes))
    look = {"s": 9, "linewidths": 0, "depthshade": False}
    if others.any():  # without a point, it would widen the axes
        space.scatter(*points[others].T.tolist(), color="0.8", alpha=0.35, zorder=1, **look)
    for place, (label, size) in enumerate(zip(covariances.classes, covariances.sizes, strict=True)):
        own = points[labels == label].T.tolist()
        space.scatter(
            *own,
            color=arm_look(place)[0],
            label=f"class {class_names[label]} ({counted(size, 'image')})",
            zorder=2,
            **look,
        )
    space.set_title("directions of the test images")
    space.tick_params(labelsize=7, pad=-2)
    # Its labels lie outside what the layout keeps free.
    space.set_box_aspect(None, zoom=0.85)  # pyright: ignore[reportArgumentType]
    for axis, share in zip("xyz", shares, strict=True):
        getattr(space, f"set_{axis}label")(f"{axis.upper()}: {100 * share:.0f} % of variance", fontsize=8, labelpad=-4)
    for number, (name, values) in enumerate(
        (
            ("diagonal of the covariance", covariances.diagonals),
            ("eigenvalues of the covariance", covariances.eigenvalues),
        )
    ):
        axes = figure.add_subplot(1, 3, 2 + number)
        _draw_positions(axes, values)
        deviation = 100 * relative_deviation(values)
        axes.set(title=f"{name}\nrelative deviation {deviation:.0f} %", xlabel="position", ylabel="variance (no unit)")
    handles, names = space.get_legend_handles_labels()
    legend_below(figure, dict(zip(names, handles, strict=True)))
    return figure


def distances_figure(arms: Mapping[str, DistanceDistributions], title: str) -> Figure:
    """Distances of positive and of negative pairs, a panel for each arm over common axes (SFT, Fig. 4b).

    Args:
        arms: the distances of each run, by name; one or more.
        title: title above all panels.
    """
    figure, all_axes = arm_panels(list(arms), title, "share of pairs in a bin (%)")
    for axes, distances in zip(all_axes, arms.values(), strict=True):
        pairs = (("positive", BLUE, distances.positives), ("negative", VERMILION, distances.negatives))
        for name, colour, shown in pairs:
            note = "none" if shown.mean is None else f"mean {shown.mean:.2f}"
            look = {"color": colour, "alpha": 0.55, "fill": True}
            axes.stairs(_percentages(shown), np.array(shown.edges), label=f"{name} pairs ({note})", **look)
        titled = f"{axes.get_title()}\noverlap {100 * distances.overlap:.1f} %"
        axes.set(xlabel="distance of directions (no unit)", title=titled, xlim=(0, 2))
        axes.legend(frameon=False)
    return figure


def draw_distances(arms: Mapping[str, Sequence[DistanceDistributions]], title: str) -> Drawn:
    """Draws the distances of pairs, of all runs of an arm together."""
    shown = {
        arm: DistanceDistributions(pooled([one.positives for one in runs]), pooled([one.negatives for one in runs]))
        for arm, runs in arms.items()
    }
    rows = [
        row
        for arm, one in shown.items()
        for pairs, distribution in (("positive", one.positives), ("negative", one.negatives))
        for row in bins(arm, distribution.edges, _percentages(distribution), pairs=pairs)
    ]
    return Drawn(distances_figure(shown, title), rows)


def rotation_shifts_figure(rotations: RotationShifts) -> Figure:
    """How far rotating between classes moves the variation, and r_w over the means' energy (SFT, Fig. 6a and c).

    Args:
        rotations: the run's rotations.
    """
    figure = Figure(figsize=(10, 4.0), layout="constrained")
    shift_axes, energy_axes = figure.subplots(1, 2)
    shifts = rotations.shifts
    last = max(np.flatnonzero(shifts.counts), default=0) + 1
    note = "none" if shifts.mean is None else f"mean {shifts.mean:.3f}"
    draw_distribution(shift_axes, _percentages(shifts), shifts.edges, 0, note)
    shift_axes.set(
        xlabel=r"$\|A\sigma - \sigma\|_2$ (no unit)",
        ylabel="share of draws in a bin (%)",
        title="shift of the variation by a rotation",
        xlim=(0, shifts.edges[last]),
    )
    shift_axes.legend(frameon=False)
    percent = [100 * energy for energy in rotations.energies]
    energy_axes.plot(percent, [100 * one for one in rotations.within_class_energies], marker="o", color=BLUE)
    energy_axes.set(
        xlabel="energy of the class means in the subspace (%)",
        ylabel="$r_w$: energy of the variation in it (%)",
        title="variation in the span of the means",
        ylim=(0, 105),
    )
    for axes in (shift_axes, energy_axes):
        add_grid(axes)
    return figure


def _draw_positions(axes: Axes, values: Sequence[Sequence[float]]) -> None:
    """The classes' values at each position, with a grey line from the least to the greatest."""
    columns = np.array(values)
    places = np.arange(1, columns.shape[1] + 1)
    axes.vlines(places, columns.min(0), columns.max(0), color="0.8", linewidth=1)
    for place, one in enumerate(columns):
        axes.plot(places, one, color=arm_look(place)[0], marker=".", markersize=3, linestyle="none")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_grid(axes)


def _percentages(shown: Distribution) -> list[float]:
    return [100 * count / max(sum(shown.counts), 1) for count in shown.counts]


def _principal_components(unit: Tensor) -> tuple[Tensor, list[float]]:
    """Coordinates along the three axes of the greatest variance, 0 where there are fewer, and their shares of it."""
    centred = unit.double() - unit.double().mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    axes = torch.zeros(centred.shape[1], 3, dtype=centred.dtype)
    shares = torch.zeros(3, dtype=centred.dtype)
    count = min(3, len(values))
    axes[:, :count] = vectors.flip(1)[:, :count]
    shares[:count] = values.flip(0)[:count].clamp(min=0) / values.clamp(min=0).sum().clamp(min=1e-30)
    return centred @ axes, shares.tolist()
