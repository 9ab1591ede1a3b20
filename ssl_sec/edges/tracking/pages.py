"""Addresses of MLflow's pages, and the view that sorts the runs of an experiment by their scores."""

import json
import os
import time
from collections.abc import Mapping
from urllib.parse import urlencode

from ssl_sec.recipes.registry import RECIPES

_VIEW = "scores"
_VIEW_TAG = f"mlflow.sharedViewState.{_VIEW}"


def _query(**more: str) -> str:
    """The parameters of a page: without the first, MLflow 3 opens its pages for language models."""
    workspace = os.environ.get("MLFLOW_WORKSPACE")
    return urlencode({"workflowType": "machine_learning", **({"workspace": workspace} if workspace else {}), **more})


def run_page(experiment_id: str | None, run_id: str) -> str:
    """The page of a run, to append to the address of the server; MLflow finds an experiment that is not known here."""
    of_experiment = "" if experiment_id is None else f"/experiments/{experiment_id}"
    return f"/#{of_experiment}/runs/{run_id}?{_query()}"


def runs_page(experiment_id: str, search: str | None = None) -> str:
    """The page that lists the runs of an experiment, or those that match a search."""
    more = {} if search is None else {"searchFilter": search}
    return f"/#/experiments/{experiment_id}/runs?{_query(**more)}"


def scores_page(experiment_id: str) -> str:
    """The page that lists the training runs of an experiment by one score, the best first and those without it last."""
    return f"{runs_page(experiment_id)}&{urlencode({'viewStateShareKey': _VIEW})}"


def scores_view(job: str) -> Mapping[str, str]:
    """The experiment tag that stores this view, which MLflow also lists under Views.

    Args:
        job: job whose runs are listed; jobs that train nothing have no view.
    """
    recipe = RECIPES.get(job)
    if recipe is None or not recipe.view_metrics:
        return {}
    state = {
        "searchFilter": f"tags.job = '{job}'",
        "orderByKey": f"metrics.`{recipe.view_metrics[0]}`",
        "orderByAsc": False,
        "selectedColumns": [
            *(f"metrics.`{name}`" for name in recipe.view_metrics),
            *(f"tags.`{name}`" for name in ("arm", "constraint", "seed", *recipe.tags)),
        ],
    }
    now = round(time.time() * 1000)
    return {_VIEW_TAG: json.dumps({"name": "Scores", "createdAt": now, "updatedAt": now, "state": json.dumps(state)})}
