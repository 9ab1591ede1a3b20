"""Reading of files that list images."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssl_sec.errors import DataError, MissingDataError, first_line, printable


def read_text(path: Path) -> str:
    """A list as text; file names in it need not be UTF-8.

    Raises:
        MissingDataError: there is no such file.
        DataError: it cannot be read.
    """
    try:
        return os.fsdecode(path.read_bytes()).removeprefix("\ufeff")
    except FileNotFoundError:
        raise MissingDataError(f"{printable(str(path))}: not there") from None
    except OSError as error:
        raise DataError(f"{printable(str(path))}: cannot be read: {first_line(error)}") from error


def read_matlab(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Some variables of a MATLAB file; missing ones are left out.

    Raises:
        MissingDataError: there is no such file.
        DataError: it cannot be read.
    """
    from scipy.io import loadmat

    try:
        with path.open("rb") as file:
            return loadmat(file, variable_names=names, squeeze_me=True)
    except FileNotFoundError:
        raise MissingDataError(f"{printable(str(path))}: not there") from None
    # For a damaged file scipy raises errors of any kind: ValueError, TypeError, KeyError, MatReadError, OSError, …
    except Exception as error:
        raise DataError(f"{printable(str(path))}: cannot be read: {first_line(error)}") from error


def rows_by_name(names: Sequence[str], where: str) -> dict[str, int]:
    """The row of each name of a list.

    Args:
        names: names in the list, row by row.
        where: name of the list in errors.

    Raises:
        DataError: a name is listed twice.
    """
    rows = {name: row for row, name in enumerate(names)}
    if len(rows) < len(names):
        again = next(name for row, name in enumerate(names) if rows[name] != row)
        raise DataError(f"{where}: {printable(again)} is listed twice")
    return rows


def is_number(text: str) -> bool:
    """Whether a field of a list is a whole number of at most 9 digits: Python refuses to convert thousands."""
    return text.isascii() and text.isdigit() and len(text) <= 9
