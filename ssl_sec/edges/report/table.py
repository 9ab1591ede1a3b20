"""A paper's table with our results beside its own.

A cell of ours is the mean over seeds, each by its newest finished run, of the metric's last value. Runs whose settings
are not the recipe's are never mixed with those whose settings are; they stand in only where there are no others, with
a footnote that says what they changed.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ssl_sec.edges.composition.compose import compose, job_of
from ssl_sec.edges.report.files import Report, in_markdown
from ssl_sec.edges.report.pictures import NOT_RUN, table_figure
from ssl_sec.edges.tables import in_table
from ssl_sec.edges.tracking.runs import ArchivedRun, RunArchive, deciding, in_order
from ssl_sec.errors import ConfigError
from ssl_sec.papers import Column, Table, Value, load
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.settings import flattened, from_values, to_values

_MOST_COLUMNS = 7
_EXPLANATION = (
    "ours: mean ± sample standard deviation of the last values, not the best (number of seeds); difference: ours less "
    "the paper's"
)

# (key, the recipe's value, the run's); None where one has no such key.
Change = tuple[str, str | None, str | None]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A metric of ours over seeds.

    Attributes:
        mean: over seeds.
        deviation: the sample standard deviation; None for a single seed.
        seeds: that were run.
        run_ids: of the runs that carry the metric.
        changes: what the runs have otherwise than the recipe; empty for the paper's own settings.
    """

    mean: float
    deviation: float | None
    seeds: tuple[str, ...]
    run_ids: tuple[str, ...]
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A run that carries the metric, the pretraining that it belongs to, and what both changed."""

    run: ArchivedRun
    pretraining: ArchivedRun
    changes: tuple[Change, ...]


class Measurements:
    """What the runs of an archive gave."""

    def __init__(self, archive: RunArchive) -> None:
        self._archive = archive
        self.orphans: set[str] = set()

    def __call__(self, recipe: str, metric: str) -> Measured | None:
        """A metric of a recipe; None where nothing was run."""
        candidates = self._candidates(recipe, metric)
        exact = [candidate for candidate in candidates if not candidate.changes]
        if not candidates:
            return None
        if exact:
            return _measured(exact, metric)
        newest = max(candidates, key=_age)
        return _measured([other for other in candidates if other.changes == newest.changes], metric)

    def _candidates(self, recipe: str, metric: str) -> list[_Candidate]:
        runs = self._archive.finished(recipe)
        by_id = {run.run_id: run for run in runs}
        found: list[_Candidate] = []
        for run in runs:
            is_copy = metric.startswith("probe/") and run.pretraining_run_id is None  # of its probe's
            if metric not in run.metrics or is_copy:
                continue
            pretraining = run if run.pretraining_run_id is None else by_id.get(run.pretraining_run_id)
            if pretraining is None:
                self.orphans.add(run.run_id)
                continue
            found.append(_Candidate(run=run, pretraining=pretraining, changes=self._changes(recipe, run, pretraining)))
        return found

    def _changes(self, recipe: str, run: ArchivedRun, pretraining: ArchivedRun) -> tuple[Change, ...]:
        expected = _settings_of(recipe)
        if expected is None:
            return (("experiment", recipe, None),)
        changes = _differences(*(_without_probe(settings) for settings in (expected, pretraining.settings)))
        if run is not pretraining:
            # It has what it does itself, and no data set of its own where it takes the pretraining's.
            own = {key: value for key, value in run.settings.items() if (key, value) != ("data", "None")}
            keys = {key for key in expected if key.startswith("probe.")} | own.keys()
            changes += _differences({key: expected[key] for key in keys if key in expected}, own)
        return tuple(sorted(changes, key=lambda change: change[0]))


def table_report(paper: str, table: Table, archive: RunArchive | None) -> Report:
    """A table of a paper with our results.

    Args:
        paper: its short name.
        table: of the paper.
        archive: our runs; None for a table that has nothing of ours.

    Raises:
        StorageError: if the store cannot be used.
    """
    measurements = Measurements(archive) if archive is not None else None
    cells = {
        (row_place, place): measurements(recipe, column.metric)
        for row_place, row in enumerate(table.rows)
        for place, column in enumerate(table.columns)
        if (recipe := table.recipe(row, column)) is not None and column.metric is not None and measurements is not None
    }
    footnotes = _Footnotes()
    title = f"{paper}, Table {table.number}: {table.title}"
    blocks = [_block(table, places, cells, footnotes) for places in _blocks(table.columns)]
    notes = [
        *([_EXPLANATION] if cells else []),
        *([f"the paper: {table.note}"] if table.note else []),
        *footnotes.lines(),
        *(_orphans_line(len(measurements.orphans)) if measurements else []),
    ]
    text = [title]
    markdown = [f"## {title}", "", f"{load(paper).title} ({load(paper).reference})"]
    for header, lines in blocks:
        text += ["", in_table(lines, header)]
        markdown += ["", in_markdown(lines, header)]
    return Report(
        name=f"{paper}-table-{table.number}",
        text="\n".join([*text, "", *notes] if notes else text),
        markdown="\n".join([*markdown, *(f"\n{note}" for note in notes)]),
        rows=_data(paper, table, cells),
        figure=table_figure(title, blocks, notes),
    )


class _Footnotes:
    """Marks of what runs changed, numbered as they come."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Change, ...], int] = {}

    def mark(self, changes: tuple[Change, ...]) -> str:
        return f" [{self._numbers.setdefault(changes, len(self._numbers) + 1)}]" if changes else ""

    def lines(self) -> list[str]:
        return [f"[{number}] changed: {_told(changes)}" for changes, number in self._numbers.items()]


def _told(changes: Sequence[Change]) -> str:
    told: list[str] = []
    for key, recipes, found in changes:
        if key == "experiment":
            told.append("no experiment of this name is there to compare the settings with")
        else:
            told.append(f"{key} {found or 'not told'} (recipe: {recipes or 'none'})")
    return ", ".join(told)


def _orphans_line(count: int) -> list[str]:
    return [f"left out: {count} whose pretraining is not in the store as finished"] if count else []


def _blocks(columns: Sequence[Column]) -> list[list[int]]:
    """Places of columns that stand side by side: all, or those of one group where all would be too wide."""
    if len(columns) <= _MOST_COLUMNS:
        return [list(range(len(columns)))]
    groups: dict[str | None, list[int]] = {}
    for place, column in enumerate(columns):
        groups.setdefault(column.group, []).append(place)
    joined: list[list[int]] = []
    for places in groups.values():  # small groups share a block
        if joined and len(joined[-1]) + len(places) <= _MOST_COLUMNS:
            joined[-1] += places
        else:
            joined.append(places)
    return joined


def _block(
    table: Table, places: Sequence[int], cells: Mapping[tuple[int, int], Measured | None], footnotes: _Footnotes
) -> tuple[list[str], list[list[str]]]:
    """The header and the lines: what a paper's row says, what ours is, and the difference."""
    has_sections = any(row.section for row in table.rows)
    header = [*([""] if has_sections else []), "", "", *(table.columns[place].heading for place in places)]
    lines: list[list[str]] = []
    section = None
    for row_place, row in enumerate(table.rows):
        said = [_said(row.values[place], _decimals(table, place)) for place in places]
        if not any(said):
            continue
        head = [row.section or "" if row.section != section else ""] if has_sections else []
        empty = [""] * len(head)
        section = row.section
        lines.append([*head, row.label, "paper" if cells else "", *said])
        own = {place: cells.get((row_place, place)) for place in places}
        if any((row_place, place) in cells for place in places):
            ours = [_ours(cells, (row_place, place), footnotes) for place in places]
            lines.append([*empty, "", "ours", *ours])
        differences = [_signed(_difference(row.values[place], own[place]), own[place], footnotes) for place in places]
        if any(differences):
            lines.append([*empty, "", "difference", *differences])
    return header, lines


def _ours(cells: Mapping[tuple[int, int], Measured | None], place: tuple[int, int], footnotes: _Footnotes) -> str:
    if place not in cells:
        return ""
    measured = cells[place]
    if measured is None:
        return NOT_RUN
    spread = "" if measured.deviation is None else f" ± {measured.deviation:.2f}"
    return f"{measured.mean:.2f}{spread} ({len(measured.seeds)}){footnotes.mark(measured.changes)}"


def _difference(value: Value, measured: Measured | None) -> float | None:
    said = value[0] if isinstance(value, tuple) else value
    return None if measured is None or not isinstance(said, float) else measured.mean - said


def _signed(difference: float | None, measured: Measured | None, footnotes: _Footnotes) -> str:
    if difference is None or measured is None:
        return ""
    return f"{difference:+.2f}{footnotes.mark(measured.changes)}"


def _said(value: Value, decimals: int | None) -> str:
    match value:
        case None:
            return ""
        case str():
            return value
        case tuple():
            return f"{value[0]:.{decimals}f} ± {value[1]:g}"
        case _:
            return f"{value:g}" if decimals is None else f"{value:.{decimals}f}"


def _decimals(table: Table, place: int) -> int | None:
    """As many as the paper's figures of a column have; None for settings."""
    values = [row.values[place] for row in table.rows]
    if table.columns[place].metric is None and not all(isinstance(value, float) and value >= 0.01 for value in values):
        return None
    numbers = [value[0] if isinstance(value, tuple) else value for value in values]
    return max((len(f"{n:.10g}".partition(".")[2]) for n in numbers if isinstance(n, float)), default=None)


@cache
def _settings_of(recipe: str) -> Mapping[str, str] | None:
    """The settings of the experiment of this name; None if there is none."""
    job = job_of(recipe)
    if job is None:
        return None
    try:
        config = from_values(RECIPES[job].config, compose(job, [f"experiment={recipe}"]))
    except ConfigError:  # it needs what the command line gives
        return None
    return deciding({key: str(value) for key, value in flattened(to_values(config)).items()})


def _measured(candidates: Sequence[_Candidate], metric: str) -> Measured:
    by_seed = {candidate.pretraining.seed: candidate for candidate in sorted(candidates, key=_age)}
    chosen = [by_seed[seed] for seed in in_order(by_seed)]
    values = [candidate.run.metrics[metric] for candidate in chosen]
    return Measured(
        mean=statistics.fmean(values),
        deviation=statistics.stdev(values) if len(values) > 1 else None,
        seeds=tuple(candidate.pretraining.seed for candidate in chosen),
        run_ids=tuple(candidate.run.run_id for candidate in chosen),
        changes=candidates[0].changes,
    )


def _age(candidate: _Candidate) -> tuple[int, int]:
    return candidate.pretraining.started_ms, candidate.run.started_ms


def _differences(expected: Mapping[str, str], found: Mapping[str, str]) -> tuple[Change, ...]:
    keys = sorted(expected.keys() | found.keys())
    return tuple((key, expected.get(key), found.get(key)) for key in keys if expected.get(key) != found.get(key))


def _without_probe(settings: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in settings.items() if not key.startswith("probe.")}


def _data(paper: str, table: Table, cells: Mapping[tuple[int, int], Measured | None]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for row_place, row in enumerate(table.rows):
        for place, column in enumerate(table.columns):
            value = row.values[place]
            if value is not None:
                about = {"paper": paper, "table": table.number, "section": row.section, "row": row.label}
                about |= {"column": column.heading, "recipe": table.recipe(row, column), "metric": column.metric}
                rows.append({**about, **_cell_data(value, cells.get((row_place, place)))})
    return rows


def _cell_data(value: Value, measured: Measured | None) -> dict[str, Any]:
    said, deviation = value if isinstance(value, tuple) else (value, None)
    ours: dict[str, Any] = dict.fromkeys(("ours", "ours_std", "num_seeds", "seeds", "difference", "changed", "run_ids"))
    if measured is not None:
        ours = {
            "ours": measured.mean,
            "ours_std": measured.deviation,
            "num_seeds": len(measured.seeds),
            "seeds": " ".join(measured.seeds),
            "difference": _difference(value, measured),
            "changed": _told(measured.changes),
            "run_ids": " ".join(measured.run_ids),
        }
    return {"paper_value": said, "paper_std": deviation, **ours}
