"""Hydra composes a job's configuration from `configs/`; dataclasses validate it."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from ssl_sec.edges.composition.config_folders import CONFIG_FOLDER, ConfigFile, config_file, own_options
from ssl_sec.edges.composition.experiments import TABLES, Experiment, as_typed, explanations, load
from ssl_sec.edges.composition.hints import in_words, meant, suggestion, swept
from ssl_sec.edges.composition.keys import keys_of, kind_of, misfit, unknown_keys
from ssl_sec.edges.overrides import understood
from ssl_sec.errors import ConfigError, nearest, printable
from ssl_sec.recipes.registry import trainings
from ssl_sec.settings import flattened

logger = logging.getLogger("ssl_sec")

# Keys of earlier versions, and what is in their place.
_RENAMED = {
    "probe.decay_epochs": "give probe.decay_at, shares of probe.epochs, as [0.6,0.75,0.9] for 60, 75, 90 of 100"
}
_EXPERIMENT = "experiment"
# What Hydra knows the chosen experiment by: no file may be in the way.
_CHOSEN = "the-chosen-one"


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


def composed(job: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The same as nested values, not resolved; keys that must be given and are not stay `???`."""
    return as_mapping(_compose(job, overrides))


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
    except InterpolationKeyError as error:
        source, whole = re.findall(r"'(.+?)'", str(error))[0], re.split(r"[.\[]", str(error.full_key))[0]
        raise ConfigError(
            f"{error.full_key}: made from {source}, which these options do not have; give {whole}=<value>"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {_first_line(error)}") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def options() -> dict[str, dict[str, str]]:
    """Group -> option -> its explanation, the first comment line of its file."""
    found = {group: {**names} for group, names in _packaged_options().items()}
    for group in found:
        found[group] |= {name: f"yours, {file.shown}: {file.explanation}" for name, file in own_options(group).items()}
    return {**found, _EXPERIMENT: explanations()}


def options_of(job: str) -> dict[str, dict[str, str]]:
    """The same of a job: its groups, with the options and experiments that it can use."""
    known = {**options(), _EXPERIMENT: experiments(job)}
    return {
        group: {name: text for name, text in known[group].items() if group == _EXPERIMENT or _usable(job, group, name)}
        for group in sorted(groups(job))
    }


def groups(job: str) -> set[str]:
    """The groups that a job chooses from."""
    return set(_primary(job).options)


def experiments(job: str) -> dict[str, str]:
    """The experiments that a job can run, with their explanations."""
    return {name: explanation for name, explanation in explanations().items() if _runs(job, name)}


def job_of(experiment: str) -> str | None:
    """The job that runs an experiment; None if there is none."""
    return next((job for job in trainings() if _runs(job, experiment)), None)


def _runs(job: str, name: str) -> bool:
    """Whether a job can run an experiment; a file that cannot be read is none."""
    try:
        experiment = load(name)
    except ConfigError:
        return False
    return experiment is not None and _fits(job, experiment)


def chosen_options(job: str, overrides: Sequence[str]) -> dict[str, str]:
    """Group -> option, as the overrides, their experiment and the job's own config choose; `null` for none."""
    return dict(_choice(job, _parsed(overrides)).options)


def chosen_experiment(job: str, overrides: Sequence[str]) -> Experiment | None:
    """The experiment that the overrides choose; None if they choose none.

    Raises:
        ConfigError: if there is none of that name, or the job cannot run it.
    """
    return _experiment(job, _parsed(overrides))


def chooses_own(job: str, overrides: Sequence[str]) -> bool:
    """Whether an experiment or an option of the user's own is chosen."""
    experiment, options = chosen_experiment(job, overrides), chosen_options(job, overrides)
    files = [config_file(group, option) for group, option in options.items()]
    return (experiment is not None and experiment.file.is_own) or any(
        file is not None and file.is_own for file in files
    )


def as_mapping(config: DictConfig) -> dict[str, Any]:
    """Nested values with `???` left in."""
    values = OmegaConf.to_container(config)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """What overrides choose, before Hydra composes it.

    Attributes:
        options: group -> option, of the overrides, their experiment and the job.
        typed: group -> option, of the overrides alone.
        experiment: without what other options replace; None if none is chosen.
        dropped: group -> key -> value, of the experiment, which are for another option than the chosen one.
        instead_of: group -> option that the dropped values are for.
    """

    options: Mapping[str, str]
    typed: Mapping[str, str]
    experiment: Experiment | None
    dropped: Mapping[str, Mapping[str, Any]]
    instead_of: Mapping[str, str]


def _choice(job: str, given: Sequence[Override]) -> _Choice:
    defaults, experiment = _primary(job).options, _experiment(job, given)
    typed = {
        override.key_or_group: "null" if override.value() is None else str(override.value())
        for override in given
        if override.key_or_group in defaults and override.key_or_group != _EXPERIMENT and not override.is_delete()
    }
    own = {**defaults, **({} if experiment is None else experiment.choices)}
    replaced, dropped = (None, {}) if experiment is None else experiment.replacing(defaults, typed)
    return _Choice(options={**own, **typed}, typed=typed, experiment=replaced, dropped=dropped, instead_of=own)


def _compose(job: str, overrides: Sequence[str]) -> DictConfig:
    given = _parsed(overrides)
    for override in given:
        if override.is_sweep_override():
            raise ConfigError(_swept(job, override, given))
        if override.key_or_group in _primary(job).options and override.value() is None:
            allowed = {**options_of(job), _EXPERIMENT: experiments(job)}[override.key_or_group]
            raise ConfigError(f"{override.key_or_group}: found 'null'; {nearest('null', allowed)}")
    choice = _choice(job, given)
    _check_options(job, choice)
    config = _with_hydra(job, given, choice)
    if choice.experiment is not None:
        _check_keys(job, choice.experiment, config)
        for group, values in choice.dropped.items():
            sets = ", ".join(f"{key}={as_typed(value)}" for key, value in values.items())
            _say(
                f"experiment={choice.experiment.name} sets {sets} for {group}={choice.instead_of[group]}: left out, as "
                f"{group}={choice.options[group]} is chosen"
            )
    return config


def _with_hydra(job: str, given: Sequence[Override], choice: _Choice) -> DictConfig:
    nodes: dict[tuple[str, str], Mapping[str, Any]] = {}
    for group, option in choice.options.items():
        file = config_file(group, option)
        if file is not None and file.is_own:
            nodes[group, option] = _values_of(group, file)
    if choice.experiment is not None:
        defaults = [{f"override /{group}": option} for group, option in choice.experiment.choices.items()]
        nodes[_EXPERIMENT, _CHOSEN] = {"defaults": [*defaults, "_self_"], **choice.experiment.values}
    # The folder of the tables is a group to Hydra, but one that nobody chooses from: `table` is a key like others.
    tables = [override for override in given if override.key_or_group == TABLES]
    lines = [_line(override) for override in given if override not in tables]
    try:
        with _registered(nodes), hydra.initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3", job_name=job):
            config = hydra.compose(job, lines)
        for override in tables:
            OmegaConf.update(config, TABLES, override.value())
        return config
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:  # no file can have that name
        raise ConfigError(_unknown_key(job, given, choice) or _first_line(error)) from error


def _parsed(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed: list[Override] = []
    for override in map(understood, overrides):
        try:
            parsed.append(parser.parse_override(override))
        except (HydraException, ValueError, RecursionError) as error:  # too many digits, or brackets
            raise ConfigError(f"{printable(repr(override))}: not understood; give key=value, or --help") from error
        _require_value(parsed[-1])
    return parsed


def _require_value(override: Override) -> None:
    """Refuses what Hydra's grammar has beside values of a job: removed keys, and settings of Hydra itself."""
    key = override.key_or_group
    if override.is_delete():
        raise ConfigError(f"{override.input_line}: a key cannot be removed; give {key}=<value>")
    if re.match(r"hydra\b", key):
        raise ConfigError(f"{key}: settings of Hydra have no effect; output_dir=<folder> says where runs are kept")


def _line(override: Override) -> str:
    assert override.input_line is not None
    chooses = override.key_or_group == _EXPERIMENT and override.value() is not None
    return f"{_EXPERIMENT}={_CHOSEN}" if chooses else override.input_line


@contextmanager
def _registered(nodes: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[None]:
    """Makes nodes known to Hydra, which copies all that it knows for each composition."""
    store = ConfigStore.instance()
    for (group, name), node in nodes.items():
        store.store(group=group, name=name, node=dict(node), package="_global_" if group == _EXPERIMENT else None)
    try:
        yield
    finally:
        for group, name in nodes:
            del store.repo[group][f"{name}.yaml"]


def _experiment(job: str, given: Sequence[Override]) -> Experiment | None:
    names = [override.value() for override in given if override.key_or_group == _EXPERIMENT]
    if _EXPERIMENT not in _primary(job).options or not names or names[-1] is None:
        return None
    name = str(names[-1])
    experiment = load(name)
    if experiment is None:
        raise ConfigError(f"{_EXPERIMENT}: found {name!r}; {nearest(name, experiments(job))}")
    if _fits(job, experiment):
        return experiment
    other = job_of(name)
    if other is not None:
        raise ConfigError(
            f"{_EXPERIMENT}: found {name!r}, which is run by jobs.{other}; {nearest(name, experiments(job))}"
        )
    known = _primary(job).keys
    (unknown, *_) = sorted(experiment.keys - known)
    raise ConfigError(f"{experiment.file.shown}: {unknown}: unknown key; {suggestion(unknown, known)}")


def _check_options(job: str, choice: _Choice) -> None:
    """Refuses an option that does not exist, or that the job cannot use."""
    own = choice.experiment if choice.experiment is not None and choice.experiment.file.is_own else None
    for group, option in {**(own.choices if own else {}), **choice.typed}.items():
        where = f"{own.file.shown}: " if own is not None and group not in choice.typed else ""
        file = config_file(group, option)
        if file is None and option != _primary(job).options[group]:
            raise ConfigError(f"{where}{group}: found {option!r}; {nearest(option, options_of(job)[group])}")
        wrong = None if file is None else misfit(job, group, _values_of(group, file), is_whole=not file.is_own)
        if wrong is not None:
            assert file is not None
            if file.is_own:
                raise ConfigError(f"{file.shown}: {wrong}")
            allowed = nearest(option, options_of(job)[group])
            raise ConfigError(f"{where}{group}: found {option!r}, which jobs.{job} cannot use; {allowed}")


def _check_keys(job: str, experiment: Experiment, config: DictConfig) -> None:
    """Refuses a user's experiment with a key that the chosen options do not have; Hydra takes it."""
    if not experiment.file.is_own:
        return
    values = as_mapping(config)
    for key in unknown_keys(kind_of(job), values):
        if any(given == key or given.startswith(f"{key}.") for given in flattened(experiment.values)):
            known = {one.name for one in keys_of(kind_of(job), values)}
            raise ConfigError(f"{experiment.file.shown}: {key}: unknown key; {suggestion(key, known)}")


def _fits(job: str, experiment: Experiment) -> bool:
    """Whether an experiment has only groups and keys of the job."""
    primary = _primary(job)
    chooses = _EXPERIMENT in primary.options
    return chooses and experiment.choices.keys() <= primary.options.keys() and experiment.keys <= primary.keys


@dataclass(frozen=True, kw_only=True, slots=True)
class _Primary:
    """A job's own config.

    Attributes:
        options: group -> option that is chosen unless another is; `null` for none.
        keys: at the top, groups among them.
    """

    options: Mapping[str, str]
    keys: frozenset[str]


@cache
def _primary(job: str) -> _Primary:
    values = ConfigFile(path=CONFIG_FOLDER / f"{job}.yaml", is_own=False).read()
    options: dict[str, str] = {}
    keys: set[str] = set()
    for entry in values.pop("defaults", []):
        if isinstance(entry, dict):
            options |= {str(group): "null" if option is None else str(option) for group, option in entry.items()}
        elif entry != "_self_":
            inherited = _primary(entry)
            options, keys = {**inherited.options, **options}, keys | inherited.keys
    return _Primary(options=options, keys=frozenset(keys | values.keys() | options.keys()))


@cache
def _packaged_options() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for path in sorted(CONFIG_FOLDER.glob("*/*.yaml")):
        if path.parent.name not in (TABLES, _EXPERIMENT):
            found.setdefault(path.parent.name, {})[path.stem] = ConfigFile(path=path, is_own=False).explanation
    return found


def _values_of(group: str, file: ConfigFile) -> dict[str, Any]:
    """The values of an option, with those of the options that it is made from."""
    return _packaged_values(group, file) if not file.is_own else _merged_values(group, file, ())


@cache
def _packaged_values(group: str, file: ConfigFile) -> dict[str, Any]:
    return _merged_values(group, file, ())


def _merged_values(group: str, file: ConfigFile, within: tuple[ConfigFile, ...]) -> dict[str, Any]:
    own = file.read()
    merged: dict[str, Any] = {}
    for name in own.pop("defaults", []):
        if name == "_self_":
            continue
        base = config_file(group, name) if isinstance(name, str) else None
        if base is None or base in (*within, file):
            raise ConfigError(f"{file.shown}: defaults: found {name!r}; {nearest(str(name), options()[group])}")
        merged |= _merged_values(group, base, (*within, file))
    return {**merged, **own}


def _swept(job: str, override: Override, given: Sequence[Override]) -> str:
    """The error about several values for a key."""
    assert override.input_line is not None
    choosing = [one for one in given if one.key_or_group in _primary(job).options and not one.is_sweep_override()]
    values = as_mapping(_with_hydra(job, choosing, _choice(job, choosing)))
    lists = [key.name for key in keys_of(kind_of(job), values) if key.allowed.startswith("list of")]
    return swept(job, override.input_line, is_list=override.key_or_group in lists)


def _unknown_key(job: str, given: Sequence[Override], choice: _Choice) -> str | None:
    """Names the override whose key does not exist once the groups are chosen."""
    choosing = [override for override in given if override.key_or_group in choice.options]
    if len(choosing) == len(given):
        return None
    values = as_mapping(_with_hydra(job, choosing, choice))
    keys = {*flattened(values), *choice.options, *values, *_groups_of_keys(values)}
    for override in given:
        key = override.key_or_group
        if key in keys or override.is_add() or override.is_delete():
            continue
        if key in _RENAMED:
            return f"{key}: unknown key; {_RENAMED[key]}"
        group, elsewhere = key.partition(".")[0], _elsewhere(job)
        if key in elsewhere and (having := _usable_ones(job, elsewhere[key])):
            now = choice.options[group]
            explained = options()[group].get(now, "").partition(";")[0].rstrip(".")
            about = f" ({explained})" if explained else ""
            return f"{key}: unknown key with {group}={now}{about}; {in_words(having)} has it"
        others = [other for other in trainings() if group in _primary(other).keys - _primary(job).keys]
        for possible in [] if meant(key, keys) else meant(key, elsewhere):
            if having := _usable_ones(job, elsewhere[possible]):
                return f"{key}: unknown key; did you mean {possible!r}, with {in_words(having)}?"
        return f"{key}: unknown key; {suggestion(key, keys, others)}"
    return None


def _groups_of_keys(values: Mapping[str, Any], path: str = "") -> set[str]:
    """The dotted keys that hold others."""
    found = {f"{path}{key}": value for key, value in values.items() if isinstance(value, Mapping)}
    return {*found, *(key for name, value in found.items() for key in _groups_of_keys(value, f"{name}."))}


def _elsewhere(job: str) -> dict[str, list[tuple[str, str]]]:
    """The keys of all options of a job's groups -> the groups and options that have them."""
    found: dict[str, list[tuple[str, str]]] = {}
    for group in groups(job) - {_EXPERIMENT}:
        for name in options()[group]:
            for key in flattened({group: _values_of_option(group, name) or {}}):
                found.setdefault(key, []).append((group, name))
    return found


def _usable_ones(job: str, having: Sequence[tuple[str, str]]) -> list[str]:
    """Those of some options that a job can use, as `group=option`."""
    return [f"{group}={name}" for group, name in having if _usable(job, group, name)]


def _usable(job: str, group: str, name: str) -> bool:
    """Whether a job can use an option; one that cannot be read it cannot."""
    values = _values_of_option(group, name)
    return values is not None and misfit(job, group, values, is_whole=name not in own_options(group)) is None


def _values_of_option(group: str, name: str) -> dict[str, Any] | None:
    """The values of an option; None if there is none that can be read."""
    try:
        file = config_file(group, name)
        return None if file is None else _values_of(group, file)
    except ConfigError:
        return None


@cache
def _say(line: str) -> None:
    """Logs a line, once though a job composes several times."""
    logger.info(line)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"\s+", " ", lines[0]) if lines else type(error).__name__
