"""The accuracy of several measures on several data sets."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from ssl_sec.figures.drawing import add_grid, arm_look, verbatim


def transfer_figure(results: Mapping[str, Mapping[str, tuple[float, float | None]]]) -> Figure:
    """A row of points for each data set, one for each measure.

    Args:
        results: results of each data set by measure: a percentage, and half the width of its interval or None.
    """
    figure = Figure(figsize=(7, 1.8 + 0.6 * len(results)), layout="constrained")
    axes = figure.subplots()
    measures = list(dict.fromkeys(measure for values in results.values() for measure in values))
    for place, measure in enumerate(measures):
        rows = [row for row, values in enumerate(results.values()) if measure in values]
        points = [values[measure] for values in results.values() if measure in values]
        heights = [row + 0.5 * ((place + 0.5) / len(measures) - 0.5) for row in rows]
        axes.errorbar(
            [value for value, _ in points],
            heights,
            xerr=[half or 0.0 for _, half in points],
            fmt="os^Dv"[place % 5],
            color=arm_look(place)[0],
            capsize=3,
            label=measure,
        )
    axes.set_yticks(range(len(results)), list(map(verbatim, results)))
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("accuracy (%)")
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    add_grid(axes)
    return figure
