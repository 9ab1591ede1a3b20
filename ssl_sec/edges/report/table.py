"""A paper's table with our results; runs that changed settings of the recipe have a footnote with the changes."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ssl_sec.edges.report.files import Report
from ssl_sec.edges.report.measurements import Change, Measured, Measurements
from ssl_sec.edges.report.not_run import how_to_run
from ssl_sec.edges.tables import in_markdown, in_table
from ssl_sec.edges.tracking.runs import RunArchive
from ssl_sec.figures.tables import NOT_RUN, draw_table
from ssl_sec.papers import Column, Table, Value, load

# Of a block of columns: their number, and the characters of their headings; so wide is a note, too.
_MAX_COLUMNS = 7
_MAX_CHARACTERS = 120
_EXPLANATION = (
    "ours: mean ± sample standard deviation of the last values, not the best (number of seeds); difference: ours minus "
    "the paper's"
)


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
        text += ["", in_table(header, *lines)]
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
