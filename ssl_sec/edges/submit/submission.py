"""From an order to jobs on a cluster: packed and sent."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from mlflow.exceptions import MlflowException

from ssl_sec.edges.composition.compose import chooses_own
from ssl_sec.edges.composition.config_folders import OPTION
from ssl_sec.edges.composition.options import own_texts
from ssl_sec.edges.folder.names import new_name, own_tags
from ssl_sec.edges.masking import masked
from ssl_sec.edges.submit.cluster import Cluster, entrypoint, is_this_machine
from ssl_sec.edges.submit.orders import Command, Order, Stage, checked, passed_on, points_of, stages_after, values_for
from ssl_sec.edges.submit.pipeline import Plan, Point
from ssl_sec.edges.tracking.pages import runs_page
from ssl_sec.edges.tracking.store import connected
from ssl_sec.edges.tracking.tracker import JOB_ID_TAG
from ssl_sec.recipes.tracking import TrackingConfig
from ssl_sec.settings import from_values, to_values

# In a pipeline's working folder: what it does.
_PLAN = "plan.json"
# In a job's working folder: the experiments and options of the user's own.
_OWN_CONFIGS = "own_configs"


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
    values = values_for(first.job, first.overrides)
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
                        replace(stage, overrides=(*with_own, *stage.overrides))
                        for stage in (Stage(job=each.job, overrides=each.overrides), *stages_after(order.then, each))
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
    tracked = [from_values(TrackingConfig, values_for(each.job, each.overrides)["tracking"]) for each in commands]
    first, *others = [own_tags(tracking) for tracking in tracked]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


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


def _point_name(name: str, swept: Sequence[str]) -> str:
    values = [override.partition("=") for override in swept]
    return "-".join([name, *(f"{key.rpartition('.')[2]}{value}".replace("/", "-") for key, _, value in values)])
