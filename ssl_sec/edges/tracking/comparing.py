"""Which settings of a run affect its result, and whether they are those of its recipe."""

import ast
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from ssl_sec.edges.folder.names import WEIGHTS
from ssl_sec.edges.folder.stored_config import RENAMED
from ssl_sec.effects import is_among, without_effect, without_keys
from ssl_sec.recipes.registry import RECIPES

# Settings that differ between results that are compared, beside those without effect: of repetitions, of the network
# that a probe measures, and whether a probe follows.
_VARIED = {"seed", "probe.seed", "run", "checkpoint", "probe.enabled"}
# Prefix of a setting that stands for the content of a file.
CONTENT = "sha256 "


def deciding(params: Mapping[str, str], job: str) -> dict[str, str]:
    """The parameters that affect the result of a job's run: not its seed, and not the places of its files."""
    free = without_effect(RECIPES[job].config) if job in RECIPES else frozenset[str]()
    found = {RENAMED.get(key, key): value for key, value in params.items()}
    return {
        key: _without(value, key, free)
        for key, value in found.items()
        if key not in _VARIED and not is_among(key, free)
    }


def telling(one: Mapping[str, str], settings: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys that distinguish some settings from others, without those that follow from the options' names.

    Only some losses have `loss.scale`: if these have one value, `loss.name` tells as much, and nothing tells of the
    others that they have none.

    Args:
        one: the settings, which are among the others.
        settings: those that are compared.
    """

    def is_told(lacking: Mapping[str, str], key: str, having: Sequence[Mapping[str, str]]) -> bool:
        return all(_options_above(key, lacking) != _options_above(key, other) for other in having)

    found: list[str] = []
    for key in {key for each in settings for key in each}:
        having = [other for other in settings if key in other]
        varies = len({other[key] for other in having}) > 1
        unlike = [other for other in settings if key not in other and not is_told(other, key, having)]
        if (varies or unlike) if key in one else not is_told(one, key, having):
            found.append(key)
    return found


def _options_above(key: str, settings: Mapping[str, str]) -> list[str | None]:
    """The names of the options that decide whether there is such a key: of `loss.first.scale`, of both losses."""
    parts = key.split(".")
    names = [".".join([*parts[:end], "name"]) for end in range(1, len(parts))]
    return [settings.get(name) for name in names if name != key]


def is_expected(key: str, expected: str | None, found: str | None) -> bool:
    """Whether a setting of a run is the one that its recipe expects.

    A recipe names published weights as torch.hub does, with the beginning of their SHA-256: `googlenet-1378be20.pth`.
    For weights that another run has saved, any content is expected. Test sets may be added to those of a recipe, which
    names only what InsightFace publishes with the training set: each is measured for itself.

    Args:
        key: key of the setting.
        expected: its value in the recipe; None if it has none.
        found: its value in `ArchivedRun.settings`; None if it has none.
    """
    if key in WEIGHTS and expected is not None and found is not None and found.startswith(CONTENT):
        published = re.search(r"-([0-9a-f]{8,})\.\w+$", expected)
        digest = found.removeprefix(CONTENT)
        return expected != "None" and (published is None or digest.startswith(published[1]))
    if key == "test_sets" and expected is not None and found is not None:
        own, given = _groups(expected), _groups(found)
        return expected == found if own is None or given is None else all(each in given for each in own)
    return expected == found


def _without(listed: str, path: str, keys: Set[str]) -> str:
    """A list of groups without some of their keys; anything else is returned unchanged."""
    values = _groups(listed) if any(key.startswith(f"{path}.") for key in keys) else None
    if values is None:
        return listed
    return str([dict(sorted(each.items())) for each in without_keys(values, path, keys)])


def _groups(listed: str) -> Sequence[Mapping[str, Any]] | None:
    """The values of a list of groups; None if it is none, or was cut off by the store."""
    try:
        values = ast.literal_eval(listed)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    is_list = isinstance(values, list | tuple) and all(isinstance(each, dict) for each in values)
    return values if is_list else None
