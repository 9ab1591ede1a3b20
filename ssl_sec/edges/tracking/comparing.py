"""Which settings of a run affect its result, and whether they are those of its recipe."""

import ast
import dataclasses
import re
from collections.abc import Mapping, Sequence, Set
from functools import cache
from typing import Any, get_args, get_type_hints

from ssl_sec.edges.folder.names import WEIGHTS
from ssl_sec.edges.folder.stored_config import RENAMED
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.settings import LocalPath

# Settings that do not change the result of a run: where and how it ran. Nor do settings with places of files.
_FREE_KEYS = {
    "seed",
    "probe.seed",
    "probe.enabled",
    "run",
    "run_name",
    "resume",
    "log_every_steps",
    "check_images",
    "checkpoint",
    "data.download",
    "data.resident_limit_mib",
}
# Prefix of a setting that stands for the content of a file.
CONTENT = "sha256 "
_FREE_GROUPS = ("runtime.", "tracking.", "checkpoint.", "monitor.")


def deciding(params: Mapping[str, str], job: str) -> dict[str, str]:
    """The parameters that affect the result of a job's run: not its seed, and not the places of its files."""
    paths = _local_keys(RECIPES[job].config) - set(WEIGHTS) if job in RECIPES else frozenset[str]()
    found = {RENAMED.get(key, key): value for key, value in params.items()}
    return {
        key: _without(value, {path.removeprefix(f"{key}.") for path in paths if path.startswith(f"{key}.")})
        for key, value in found.items()
        if key not in _FREE_KEYS | paths and not key.startswith(_FREE_GROUPS)
    }


def differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys whose values are not the same in all settings."""
    keys = {key for one in settings for key in one}
    return [key for key in keys if len({one.get(key) for one in settings}) > 1]


def is_expected(key: str, expected: str | None, found: str | None) -> bool:
    """Whether a setting of a run is the one that its recipe expects.

    A recipe names published weights as torch.hub does, with the beginning of their SHA-256: `googlenet-1378be20.pth`.
    For weights that another run has saved, any content is expected.

    Args:
        key: key of the setting.
        expected: its value in the recipe; None if it has none.
        found: its value in `ArchivedRun.settings`; None if it has none.
    """
    if key in WEIGHTS and expected is not None and found is not None and found.startswith(CONTENT):
        published = re.search(r"-([0-9a-f]{8,})\.\w+$", expected)
        digest = found.removeprefix(CONTENT)
        return expected != "None" and (published is None or digest.startswith(published[1]))
    return expected == found


def _without(listed: str, keys: Set[str]) -> str:
    """A list of values by name without some of their keys; anything else is returned unchanged."""
    try:
        values = ast.literal_eval(listed) if keys else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # cut off by the store
        return listed
    if not isinstance(values, list | tuple) or not all(isinstance(each, dict) for each in values):
        return listed
    free = keys | {"resident_limit_mib"}
    return str([{key: value for key, value in sorted(each.items()) if key not in free} for each in values])


@cache
def _local_keys(kind: Any, path: str = "") -> frozenset[str]:
    """The dotted keys of a dataclass, or of any in a union or a list, whose values are paths on a machine."""
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        return frozenset[str]().union(*(_local_keys(each, path) for each in get_args(kind)))
    hints = {
        f"{path}.{name}" if path else name: hint for name, hint in get_type_hints(kind, include_extras=True).items()
    }
    nested = (_local_keys(hint, key) for key, hint in hints.items() if get_args(hint) or dataclasses.is_dataclass(hint))
    return frozenset(key for key, hint in hints.items() if _holds_path(hint)).union(*nested)


def _holds_path(hint: Any) -> bool:
    rules = getattr(hint, "__metadata__", ())
    return any(isinstance(rule, LocalPath) for rule in rules) or any(map(_holds_path, get_args(hint)))
