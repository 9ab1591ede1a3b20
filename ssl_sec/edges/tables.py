"""Tables in plain text, Markdown and CSV, and means with standard deviations for their cells."""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from typing import Any


def in_table(columns: Sequence[str], *rows: Sequence[Any]) -> str:
    """A table in plain text, with aligned columns."""
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation; None for one value, and NaN if one of them is not finite."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def mean_and_std(values: Sequence[float]) -> str:
    """For example 80.00 ± 1.50; empty without values."""
    if not values:
        return ""
    spread = deviation(values)
    return f"{statistics.fmean(values):.2f}{'' if spread is None else f' ± {spread:.2f}'}"


def in_markdown(columns: Sequence[str], *rows: Sequence[str]) -> str:
    """A table in GitHub's Markdown."""
    lines = ([cell.replace("|", "\\|") for cell in row] for row in (columns, ["---"] * len(columns), *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def in_csv(columns: Sequence[str], *rows: Sequence[Any]) -> str:
    """A table as CSV, its lines ended by a line feed."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()
