"""Which settings leave the result of a run as it is: how it runs, and where its files are.

The annotation of a field says so, for a group with all of its keys: `resume: NoEffect[bool]`.
"""

import dataclasses
from collections.abc import Mapping, Sequence, Set
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from ssl_sec.rules import LocalPath

T = TypeVar("T")


class _Mark:
    """A rule that allows every value."""

    def check(self, key: str, value: Any) -> None:
        """Checks nothing."""


class _NoEffect(_Mark): ...


class _NoEffectYetKept(_Mark): ...


class _ImageFiles(_Mark): ...


class _ContentPath(LocalPath): ...


# A setting without effect on the result, as any path on this machine.
NoEffect = Annotated[T, _NoEffect()]
# Such a setting that a resume keeps, since the layout of the checkpoints depends on it.
NoEffectYetKept = Annotated[T, _NoEffectYetKept()]
# Paths, globs or URLs of images, which may be in any folder: only their names may have an effect.
ImageFiles = Annotated[T, _ImageFiles()]
# A path on this machine of a file whose content has an effect.
Content = Annotated[str, _ContentPath()]


@cache
def without_effect(kind: Any) -> frozenset[str]:
    """The dotted keys and groups of a dataclass, or of any in a union or a list, that have no effect."""
    return _marked(kind, (_NoEffect, _NoEffectYetKept, LocalPath)) - _marked(kind, (_ContentPath,))


@cache
def kept_by_resume(kind: Any) -> frozenset[str]:
    """Those of the keys without effect that a resume may not change."""
    return _marked(kind, (_NoEffectYetKept,))


@cache
def image_files(kind: Any) -> frozenset[str]:
    """The dotted keys of such a dataclass with paths, globs or URLs of images."""
    return _marked(kind, (_ImageFiles,))


@cache
def local_paths(kind: Any) -> frozenset[str]:
    """The dotted keys of such a dataclass with paths on this machine."""
    return _marked(kind, (LocalPath,))


def is_among(key: str, keys: Set[str]) -> bool:
    """Whether a dotted key, or a group that it is in, is one of the keys."""
    parts = key.split(".")
    return any(".".join(parts[:count]) in keys for count in range(1, len(parts) + 1))


def without_keys(groups: Sequence[Mapping[str, Any]], path: str, keys: Set[str]) -> list[dict[str, Any]]:
    """The groups of a list at a dotted key, such as test sets, without their keys that are among `keys`."""
    return [{key: value for key, value in group.items() if not is_among(f"{path}.{key}", keys)} for group in groups]


def file_names(places: Sequence[str] | None) -> list[str] | None:
    """The names of image files without their folders."""
    return None if places is None else [place.rpartition("/")[2] for place in places]


def _marked(kind: Any, marks: tuple[type, ...], path: str = "") -> frozenset[str]:
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        return frozenset[str]().union(*(_marked(each, marks, path) for each in get_args(kind)))
    hints = {
        f"{path}.{name}" if path else name: hint for name, hint in get_type_hints(kind, include_extras=True).items()
    }
    nested = (_marked(hint, marks, key) for key, hint in hints.items())
    return frozenset(key for key, hint in hints.items() if _has_mark(hint, marks)).union(*nested)


def _has_mark(hint: Any, marks: tuple[type, ...]) -> bool:
    rules = getattr(hint, "__metadata__", ())
    return any(isinstance(rule, marks) for rule in rules) or any(_has_mark(each, marks) for each in get_args(hint))
