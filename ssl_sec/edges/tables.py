"""Tables in plain text, Markdown and CSV, and means with standard deviations for their cells."""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from typing import Any

# Decimals of a cell.
_FEWEST, _MOST = 2, 8


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


def decimals(*values: float) -> int:
    """The decimals of values that are shown together: 2, or more where the largest would have less than two digits."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0)
    return min(max(_FEWEST, 1 - math.floor(math.log10(largest))), _MOST) if largest else _FEWEST


def mean_and_std(values: Sequence[float]) -> str:
    """For example 80.00 ± 1.50, or 0.0032 ± 0.0001; empty without values."""
    if not values:
        return ""
    mean, spread = statistics.fmean(values), deviation(values)
    digits = decimals(mean, spread or 0)
    return f"{mean:.{digits}f}{'' if spread is None else f' ± {spread:.{digits}f}'}"


def in_markdown(columns: Sequence[str], *rows: Sequence[str]) -> str:
    """A table in GitHub's Markdown."""
    lines = ([cell.replace("|", "\\|") for cell in row] for row in (columns, ["---"] * len(columns), *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def in_csv(columns: Sequence[str], *rows: Sequence[Any]) -> str:
    """A table as CSV, its lines ended by a line feed."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()
