"""The trials of a search: as a table, as metrics of its run in MLflow, and as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from ssl_sec.edges.pictures import save_picture
from ssl_sec.edges.tables import in_csv, in_table
from ssl_sec.edges.tune.space import Interval, Search
from ssl_sec.figures.tuning import Axis, tuning_figure
from ssl_sec.files import replace_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A trial that was measured.

    Attributes:
        name: name of the trial's run.
        overrides: overrides of the trial, `key=value` for each key.
        values: the overrides as plain values, by key.
        metric: its last measurement.
        at: epochs or steps before that measurement.
    """

    name: str
    overrides: Sequence[str]
    values: Mapping[str, float | str]
    metric: float
    at: int


def rows_of(trials: Sequence[Trial], search: Search) -> list[list[str]]:
    """The header of a table of trials, and its rows."""
    rows = [["trial", *search.space, search.metric, search.recipe.length]]
    for trial in trials:
        values = [one.partition("=")[2] for one in trial.overrides]
        rows.append([trial.name, *values, f"{trial.metric:.4g}", str(trial.at)])
    return rows


def table_of(trials: Sequence[Trial], search: Search) -> str:
    """The trials as text, in the given order."""
    return in_table(*rows_of(trials, search))


def best_first(search: Search, trials: Sequence[Trial]) -> list[Trial]:
    """The trials sorted by the epochs or steps that they reached, and those of the same by their metric."""
    return sorted(trials, key=partial(_rank, search), reverse=True)


def _rank(search: Search, trial: Trial) -> tuple[bool, int, float]:
    return search.rank(trial.metric, trial.at)


def _number_of(trial: Trial) -> int:
    return int(trial.name.rpartition("-")[2])


def records_of(search: Search, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The metric of each trial and the best one so far, by the number of the trial."""
    best_so_far = accumulate(trials, partial(max, key=partial(_rank, search)))
    return [
        {"step": _number_of(trial), "metrics": {"tune/trial": trial.metric, "tune/best": best.metric}}
        for trial, best in zip(trials, best_so_far, strict=True)
    ]


def files_of(search: Search, trials: Sequence[Trial], folder: Path) -> list[Path]:
    """The table as CSV, and the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    table, picture = folder / "trials.csv", folder / "parallel.png"
    rows = [[trial.name, *trial.values.values(), trial.metric, trial.at] for trial in trials]
    replace_text(table, in_csv(["trial", *search.space, search.metric, search.recipe.length], *rows))
    axes = [
        Axis(name=key, values=[trial.values[key] for trial in trials], is_log=isinstance(one, Interval) and one.is_log)
        for key, one in search.space.items()
    ]
    order = [trials.index(trial) for trial in best_first(search, trials)]
    numbers = [_number_of(trial) for trial in trials]
    save_picture(picture, tuning_figure(axes, search.metric, [trial.metric for trial in trials], order, numbers))
    return [table, picture]
