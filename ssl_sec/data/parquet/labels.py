"""The classes of images: a column of integers, or of names, which are numbered in alphabetical order."""

import json
from collections.abc import Mapping
from enum import StrEnum

import numpy as np
import pyarrow as pa
from jaxtyping import Int64

from ssl_sec.data.image_set import MAX_CLASSES
from ssl_sec.data.parquet.columns import Columns
from ssl_sec.errors import DataError, nearest, printable


class Kind(StrEnum):
    """The kind of values that name the classes."""

    NONE = "no labels"
    NUMBERS = "labels that are integers"
    NAMES = "labels that are strings"


def find_labels(schema: pa.Schema, column: str | None, path: str) -> Kind:
    """The kind of values in the column of labels.

    Args:
        schema: schema of a file.
        column: name of the column, which may be absent if it is the default name; None for no labels.
        path: path of the file, for errors.

    Raises:
        DataError: the column is missing, there are several, or it holds neither integers nor strings.
    """
    if column is None or (column == Columns.label_column and column not in schema.names):
        return Kind.NONE
    if column not in schema.names:
        raise DataError(f"{path}: no label column {column!r}; {nearest(column, schema.names)}")
    check_unique(schema, column, path)
    found = schema.field(column).type
    value = found.value_type if pa.types.is_dictionary(found) else found
    if pa.types.is_integer(value):
        return Kind.NUMBERS
    if pa.types.is_string(value) or pa.types.is_large_string(value):
        return Kind.NAMES
    raise DataError(f"{path}: label column {column!r} is {found}; allowed: integers or strings")


def check_unique(schema: pa.Schema, column: str | None, path: str) -> None:
    """Refuses a column name that several columns have."""
    count = schema.names.count(column)
    if count > 1:
        raise DataError(f"{printable(path)}: {count} columns are named {column!r}; allowed: one")


def read_labels(
    column: pa.Array, numbers: Mapping[str, int] | None, path: str, first_row: int
) -> Int64[np.ndarray, " rows"]:
    """The labels of some rows.

    Args:
        column: labels of the rows, or names of their classes.
        numbers: numbers of the classes by name; None if the column holds numbers.
        path: path of the file, for errors.
        first_row: position of the first of the rows in the file, for errors.

    Raises:
        DataError: a row has no label, a class that is not in `numbers`, or a number < 0 or ≥ MAX_CLASSES.
    """
    if column.null_count:
        row = first_row + column.is_null().to_pylist().index(True)
        allowed = "integers, 0 or more" if numbers is None else "the name of a class"
        raise DataError(f"{path} row {row}: no label; allowed: {allowed}")
    if numbers is not None:
        names = column.to_pylist()
        for place, name in enumerate(names):
            if name not in numbers:
                row = first_row + place
                raise DataError(f"{path} row {row}: class {printable(name)!r}; {nearest(printable(name), numbers)}")
        return np.array([numbers[name] for name in names], np.int64)
    labels = column.to_numpy(zero_copy_only=False)
    wrong = (labels < 0) | (labels >= MAX_CLASSES)
    if wrong.any():
        where = int(wrong.argmax())
        found = f"{path} row {first_row + where}: label {labels[where]}; allowed: 0 to {MAX_CLASSES - 1}"
        raise DataError(f"{found}; data.label_column=null reads images without labels")
    return labels.astype(np.int64)


def names_in(column: pa.Array) -> set[str]:
    """The different names of a column; rows without one are left to `read_labels`."""
    return {name for name in column.unique().to_pylist() if name is not None}


def names_in_metadata(schema: pa.Schema, label_column: str | None) -> tuple[str, ...] | None:
    """The names of numbered classes, as the `datasets` library writes them into its files; None if it did not."""
    try:
        metadata = json.loads((schema.metadata or {})[b"huggingface"])
        names = metadata["info"]["features"][label_column]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return tuple(map(str, names)) if isinstance(names, list) and names else None
