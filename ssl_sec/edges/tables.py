"""Tables in plain text, and the standard deviation in their cells."""

import math
import statistics
from collections.abc import Sequence
from typing import Any


def in_table(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
    """Rows of cells as a table of aligned columns."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation; None for one value, and NaN if one of them is not finite."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def in_markdown(columns: Sequence[str], *rows: Sequence[str]) -> str:
    """A table in Markdown.

    Args:
        columns: names of the columns.
        rows: one row each, with a cell for each column.
    """
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))
