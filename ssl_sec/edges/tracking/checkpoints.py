"""The kept checkpoints of a run as models in MLflow, side by side with their steps and metrics.

They are logged models without a format of MLflow's: the weights as safetensors, which `jobs.probe` and `jobs.export`
read with `checkpoint=`.
"""

import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

from mlflow.artifacts import download_artifacts
from mlflow.entities import LoggedModel, LoggedModelStatus, Metric
from mlflow.tracking import MlflowClient

from ssl_sec.edges.folder.checkpoints import chosen_step, kept_checkpoints, score_among, write_network
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.names import CHECKPOINT_TAG
from ssl_sec.edges.tracking.store import all_pages, quoted
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.registry import RecipeRow
from ssl_sec.recipes.tracking import Checkpoint

_SCORE_TAG = "score"
_MODEL_TYPE = "checkpoint"
# Prefixes of metrics of which a long run has too many points to search them for a few steps.
_FREQUENT, _LOSS = ("train/", "system/"), "train/loss"


def log_checkpoints(
    client: MlflowClient, experiment_id: str, run_id: str, recipe: RecipeRow, folder: RunFolder
) -> None:
    """Logs each kept checkpoint of a run as a model, with the metrics of its step; whole models stay."""
    logged = _logged(client, experiment_id, run_id)
    known = _whole(logged).keys()
    new = {step: score for step, score in kept_checkpoints(folder).items() if step not in known}
    points = _points(client, run_id, [step - 1 for step in new])
    for step, score in new.items():
        for model in logged:  # whose upload was interrupted
            if _step(model) == step:
                client.delete_logged_model(model.model_id)
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
        client.log_batch(
            run_id, metrics=[_of_model(point, model.model_id) for point in points if point.step == step - 1]
        )


def download_checkpoint(
    client: MlflowClient, experiment_id: str, run_id: str, checkpoint: Checkpoint, folder: Path
) -> int:
    """Downloads the weights of a kept checkpoint of a run.

    Returns:
        The steps taken when it was saved.

    Raises:
        ConfigError: if there is no such checkpoint.
    """
    models = _whole(_logged(client, experiment_id, run_id))
    kept = {step: _score(model) for step, model in models.items()}
    where = f"run {run_id} in MLflow at {client.tracking_uri}"
    if not kept:
        raise ConfigError(
            f"checkpoint: found {checkpoint!r}, but {where} has no checkpoints, which are uploaded once it has "
            "finished; allowed: run=<its folder>, where they are"
        )
    step = chosen_step(checkpoint, kept, where, lambda: score_among(client.get_run(run_id).data.metrics))
    model = models[step]
    for artifact in client.list_logged_model_artifacts(model.model_id):
        place = f"{model.artifact_location}/{artifact.path}"
        download_artifacts(artifact_uri=place, dst_path=str(folder), tracking_uri=client.tracking_uri)
    return step


def is_checkpoint(model: LoggedModel) -> bool:
    """Whether a model is a kept checkpoint of a run."""
    return model.model_type == _MODEL_TYPE


def _logged(client: MlflowClient, experiment_id: str, run_id: str) -> list[LoggedModel]:
    """The models of the kept checkpoints of a run, also those whose upload has not finished."""
    condition = f"source_run_id = {quoted(run_id)}"
    found = all_pages(
        lambda token: client.search_logged_models([experiment_id], condition, page_token=token)  # pyright: ignore
    )
    return [model for model in found if CHECKPOINT_TAG in model.tags]


def _whole(logged: Iterable[LoggedModel]) -> dict[int, LoggedModel]:
    """Steps taken -> model of each checkpoint that was uploaded, oldest first."""
    by_step = {_step(model): model for model in logged if model.status == LoggedModelStatus.READY}
    return dict(sorted(by_step.items()))


def _step(model: LoggedModel) -> int:
    """The steps that were taken when the checkpoint was written."""
    return int(model.tags[CHECKPOINT_TAG])


def _score(model: LoggedModel) -> float | None:
    return float(model.tags[_SCORE_TAG]) if _SCORE_TAG in model.tags else None


def _points(client: MlflowClient, run_id: str, steps: Collection[int]) -> list[Metric]:
    """The points of some steps of a run: of rarely measured metrics, and of the loss."""
    if not steps:
        return []
    names = [name for name in client.get_run(run_id).data.metrics if not name.startswith(_FREQUENT) or name == _LOSS]
    return [point for name in names for point in client.get_metric_history(run_id, name) if point.step in steps]


def _of_model(point: Metric, model_id: str) -> Metric:
    """The point as one of a model; the store identifies it by its time and value, so that the run has it only once."""
    return Metric(point.key, point.value, point.timestamp, point.step, model_id=model_id)
