"""The kept checkpoints of a run as models in MLflow, side by side with their steps and metrics.

They are logged models without a format of MLflow's: the weights as safetensors, which `jobs.probe` and `jobs.export`
take by `checkpoint=`.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.artifacts import download_artifacts
from mlflow.entities import LoggedModel, Metric
from mlflow.tracking import MlflowClient

from ssl_sec.edges.folder.checkpoints import chosen_step, kept_checkpoints, write_network
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.names import CHECKPOINT_TAG
from ssl_sec.edges.tracking.store import all_pages, quoted
from ssl_sec.recipes.registry import RecipeRow
from ssl_sec.recipes.tracking import Checkpoint

_SCORE_TAG = "score"
_MODEL_TYPE = "checkpoint"


def log_checkpoints(
    client: MlflowClient, experiment_id: str, run_id: str, recipe: RecipeRow, folder: RunFolder
) -> None:
    """Logs each kept checkpoint of a run as a model, with the metrics of its step; those that are there stay.

    Args:
        client: of the store.
        experiment_id: of the run's experiment.
        run_id: of the run.
        recipe: of the run.
        folder: of the run.
    """
    known = _models(client, experiment_id, run_id).keys()
    for step, score in kept_checkpoints(folder).items():
        if step in known:
            continue
        with tempfile.TemporaryDirectory() as made:
            write_network(folder, recipe, step, Path(made))
            model = client.create_logged_model(
                experiment_id,
                name=f"checkpoint-{step}",
                source_run_id=run_id,
                tags={CHECKPOINT_TAG: str(step), **({} if score is None else {_SCORE_TAG: str(score)})},
                params={"steps": str(step)},
                model_type=_MODEL_TYPE,
            )
            client.log_model_artifacts(model.model_id, made)
        client.finalize_logged_model(model.model_id, "READY")
        now = int(time.time() * 1000)
        points = [
            Metric(name, value, now, step - 1, model_id=model.model_id, run_id=run_id)
            for name, value in _metrics_at(step - 1, folder.records()).items()
        ]
        client.log_batch(run_id, metrics=points)


def download_checkpoint(
    client: MlflowClient, experiment_id: str, run_id: str, checkpoint: Checkpoint, folder: Path
) -> None:
    """Downloads the weights of a kept checkpoint of a run.

    Args:
        client: of the store.
        experiment_id: of the run's experiment.
        run_id: of the run.
        checkpoint: the value of the key `checkpoint`.
        folder: an existing folder.

    Raises:
        ConfigError: if there is no such checkpoint.
    """
    models = _models(client, experiment_id, run_id)
    kept = {step: _score(model) for step, model in models.items()}
    model = models[chosen_step(checkpoint, kept, f"run {run_id} in MLflow at {client.tracking_uri}")]
    for artifact in client.list_logged_model_artifacts(model.model_id):
        place = f"{model.artifact_location}/{artifact.path}"
        download_artifacts(artifact_uri=place, dst_path=str(folder), tracking_uri=client.tracking_uri)


def _models(client: MlflowClient, experiment_id: str, run_id: str) -> dict[int, LoggedModel]:
    """Steps taken -> model of each kept checkpoint of a run, the oldest first."""
    condition = f"source_run_id = {quoted(run_id)}"
    found = all_pages(
        lambda token: client.search_logged_models([experiment_id], condition, page_token=token)  # pyright: ignore
    )
    steps = {int(model.tags[CHECKPOINT_TAG]): model for model in found if CHECKPOINT_TAG in model.tags}
    return dict(sorted(steps.items()))


def _score(model: LoggedModel) -> float | None:
    return float(model.tags[_SCORE_TAG]) if _SCORE_TAG in model.tags else None


def _metrics_at(step: int, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of a step."""
    return {name: value for record in records if record["step"] == step for name, value in record["metrics"].items()}
