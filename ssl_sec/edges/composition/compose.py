"""Hydra composes a job's configuration from `configs/`; dataclasses validate it."""

import logging
import pickle
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, lru_cache
from typing import Any

import hydra
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from ssl_sec.edges.composition.config_folders import as_mapping
from ssl_sec.edges.composition.experiments import Experiment, as_typed, explanations, load
from ssl_sec.edges.composition.hints import suggestion
from ssl_sec.edges.composition.keys import OF, keys_of, kind_of, misfit, unknown_keys
from ssl_sec.edges.composition.mistakes import Choice, defaults_of_override, sweep_mistake, unknown_key
from ssl_sec.edges.composition.options import EXPERIMENT, option, options, primary, usable, values_of_file
from ssl_sec.edges.overrides import in_grammar, parsed, understood
from ssl_sec.errors import ConfigError, first_line, nearest
from ssl_sec.recipes.registry import PRETRAIN, require_training, trainings
from ssl_sec.settings import flattened

logger = logging.getLogger("ssl_sec")

# Jobs that run a training several times.
_OF_TRAININGS = ("ablate", "study", "tune")
# The name of the chosen experiment in Hydra.
_CHOSEN = "the-chosen-one"
# The package in which Hydra looks for files: one without folders, which would be groups. hydra.initialize needs none,
# but reads the whole stack to find its caller.
_NO_FILES = "ssl_sec.edges.composition"
# What Hydra keeps for the whole process; one thread at a time replaces it.
_OF_PROCESS = (ConfigStore, GlobalHydra, JobRuntime, VersionBase)
_turn = threading.Lock()


def compose(job: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The resolved values of a job's configuration.

    Args:
        job: names the primary config, `configs/<job>.yaml`.
        overrides: `key=value` or `group=option`, in Hydra's grammar.

    Raises:
        ConfigError: for a group, an option, a key or a value that does not exist, with the nearest names.
    """
    return as_values(job, _compose(job, overrides))


def composed_yaml(job: str, overrides: Sequence[str]) -> str:
    """The same values as YAML; required keys that are missing stay `???`."""
    return OmegaConf.to_yaml(_compose(job, overrides))


def composed(job: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The same as nested values, not resolved; required keys that are missing stay `???`."""
    return as_mapping(_compose(job, overrides))


def as_values(job: str, config: DictConfig) -> dict[str, Any]:
    """Plain nested values of a job's composed config.

    Raises:
        ConfigError: for a required key that is missing.
    """
    # Not OmegaConf.missing_keys, which fails where another key is made from the missing one.
    missing = sorted(key for key, value in flattened(as_mapping(config)).items() if value == "???")
    if missing:
        allowed = next((key.allowed for key in keys_of(kind_of(job), as_mapping(config)) if key.name == missing[0]), "")
        value = f"<{allowed}>" if " | " in allowed else "<value>"
        raise ConfigError(f"{missing[0]}: missing; give it as {missing[0]}={value}")
    return resolved(config)


def resolved(config: DictConfig) -> dict[str, Any]:
    """Plain nested values, in which interpolations are replaced by what they refer to.

    Raises:
        ConfigError: if that is not there.
    """
    try:
        return as_mapping(config, resolve=True)
    except InterpolationKeyError as error:
        source, whole = re.findall(r"'(.+?)'", str(error))[0], re.split(r"[.\[]", str(error.full_key))[0]
        raise ConfigError(
            f"{error.full_key}: made from {source}, which these options do not have; give {whole}=<value>"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {first_line(error)}") from error


def options_of(job: str) -> dict[str, dict[str, str]]:
    """Group -> option -> its explanation: the groups of a job, with the options and experiments that it can use."""
    return {
        group: experiments(job)
        if group == EXPERIMENT
        else {name: text for name, text in options(group, job).items() if usable(job, group, name)}
        for group in sorted(primary(job).options)
    }


def experiments(job: str) -> dict[str, str]:
    """The experiments that a job can run, with their explanations."""
    return {name: explanation for name, explanation in explanations().items() if _runs(job, name)}


def job_of(experiment: str) -> str | None:
    """The job that runs an experiment; None if there is none."""
    return next((job for job in trainings() if _runs(job, experiment)), None)


def training_of(overrides: Sequence[str], named: str | None = None) -> str:
    """The training that a job runs several times: that of the key `job`, or of the experiment; else pretraining.

    Args:
        overrides: overrides in Hydra's grammar.
        named: value of the key `job` that is given elsewhere.

    Raises:
        ConfigError: if `job` is no training.
    """
    # The values of others may be sweeps, which are no values yet.
    given = {one.key_or_group: one.value() for one in _parsed(overrides) if one.key_or_group in ("job", EXPERIMENT)}
    job, experiment = named or given.get("job"), given.get(EXPERIMENT)
    if job is None:
        return (None if experiment is None else job_of(str(experiment))) or PRETRAIN.name
    require_training(str(job))
    return str(job)


def config_of(job: str, overrides: Sequence[str]) -> str:
    """The name of a job's config; that of a job that runs trainings has the keys of the training that it runs.

    Raises:
        ConfigError: for a key `job` that is no training.
    """
    return on_training(job, training_of(overrides)) if job in _OF_TRAININGS else job


def on_training(job: str, training: str) -> str:
    """The name of the config of a job that runs a training several times."""
    return job if training == PRETRAIN.name else f"{job}{OF}{training}"


def _runs(job: str, name: str) -> bool:
    """Whether a job can run an experiment; false for a file that cannot be read."""
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
    """Whether an experiment or an option of the user is chosen."""
    experiment, options = chosen_experiment(job, overrides), chosen_options(job, overrides)
    files = [option(group, name, job) for group, name in options.items()]
    return (experiment is not None and experiment.file.is_own) or any(file and file.is_own for file in files)


def _choice(job: str, given: Sequence[Override]) -> Choice:
    defaults, experiment = primary(job).options, _experiment(job, given)
    typed = {
        override.key_or_group: "null" if override.value() is None else str(override.value())
        for override in given
        if override.key_or_group in defaults and override.key_or_group != EXPERIMENT and not override.is_delete()
    }
    own = {**defaults, **({} if experiment is None else experiment.choices)}
    replaced, dropped = (None, {}) if experiment is None else experiment.replacing(defaults, typed)
    return Choice(options={**own, **typed}, typed=typed, experiment=replaced, dropped=dropped, instead_of=own)


def _compose(job: str, overrides: Sequence[str]) -> DictConfig:
    given = _parsed(overrides)
    choice = _choice(job, [override for override in given if not override.is_sweep_override()])
    for override in given:
        if override.is_sweep_override():
            raise ConfigError(sweep_mistake(job, override, choice))
        group = override.key_or_group
        if group in choice.options and override.value() is None:
            raise ConfigError(f"{group}: found 'null'; {nearest('null', options_of(job)[group])}")
    if mistake := unknown_key(job, given, choice, in_files=True):
        raise ConfigError(mistake)
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


def _with_hydra(job: str, given: Sequence[Override], choice: Choice) -> DictConfig:
    """Composes a job's config; all of it is given to Hydra here, so that Hydra looks for no files."""
    nodes = {("", name): primary(name).node for name in (job, *primary(job).bases)}
    for group, name in choice.options.items():
        if group != EXPERIMENT and (file := option(group, name, job)) is not None:
            nodes[group, name] = values_of_file(group, file, job)
    if choice.experiment is not None:
        defaults = [{f"override /{group}": name} for group, name in choice.experiment.choices.items()]
        nodes[EXPERIMENT, _CHOSEN] = {"defaults": [*defaults, "_self_"], **choice.experiment.values}
    choosing: list[str] = []
    setting: list[Override] = []
    for override in (parsed(line) for one in given for line in _lines(job, one)):
        if override.key_or_group in primary(job).options:
            choosing.append(str(override.input_line))
        else:
            setting.append(override)
    try:
        with _turn:
            config = deepcopy(_of_options(job, tuple(choosing), pickle.dumps(nodes)))
        for override in setting:
            _set(config, override)
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:  # no file can have that name
        raise ConfigError(unknown_key(job, given, choice) or first_line(error)) from error
    return config


@lru_cache(maxsize=128)
def _of_options(job: str, choosing: tuple[str, ...], nodes: bytes) -> DictConfig:
    """A job's config by its options alone; those of a study or a search have few combinations of them.

    Args:
        job: name of the job's config.
        choosing: the overrides that choose them.
        nodes: (group, name) -> the values of all configs that these may name, pickled.
    """
    with _registered(pickle.loads(nodes)), hydra.initialize_config_module(_NO_FILES, version_base="1.3", job_name=job):
        return hydra.compose(job, list(choosing))


def _set(config: DictConfig, override: Override) -> None:
    """Sets a key as Hydra does."""
    key, value = override.key_or_group, override.value()
    if override.package is not None:
        raise ConfigError(f"{override.input_line}: {key} is no group of options; give {key}=<value>")
    if override.is_add() and not isinstance(value, (dict, list)):
        if OmegaConf.select(config, key, throw_on_missing=False) is not None:
            raise ConfigError(f"{override.input_line}: the key is there already; give {key}=<value>")
    OmegaConf.update(config, key, value, force_add=override.is_add() or override.is_force_add())


def _parsed(overrides: Sequence[str]) -> list[Override]:
    found = [parsed(understood(override)) for override in overrides]
    for override in found:
        _require_value(override)
    return found


def _require_value(override: Override) -> None:
    """Refuses parts of Hydra's grammar that are not values of a job: removed keys, and settings of Hydra itself."""
    key = override.key_or_group
    if override.is_delete():
        raise ConfigError(f"{override.input_line}: a key cannot be removed; give {key}=<value>")
    if re.match(r"hydra\b", key):
        raise ConfigError(f"{key}: settings of Hydra have no effect; output_dir=<folder> says where runs are kept")


def _lines(job: str, override: Override) -> list[str]:
    """The overrides that Hydra gets for an override."""
    assert override.input_line is not None
    key = override.key_or_group
    if (defaults := defaults_of_override(job, override)) is not None:
        return [f"{key}=null", f"++{key}={in_grammar(defaults)}"]  # instead of the former value: Hydra merges groups
    if key == EXPERIMENT and override.value() is not None:
        return [f"{EXPERIMENT}={_CHOSEN}"]
    if key in primary(job).options:
        return [override.input_line.lstrip("+")]  # an option replaces another one, also where it is to be added
    # Values by name may have other keys than the values that they replace; from_values knows which ones are allowed.
    adds = isinstance(override.value(), dict) and not override.is_add() and not override.is_force_add()
    return [f"++{override.input_line}" if adds else override.input_line]


@contextmanager
def _registered(nodes: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[None]:
    """Makes nodes known to Hydra, by group and name; the state of a program of Hydra is put aside meanwhile."""
    Plugins.instance()  # the first time it registers the plugins' configs in the state of the process
    before = Singleton._instances
    Singleton._instances = {kind: one for kind, one in before.items() if kind not in _OF_PROCESS}
    try:
        store = ConfigStore.instance()
        store.repo["hydra"] = _settings_of_hydra()
        for (group, name), node in nodes.items():
            package = "_global_" if group == EXPERIMENT else None
            store.store(group=group or None, name=name, node=dict(node), package=package)
        yield
    finally:
        Singleton._instances = before


@cache
def _settings_of_hydra() -> dict[str, ConfigNode]:
    """Hydra's own config without its launcher, sweeper, help and logging, which no job uses: half of its time."""
    node = OmegaConf.structured(HydraConf(defaults=[]))
    return {"config.yaml": ConfigNode("config.yaml", node, group="hydra", package=None, provider="hydra")}


def _experiment(job: str, given: Sequence[Override]) -> Experiment | None:
    names = [override.value() for override in given if override.key_or_group == EXPERIMENT]
    if EXPERIMENT not in primary(job).options or not names or names[-1] is None:
        return None
    name = str(names[-1])
    experiment = load(name)
    if experiment is None:
        raise ConfigError(f"{EXPERIMENT}: found {name!r}; {nearest(name, experiments(job))}")
    if _fits(job, experiment):
        return experiment
    other = job_of(name)
    if other is not None:
        raise ConfigError(
            f"{EXPERIMENT}: found {name!r}, which is run by jobs.{other}; {nearest(name, experiments(job))}"
        )
    known = primary(job).keys
    (unknown, *_) = sorted(experiment.keys - known)
    raise ConfigError(f"{experiment.file.shown}: {unknown}: unknown key; {suggestion(unknown, known)}")


def _check_options(job: str, choice: Choice) -> None:
    """Refuses an option that does not exist, or that the job cannot use."""
    own = choice.experiment if choice.experiment is not None and choice.experiment.file.is_own else None
    for group, name in {**(own.choices if own else {}), **choice.typed}.items():
        where = f"{own.file.shown}: " if own is not None and group not in choice.typed else ""
        file = option(group, name, job)
        if file is None and name != primary(job).options[group]:
            others = "; encoder=timm encoder.model=NAME for any network of timm" if group == "encoder" else ""
            raise ConfigError(f"{where}{group}: found {name!r}; {nearest(name, options_of(job)[group])}{others}")
        wrong = None if file is None else misfit(job, group, values_of_file(group, file, job), is_whole=not file.is_own)
        if wrong is not None:
            assert file is not None
            if file.is_own:
                raise ConfigError(f"{file.shown}: {wrong}")
            allowed = nearest(name, options_of(job)[group])
            raise ConfigError(
                f"{where}{group}: found {name!r}, which jobs.{job.partition(OF)[0]} cannot use; {allowed}"
            )


def _check_keys(job: str, experiment: Experiment, config: DictConfig) -> None:
    """Refuses a user's experiment with a key that the chosen options do not have; Hydra would accept it."""
    if not experiment.file.is_own:
        return
    values = as_mapping(config)
    for key in unknown_keys(kind_of(job), values):
        if any(given == key or given.startswith(f"{key}.") for given in flattened(experiment.values)):
            raise ConfigError(f"{experiment.file.shown}: {refusal_of_key(job, key, values)}")


def refusal_of_key(job: str, key: str, values: Mapping[str, Any]) -> str:
    """What a job says of a key that its options do not have.

    Args:
        job: name of the job.
        key: the key.
        values: values of the job's keys, which choose the options.
    """
    return f"{key}: unknown key; {suggestion(key, {one.name for one in keys_of(kind_of(job), values)})}"


def _fits(job: str, experiment: Experiment) -> bool:
    """Whether all groups and keys of an experiment exist in the job."""
    own = primary(job)
    return EXPERIMENT in own.options and experiment.choices.keys() <= own.options.keys() and experiment.keys <= own.keys


@cache
def _say(line: str) -> None:
    """Logs a line only once, since a job may compose its configuration several times."""
    logger.info(line)
