"""The tables of the four papers as data, with our recipe and metric for each cell, and the figures that we draw.

Each paper is a YAML file in this folder. Results are in percent, like our metrics.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from ssl_sec.errors import ConfigError, counted, nearest
from ssl_sec.rules import check
from ssl_sec.settings import from_values

_FOLDER = Path(__file__).parent

# A number, a setting as text, a mean with its standard deviation, or an empty cell.
Value = float | str | tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        label: its heading.
        group: the heading above it and its neighbours.
        metric: name of our metric, in percent except for norms; `{measure}` in it is replaced by that of the row; None
            if we do not measure it.
        data: the data set, which completes the recipes of the rows.
    """

    label: str
    group: str | None = None
    metric: str | None = None
    data: str | None = None

    @property
    def heading(self) -> str:
        """Both headings."""
        return f"{self.group} {self.label}" if self.group else self.label


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: a method or a setting.

    Attributes:
        label: the method or the setting, in our words.
        values: values of the row, one for each column.
        section: the heading of several rows.
        recipe: our recipe; `{data}` in it is replaced by that of the column; None if it is not implemented.
        measure: what is measured in this row, for the columns' metrics with `{measure}`.
    """

    label: str
    values: tuple[Value, ...]
    section: str | None = None
    recipe: str | None = None
    measure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a paper.

    Attributes:
        number: its number in the paper.
        title: its title, in our words.
        columns: the columns, from left to right.
        rows: the rows, from top to bottom.
        note: the paper's note on the table.
    """

    number: int
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str | None = None

    def __post_init__(self) -> None:
        for row in self.rows:
            key = f"table {self.number}, {row.label}"
            check(len(row.values) == len(self.columns), key, row.values, f"{counted(len(self.columns), 'value')}")
            spreads = [value for value in row.values if isinstance(value, tuple)]
            check(all(len(spread) == 2 for spread in spreads), key, spreads, "pairs of mean and standard deviation")
            if row.recipe is not None and "{" in row.recipe:
                check("{data}" in row.recipe, key, row.recipe, "a name with {data} as the only placeholder")
                missing = [column.heading for column in self.columns if column.metric and column.data is None]
                check(not missing, key, row.recipe, f"without {{data}}, since {missing} have no data")

            named = any("{measure}" in (column.metric or "") for column in self.columns)
            allowed = "given, for the columns' metrics" if named else "none, as no metric has {measure}"
            check(row.recipe is None or named == (row.measure is not None), f"{key}, measure", row.measure, allowed)

    def recipe(self, row: Row, column: Column) -> str | None:
        """Returns our recipe for a cell; None if there is none."""
        if row.recipe is None or column.metric is None:
            return None
        return row.recipe.replace("{data}", column.data) if column.data else row.recipe

    def metric(self, row: Row, column: Column) -> str | None:
        """Returns our metric for a cell; None if we do not measure it."""
        return column.metric and column.metric.replace("{measure}", row.measure or "")

    def cells(self) -> Iterator[tuple[str, str, Value]]:
        """Yields recipe, metric and value of each cell that has a recipe of ours."""
        for row in self.rows:
            for column, value in zip(self.columns, row.values, strict=True):
                recipe, metric = self.recipe(row, column), self.metric(row, column)
                if recipe is not None and metric is not None:
                    yield recipe, metric, value

    def recipes(self) -> tuple[str, ...]:
        """Returns our recipes for all cells, in order, each once."""
        return tuple(dict.fromkeys(recipe for recipe, _, _ in self.cells()))


@dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """A figure of a paper that reports draw from our runs.

    Attributes:
        number: number of the figure in the paper, such as "5a".
        shows: what it shows: "curve", "norm_statistics", "bound", "weights", "sweep", or the name of a recipe's
            comparison; of several, the first that the runs have.
    """

    number: str
    shows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FigureOfRuns:
    """A figure of a paper that runs draw of themselves.

    Attributes:
        number: number of the figure in the paper.
        file: name of the run's file.
    """

    number: str
    file: str


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper's tables, and its figures that are drawn from our runs.

    Attributes:
        title: the paper's title.
        reference: authors, venue and year.
        tables: the tables, in order.
        figures: the figures, in order.
        drawn_by_runs: those that no report draws, as runs draw them.
    """

    title: str
    reference: str
    tables: tuple[Table, ...]
    figures: tuple[PaperFigure, ...] = ()
    drawn_by_runs: tuple[FigureOfRuns, ...] = ()

    def __post_init__(self) -> None:
        numbers = [table.number for table in self.tables]
        check(numbers == sorted(set(numbers)), "tables", numbers, "ascending numbers")

    def table(self, number: int) -> Table:
        """Returns a table by its number.

        Raises:
            ConfigError: if there is no such table.
        """
        by_number = {table.number: table for table in self.tables}
        if number not in by_number:
            allowed = ", ".join(map(str, by_number))
            raise ConfigError(f"table: found {number}, but {self.title!r} has {allowed}")
        return by_number[number]

    def figure(self, number: str) -> PaperFigure:
        """Returns a figure by its number.

        Raises:
            ConfigError: if there is no such figure, or if it is not drawn from runs.
        """
        by_number = {figure.number: figure for figure in self.figures}
        if number not in by_number:
            allowed = ", ".join(by_number) or "none"
            files = {figure.number: figure.file for figure in self.drawn_by_runs}
            where = f", which runs draw themselves as {files[number]}" if number in files else ""
            raise ConfigError(f"figure: found {number}{where}; of {self.title!r}, allowed: {allowed}")
        return by_number[number]


def list_papers() -> tuple[str, ...]:
    """Returns the short names of the papers."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


@cache
def load(name: str) -> Paper:
    """Loads a paper by its short name.

    Raises:
        ConfigError: if there is no such paper.
    """
    if name not in list_papers():
        raise ConfigError(f"paper: found {name!r}; {nearest(name, list_papers())}")
    text = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    return from_values(Paper, yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))  # C is much faster


def find_reported(recipe: str) -> dict[str, Value]:
    """Returns metric -> value for one of our recipes, each from the first table that has it."""
    return {**_collect_reported().get(recipe, {})}


@cache
def _collect_reported() -> dict[str, dict[str, Value]]:
    reported: dict[str, dict[str, Value]] = {}
    for table in (table for name in list_papers() for table in load(name).tables):
        for recipe, metric, value in table.cells():
            if value is not None:
                reported.setdefault(recipe, {}).setdefault(metric, value)
    return reported
