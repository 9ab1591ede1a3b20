"""Hydra composes a job's configuration from `configs/`; dataclasses validate it.

The rows of `configs/table/*.yaml` become experiments: a key that names a config group chooses one of its options,
any other is a value. A table's `grid` has a row for every combination of its axes' choices: a row is named by `name`,
in which {axis} stands for the choice, and has the values of each of the `rules` whose `when` it meets, in their order.
Its single `rows` may be `like` another row of the table.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, OmegaConfBaseException

from ssl_sec.edges.overrides import understood
from ssl_sec.errors import ConfigError, nearest, printable
from ssl_sec.papers import Value, reported
from ssl_sec.settings import flattened

_PACKAGED = Path(__file__).parents[1] / "configs"
CONFIG_FOLDER = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[2] / "configs"

_TABLES = "table"
# Keys of earlier versions, and what stands in their place.
_RENAMED = {
    "probe.decay_epochs": "give probe.decay_at, shares of probe.epochs, as [0.6,0.75,0.9] for 60, 75, 90 of 100"
}
TrainingJob = Literal["pretrain", "metric_learning", "face"]
_TRAINING_JOBS: tuple[TrainingJob, ...] = ("pretrain", "metric_learning", "face")


def compose(job: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The resolved values of a job's configuration.

    Args:
        job: names the primary config, `configs/<job>.yaml`.
        overrides: `key=value` or `group=option`, in Hydra's grammar.

    Raises:
        ConfigError: for a group, an option, a key or a value that does not exist, with the nearest names.
    """
    return as_values(_compose(job, overrides))


def composed_yaml(job: str, overrides: Sequence[str]) -> str:
    """The same as YAML; keys that must be given and are not stay `???`."""
    return OmegaConf.to_yaml(_compose(job, overrides))


def as_values(config: DictConfig) -> dict[str, Any]:
    """Plain nested values of a composed config.

    Raises:
        ConfigError: for a key that must be given and is not.
    """
    # Not OmegaConf.missing_keys, which fails where another key is made from the missing one.
    missing = sorted(key for key, value in flattened(as_mapping(config)).items() if value == "???")
    if missing:
        raise ConfigError(f"{missing[0]}: missing; give it as {missing[0]}=<value>")
    try:
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {_first_line(error)}") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@cache
def options() -> dict[str, dict[str, str]]:
    """Group -> option -> its explanation, the first comment line of its file."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(CONFIG_FOLDER.glob("*/*.yaml")):
        if path.parent.name != _TABLES:
            found.setdefault(path.parent.name, {})[path.stem] = _explanation(path)
    for name in _table_rows():
        figures = ", ".join(f"{metric.rpartition('/')[2]} {_told(value)}" for metric, value in reported(name).items())
        found["experiment"][name] = f"the paper's: {figures}" if figures else "not in the paper's tables"
    return found


def groups(job: str) -> set[str]:
    """The groups that a job chooses from."""
    return _groups_and_keys(job)[0]


@cache
def experiments(job: str) -> dict[str, str]:
    """The experiments that a job can run, with their explanations."""
    return {name: explanation for name, explanation in options()["experiment"].items() if _fits(job, name)}


def job_of(experiment: str) -> TrainingJob | None:
    """The job that runs an experiment; None if there is none."""
    if experiment not in _table_rows() and not _experiment_path(experiment).is_file():
        return None
    return next((job for job in _TRAINING_JOBS if _fits(job, experiment)), None)


def _fits(job: str, experiment: str) -> bool:
    """Whether an experiment has only groups and keys of the job."""
    known, keys = _groups_and_keys(job)
    chosen, given = _needed(experiment)
    return "experiment" in known and chosen <= known and given <= keys


@cache
def _groups_and_keys(job: str) -> tuple[set[str], set[str]]:
    """The groups that a job chooses from, and its top-level keys."""
    primary = OmegaConf.load(CONFIG_FOLDER / f"{job}.yaml")
    assert isinstance(primary, DictConfig)
    values = as_mapping(primary)
    defaults = values.pop("defaults", [])
    own_groups = {str(group) for entry in defaults if isinstance(entry, dict) for group in entry}
    inherited = [entry for entry in defaults if isinstance(entry, str) and entry != "_self_"]
    for other in inherited:
        more_groups, more_keys = _groups_and_keys(other)
        own_groups, values = own_groups | more_groups, {**dict.fromkeys(more_keys), **values}
    return own_groups, {*values, *own_groups}


@cache
def _needed(experiment: str) -> tuple[set[str], set[str]]:
    """The groups that an experiment chooses from, and its top-level keys."""
    rows = _table_rows()
    if experiment in rows:
        keys = {key.partition(".")[0] for key in rows[experiment]}
        return keys & _groups(), keys
    node = OmegaConf.load(_experiment_path(experiment))
    assert isinstance(node, DictConfig)
    values = as_mapping(node)
    defaults = [entry for entry in values.pop("defaults", []) if isinstance(entry, dict)]
    chosen = {str(key).removeprefix("override /") for entry in defaults for key in entry}
    return chosen, set(values)


def _experiment_path(experiment: str) -> Path:
    return CONFIG_FOLDER / "experiment" / f"{experiment}.yaml"


@cache
def _groups() -> frozenset[str]:
    """The names of all groups."""
    return frozenset(path.name for path in CONFIG_FOLDER.iterdir() if path.is_dir())


def _compose(job: str, overrides: Sequence[str]) -> DictConfig:
    parser = OverridesParser.create()
    overrides = [understood(override) for override in overrides]
    for override in overrides:
        try:
            parsed = parser.parse_override(override)
        except (HydraException, ValueError, RecursionError) as error:  # too many digits, or brackets
            raise ConfigError(f"{printable(repr(override))}: not understood; give key=value, or --help") from error
        _require_value(parsed)
    for override in overrides:
        key, _, name = override.partition("=")
        if key == "experiment" and name in _table_rows():
            _register_row(name)
    misplaced = _misplaced(job, overrides)
    if misplaced is not None:
        raise ConfigError(misplaced)
    # The folder of the tables is a group to Hydra, but one that nobody chooses from: `table` is a key like others.
    tables = [override for override in overrides if override.partition("=")[0] == _TABLES]
    try:
        with hydra.initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3", job_name=job):
            config = hydra.compose(job, [override for override in overrides if override not in tables])
        for override in tables:
            OmegaConf.update(config, _TABLES, parser.parse_override(override).value())
        return config
    except ConfigAttributeError as error:
        raise ConfigError(_unknown_key(job, overrides) or _first_line(error)) from error
    except MissingConfigException as error:
        raise ConfigError(_missing_option(job, overrides) or _first_line(error)) from error
    except ConfigCompositionException as error:
        raise ConfigError(_unknown_key(job, overrides) or _first_line(error)) from error
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:  # no file can have that name
        known = _missing_option(job, overrides) or _unknown_key(job, overrides)
        raise ConfigError(known or _first_line(error)) from error


def _require_value(override: Override) -> None:
    """Refuses what Hydra's grammar has beside values of a job: removed keys, and settings of Hydra itself.

    What an experiment sets may be removed from a group, for an option that does not have it.
    """
    key = override.key_or_group
    if override.is_delete() and "." not in key:
        raise ConfigError(f"{override.input_line}: a key cannot be removed; give {key}=<value>")
    if re.match(r"hydra\b", key):
        raise ConfigError(f"{key}: settings of Hydra have no effect; output_dir=<folder> says where runs are kept")


def _misplaced(job: str, overrides: Sequence[str]) -> str | None:
    """Names an experiment that is another job's."""
    for override in overrides:
        key, _, name = override.partition("=")
        other = job_of(name) if key == "experiment" else None
        if other is not None and not _fits(job, name):
            return f"experiment: found {name!r}, which is run by jobs.{other}; {nearest(name, experiments(job))}"
    return None


def _missing_option(job: str, overrides: Sequence[str]) -> str | None:
    known = {**options(), "experiment": experiments(job)}
    for override in overrides:
        group, _, option = override.lstrip("+").partition("=")
        if group in known and option not in known[group]:
            return f"{group}: found {printable(repr(option))}; {nearest(option, known[group])}"
    return None


def _unknown_key(job: str, overrides: Sequence[str]) -> str | None:
    """Names the override whose key does not exist once the groups are chosen."""
    known = options()
    chosen = [override for override in overrides if override.partition("=")[0] in known]
    config = as_mapping(_compose(job, chosen)) if len(chosen) < len(overrides) else {}
    keys = {*flattened(config), *config, *(".".join(key.split(".")[:-1]) for key in flattened(config))} - {""}
    for override in overrides:
        key = override.partition("=")[0]
        if key in _RENAMED:
            return f"{key}: unknown key; {_RENAMED[key]}"
        if key not in keys and key not in known and not key.startswith(("+", "~")):
            return f"{key}: unknown key; {nearest(key, keys | known.keys())}"
    return None


def as_mapping(config: DictConfig) -> dict[str, Any]:
    """Nested values with `???` left in."""
    values = OmegaConf.to_container(config)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@cache
def _register_row(name: str) -> None:
    """Makes a row known to Hydra, which copies all that it knows for each composition."""
    known, row = _groups(), _table_rows()[name]
    defaults = [{f"override /{key}": value} for key, value in row.items() if key in known]
    values = OmegaConf.create({})
    for key, value in row.items():
        if key not in known:
            OmegaConf.update(values, key, value, force_add=True)
    node = {"defaults": [*defaults, "_self_"], "recipe": name, **as_mapping(values)}
    ConfigStore.instance().store(group="experiment", name=name, node=node, package="_global_")


@cache
def _table_rows() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted((CONFIG_FOLDER / _TABLES).glob("*.yaml")):
        table = OmegaConf.load(path)
        assert isinstance(table, DictConfig)
        values = as_mapping(table)
        here = dict(_grid_rows(values["grid"])) if "grid" in values else {}
        for name, row in values.get("rows", {}).items():
            own = {**row}
            here[name] = {**here.get(own.pop("like", None), {}), **own}
        rows |= {name: {**values.get("common", {}), **row} for name, row in here.items()}
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


def _told(value: Value) -> str:
    return f"{value[0]} ± {value[1]}" if isinstance(value, tuple) else str(value)


def _explanation(path: Path) -> str:
    comments: Iterable[str] = (line for line in path.read_text("utf-8").splitlines() if line.startswith("# "))
    return next((line[2:] for line in comments if not line.startswith("# @package")), "")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(re.sub(r"\s+", " ", lines[0])) if lines else type(error).__name__
