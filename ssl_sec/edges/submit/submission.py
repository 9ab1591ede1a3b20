"""From an order to jobs on a cluster: packed and sent."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from mlflow.exceptions import MlflowException

from ssl_sec.edges.composition.compose import chooses_own
from ssl_sec.edges.composition.config_folders import OPTION
from ssl_sec.edges.composition.options import own_texts
from ssl_sec.edges.folder.names import new_name, user_tags
from ssl_sec.edges.masking import masked
from ssl_sec.edges.overrides import key_and_value, key_of
from ssl_sec.edges.storage.places import is_remote
from ssl_sec.edges.submit.cluster import Cluster, entrypoint, is_this_machine
from ssl_sec.edges.submit.orders import (
    Command,
    Order,
    check_command,
    expand_sweep,
    following_stages,
    passed_environment,
    probed_folder,
    values_for,
)
from ssl_sec.edges.submit.pipeline import Chain, PipelinePlan
from ssl_sec.edges.tracking.pages import runs_page
from ssl_sec.edges.tracking.store import connect_to_store, tracking_uri
from ssl_sec.edges.tracking.tracker import JOB_ID_TAG
from ssl_sec.recipes.tracking import TrackingConfig
from ssl_sec.settings import from_values, to_values

# The plan, in a pipeline's working folder.
_PLAN = "plan.json"
# The user's own experiments and options, in a job's working folder.
_OWN_CONFIGS = "own_configs"


def submit_order(order: Order, cluster: Cluster) -> dict[str, str]:
    """Starts the order's job, or the pipeline of its jobs.

    Returns:
        The id of the job, its page in the dashboard, and the page of its run in MLflow.

    Raises:
        UserError: if the order is wrong, or the cluster refuses it.
    """
    is_local = is_this_machine(cluster.address)
    environment = passed_environment(is_local)
    swept_keys = [key_of(each).rpartition(".")[2] for _, swept in expand_sweep(order.overrides) for each in swept]
    base = order.name or new_name("-".join(["sweep", *dict.fromkeys(swept_keys)]))
    points = _points(order, base, is_local)
    commands = [point.stages[0] for point in points]
    first = commands[0]
    name = base if len(points) > 1 else first.name
    was_given = order.name is not None or "run_name" in map(key_of, order.overrides)
    job_id = make_job_id(first.recipe, name, is_new=not was_given)
    values = values_for(first.job, first.overrides)
    tracking = from_values(TrackingConfig, values["tracking"])
    beside = probed_folder(first.job, first.overrides, values)
    output_dir = str(values["output_dir"]) if beside is None else beside.rstrip("/").rsplit("/", 2)[0]
    files: dict[str, str] = {}
    if any(chooses_own(each.job, each.overrides) for each in commands):
        files = {f"{_OWN_CONFIGS}/{name}": text for name, text in own_texts().items()}
        points = [_with_own_configs(point) for point in points]
    line = entrypoint(first.job, points[0].stages[0].overrides, order.python)
    if len(points) > 1 or order.then is not None:
        plan = PipelinePlan(
            name=name,
            recipe=first.recipe,
            output_dir=output_dir,
            tracking=replace(tracking, tags=_shared_tags(commands)),
            parallel=order.parallel,
            points=tuple(points),
        )
        line = entrypoint("pipeline", [_PLAN], order.python)
        files |= {_PLAN: json.dumps(to_values(plan), indent=1)}
    cluster.submit(line, job_id, {"job_name": name, "recipe": first.recipe, "job": first.job}, environment, files)
    uri = tracking.uri or environment.get("MLFLOW_TRACKING_URI")
    if uri is None and is_remote(output_dir):
        page = "at MLFLOW_TRACKING_URI of the nodes, or else in mlflow.db in the staging folder of the job's machine"
    elif uri is None and not is_local:
        page = f"at MLFLOW_TRACKING_URI of the nodes, or else {tracking_uri(tracking, output_dir)}"
    else:
        page = mlflow_page(uri or tracking_uri(tracking, output_dir), tracking.experiment or first.recipe, job_id)
    return {"job": job_id, "dashboard": f"{cluster.address}/#/jobs/{job_id}", "MLflow": page}


def _points(order: Order, base: str, is_local: bool) -> list[Chain]:
    """The points of an order, or its only one; in a sweep their runs have names that begin with `base`."""
    points: list[Chain] = []
    for overrides, swept in expand_sweep(order.overrides):
        name = _point_name(base, swept) if swept else order.name
        command = check_command(order.job, overrides, name, is_local)
        points.append(Chain(swept=swept, stages=(command, *following_stages(order.then, command, is_local))))
    return points


def _with_own_configs(point: Chain) -> Chain:
    """A point whose jobs read the user's own configs, which are sent with them."""
    option = f"{OPTION}={_OWN_CONFIGS}"
    return replace(point, stages=tuple(replace(each, overrides=(option, *each.overrides)) for each in point.stages))


def _shared_tags(commands: Sequence[Command]) -> dict[str, str | bool | int | float]:
    """The user's tags that all runs share."""
    tracked = [from_values(TrackingConfig, values_for(each.job, each.overrides)["tracking"]) for each in commands]
    first, *others = [user_tags(tracking) for tracking in tracked]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def make_job_id(recipe: str, name: str, is_new: bool) -> str:
    """A new id with the name of the run; a name that is not new gets the time added."""
    named = f"{recipe}-{name}"
    return re.sub(r"[^A-Za-z0-9_.-]", "-", named if is_new else new_name(named))


def mlflow_page(uri: str, experiment: str, job_id: str) -> str:
    """The page where MLflow shows the runs of a job, even before they exist."""
    if not uri.startswith(("http://", "https://")):
        return masked(uri)
    try:
        found = connect_to_store(uri).get_experiment_by_name(experiment)
    except MlflowException:
        found = None
    if found is None:
        return masked(uri)
    return masked(f"{uri}{runs_page(found.experiment_id, f'tags.`{JOB_ID_TAG}` = {json.dumps(job_id)}')}")


def _point_name(name: str, swept: Sequence[str]) -> str:
    values = map(key_and_value, swept)
    return "-".join([name, *(f"{key.rpartition('.')[2]}{value}".replace("/", "-") for key, value in values)])
