"""Addresses of MLflow's pages, and the view of an experiment's runs that answers which of them is best."""

import json
import time
from collections.abc import Mapping
from urllib.parse import urlencode

from ssl_sec.recipes.registry import RECIPES

# MLflow 3 opens on its pages for language models unless it is told otherwise, in the part behind the #.
_TRAINING = {"workflowType": "machine_learning"}

_VIEW = "scores"
_VIEW_TAG = f"mlflow.sharedViewState.{_VIEW}"


def run_page(experiment_id: str, run_id: str) -> str:
    """The page of a run, to be put behind the server's address."""
    return f"/#/experiments/{experiment_id}/runs/{run_id}?{urlencode(_TRAINING)}"


def runs_page(experiment_id: str, search: str | None = None) -> str:
    """The page that lists an experiment's runs, or those that a search finds."""
    more = {} if search is None else {"searchFilter": search}
    return f"/#/experiments/{experiment_id}/runs?{urlencode({**_TRAINING, **more})}"


def scores_page(experiment_id: str) -> str:
    """The page that lists an experiment's training runs with their scores, the best first."""
    return f"{runs_page(experiment_id)}&{urlencode({'viewStateShareKey': _VIEW})}"


def scores_view(job: str) -> Mapping[str, str]:
    """The tag of an experiment that keeps this page, which MLflow also lists under Views.

    Args:
        job: whose runs are listed; of a job that trains nothing there is no such page.
    """
    recipe = RECIPES.get(job)
    if recipe is None or not recipe.figures:
        return {}
    state = {
        "searchFilter": f"tags.job = '{job}'",
        "orderByKey": f"metrics.`{recipe.figures[0]}`",
        "orderByAsc": False,
        "selectedColumns": [
            *(f"metrics.`{name}`" for name in recipe.figures),
            *(f"tags.`{name}`" for name in ("constraint", "seed", *recipe.tags)),
        ],
    }
    now = round(time.time() * 1000)
    return {_VIEW_TAG: json.dumps({"name": "Scores", "createdAt": now, "updatedAt": now, "state": json.dumps(state)})}
