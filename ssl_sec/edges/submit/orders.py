"""Checks the command line of a job for a cluster, without importing Ray or MLflow.

A command that cannot work is refused before anything is submitted. Everything that is submitted is visible in the
cluster's dashboard, so it must hold no secrets: credentials belong in the environment of the cluster's nodes.
"""

import itertools
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.errors import HydraException

from ssl_sec.data.base_config import DataSetConfig
from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.environment import is_loopback
from ssl_sec.edges.folder.names import new_name, run_name_of
from ssl_sec.edges.masking import HIDDEN, masked, masked_values
from ssl_sec.edges.overrides import assigned, in_grammar, key_and_value, key_of, parsed, understood
from ssl_sec.edges.run.job_values import quoted, resumed_run, values_of
from ssl_sec.edges.storage.places import absolute_store, is_remote
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.registry import PRETRAIN, PROBE, RECIPES
from ssl_sec.settings import flattened, from_values, to_values

_STORE = "MLFLOW_TRACKING_URI"
# Beginnings of the keys of a pretraining that the probe after it has, too.
_CARRIED = ("runtime", "tracking.uri", "tracking.experiment", "tracking.tags")
# Environment variables that are passed to a job.
_PASSED_VARIABLES = (
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    _STORE,
    "MLFLOW_S3_ENDPOINT_URL",
    "MLFLOW_WORKSPACE",
    "OMP_NUM_THREADS",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a user wants to submit.

    Attributes:
        job: name of the job.
        overrides: overrides in Hydra's grammar; several values of a key make a sweep.
        name: name of the run or the sweep; None takes a default.
        then: the job after each pretraining, `probe` with its overrides, or None.
        parallel: number of points of a sweep that run at the same time.
        python: the Python that runs the job, looked up in the PATH of the cluster's head.
    """

    job: str
    overrides: tuple[str, ...]
    name: str | None = None
    then: str | None = None
    parallel: int = 1
    python: str = "python"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A job with checked overrides."""

    job: str
    overrides: tuple[str, ...]
    name: str
    recipe: str


def check(order: Order) -> None:
    """Raises a ConfigError if the order cannot work on any cluster."""
    passed_environment(is_local=True)
    if order.parallel < 1:
        raise ConfigError(f"--parallel: found {order.parallel}, must be ≥ 1")
    if order.then is not None and order.job != PRETRAIN.name:
        raise ConfigError(f"--then: found {order.then!r} after {order.job}; allowed after pretrain")
    for overrides, _ in expand_sweep(order.overrides):
        following_stages(order.then, check_command(order.job, overrides, order.name, is_local=True), is_local=True)


def check_command(job: str, overrides: Sequence[str], name: str | None, is_local: bool) -> Command:
    """Checks a command and completes it: with a valid configuration, absolute paths, a name and no secrets.

    Args:
        job: name of the job.
        overrides: overrides in Hydra's grammar.
        name: name of the run; None takes a default.
        is_local: whether the cluster is on this machine, so that relative paths can be resolved.

    Raises:
        ConfigError: if the command cannot work.
    """
    _require_no_secrets(overrides)
    given = [*overrides, *([assigned("run_name", name)] if name else [])]
    resumed = resumed_run(job, given)
    values = _values_seen_here(job, given, resumed)
    if resumed is not None:
        # The job starts in another folder, so the path must be absolute.
        folder = os.path.join(values["output_dir"], values["recipe"], values["run_name"])
        given = [o for o in given if key_of(o) not in ("resume", "output_dir")]
        given.append(assigned("resume", folder))
    given = _with_absolute_folder(job, given, values, is_local)
    if not values.get("run_name"):
        # The folder may not be visible from here, so the time makes the name unique.
        unnamed = from_values(RECIPES[job].config, values_for(job, given))
        what = run_name_of(unnamed) if isinstance(unnamed, TrainingConfig) else job
        given.append(f"run_name={new_name(what)}")
    if (uri := values["tracking"]["uri"]) and (reached := _reached_store("tracking.uri", uri, is_local)) != uri:
        given.append(assigned("tracking.uri", reached))
    config = from_values(RECIPES[job].config, values_for(job, given))
    if resumed is None:
        given += _absolute_data(config, is_local)
    assert config.run_name is not None
    recipe = config.recipe_name if isinstance(config, TrainingConfig) else job
    return Command(job=job, overrides=tuple(given), name=config.run_name, recipe=recipe)


def _require_no_secrets(overrides: Sequence[str]) -> None:
    """Raises a ConfigError about an override that holds credentials."""
    for override in overrides:
        if (shown := _without_secrets(override)) != override:
            raise ConfigError(
                f"{shown}: found credentials, which the cluster's dashboard would show; allowed: "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or the like, in the environment of its nodes"
            )


def _values_seen_here(job: str, overrides: Sequence[str], resumed: str | None) -> dict[str, Any]:
    """The configuration of the job, which is read in the folder of the run if one is resumed.

    Raises:
        ConfigError: if it cannot work; with a hint if the folder is not on this machine.
    """
    try:
        return values_for(job, overrides)
    except ConfigError as error:
        if resumed is None or not os.path.isabs(resumed) or os.path.exists(resumed):
            raise
        name = os.path.basename(resumed.rstrip("/"))
        hint = f"if only the nodes see it: its settings with run_name={name} resume=auto"
        raise ConfigError(f"{error}; {hint}") from error


def _with_absolute_folder(job: str, overrides: list[str], values: Mapping[str, Any], is_local: bool) -> list[str]:
    """The overrides with an absolute path of the output folder, or of the run to probe, whose folder the job takes.

    Raises:
        ConfigError: the path is relative, and the cluster is elsewhere.
    """
    storage = "an absolute path on storage that all nodes share"
    run = probed_folder(job, overrides, values)
    if run is not None:
        if is_remote(run) or os.path.isabs(run):
            return overrides
        absolute = _absolute("run", run, f"{storage}, a URL of object storage, or the id or name of a run", is_local)
        return [*(o for o in overrides if key_of(o) != "run"), assigned("run", absolute)]
    output_dir = str(values["output_dir"]).removeprefix("file://")
    if is_remote(output_dir) or os.path.isabs(output_dir):
        return overrides
    absolute = _absolute("output_dir", output_dir, f"{storage}, or the URL of object storage", is_local)
    return [*overrides, assigned("output_dir", absolute)]


def _without_secrets(override: str) -> str:
    """An override without credentials in addresses and without the values of keys like `token`."""
    if masked(override) != override:
        return masked(override)
    given = parsed(understood(override))
    value = {given.key_or_group: given.value()}
    return override if masked_values(value) == value else f"{given.key_or_group}={HIDDEN}"


def _absolute(key: str, path: str, allowed: str, is_local: bool) -> str:
    """The absolute path of a relative one, as the job starts in another folder.

    Raises:
        ConfigError: the cluster is elsewhere.
    """
    if not is_local:
        raise ConfigError(f"{key}: found {path!r}, must be {allowed}")
    return os.path.abspath(os.path.expanduser(path))


def _reached_store(key: str, uri: str, is_local: bool) -> str:
    """The address by which the nodes reach a tracking store.

    Raises:
        ConfigError: only this machine reaches it, and the cluster is elsewhere.
    """
    absolute = absolute_store(uri)
    if not is_local and (absolute != uri or is_loopback(uri)):
        raise ConfigError(
            f"{key}: found {uri!r}, which the cluster's nodes cannot reach; allowed: an address that they reach, or "
            "none, if they have one in their environment"
        )
    return absolute


def _absolute_data(config: Any, is_local: bool) -> list[str]:
    """The overrides that make relative paths of data absolute, since no data is sent.

    Raises:
        ConfigError: a path is relative, and the cluster is elsewhere.
    """
    if not isinstance(config.data, DataSetConfig):  # a probe takes the images of its run
        return []
    found: list[str] = []
    for key, places in config.data.all_places.items():
        or_url = "" if key == "root" else ", or a URL"
        allowed = f"an absolute path that all nodes see{or_url}: no data is sent"
        absolute = [
            place
            if "://" in place or place.startswith(("/", "~"))
            else _absolute(f"data.{key}", place, allowed, is_local)
            for place in places
        ]
        if absolute != list(places):
            found.append(assigned("data.root", *absolute) if key == "root" else f"data.{key}={in_grammar(absolute)}")
    return found


def values_for(job: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration of the job; the run of a probe is searched where the probe runs."""
    return values_of(job, overrides) if RECIPES[job].is_training else compose(job, quoted(overrides))


def probed_folder(job: str, overrides: Sequence[str], values: Mapping[str, Any]) -> str | None:
    """The folder or URL of the run to probe, if it is given by that and no output folder is; None otherwise."""
    word = "" if job != PROBE.name else str(values["run"])
    is_folder = "/" in word and not word.startswith("models:")
    is_chosen = values["output_dir"] != "runs" or "output_dir" in map(key_of, overrides)
    return os.path.expanduser(word.removeprefix("file://")) if is_folder and not is_chosen else None


def passed_environment(is_local: bool) -> dict[str, str]:
    """The environment variables that are passed to a job.

    Raises:
        ConfigError: if they contain credentials, which the dashboard would show, or a store that the nodes cannot
            reach.
    """
    variables = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
    for name, value in variables.items():
        if masked(value) != value:
            raise ConfigError(
                f"{name}: found credentials in {masked(value)}, which the cluster's dashboard would show; allowed: the "
                "address alone, with the credentials in the environment of the cluster's nodes"
            )
    if uri := variables.get(_STORE):
        variables[_STORE] = _reached_store(_STORE, uri, is_local)
    return variables


def expand_sweep(overrides: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The points of a sweep: the overrides of each, and those among them that differ between points.

    Raises:
        ConfigError: for an invalid override.
    """
    choices: list[list[str]] = []
    for text in map(understood, quoted(overrides)):
        override = parsed(text)
        if not override.is_sweep_override():
            choices.append([text])
            continue
        try:
            choices.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        except HydraException as error:  # an interval has no points, and a glob none that are known here
            key, found = key_and_value(text)
            raise ConfigError(
                f"{key}: found {found}; allowed in a sweep: values with commas, or "
                "range(start,stop,step); jobs.tune searches an interval"
            ) from error
    return [
        (point, tuple(value for value, among in zip(point, choices, strict=True) if len(among) > 1))
        for point in itertools.product(*choices)
    ]


def following_stages(then: str | None, command: Command, is_local: bool) -> tuple[Command, ...]:
    """The probe after a pretraining: as the pretraining's configuration says, with the changes of `--then`.

    Args:
        then: the job and its overrides, as in a shell; None if nothing follows.
        command: the pretraining.
        is_local: whether the cluster is on this machine.

    Raises:
        ConfigError: if it cannot work.
    """
    if then is None:
        return ()
    try:
        job, *changes = shlex.split(then)
    except ValueError as error:  # nothing, or a quotation mark without its other one
        raise ConfigError(f'--then: found {then!r}; allowed: probe, or "probe probe.epochs=50"') from error
    if job != PROBE.name:
        raise ConfigError(f"--then: found {job!r}; allowed: probe")
    config = from_values(PretrainConfig, values_for("pretrain", command.overrides))
    settings = {f"probe.{key}": value for key, value in flattened(to_values(config.probe)).items() if key != "enabled"}
    settings |= {"output_dir": config.output_dir, "run_name": f"{command.name}-probe"}
    settings |= {"run": f"{config.output_dir.rstrip('/')}/{command.recipe}/{command.name}"}
    carried = [o for o in command.overrides if key_of(o).startswith(_CARRIED)]
    overrides = (*(_override(key, value) for key, value in settings.items()), *carried, *changes)
    return (check_command(job, overrides, None, is_local),)


def _override(key: str, value: Any) -> str:
    return assigned(key, value) if isinstance(value, str) else f"{key}={json.dumps(value)}"
