"""Errors that a user can fix; a job prints them as one line and exits with their code."""

import difflib
import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, cast, get_args

_LONGEST_SHOWN = 400
# Names that a message about many of them shows.
_NAMED = 8
# The errors of a full disk, of a quota or a limit of size, and of storage that cannot be written.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_TORCH_CANNOT_WRITE = r"PytorchStreamWriter failed|unexpected pos \d+ vs|iostream error"
_PLURALS = {"person": "people", "query": "queries"}
_SOMEWHERE = "a file in output_dir, output or the folder for temporary files"


class UserError(ValueError):
    """Something outside the program is wrong; the message names it, what was found and what is allowed."""

    exit_code: ClassVar[int] = 1


class ConfigError(UserError):
    """A key or a value of the configuration is wrong."""

    exit_code = 2


class DataError(UserError):
    """A data set or one of its files is wrong."""

    exit_code = 3


class MissingDataError(DataError, FileNotFoundError):
    """A data set or one of its files does not exist."""


class StorageError(UserError):
    """A checkpoint, a run folder or the tracking store cannot be used."""

    exit_code = 4


class Stopped(Exception):
    """The run was asked to stop, saved its state and stopped."""

    exit_code: ClassVar[int] = 130


def out_of_memory(error: BaseException) -> ConfigError | None:
    """The error to report for an allocation that failed; None if the error is of another kind."""
    text = str(error)
    is_memory = re.search(r"(out of|not enough|can't allocate) memory", text, re.IGNORECASE)
    if not isinstance(error, MemoryError) and not (isinstance(error, RuntimeError) and is_memory):
        return None
    asked = re.search(r"allocate (?:you tried to allocate )?([\d.]+ ?(?:bytes|[KMGTP]iB))", text)
    at_once = f" for {asked[1]} at once" if asked else ""
    return ConfigError(
        f"not enough memory{at_once}; less is needed with a smaller global_batch_size, encoder.width, head.dim or "
        "image, and in training with runtime.recompute=true, or runtime.micro_batch_size for an encoder without batch "
        "norm"
    )


def lost_loader(error: BaseException) -> UserError | None:
    """The error to report for a process of a data loader that died; None if the error is of another kind."""
    if not isinstance(error, RuntimeError) or not str(error).startswith("DataLoader worker (pid"):
        return None
    return UserError(f"{str(error).strip(' .')}; if memory ran out, a lower runtime.num_loader_workers needs less")


def out_of_space(error: BaseException) -> StorageError | None:
    """The error to report for a file that cannot be written, as on a full disk; None if it is of another kind."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _UNWRITABLE:
            return StorageError(f"{cause.filename or _SOMEWHERE} cannot be written: {cause.strerror}")
        if isinstance(cause, RuntimeError) and re.search(_TORCH_CANNOT_WRITE, str(cause)):
            return StorageError(f"{_SOMEWHERE} cannot be written: the disk may be full")
        cause = cause.__cause__ or cause.__context__
    return None


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A clause with the allowed names nearest to `name`, or all of them if they are few.

    Args:
        name: the name that was found.
        allowed: the valid names.

    Returns:
        For example ``did you mean 'momentum'?`` or ``allowed: lr, momentum``.
    """
    names = sorted(allowed)
    begins = sorted((one for one in names if len(name) > 2 and one.startswith(name)), key=len)
    close = list(dict.fromkeys([*begins, *difflib.get_close_matches(name, names, n=3, cutoff=0.6)]))[:3]
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else ""
    if close and len(names) > 8:
        return hint
    listed = names if len(names) <= 24 else [*names[:24], "…"]
    return f"{hint} allowed: {', '.join(listed)}".strip()


def check_option(key: str, found: object, options: object) -> None:
    """Raises a ConfigError that names the key and the nearest option, unless the value is one of a Literal's."""
    allowed = get_args(options)
    if not any(type(found) is type(option) and found == option for option in allowed):
        raise ConfigError(f"{key}: found {shown(found)}; {nearest(str(found), map(str, allowed))}")


def printable(name: str) -> str:
    """`name` on one line, shortened if long; characters that cannot be printed are escaped (as line ends are)."""
    if len(name) > _LONGEST_SHOWN:
        name = f"{name[: _LONGEST_SHOWN // 2]}…{name[-_LONGEST_SHOWN // 2 :]}"
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def shown(value: object) -> str:
    """A value on one line as a configuration writes it: null, true, 0.5, 'name', [1, 2]."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, tuple | list):
        return printable(f"[{', '.join(map(shown, cast(Sequence[object], value)))}]")
    return printable(repr(value))


def counted(count: int, noun: str) -> str:
    """A count with its noun, for example ``1 seed``, ``2 classes``, ``3 people`` or ``1,437 images``."""
    plural = _PLURALS.get(noun) or noun + ("es" if noun.endswith("s") else "s")
    return f"{count:,} {noun if count == 1 else plural}"


def some_names(names: Sequence[str]) -> str:
    """The number of names and the first of them, for example ``3: cat, dog, …``."""
    return f"{len(names)}: {printable(', '.join(names[:_NAMED]))}{', …' if len(names) > _NAMED else ''}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none; for invalid YAML the line and the reason.

    Of an error that SQLAlchemy has wrapped, it is that of the database.
    """
    if isinstance(of_database := getattr(error.__cause__, "orig", None), Exception):
        return first_line(of_database)
    if (mark := getattr(error, "problem_mark", None)) is not None:
        return printable(
            f"not YAML in line {mark.line + 1}: {getattr(error, 'problem', None) or error}".splitlines()[0]
        )
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def require_path(key: str, path: str) -> None:
    """Raises a MissingDataError unless `path`, which the key gives, exists on this machine."""
    if not Path(path).expanduser().exists():
        raise MissingDataError(f"{key}: found {printable(path)!r}: no such file or folder")


@contextmanager
def writing(key: str, path: Path) -> Iterator[None]:
    """Turns an error of the system in the block into one line: `path`, which the key gives, cannot be written."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{key}: {path} cannot be written: {error.strerror or first_line(error)}") from error
