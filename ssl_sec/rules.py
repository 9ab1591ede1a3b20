"""What values of settings may be, beyond their types: rules for annotations, `Annotated[int, Range(ge=1)]`.

A number without a range of its own is finite: a float fits into 32 bits, an integer into 64.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

from ssl_sec.errors import ConfigError, printable, shown

# The largest values that torch takes: float32 with room for a product, int64.
_LARGEST = {float: 1e30, int: 2**63 - 1}

_LONGEST_NAME, _LONGEST_PATH = 255, 4096  # of Linux, in bytes

# A run's folder holds files whose names are the run's name with a suffix.
_LONGEST_RUN_NAME = 200


class Rule(Protocol):
    """A requirement of an annotation, beyond the type of the value."""

    def check(self, key: str, value: Any) -> None:
        """Raises a ConfigError that names the key, unless the value is allowed."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """An interval; without a bound here, torch's limits are the bounds. NaN is never inside.

    Attributes:
        gt: the value is greater.
        ge: the value is greater or equal.
        lt: the value is less.
        le: the value is less or equal.
        note: added to the error message.
    """

    gt: int | float | None = None
    ge: int | float | None = None
    lt: int | float | None = None
    le: int | float | None = None
    note: str = ""

    def check(self, key: str, value: int | float) -> None:
        """Raises a ConfigError that names the key, unless the value is in the interval."""
        check(hasattr(value, "__abs__"), key, value, "a number")
        largest = _LARGEST[int if isinstance(value, int) else float]
        if not (
            abs(value) <= largest
            and (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        ):
            check(False, key, value, self._allowed(value, largest) + (self.note and f", {self.note}"))

    def _allowed(self, value: int | float, largest: int | float) -> str:
        begin = f"({self.gt}" if self.gt is not None else None if self.ge is None else f"[{self.ge}"
        end = f"{self.lt})" if self.lt is not None else None if self.le is None else f"{self.le}]"
        if begin is None and end is None and not abs(value) <= sys.float_info.max:
            return "a finite number"
        if begin is not None and end is None and not value > largest:
            return begin.replace("(", "> ").replace("[", "≥ ")
        return f"in {begin or f'[{-largest}'}, {end or f'{largest}]'}"


class LocalPath:
    """A path on this machine, not a URL, short enough for the file system."""

    def check(self, key: str, value: str) -> None:
        """Raises a ConfigError that names the key, unless the value is a valid path."""
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value):
            raise ConfigError(
                f"{key}: found {printable(value)!r}, a URL; must be a path, on a cluster one that all nodes see"
            )
        check(value.strip() != "" and "\0" not in value, key, value, "a path")
        encoded = os.fsencode(value)
        fits = len(encoded) <= _LONGEST_PATH and max(map(len, encoded.split(b"/"))) <= _LONGEST_NAME
        check(fits, key, value, f"a path of at most {_LONGEST_PATH} bytes, with names of at most {_LONGEST_NAME}")
        try:
            Path(value).expanduser()
        except RuntimeError:
            check(False, key, value, "a path; the home folder that ~ stands for is not known")


class PlainName:
    """A valid name for a folder."""

    def check(self, key: str, value: str) -> None:
        """Raises a ConfigError that names the key, unless the value is a valid name."""
        plain = value not in {"", ".", ".."} and not any(part in value for part in ("/", os.sep, "\0"))
        check(plain, key, value, "a plain name without slashes")
        fits = value.isprintable() and len(os.fsencode(value)) <= _LONGEST_RUN_NAME
        check(fits, key, value, f"a name of at most {_LONGEST_RUN_NAME} bytes that can be printed")


class NotEmpty:
    """A list with one value or more."""

    def check(self, key: str, value: Sequence[object]) -> None:
        """Raises a ConfigError that names the key if the list is empty."""
        check(len(value) > 0, key, value, "one value or more")


Local = Annotated[str, LocalPath()]
Name = Annotated[str, PlainName()]
Positive = Annotated[float, Range(gt=0)]
NotNegative = Annotated[float, Range(ge=0)]
Share = Annotated[float, Range(gt=0, le=1)]
Probability = Annotated[float, Range(ge=0, le=1)]
BelowOne = Annotated[float, Range(ge=0, lt=1)]
Seconds = Annotated[float, Range(gt=0, le=10**7)]
Count = Annotated[int, Range(ge=1)]
CountOrZero = Annotated[int, Range(ge=0)]
Seed = Annotated[int, Range(ge=0)]
Side = Annotated[int, Range(ge=1, le=16384)]
Processes = Annotated[int, Range(ge=0, le=1024)]


def check(condition: bool, key: str, found: object, allowed: str) -> None:
    """Raises a ConfigError that names the key, what was found and what is allowed, unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key}: found {shown(found)}, must be {allowed}")
