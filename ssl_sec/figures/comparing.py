"""The figures of several runs in a report, from the files that each run has left in MLflow."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from matplotlib.figure import Figure

from ssl_sec.figures.drawing import small_plots, wrapped
from ssl_sec.figures.training import draw_norms_on, norm_distributions, norm_distributions_figure
from ssl_sec.training.norms import NormHistogram

Rows = list[dict[str, Any]]

# Letters of a line of the legend below a panel, and its height.
_LETTERS_BELOW = 56
_INCHES_BELOW = 0.22


class Drawn(NamedTuple):
    """A figure of several arms, and its data.

    Attributes:
        figure: the figure.
        rows: rows of a table, each with the key "arm".
    """

    figure: Figure
    rows: Rows


@dataclass(frozen=True, kw_only=True)
class ComparisonFigure:
    """A figure that can show several arms side by side.

    Attributes:
        about: description of the figure, for its title.
        artifact: file of a run from which the figure is drawn.
        read: function that reads the drawn data from that file; it returns None if they are not there.
        draw: function from the data of each arm's runs, one or more, and a title to the figure. Raises a DataError for
            arms that cannot be compared.
        pools_seeds: whether the runs of an arm are drawn together; otherwise an arm has one run.
        draw_panels: like `draw`, for the arms of several data sets by name; None if they are drawn like
            those of one.
    """

    about: str
    artifact: str
    read: Callable[[Path], Any]
    draw: Callable[[Mapping[str, Sequence[Any]], str], Drawn]
    pools_seeds: bool = True
    draw_panels: Callable[[Mapping[str, Mapping[str, Sequence[Any]]], str], Drawn] | None = None


def numbers_of(name: str, build: Callable[[Any], Any]) -> Callable[[Path], Any]:
    """A function that reads the numbers of one comparison from the file of all comparisons.

    Args:
        name: name of the comparison.
        build: function that makes the result from its plain values.
    """

    def read(path: Path) -> Any:
        values = json.loads(path.read_text()).get(name)
        return build(values) if values else None

    return read


def from_plain(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A dataclass from the output of `dataclasses.asdict`."""
    hints = get_type_hints(kind)
    nested = {name for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    return kind(**{name: from_plain(hints[name], one) if name in nested else one for name, one in values.items()})


def draw_norms(arms: Mapping[str, Sequence[NormHistogram]], title: str) -> Drawn:
    """Draws distributions of norms, for each arm the mean over its runs."""
    edges, shares = norm_distributions(arms)
    rows = [row for arm, values in shares.items() for row in bins(arm, edges, values)]
    return Drawn(norm_distributions_figure(edges, shares, title), rows)


def draw_norm_panels(data_sets: Mapping[str, Mapping[str, Sequence[NormHistogram]]], title: str) -> Drawn:
    """Draws distributions of norms in a panel for each data set, with its own arms below it (SEC, Fig. 1)."""
    num_lines = max(sum(1 + _below(arm).count("\n") for arm in arms) for arms in data_sets.values())
    figure, all_axes = small_plots(len(data_sets), (5.4, 3.9 + _INCHES_BELOW * num_lines), margin=0.3)
    figure.suptitle(title)
    rows: Rows = []
    for axes, (data, arms) in zip(all_axes, data_sets.items(), strict=True):
        edges, shares = norm_distributions(arms)
        rows += [row for arm, values in shares.items() for row in bins(arm, edges, values, data=data)]
        draw_norms_on(axes, edges, shares, data)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles, list(map(_below, labels)), loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
    return Drawn(figure, rows)


def _below(arm: str) -> str:
    """The name of an arm in a legend below a panel."""
    return wrapped(arm, _LETTERS_BELOW)


def bins(arm: str, edges: Sequence[float], shares_percent: Sequence[float], **more: Any) -> Rows:
    """The rows of an arm's histogram."""
    return [
        {"arm": arm, **more, "low": low, "high": high, "share_percent": share}
        for low, high, share in zip(edges[:-1], edges[1:], shares_percent, strict=True)
    ]


def _last_histogram(path: Path) -> NormHistogram | None:
    histograms = reversed(json.loads(path.read_text()))
    return next((NormHistogram(**one) for one in histograms if sum(one["counts"])), None)


# The comparison that every training run allows.
NORMS = ComparisonFigure(
    about="norms of the embeddings, last batch of training",
    artifact="norms.json",
    read=_last_histogram,
    draw=draw_norms,
    draw_panels=draw_norm_panels,
)
