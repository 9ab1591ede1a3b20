"""The .bin files of InsightFace: pickles of encoded images and of whether the two of each pair show one person."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_sec.errors import DataError, MissingDataError, first_line, printable


def read_bin(path: Path) -> tuple[list[bytes], list[bool]]:
    """Encoded images, and whether the two of each pair show one person, from a pickle that may come from anyone.

    Names in the pickle are not imported: a few stand-ins, which only rearrange bytes, replace the functions that build
    NumPy's arrays and Python 2's strings, and any other name is an error.

    Raises:
        MissingDataError: there is no such file.
        DataError: it is damaged, or holds anything else.
    """
    printed = printable(str(path))
    try:
        with path.open("rb") as file:
            content = _BinReader(file, encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{printed}: {error}") from None
    except FileNotFoundError:
        raise MissingDataError(f"{printed}: not there") from None
    # For a damaged pickle the reader raises errors of any kind: UnpicklingError, EOFError, TypeError, MemoryError, …
    except Exception as error:
        raise DataError(f"{printed}: cannot be read: {first_line(error)}") from error
    if not isinstance(content, tuple | list) or len(content) != 2:
        raise DataError(f"{printed}: not a pair of images and of what they show")
    images, same = (values.items if isinstance(values, _Array) else values for values in content)
    if not isinstance(images, tuple | list) or not isinstance(same, tuple | list | bytes):
        raise DataError(f"{printed}: not a list of images and one of what they show")
    encoded = [image.items if isinstance(image, _Array) else image for image in images]
    for place, image in enumerate(encoded):
        if not isinstance(image, bytes):
            raise DataError(f"{printed} image {place}: found {type(image).__name__}; allowed: encoded images")
    for place, value in enumerate(same):
        if not isinstance(value, int) or value not in (0, 1):
            raise DataError(f"{printed} pair {place}: found {type(value).__name__}; allowed: booleans")
    return encoded, [bool(value) for value in same]


@dataclass(slots=True)
class _ElementType:
    """Stands in for numpy.dtype."""

    code: str

    def __setstate__(self, state: Any) -> None:
        """Ignores byte order and alignment, which single bytes do not have."""


@dataclass(slots=True)
class _Array:
    """Stands in for numpy.ndarray."""

    items: bytes = b""

    def __setstate__(self, state: Any) -> None:
        _, _, element_type, _, items = state
        self.items = _array(items, element_type).items


class _StandIn:
    """A harmless function in place of one that a pickle names, without attributes that the pickle could set."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise DataError("holds a state of a function; allowed: encoded images and booleans")


class _BinReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name."""
        # NumPy 2 renamed the module.
        make = _STAND_INS.get((module.replace("numpy.core.", "numpy._core."), name))
        if make is None:
            raise DataError(f"holds an object of {printable(f'{module}.{name}')}; allowed: encoded images and booleans")
        return _StandIn(make)


def _element_type(code: str | bytes, *_: Any) -> _ElementType:
    code = code.decode("ascii") if isinstance(code, bytes) else code
    if code not in ("u1", "b1"):
        raise DataError(f"holds an array of {printable(str(code))!r}; allowed: encoded images and booleans")
    return _ElementType(code)


def _array(items: Any, element_type: Any, *_: Any) -> _Array:
    if not isinstance(items, bytes | bytearray) or not isinstance(element_type, _ElementType):
        raise DataError("holds an array that is not of bytes; allowed: encoded images and booleans")
    return _Array(bytes(items))


def _scalar(element_type: Any, items: Any) -> int:
    (value,) = _array(items, element_type).items
    return value


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise DataError(f"holds text in {printable(str(encoding))!r}; allowed: encoded images and booleans")
    return text.encode("latin1")


def _no_array(*_: Any) -> Any:
    raise DataError("holds an array of another kind; allowed: encoded images and booleans")


_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "dtype"): _element_type,
    ("numpy", "ndarray"): _no_array,
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy._core.numeric", "_frombuffer"): _array,
    ("_codecs", "encode"): _encode,
}
