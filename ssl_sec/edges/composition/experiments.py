"""Experiments: files of `configs/experiment`, the user's own among them, and rows of the papers' tables.

The rows of `configs/table/*.yaml` become experiments: a key that names a config group chooses one of its options, any
other key is a value. A table's `grid` has a row for each combination of its axes' choices: a row's name is made from
`name`, in which {axis} stands for the choice, and its values are those of each of the `rules` whose `when` it meets, in
order. Its single `rows` may be `like` another row of the table.

An experiment's values for a group apply only to the option that it chooses there.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ssl_sec.edges.composition.config_folders import CONFIG_FOLDER, ConfigFile, config_file, doubled, own_options
from ssl_sec.edges.composition.options import EXPERIMENT, groups
from ssl_sec.errors import ConfigError, nearest, shown
from ssl_sec.papers import Value, find_reported
from ssl_sec.settings import flattened

TABLES = "table"


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """Chosen options of groups, and changed values.

    Attributes:
        name: the experiment's name.
        file: the file that defines it.
        choices: group -> option.
        values: nested, by top-level key; the values of a group apply to the option that is chosen.
    """

    name: str
    file: ConfigFile
    choices: Mapping[str, str]
    values: Mapping[str, Any]

    @property
    def keys(self) -> set[str]:
        """Its top-level keys, including groups."""
        return {*self.choices, *self.values}

    @property
    def is_row(self) -> bool:
        """Whether it is a row of a paper's table."""
        return self.file.path.parent.name == TABLES

    def replacing(
        self, defaults: Mapping[str, str], chosen: Mapping[str, str]
    ) -> tuple["Experiment", dict[str, dict[str, Any]]]:
        """The experiment with other options than its own, without its values for the options that are replaced.

        Args:
            defaults: group -> option of the groups for which the experiment chooses none.
            chosen: group -> option instead of the experiment's own.

        Returns:
            The experiment without the choices and values that are replaced; group -> key -> value, those values.
        """
        own = {**defaults, **self.choices}
        others = {group for group, option in chosen.items() if option != own[group]}
        replaced = Experiment(
            name=self.name,
            file=self.file,
            choices={group: option for group, option in self.choices.items() if group not in chosen},
            values={key: value for key, value in self.values.items() if key not in others},
        )
        return replaced, {group: flattened({group: self.values[group]}) for group in others & self.values.keys()}


def load(name: str) -> Experiment | None:
    """An experiment by its name; None if there is none.

    Raises:
        ConfigError: if it is a user's and cannot be read or is malformed, or the package has one of the same name.
    """
    if name not in _rows():
        file = config_file(EXPERIMENT, name)
        if file is None:
            return None
        return _of_file(name, file, ()) if file.is_own else _of_package(name, file)
    if name in (own := own_options(EXPERIMENT)):
        raise doubled(EXPERIMENT, name, own[name])
    return _row(name)


def explanations() -> dict[str, str]:
    """Name -> explanation of all experiments: the files, then the rows of tables, then the user's own."""
    packaged = {name: file.explanation for name, file in _packaged().items()}
    rows = {name: _papers_figures(name) for name in _rows()}
    own = {name: f"yours, {file.shown}: {file.explanation}" for name, file in own_options(EXPERIMENT).items()}
    return {**packaged, **rows, **own}


@cache
def _packaged() -> dict[str, ConfigFile]:
    paths = sorted((CONFIG_FOLDER / EXPERIMENT).glob("*.yaml"))
    return {path.stem: ConfigFile(path=path, is_own=False) for path in paths}


@cache
def _papers_figures(name: str) -> str:
    figures = ", ".join(
        f"{metric.rpartition('/')[2]} {value_text(value)}" for metric, value in find_reported(name).items()
    )
    return f"the paper's: {figures}" if figures else "not in the paper's tables"


def value_text(value: Value) -> str:
    """A figure of a paper in the usual notation."""
    return f"{value[0]} ± {value[1]}" if isinstance(value, tuple) else str(value)


@cache
def _of_package(name: str, file: ConfigFile) -> Experiment:
    return _of_file(name, file, ())


def _of_file(name: str, file: ConfigFile, within: tuple[Path, ...]) -> Experiment:
    """An experiment from a file, with the content of the experiments that its `defaults` name."""
    values = file.read()
    entries = values.pop("defaults", None) or []
    if not isinstance(entries, list):
        raise ConfigError(f"{file.shown}: defaults: found {shown(entries)}, must be a list")
    choices: dict[str, str] = {}
    inherited: dict[str, Any] = {}
    for entry in entries:
        if entry == "_self_":
            continue
        if isinstance(entry, str):
            base = _base(entry, file, within)
            choices, inherited = _over(choices, inherited, base.choices, base.values)
        else:
            choices, inherited = _over(choices, inherited, _choices(entry, file), {})
    choices, values = _over(choices, inherited, {}, {"recipe": name, **values})
    return Experiment(name=name, file=file, choices=choices, values=values)


def _base(entry: str, file: ConfigFile, within: tuple[Path, ...]) -> Experiment:
    name = entry.removeprefix(f"/{EXPERIMENT}/")
    if name in _rows():
        return _row(name)
    base = config_file(EXPERIMENT, name)
    if base is None:
        raise ConfigError(f"{file.shown}: defaults: found {name!r}; {nearest(name, explanations())}")
    if base.path in (*within, file.path):
        raise ConfigError(f"{file.shown}: defaults: found {name!r}, which is made from this experiment itself")
    return _of_file(name, base, (*within, file.path))


def _choices(entry: Any, file: ConfigFile) -> dict[str, str]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{file.shown}: defaults: found {entry!r}, must be as 'override /data: cifar10'")
    chosen = {str(key).removeprefix("override").strip().lstrip("/"): str(option) for key, option in entry.items()}
    allowed = groups() - {EXPERIMENT}
    for group in chosen:
        if group not in allowed:
            raise ConfigError(f"{file.shown}: defaults: found {group!r}; {nearest(group, allowed)}")
    return chosen


def _over(
    choices: Mapping[str, str], values: Mapping[str, Any], new_choices: Mapping[str, str], new_values: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Choices and values, overridden by new ones, whose values apply to the options chosen there."""
    kept = {key: value for key, value in values.items() if new_choices.get(key, choices.get(key)) == choices.get(key)}
    return {**choices, **new_choices}, merged(kept, new_values)


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, overridden by others; a list replaces a list."""
    both = {key for key in over if isinstance(over[key], Mapping) and isinstance(values.get(key), Mapping)}
    return {**values, **over, **{key: merged(values[key], over[key]) for key in both}}


@cache
def _row(name: str) -> Experiment:
    file, row = _rows()[name]
    known = groups()
    values: dict[str, Any] = {"recipe": name}
    for key, value in row.items():
        if key not in known:
            *path, last = key.split(".")
            place = values
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value
    choices = {key: str(value) for key, value in row.items() if key in known}
    return Experiment(name=name, file=file, choices=choices, values=values)


@cache
def _rows() -> dict[str, tuple[ConfigFile, dict[str, Any]]]:
    """The rows of all tables by name, with their files."""
    rows: dict[str, tuple[ConfigFile, dict[str, Any]]] = {}
    for path in sorted((CONFIG_FOLDER / TABLES).glob("*.yaml")):
        file = ConfigFile(path=path, is_own=False)
        values = file.read()
        here = dict(_grid_rows(values["grid"])) if "grid" in values else {}
        for name, row in values.get("rows", {}).items():
            own = {**row}
            here[name] = {**here.get(own.pop("like", None), {}), **own}
        rows |= {name: (file, {**values.get("common", {}), **row}) for name, row in here.items()}
    return rows


def _grid_rows(grid: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a grid by name."""
    axes: dict[str, list[Any]] = grid["axes"]
    for choices in itertools.product(*axes.values()):
        row = dict(zip(axes, choices, strict=True))
        values: dict[str, Any] = {}
        for rule in grid["rules"]:
            own = {**rule}
            if all(row[axis] in _listed(allowed) for axis, allowed in own.pop("when", {}).items()):
                values |= own
        yield grid["name"].format(**row), values


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def as_typed(value: Any) -> str:
    """A value as it is typed on a command line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}: {as_typed(item)}' for key, item in value.items())}}}"
    return str(value)
