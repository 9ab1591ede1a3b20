"""What the four papers report, as data: each table with the recipe and the metric that answer to a cell here.

A paper is a file beside this one. Results are in percent, as our metrics are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from ssl_sec.errors import ConfigError, nearest
from ssl_sec.settings import check, from_values

_FOLDER = Path(__file__).parent

# A figure, words (settings), a mean with its standard deviation, or nothing.
Value = float | str | tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        label: its heading.
        group: the heading over it and its neighbours.
        metric: our name in MLflow of what it reports, in percent but for norms; None where we measure nothing of the
            kind.
        data: the data set, for the recipes of the rows.
    """

    label: str
    group: str | None = None
    metric: str | None = None
    data: str | None = None

    @property
    def heading(self) -> str:
        """Both headings in one."""
        return f"{self.group} {self.label}" if self.group else self.label


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: a method or a setting.

    Attributes:
        label: in our words.
        values: one for each column.
        section: what several rows have in common.
        recipe: ours; `{data}` stands for the column's. None for what is not implemented here.
    """

    label: str
    values: tuple[Value, ...]
    section: str | None = None
    recipe: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a paper.

    Attributes:
        number: the paper's.
        title: what it shows, in our words.
        columns: from left to right.
        rows: from top to bottom.
        note: what the paper adds to it.
    """

    number: int
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str | None = None

    def __post_init__(self) -> None:
        for row in self.rows:
            key = f"table {self.number}, {row.label}"
            check(len(row.values) == len(self.columns), key, row.values, f"{len(self.columns)} values")
            spreads = [value for value in row.values if isinstance(value, tuple)]
            check(all(len(spread) == 2 for spread in spreads), key, spreads, "pairs of mean and standard deviation")
            if row.recipe is not None and "{" in row.recipe:
                check("{data}" in row.recipe, key, row.recipe, "a name in which {data} alone is filled in")
                missing = [column.heading for column in self.columns if column.metric and column.data is None]
                check(not missing, key, row.recipe, f"without {{data}}, which {missing} do not name")

    def recipe(self, row: Row, column: Column) -> str | None:
        """Our recipe for a cell; None where there is none."""
        if row.recipe is None or column.metric is None:
            return None
        return row.recipe.replace("{data}", column.data) if column.data else row.recipe

    def recipes(self) -> tuple[str, ...]:
        """Our recipes for all of its cells, in order, each once."""
        found = (self.recipe(row, column) for row in self.rows for column in self.columns)
        return tuple(dict.fromkeys(recipe for recipe in found if recipe is not None))


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper's tables.

    Attributes:
        title: the paper's.
        reference: authors, place and year.
        tables: in order.
    """

    title: str
    reference: str
    tables: tuple[Table, ...]

    def __post_init__(self) -> None:
        numbers = [table.number for table in self.tables]
        check(numbers == sorted(set(numbers)), "tables", numbers, "ascending numbers")

    def table(self, number: int) -> Table:
        """A table by its number.

        Raises:
            ConfigError: if there is none of that number.
        """
        by_number = {table.number: table for table in self.tables}
        if number not in by_number:
            allowed = ", ".join(map(str, by_number))
            raise ConfigError(f"table: found {number}, but {self.title!r} has {allowed}")
        return by_number[number]


def names() -> tuple[str, ...]:
    """The short names of the papers."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


@cache
def load(name: str) -> Paper:
    """A paper by its short name.

    Raises:
        ConfigError: if there is none of that name.
    """
    if name not in names():
        raise ConfigError(f"paper: found {name!r}; {nearest(name, names())}")
    return from_values(Paper, yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))


def reported(recipe: str) -> dict[str, Value]:
    """What the papers report of one of our recipes: metric -> value, of the first table that has it."""
    return {**_all_reported().get(recipe, {})}


@cache
def _all_reported() -> dict[str, dict[str, Value]]:
    found: dict[str, dict[str, Value]] = {}
    for recipe, metric, value in _cells():
        if value is not None:
            found.setdefault(recipe, {}).setdefault(metric, value)
    return found


def _cells() -> Iterator[tuple[str, str, Value]]:
    for table in (table for name in names() for table in load(name).tables):
        for row in table.rows:
            for column, value in zip(table.columns, row.values, strict=True):
                recipe = table.recipe(row, column)
                if recipe is not None and column.metric is not None:
                    yield recipe, column.metric, value
