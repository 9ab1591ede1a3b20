"""From a command line to jobs on a cluster: checked, packed, sent.

A command that cannot work is refused before anything is sent. What is sent can be seen by whoever sees the
cluster's dashboard, so it holds no secrets: credentials belong into the environment of the cluster's nodes.
"""

import itertools
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlflow.exceptions import MlflowException

from ssl_sec.edges.composition.compose import chooses_own, compose
from ssl_sec.edges.composition.config_folders import OPTION
from ssl_sec.edges.composition.options import own_texts
from ssl_sec.edges.folder.names import new_name, own_tags, run_name_of
from ssl_sec.edges.masking import masked
from ssl_sec.edges.overrides import assigned, parsed, understood
from ssl_sec.edges.run.job_values import quoted, resumed_run, values_of
from ssl_sec.edges.submit.cluster import Cluster, entrypoint, is_this_machine
from ssl_sec.edges.submit.pipeline import Plan, Point, Stage
from ssl_sec.edges.tracking.pages import runs_page
from ssl_sec.edges.tracking.store import connected
from ssl_sec.edges.tracking.tracker import JOB_ID_TAG
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.config import TrackingConfig, TrainingConfig
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.registry import PROBE, RECIPES
from ssl_sec.settings import flattened, from_values, to_values

# Of this process's environment, what a job needs too.
_PASSED_ON = ("MLFLOW_TRACKING_URI", "MLFLOW_S3_ENDPOINT_URL", "OMP_NUM_THREADS", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S")

# In a pipeline's working folder: what it does.
_PLAN = "plan.json"
# In a job's working folder: the experiments and options of the user's own.
_OWN_CONFIGS = "own_configs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a user asks for.

    Attributes:
        job: which.
        overrides: in Hydra's grammar; several values of a key make a sweep.
        name: of the run or the sweep; None makes one.
        then: what follows each pretraining, `probe` with its overrides, or None.
        parallel: points of a sweep that run at once.
        python: that runs the job; the name is looked up in the PATH of the cluster's head.
    """

    job: str
    overrides: tuple[str, ...]
    name: str | None = None
    then: str | None = None
    parallel: int = 1
    python: str = "python"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A job and its overrides, checked.

    Attributes:
        job: names the module `jobs.<job>`.
        overrides: in Hydra's grammar.
        name: of the run.
        recipe: of the run.
    """

    job: str
    overrides: tuple[str, ...]
    name: str
    recipe: str


def check(order: Order) -> None:
    """Raises a ConfigError if the order cannot be carried out on any cluster."""
    passed_on()
    if order.parallel < 1:
        raise ConfigError(f"--parallel: found {order.parallel}, must be ≥ 1")
    if order.then is not None and not RECIPES[order.job].is_probed:
        raise ConfigError(f"--then: found {order.then!r} after {order.job}; allowed after pretrain")
    for overrides, _ in points_of(order.overrides):
        _then(order.then, checked(order.job, overrides, order.name, is_local=True))


def send(order: Order, cluster: Cluster) -> dict[str, str]:
    """Starts the order's job, or the pipeline of its jobs.

    Returns:
        The id of the job, its page in the dashboard, and where its run in MLflow is, or will be.

    Raises:
        UserError: if it is wrong, or the cluster refuses it.
    """
    environment = passed_on()
    is_local = is_this_machine(cluster.address)
    varied = {
        swept.partition("=")[0].rpartition(".")[2]: None for _, each in points_of(order.overrides) for swept in each
    }
    base = order.name or new_name("-".join(["sweep", *varied]))
    points = [
        (checked(order.job, overrides, _point_name(base, swept) if swept else order.name, is_local), swept)
        for overrides, swept in points_of(order.overrides)
    ]
    first = points[0][0]
    name = base if len(points) > 1 else first.name
    was_given = order.name is not None or any(override.startswith("run_name=") for override in order.overrides)
    job_id = job_id_for(first.recipe, name, is_new=not was_given)
    values = _values(first.job, first.overrides)
    tracking = from_values(TrackingConfig, values["tracking"])
    files, with_own = {}, list[str]()
    if any(chooses_own(each.job, each.overrides) for each, _ in points):
        files = {f"{_OWN_CONFIGS}/{name}": text for name, text in own_texts().items()}
        with_own = [f"{OPTION}={_OWN_CONFIGS}"]
    line = entrypoint(first.job, [*with_own, *first.overrides], order.python)
    if len(points) > 1 or order.then is not None:
        plan = Plan(
            name=name,
            recipe=first.recipe,
            output_dir=str(values["output_dir"]),
            tracking=replace(tracking, tags=_shared_tags([each for each, _ in points])),
            parallel=order.parallel,
            points=tuple(
                Point(
                    name=each.name,
                    swept=swept,
                    stages=tuple(
                        Stage(job=stage.job, overrides=(*with_own, *stage.overrides))
                        for stage in (each, *_then(order.then, each))
                    ),
                )
                for each, swept in points
            ),
        )
        line = entrypoint("pipeline", [_PLAN], order.python)
        files |= {_PLAN: json.dumps(to_values(plan), indent=1)}
    cluster.submit(line, job_id, {"job_name": name, "recipe": first.recipe, "job": first.job}, environment, files)
    uri = tracking.uri or environment.get("MLFLOW_TRACKING_URI") or f"sqlite:///{values['output_dir']}/mlflow.db"
    page = mlflow_page(uri, tracking.experiment or first.recipe, job_id)
    return {"job": job_id, "dashboard": f"{cluster.address}/#/jobs/{job_id}", "MLflow": page}


def _shared_tags(commands: Sequence[Command]) -> dict[str, str | bool | int | float]:
    """The tags of the user's own that all the runs have."""
    tracked = [from_values(TrackingConfig, _values(each.job, each.overrides)["tracking"]) for each in commands]
    first, *others = [own_tags(tracking) for tracking in tracked]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def checked(job: str, overrides: Sequence[str], name: str | None, is_local: bool) -> Command:
    """A command that the cluster can run: its configuration is valid, its paths absolute, its secrets none.

    Args:
        job: which.
        overrides: in Hydra's grammar.
        name: of the run; None makes one.
        is_local: whether the cluster is on this machine, where relative paths mean something.

    Raises:
        ConfigError: if it is wrong.
    """
    for override in overrides:
        if masked(override) != override:
            raise ConfigError(
                f"{masked(override)}: found credentials, which the cluster's dashboard would show; allowed: "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or the like, in the environment of its nodes"
            )
    given = [*overrides, *([assigned("run_name", name)] if name else [])]
    values = _values(job, given)
    if resumed_run(job, given) is not None:
        # The job starts in another folder.
        folder = os.path.join(values["output_dir"], values["recipe"], values["run_name"])
        given = [o for o in given if not o.startswith(("resume=", "output_dir="))]
        given.append(assigned("resume", folder))
    output_dir = str(values["output_dir"])
    if not os.path.isabs(output_dir):
        if not is_local:
            raise ConfigError(
                f"output_dir: found {output_dir!r}, must be an absolute path on storage that all nodes share"
            )
        given.append(assigned("output_dir", os.path.abspath(output_dir)))
    if not values.get("run_name"):
        # The folder may be out of sight from here, so that the time makes the name one of its own.
        unnamed = from_values(RECIPES[job].config, _values(job, given))
        what = run_name_of(unnamed) if isinstance(unnamed, TrainingConfig) else job
        given.append(f"run_name={new_name(what)}")
    config = from_values(RECIPES[job].config, _values(job, given))
    assert config.run_name is not None
    recipe = config.recipe_name if isinstance(config, TrainingConfig) else job
    return Command(job=job, overrides=tuple(given), name=config.run_name, recipe=recipe)


def _values(job: str, overrides: Sequence[str]) -> dict[str, Any]:
    """What the job will run with; the run of a probe is looked up where the probe runs."""
    return values_of(job, overrides) if RECIPES[job].is_training else compose(job, quoted(overrides))


def passed_on() -> dict[str, str]:
    """Of this process's environment, what a job needs too.

    Raises:
        ConfigError: if there are credentials in it, which the dashboard would show.
    """
    variables = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    for name, value in variables.items():
        if masked(value) != value:
            raise ConfigError(
                f"{name}: found credentials in {masked(value)}, which the cluster's dashboard would show; allowed: the "
                "address alone, with the credentials in the environment of the cluster's nodes"
            )
    return variables


def job_id_for(recipe: str, name: str, is_new: bool) -> str:
    """An id that names the run, and is new for each submission of it; a name that was just made is new itself."""
    named = f"{recipe}-{name}"
    return re.sub(r"[^A-Za-z0-9_.-]", "-", named if is_new else new_name(named))


def mlflow_page(uri: str, experiment: str, job_id: str) -> str:
    """Where MLflow shows the runs of a job, also before they are there."""
    if not uri.startswith(("http://", "https://")):
        return masked(uri)
    try:
        found = connected(uri).get_experiment_by_name(experiment)
    except MlflowException:
        found = None
    if found is None:
        return masked(uri)
    return masked(f"{uri}{runs_page(found.experiment_id, f'tags.`{JOB_ID_TAG}` = {json.dumps(job_id)}')}")


def points_of(overrides: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The points of a sweep: all overrides of each, and among them those that the sweep varies.

    Raises:
        ConfigError: for an override that is none.
    """
    choices: list[list[str]] = []
    for text in map(understood, quoted(overrides)):
        override = parsed(text)
        if override.is_sweep_override():
            choices.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([text])
    return [
        (point, tuple(value for value, among in zip(point, choices, strict=True) if len(among) > 1))
        for point in itertools.product(*choices)
    ]


def _point_name(name: str, swept: Sequence[str]) -> str:
    values = [override.partition("=") for override in swept]
    return "-".join([name, *(f"{key.rpartition('.')[2]}{value}".replace("/", "-") for key, _, value in values)])


def _then(then: str | None, command: Command) -> tuple[Stage, ...]:
    """The probe after a pretraining: as the pretraining's configuration describes it, unless it is said otherwise."""
    if then is None:
        return ()
    job, *changes = shlex.split(then)
    if job != PROBE.name:
        raise ConfigError(f"--then: found {job!r}; allowed: probe")
    config = from_values(PretrainConfig, _values("pretrain", command.overrides))
    settings = {f"probe.{key}": value for key, value in flattened(to_values(config.probe)).items() if key != "enabled"}
    settings |= {"output_dir": config.output_dir, "run_name": f"{command.name}-probe"}
    carried = [
        o
        for o in command.overrides
        if o.startswith(("runtime", "tracking.uri=", "tracking.experiment=", "tracking.tags"))
    ]
    overrides = (*(_override(key, value) for key, value in settings.items()), *carried, *changes)
    checked(job, (*overrides, "run=the-one-before"), None, is_local=False)
    return (Stage(job=job, overrides=overrides),)


def _override(key: str, value: Any) -> str:
    return assigned(key, value) if isinstance(value, str) else f"{key}={json.dumps(value)}"
