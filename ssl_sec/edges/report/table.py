"""A paper's table with our results.

Our value is the mean over seeds of the metric's last value in each seed's newest finished run. Runs with the recipe's
settings are never mixed with runs that changed some; the latter are shown only if there are no others, with a footnote
that lists the changes. Runs that started from different weights are never mixed; those of the newest run are shown.
"""

import copy
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ssl_sec.edges.composition.compose import compose, composed, job_of
from ssl_sec.edges.report.files import Report
from ssl_sec.edges.report.not_run import how_to_run
from ssl_sec.edges.tables import deviation, in_markdown, in_table
from ssl_sec.edges.tracking.comparing import deciding, is_expected
from ssl_sec.edges.tracking.runs import ArchivedRun, RunArchive, in_order
from ssl_sec.errors import ConfigError
from ssl_sec.figures.tables import NOT_RUN, draw_table
from ssl_sec.papers import Column, Table, Value, load
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.settings import flattened, from_values, to_values

# Of a block of columns: their number, and the characters of their headings; so wide is a note, too.
_MAX_COLUMNS = 7
_MAX_CHARACTERS = 120
_EXPLANATION = (
    "ours: mean ± sample standard deviation of the last values, not the best (number of seeds); difference: ours minus "
    "the paper's"
)

# (key, the recipe's value, the run's value); None if the key is missing.
Change = tuple[str, str | None, str | None]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A metric of our runs over seeds.

    Attributes:
        mean: the mean over seeds.
        deviation: the sample standard deviation; None for a single seed.
        seeds: the seeds that were run.
        run_ids: the runs that have the metric.
        changes: how the runs' settings differ from the recipe's.
    """

    mean: float
    deviation: float | None
    seeds: tuple[str, ...]
    run_ids: tuple[str, ...]
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A run that has the metric, its pretraining, and the changed settings of both."""

    run: ArchivedRun
    pretraining: ArchivedRun
    changes: tuple[Change, ...]

    @property
    def is_on_own_data(self) -> bool:
        """Whether the data set of the result is that of the pretraining."""
        trained_on = self.pretraining.params.get("data.name")
        return self.run.params.get("data.name", trained_on) == trained_on


class Measurements:
    """The results of the runs in an archive.

    Attributes:
        orphans: the ids of probes whose pretraining is not in the archive.
    """

    def __init__(self, archive: RunArchive) -> None:
        self._archive = archive
        self.orphans: set[str] = set()

    def __call__(self, recipe: str, metric: str) -> Measured | None:
        """Returns a metric of a recipe; None if it was not run."""
        candidates = self._find_candidates(recipe, metric)
        exact = [candidate for candidate in candidates if not candidate.changes]
        if not candidates:
            return None
        # Before those of a transfer to another data set.
        chosen = exact or [candidate for candidate in candidates if candidate.is_on_own_data] or candidates
        newest = max(chosen, key=_start_time)
        alike = newest.changes, newest.pretraining.weights
        return _average([other for other in chosen if (other.changes, other.pretraining.weights) == alike], metric)

    def _find_candidates(self, recipe: str, metric: str) -> list[_Candidate]:
        runs = self._archive.finished(recipe)
        by_id = {run.run_id: run for run in runs}
        found: list[_Candidate] = []
        for run in runs:
            is_copy = metric.startswith("probe/") and run.pretraining_run_id is None  # a copy of its probe's metric
            if metric not in run.metrics or is_copy:
                continue
            pretraining = run if run.pretraining_run_id is None else by_id.get(run.pretraining_run_id)
            if pretraining is None:
                self.orphans.add(run.run_id)
                continue
            found.append(
                _Candidate(run=run, pretraining=pretraining, changes=self._find_changes(recipe, run, pretraining))
            )
        return found

    def _find_changes(self, recipe: str, run: ArchivedRun, pretraining: ArchivedRun) -> tuple[Change, ...]:
        expected = _compose_settings(recipe)
        if expected is None:
            return (("experiment", recipe, None),)
        if missing := expected.keys() - pretraining.settings.keys():
            # Keys that the run's version did not have: that version behaved as their defaults.
            expected = {key: value for key, value in expected.items() if key not in missing & _defaults(recipe)}
        changes = _compare(*(remove_probe(settings) for settings in (expected, pretraining.settings)))
        if run is not pretraining:
            # The probe's own settings; data=None means the data set of the pretraining.
            own = {key: value for key, value in run.settings.items() if (key, value) != ("data", "None")}
            keys = {key for key in expected if key.startswith("probe.")} | own.keys()
            changes += _compare({key: expected[key] for key in keys if key in expected}, own)
        return tuple(sorted(changes, key=lambda change: change[0]))


def make_table_report(paper: str, table: Table, archive: RunArchive | None) -> Report:
    """Makes a report with a table of a paper and our results.

    Args:
        paper: the paper's short name.
        table: the table.
        archive: our runs; None if nothing was run.

    Raises:
        StorageError: if the store cannot be used.
    """
    measurements = Measurements(archive) if archive is not None else None
    cells = {
        (row_place, place): measurements(recipe, metric) if measurements is not None else None
        for row_place, row in enumerate(table.rows)
        for place, column in enumerate(table.columns)
        if (recipe := table.recipe(row, column)) is not None and (metric := table.metric(row, column)) is not None
    }
    recipes = (
        table.recipe(table.rows[row], table.columns[place]) for (row, place), one in cells.items() if one is None
    )
    missing = {recipe for recipe in recipes if recipe is not None}
    footnotes = _Footnotes()
    title = f"{paper}, Table {table.number}: {table.title}"
    blocks = [_make_block(table, places, cells, footnotes) for places in _split_columns(table.columns)]
    orphans = len(measurements.orphans) if measurements is not None else 0
    notes = [
        *([_EXPLANATION] if cells else []),
        *([how_to_run(table, missing)] if missing else []),
        *([f"the paper: {table.note}"] if table.note else []),
        *footnotes.lines(),
        *([f"left out: {orphans} without a finished pretraining in the store"] if orphans else []),
    ]
    wrap = textwrap.TextWrapper(
        _MAX_CHARACTERS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    ).fill
    text = [title]
    markdown = [f"## {title}", "", f"{load(paper).title} ({load(paper).reference})"]
    for header, lines in blocks:
        text += ["", in_table(lines, header)]
        markdown += ["", in_markdown(header, *lines)]
    return Report(
        name=f"{paper}-table-{table.number}",
        text="\n".join([*text, "", *map(wrap, notes)] if notes else text),
        markdown="\n".join([*markdown, *("\n" + note.replace("<", "&lt;") for note in notes)]),
        rows=_make_rows(paper, table, cells),
        figure=draw_table(title, blocks, notes),
    )


class _Footnotes:
    """Numbered footnotes that list changed settings."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Change, ...], int] = {}

    def mark(self, changes: tuple[Change, ...]) -> str:
        return f" [{self._numbers.setdefault(changes, len(self._numbers) + 1)}]" if changes else ""

    def lines(self) -> list[str]:
        return [f"[{number}] changed: {_describe_changes(changes)}" for changes, number in self._numbers.items()]


def _describe_changes(changes: Sequence[Change]) -> str:
    texts: list[str] = []
    for key, expected, found in changes:
        if key == "experiment":
            texts.append("there is no experiment of this name to compare the settings with")
        else:
            texts.append(f"{key} {found or 'not given'} (recipe: {expected or 'none'})")
    return ", ".join(texts)


def _split_columns(columns: Sequence[Column]) -> list[list[int]]:
    """Splits the columns into blocks: one block, or several with whole groups if one would be too wide."""

    def fits(places: Sequence[int]) -> bool:
        characters = sum(len(columns[place].heading) + 2 for place in places)
        return len(places) <= _MAX_COLUMNS and characters <= _MAX_CHARACTERS

    if fits(range(len(columns))):
        return [list(range(len(columns)))]
    groups: dict[str | None, list[int]] = {}
    for place, column in enumerate(columns):
        groups.setdefault(column.group, []).append(place)
    joined: list[list[int]] = []
    for places in groups.values():  # small groups share a block
        if joined and fits([*joined[-1], *places]):
            joined[-1] += places
        else:
            joined.append(places)
    return joined


def _make_block(
    table: Table, places: Sequence[int], cells: Mapping[tuple[int, int], Measured | None], footnotes: _Footnotes
) -> tuple[list[str], list[list[str]]]:
    """Makes the header and the lines of a block: the paper's, ours, and the difference for each row."""
    has_sections = any(row.section for row in table.rows)
    header = [*([""] if has_sections else []), "", "", *(table.columns[place].heading for place in places)]
    lines: list[list[str]] = []
    section = None
    for row_place, row in enumerate(table.rows):
        reported = [_format_value(row.values[place], _count_decimals(table, place)) for place in places]
        if not any(reported):
            continue
        head = [row.section or "" if row.section != section else ""] if has_sections else []
        empty = [""] * len(head)
        section = row.section
        lines.append([*head, row.label, "paper" if cells else "", *reported])
        measured = {place: cells.get((row_place, place)) for place in places}
        if any((row_place, place) in cells for place in places):
            ours = [_format_ours(cells, (row_place, place), footnotes) for place in places]
            lines.append([*empty, "", "ours", *ours])
        differences = [_format_difference(row.values[place], measured[place], footnotes) for place in places]
        if any(differences):
            lines.append([*empty, "", "difference", *differences])
    return header, lines


def _format_ours(
    cells: Mapping[tuple[int, int], Measured | None], place: tuple[int, int], footnotes: _Footnotes
) -> str:
    if place not in cells:
        return ""
    measured = cells[place]
    if measured is None:
        return NOT_RUN
    spread = "" if measured.deviation is None else f" ± {measured.deviation:.2f}"
    return f"{measured.mean:.2f}{spread} ({len(measured.seeds)}){footnotes.mark(measured.changes)}"


def _subtract(measured: Measured | None, value: Value) -> float | None:
    reported = value[0] if isinstance(value, tuple) else value
    return None if measured is None or not isinstance(reported, float) else measured.mean - reported


def _format_difference(value: Value, measured: Measured | None, footnotes: _Footnotes) -> str:
    difference = _subtract(measured, value)
    if difference is None or measured is None:
        return ""
    return f"{difference:+.2f}{footnotes.mark(measured.changes)}"


def _format_value(value: Value, decimals: int | None) -> str:
    match value:
        case None:
            return ""
        case str():
            return value
        case tuple():
            return f"{value[0]:.{decimals}f} ± {value[1]:g}"
        case _:
            return f"{value:g}" if decimals is None else f"{value:.{decimals}f}"


def _count_decimals(table: Table, place: int) -> int | None:
    """Counts the decimals of the paper's numbers in a column; None for settings."""
    values = [row.values[place] for row in table.rows]
    if table.columns[place].metric is None and not all(isinstance(value, float) and value >= 0.01 for value in values):
        return None
    numbers = [value[0] if isinstance(value, tuple) else value for value in values]
    return max((len(f"{n:.10g}".partition(".")[2]) for n in numbers if isinstance(n, float)), default=None)


@cache
def _compose_settings(recipe: str) -> Mapping[str, str] | None:
    """Composes the settings of the experiment of this name that decide its result; None if there is none."""
    config = _compose_config(recipe)
    if config is None:
        return None
    return deciding({key: str(value) for key, value in flattened(to_values(config)).items()}, str(job_of(recipe)))


@cache
def _defaults(recipe: str) -> frozenset[str]:
    """The keys of an experiment whose values are those that a configuration without the key would have."""
    config = _compose_config(recipe)
    values = {} if config is None else to_values(config)
    return frozenset(key for key in flattened(values) if _is_default(type(config), values, key))


def _is_default(kind: type, values: Mapping[str, Any], key: str) -> bool:
    without = copy.deepcopy(dict(values))
    *path, last = key.split(".")
    group = without
    for part in path:
        group = group[part]
    del group[last]
    try:
        return to_values(from_values(kind, without)) == values
    except ConfigError:  # a required key
        return False


@cache
def _compose_config(recipe: str) -> Any:
    """Composes the configuration of the experiment of this name; None if there is none."""
    job = job_of(recipe)
    if job is None:
        return None
    experiment = f"experiment={recipe}"
    # Required keys say where something is on a machine; they do not change a result.
    missing = [key for key, value in flattened(composed(job, [experiment])).items() if value == "???"]
    try:
        return from_values(RECIPES[job].config, compose(job, [experiment, *(f"{key}=elsewhere" for key in missing)]))
    except ConfigError:  # it requires other values from the command line
        return None


def _average(candidates: Sequence[_Candidate], metric: str) -> Measured:
    by_seed = {candidate.pretraining.seed: candidate for candidate in sorted(candidates, key=_start_time)}
    chosen = [by_seed[seed] for seed in in_order(by_seed)]
    values = [candidate.run.metrics[metric] for candidate in chosen]
    return Measured(
        mean=statistics.fmean(values),
        deviation=deviation(values),
        seeds=tuple(candidate.pretraining.seed for candidate in chosen),
        run_ids=tuple(candidate.run.run_id for candidate in chosen),
        changes=candidates[0].changes,
    )


def _start_time(candidate: _Candidate) -> tuple[int, int]:
    return candidate.pretraining.started_ms, candidate.run.started_ms


def _compare(expected: Mapping[str, str], found: Mapping[str, str]) -> tuple[Change, ...]:
    keys = sorted(expected.keys() | found.keys())
    return tuple(
        (key, expected.get(key), found.get(key))
        for key in keys
        if not is_expected(key, expected.get(key), found.get(key))
    )


def remove_probe(settings: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings without those of the probe."""
    return {key: value for key, value in settings.items() if not key.startswith("probe.")}


def _make_rows(paper: str, table: Table, cells: Mapping[tuple[int, int], Measured | None]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for row_place, row in enumerate(table.rows):
        for place, column in enumerate(table.columns):
            value = row.values[place]
            if value is not None:
                keys = {"paper": paper, "table": table.number, "section": row.section, "row": row.label}
                keys |= {
                    "column": column.heading,
                    "recipe": table.recipe(row, column),
                    "metric": table.metric(row, column),
                }
                rows.append({**keys, **_make_cell(value, cells.get((row_place, place)))})
    return rows


def _make_cell(value: Value, measured: Measured | None) -> dict[str, Any]:
    reported, deviation = value if isinstance(value, tuple) else (value, None)
    ours: dict[str, Any] = dict.fromkeys(("ours", "ours_std", "num_seeds", "seeds", "difference", "changed", "run_ids"))
    if measured is not None:
        ours = {
            "ours": measured.mean,
            "ours_std": measured.deviation,
            "num_seeds": len(measured.seeds),
            "seeds": " ".join(measured.seeds),
            "difference": _subtract(measured, value),
            "changed": _describe_changes(measured.changes),
            "run_ids": " ".join(measured.run_ids),
        }
    return {"paper_value": reported, "paper_std": deviation, **ours}
