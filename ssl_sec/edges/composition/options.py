"""The groups of a job's config, and the options of each group.

An option is a file of `configs/<group>` or of the user's own, or a dataclass: every name of a group's dataclasses is an
option with their defaults. Files exist only for what differs from these defaults. Recipes may declare different
dataclasses of one name, as `optimiser=adamw` of pretraining and of fine-tuning: each job has its own.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ssl_sec.edges.composition.config_folders import CONFIG_FOLDER, ConfigFile, config_file, doubled, own_options
from ssl_sec.edges.composition.keys import OF, defaults_of, kind_of, kinds_by_name, misfit, summary_of
from ssl_sec.errors import ConfigError, nearest
from ssl_sec.recipes.registry import PRETRAIN, RECIPES

EXPERIMENT = "experiment"


@dataclass(frozen=True, kw_only=True, slots=True)
class Primary:
    """A job's own config.

    Attributes:
        bases: the jobs whose configs it extends.
        options: group -> option chosen by default; `null` for none.
        values: all other values, including those of its bases.
        node: the content of its file.
    """

    bases: tuple[str, ...]
    options: Mapping[str, str]
    values: Mapping[str, Any]
    node: Mapping[str, Any]

    @property
    def keys(self) -> set[str]:
        """Its top-level keys, including groups."""
        return {*self.options, *self.values}


@cache
def primary(job: str) -> Primary:
    """The config of a job, `configs/<job>.yaml`, on that of its training."""
    own, _, training = job.partition(OF)
    node = ConfigFile(path=CONFIG_FOLDER / f"{own}.yaml", is_own=False).read()
    defaults = [training if training and entry == PRETRAIN.name else entry for entry in node.get("defaults", [])]
    node |= {"defaults": defaults} if defaults else {}
    bases = tuple(entry for entry in defaults if isinstance(entry, str) and entry != "_self_")
    options: dict[str, str] = {}
    values: dict[str, Any] = {}
    for base in map(primary, bases):
        options, values = {**options, **base.options}, {**values, **base.values}
    for entry in defaults:
        if isinstance(entry, dict):
            options |= {str(group): "null" if option is None else str(option) for group, option in entry.items()}
    values |= {key: value for key, value in node.items() if key != "defaults"}
    return Primary(bases=bases, options=options, values=values, node=node)


@cache
def groups() -> frozenset[str]:
    """The names of all groups, including that of the experiments."""
    return frozenset(group for path in CONFIG_FOLDER.glob("*.yaml") for group in primary(path.stem).options)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Declared(ConfigFile):
    """A dataclass with its defaults, as an option.

    Attributes:
        name: name of the option, and the dataclass's own `name`.
        kind: the dataclass, in the module `path`.
    """

    name: str
    kind: type[Any]

    @property
    def comment(self) -> list[str]:
        """The first paragraph of its docstring."""
        return [summary_of(self.kind)]

    def read(self) -> dict[str, Any]:
        """Its defaults; `???` for required values."""
        return {"name": self.name, **{key: value for key, value in defaults_of(self.kind).items() if key != "name"}}


@cache
def _declared(group: str, job: str) -> dict[str, ConfigFile]:
    """The options of a group that dataclasses declare, by name: those of the job, and others that only recipes have."""
    kinds: dict[str, type[Any]] = {}
    for declaring in (job, *RECIPES):
        kinds = {**kinds_by_name(kind_of(declaring), group), **kinds}
    return {
        name: _Declared(path=Path(str(sys.modules[kind.__module__].__file__)), is_own=False, name=name, kind=kind)
        for name, kind in kinds.items()
    }


@cache
def _packaged(group: str, job: str) -> dict[str, ConfigFile]:
    """The package's options of a group by name."""
    files = {path.stem: ConfigFile(path=path, is_own=False) for path in (CONFIG_FOLDER / group).glob("*.yaml")}
    return dict(sorted({**_declared(group, job), **files}.items()))


def options(group: str, job: str) -> dict[str, str]:
    """All options of a group with their explanations; those that the job cannot use are among them, see `usable`."""
    packaged = _packaged(group, job)
    own = {name: file for name, file in own_options(group).items() if name not in packaged}
    return {
        **{name: option.explanation for name, option in packaged.items()},
        **{name: f"yours, {file.shown}: {file.explanation}" for name, file in own.items()},
    }


def option(group: str, name: str, job: str) -> ConfigFile | None:
    """An option of a group, as a job declares it, or as the first recipe that has it; None if there is none.

    Raises:
        ConfigError: if the package and the user have different ones.
    """
    file = config_file(group, name)
    if file is not None and not file.is_own:
        return file  # without torch
    found = _declared(group, job).get(name)
    # A copy of an earlier version's file has fewer keys.
    if found is not None and file is not None and {**found.read(), **file.read()} != found.read():
        raise doubled(group, name, file)
    return found or file


def is_in_files(group: str, name: str) -> bool:
    """Whether an option is one of the package's and only in files, which are read without torch."""
    file = config_file(group, name)
    return (
        file is not None
        and not file.is_own
        and all(is_in_files(group, base) for base in file.read().get("defaults", []))
    )


def values_of_file(group: str, file: ConfigFile, job: str) -> dict[str, Any]:
    """The values of an option, including those of the options that it extends, as a job declares them."""
    return _merged(group, file, job, ()) if file.is_own else _packaged_values(group, file, job)


@cache
def _packaged_values(group: str, file: ConfigFile, job: str) -> dict[str, Any]:
    return _merged(group, file, job, ())


def _merged(group: str, file: ConfigFile, job: str, within: tuple[ConfigFile, ...]) -> dict[str, Any]:
    own = file.read()
    merged: dict[str, Any] = {}
    for name in own.pop("defaults", []):
        if name == "_self_":
            continue
        base = option(group, name, job) if isinstance(name, str) else None
        if base is None or base in (*within, file):
            raise ConfigError(f"{file.shown}: defaults: found {name!r}; {nearest(str(name), options(group, job))}")
        merged |= _merged(group, base, job, (*within, file))
    return {**merged, **own}


def values_of_option(group: str, name: str, job: str) -> dict[str, Any] | None:
    """The values of an option, as a job declares it; None if there is none that can be read."""
    try:
        file = option(group, name, job)
        return None if file is None else values_of_file(group, file, job)
    except ConfigError:
        return None


def usable(job: str, group: str, name: str) -> bool:
    """Whether a job can use an option; false for one that cannot be read."""
    values = values_of_option(group, name, job)
    return values is not None and misfit(job, group, values, is_whole=name in _packaged(group, job)) is None


def own_texts() -> dict[str, str]:
    """The text of all of the user's own files, by their path in a folder of configs."""
    own = {f"{group}/{name}.yaml": file for group in sorted(groups()) for name, file in own_options(group).items()}
    return {name: file.path.read_text(encoding="utf-8", errors="replace") for name, file in own.items()}
