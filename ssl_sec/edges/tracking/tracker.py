"""A run in MLflow, created by the driver.

Tracking never stops training: whatever happens to MLflow, the metrics are in the run's `metrics.jsonl`.
"""

import contextlib
import getpass
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import torch
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunInfo, RunStatus, SourceType
from mlflow.entities.lifecycle_stage import LifecycleStage
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.tracking import MlflowClient
from mlflow.types import Schema, TensorSpec
from mlflow.utils.mlflow_tags import (
    MLFLOW_GIT_COMMIT,
    MLFLOW_PARENT_RUN_ID,
    MLFLOW_RUN_NAME,
    MLFLOW_RUN_NOTE,
    MLFLOW_SOURCE_NAME,
    MLFLOW_SOURCE_TYPE,
    MLFLOW_USER,
)
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH
from torch import nn

from ssl_sec import __version__
from ssl_sec.edges.environment import with_variables
from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.masking import masked, masked_values
from ssl_sec.edges.packaging import JOB_ID_VARIABLE
from ssl_sec.edges.tracking.following import Record
from ssl_sec.edges.tracking.notes import describe_end, description, resumed, with_cluster, with_end, with_table
from ssl_sec.edges.tracking.pages import scores_view
from ssl_sec.edges.tracking.provenance import DIRTY_TAG
from ssl_sec.edges.tracking.store import (
    artifacts_beside,
    connect_to_store,
    find_run,
    importing_mlflow_pytorch,
    moved_store,
    refusals,
    sqlite_file,
    store_errors,
)
from ssl_sec.errors import StorageError
from ssl_sec.settings import flattened

logger = logging.getLogger("ssl_sec")

# The id of the Ray job that made the run.
JOB_ID_TAG = "ray.job_id"
# How the run ended.
ENDED_TAG = "ended"

_POINTS_A_CALL = 1000
_PARAMS_A_CALL = 100
_TAG_LIMIT = 5_000
# Tags of a run that MLflow gives its models, too.
_ABOUT_THE_SOURCE = (MLFLOW_USER, MLFLOW_SOURCE_NAME, MLFLOW_SOURCE_TYPE, MLFLOW_GIT_COMMIT)
# Prefix of the tags with the settings that a resume has changed.
_CHANGED = "resumed."
# Prefix of MLflow's metrics of machines, which have their own steps.
MACHINES = "system/"


def current_parameters(run: Run) -> Mapping[str, str]:
    """The parameters of a run with the values that resumes have changed, which MLflow has as tags."""
    changed = {key.removeprefix(_CHANGED): tag for key, tag in run.data.tags.items() if key.startswith(_CHANGED)}
    return {**run.data.params, **changed}


class TrackedRun:
    """A run in MLflow.

    Attributes:
        earlier_end_ms: time at which a reopened run had ended, in milliseconds since 1970; None if it had not, or has
            metrics of later steps since.
    """

    def __init__(self, client: MlflowClient, run_id: str, experiment_id: str) -> None:
        self.client = client
        self.run_id = run_id
        self.experiment_id = experiment_id
        self.earlier_end_ms: int | None = None
        self._newest_step: dict[str, int] = {}
        self._is_in_sync = True
        self._created_ms: int | None = None

    @classmethod
    def start(
        cls,
        identity: RunIdentity,
        values: Mapping[str, Any],
        on_created: Callable[[str], object] = lambda run_id: None,
    ) -> "TrackedRun":
        """Creates a run.

        Args:
            identity: identity of the run.
            values: parameters of the run.
            on_created: called with the run's id before the parameters are logged: if the store fails then, the run is
                reopened, and `log_changes` logs them.

        Raises:
            StorageError: if the store cannot be used.
        """
        refused = (
            f"tracking.experiment: found {identity.experiment!r}, in which MLflow at {masked(identity.uri)} lets this "
            "user create no runs; allowed: one for which the user has the permission EDIT, or a new one"
        )
        with store_errors(identity.uri), refusals(refused):
            client = connect_to_store(identity.uri)
            experiment_id = _experiment_id(client, identity)
            tags = {
                MLFLOW_RUN_NAME: identity.name,
                MLFLOW_USER: getpass.getuser(),
                MLFLOW_SOURCE_NAME: f"jobs.{identity.job}",
                MLFLOW_SOURCE_TYPE: SourceType.to_string(SourceType.JOB),
                "ssl_sec.version": __version__,
                **({JOB_ID_TAG: os.environ[JOB_ID_VARIABLE]} if JOB_ID_VARIABLE in os.environ else {}),
                **identity.tags,
                **({} if identity.parent_run_id is None else {MLFLOW_PARENT_RUN_ID: identity.parent_run_id}),
            }
            tags[MLFLOW_RUN_NOTE] = description(tags)
            tags = {key: value[:_TAG_LIMIT] for key, value in tags.items()}
            created = client.create_run(experiment_id, tags=tags, run_name=identity.name).info
            _warn_of_move(identity.uri, created)
            on_created(created.run_id)
            run = cls(client, created.run_id, experiment_id)
            run._log_parameters(flattened(masked_values(values)))
        return run

    @classmethod
    def reopen(cls, uri: str, run_id: str) -> "TrackedRun | None":
        """Reopens a run; None if the store does not have it. Points that it already has are not logged again.

        Raises:
            StorageError: if the store cannot be used, or the run was deleted.
        """
        with store_errors(uri):
            client = connect_to_store(uri)
            run = find_run(client, run_id)
            if run is None:
                return None
            if run.info.lifecycle_stage == LifecycleStage.DELETED:
                restore = f"mlflow runs restore --run-id {run_id}"
                raise StorageError(f"the run {run_id} was deleted in MLflow; restore it with `{restore}`")
            client.update_run(run_id, status=RunStatus.to_string(RunStatus.RUNNING))
            _warn_of_move(uri, run.info)
            if ENDED_TAG in run.data.tags:
                client.delete_tag(run_id, ENDED_TAG)
            tracked = cls(client, run_id, run.info.experiment_id)
            if run.info.status != RunStatus.to_string(RunStatus.RUNNING):
                tracked.earlier_end_ms = run.info.end_time
            tracked._look_up_newest_steps()
        return tracked

    def log_changes(self, values: Mapping[str, Any]) -> None:
        """Logs the settings that a resume has changed as tags, as parameters cannot change; new ones as parameters."""
        parameters = current_parameters(self.client.get_run(self.run_id))
        settings = {key: str(value)[:MAX_PARAM_VAL_LENGTH] for key, value in flattened(masked_values(values)).items()}
        self._log_parameters({key: value for key, value in settings.items() if key not in parameters})
        for key, value in settings.items():
            if key not in ("resume", "run_name") and parameters.get(key, value) != value:
                self.client.set_tag(self.run_id, f"{_CHANGED}{key}", value)

    def _log_parameters(self, settings: Mapping[str, Any]) -> None:
        parameters = [Param(key, str(value)) for key, value in settings.items()]
        for start in range(0, len(parameters), _PARAMS_A_CALL):
            self.client.log_batch(self.run_id, params=parameters[start : start + _PARAMS_A_CALL])

    def __call__(self, records: Sequence[Record]) -> None:
        """Logs the metrics of new steps; after an error, takes the same records again and logs no point twice."""
        if not self._is_in_sync:  # after an error the store may still have taken the points
            self._look_up_newest_steps()
        now = int(time.time() * 1000)
        points: list[Metric] = []
        newest = dict(self._newest_step)
        for record in records:
            for key, value in record.get("metrics", {}).items():
                if record["step"] > newest.get(key, -1):
                    newest[key] = record["step"]
                    points.append(Metric(key, float(value), now, record["step"]))
        if points:
            self.earlier_end_ms = None
        self._is_in_sync = False
        self._log(points)
        self._is_in_sync = True
        self._newest_step = newest

    def log_latest(self, records: Sequence[Record]) -> None:
        """Logs the metrics of steps that may be there with other values: the newest point of a step counts."""
        now = int(time.time() * 1000)
        points = [
            Metric(key, float(value), now, record["step"])
            for record in records
            for key, value in record["metrics"].items()
        ]
        known: dict[tuple[str, int], float] = {}
        for key in {point.key for point in points}:
            history = self.client.get_metric_history(self.run_id, key)
            known |= {(key, point.step): point.value for point in sorted(history, key=lambda point: point.timestamp)}
        self._log([point for point in points if known.get((point.key, point.step)) != point.value])

    def log_machines(self, metrics: Mapping[str, float], interval_s: float) -> None:
        """Logs the utilisation of machines; the step is the number of samples since the run was created, as in MLflow.

        Args:
            metrics: utilisation by names that start with `system/`.
            interval_s: time between two samples.
        """
        if self._created_ms is None:
            self._created_ms = self.client.get_run(self.run_id).info.start_time
        now = int(time.time() * 1000)
        step = max(0, int((now - self._created_ms) / (1000 * interval_s)))
        self._log([Metric(name, value, now, step) for name, value in metrics.items()])

    def _log(self, points: Sequence[Metric]) -> None:
        for start in range(0, len(points), _POINTS_A_CALL):
            self.client.log_batch(self.run_id, metrics=points[start : start + _POINTS_A_CALL])

    def _look_up_newest_steps(self) -> None:
        for key in self.client.get_run(self.run_id).data.metrics:
            if key.startswith(MACHINES):  # no step of these is logged again
                continue
            history = self.client.get_metric_history(self.run_id, key)
            self._newest_step[key] = max(point.step for point in history)

    @property
    def _last_step(self) -> int:
        return max(self._newest_step.values(), default=0)

    def log_data(self, data: Dataset, context: str) -> None:
        """Logs a data set as an input of the run."""
        self.client.log_inputs(self.run_id, [DatasetInput(data, [InputTag("mlflow.data.context", context)])])

    def log_file(self, path: Path, folder: str | None = None) -> None:
        """Uploads a file."""
        self.client.log_artifact(self.run_id, str(path), folder)

    def has_file(self, name: str) -> bool:
        """Whether a file was uploaded."""
        return any(artifact.path == name for artifact in self.client.list_artifacts(self.run_id))

    def log_resume(self, tags: Mapping[str, str]) -> None:
        """Adds the command and the code of a resume to the description, and removes the run's end from it.

        The tags get its folder, which may have been moved, and its Ray job.
        """
        self._set_note(lambda note: resumed(note, tags))
        dirty = "true" if tags.get(DIRTY_TAG) == "true" else None
        now = {"folder": tags.get("folder"), JOB_ID_TAG: os.environ.get(JOB_ID_VARIABLE), DIRTY_TAG: dirty}
        for key, value in now.items():
            if value is not None:
                self.client.set_tag(self.run_id, key, value[:_TAG_LIMIT])

    def end(self, status: str, reason: str | None = None, end_ms: int | None = None) -> None:
        """Ends the run as FINISHED, FAILED or KILLED, and writes why into the tag `ended` and the description.

        Args:
            status: how the run ended, in MLflow's words.
            reason: why it ended so; None if that needs no words.
            end_ms: time of the end in milliseconds since 1970; None for now.
        """
        self.client.set_terminated(self.run_id, status, end_ms)
        ended = masked(describe_end(status, reason))
        self.client.set_tag(self.run_id, ENDED_TAG, ended)
        self._set_note(lambda note: with_end(note, ended))

    def describe_cluster(self, cluster: str) -> None:
        """Adds the cluster that the run is on to the description."""
        self._set_note(lambda note: with_cluster(note, cluster))

    def describe_results(self, table: str) -> None:
        """Puts a table in Markdown in front of the description, replacing an earlier one."""
        self._set_note(lambda note: with_table(note, table))

    def _set_note(self, change: Callable[[str], str]) -> None:
        note = change(self.client.get_run(self.run_id).data.tags.get(MLFLOW_RUN_NOTE, ""))
        self.client.set_tag(self.run_id, MLFLOW_RUN_NOTE, note[:_TAG_LIMIT])

    def log_network(self, network: nn.Module, image_shape: tuple[int, ...], width: int, name: str) -> None:
        """Logs a network as a model (an exported program, not a pickle), to be loaded on the CPU, and registers it.

        The metrics of the run's last step become those of the model.

        Args:
            network: images in [0, 1] -> features or embeddings, on the CPU.
            image_shape: channels, height and width of the training images.
            width: dimension of the output.
            name: name of the registered model; MLflow finds its newest version as `models:/<name>/latest`.
        """
        example = np.zeros((2, *image_shape), dtype=np.float32)
        signature = ModelSignature(
            inputs=Schema([TensorSpec(np.dtype(np.float32), (-1, *image_shape))]),
            outputs=Schema([TensorSpec(np.dtype(np.float32), (-1, width))]),
        )
        run = self.client.get_run(self.run_id).data
        # Without it MLflow would take the experiment and the run that are active in this process: a program's.
        model = self.client.create_logged_model(
            self.experiment_id,
            name="encoder",
            source_run_id=self.run_id,
            tags={key: run.tags[key] for key in _ABOUT_THE_SOURCE if key in run.tags},
            params=run.params,
        )
        with _fluent(self.client.tracking_uri):
            Model.log(
                artifact_path=None,
                model_id=model.model_id,
                run_id=self.run_id,
                flavor=_TorchOnCPU,
                pytorch_model=network.float().eval(),
                step=self._last_step,
                signature=signature,
                input_example=example,
                pip_requirements=[f"torch=={torch.__version__.split('+')[0]}", f"numpy=={np.__version__}"],
                registered_model_name=name,
            )


class _TorchOnCPU:
    """MLflow's flavour of PyTorch, which is loaded on the CPU.

    By default it is loaded on a GPU where there is one, which fails: an exported program stays on its device.
    """

    @staticmethod
    def save_model(path: str, mlflow_model: Model, **options: Any) -> None:
        """Saves a network; `options` are those of `mlflow.pytorch.save_model`."""
        with importing_mlflow_pytorch():
            from mlflow.pyfunc import FLAVOR_NAME
            from mlflow.pytorch import save_model
        save_model(path=path, mlflow_model=mlflow_model, **options)
        mlflow_model.flavors[FLAVOR_NAME]["config"] = {"device": "cpu"}
        mlflow_model.save(os.path.join(path, MLMODEL_FILE_NAME))


@contextlib.contextmanager
def _fluent(uri: str) -> Iterator[None]:
    """Points MLflow's fluent interface, which models need, to `uri`; its global address is restored afterwards."""
    # MLflow writes the address to the environment, where the next run of this process would find it.
    with with_variables({"MLFLOW_TRACKING_URI": uri}):
        mlflow.set_tracking_uri(uri)
        try:
            yield
        finally:
            mlflow.set_tracking_uri(None)  # pyright: ignore[reportArgumentType]


def _warn_of_move(uri: str, run: RunInfo) -> None:
    """Warns that the files of a run go to the place where a sqlite store was made."""
    if (moved := moved_store(uri, run.artifact_uri)) is not None:
        logger.warning("%s: %s", uri, moved)


def _experiment_id(client: MlflowClient, identity: RunIdentity) -> str:
    """The id of the experiment, which is created if need be; artifacts of a sqlite store are kept beside its file.

    Raises:
        StorageError: if the experiment was deleted.
    """
    view = scores_view(identity.job or "")
    experiment = client.get_experiment_by_name(identity.experiment)
    if experiment is None:
        file = sqlite_file(identity.uri)
        location = None if file is None else artifacts_beside(file).as_uri()
        try:
            # The UI opens an experiment of this kind on its training runs.
            tags = {"mlflow.experimentKind": "custom_model_development", **view}
            return client.create_experiment(identity.experiment, artifact_location=location, tags=tags)
        except MlflowException:  # another run has just created it
            experiment = client.get_experiment_by_name(identity.experiment)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == LifecycleStage.DELETED:
        raise StorageError(
            f"tracking.experiment: {identity.experiment!r} was deleted in MLflow; restore it with `mlflow experiments "
            f"restore --experiment-id {experiment.experiment_id}`, or give tracking.experiment=<name>"
        )
    for key in view.keys() - experiment.tags.keys():
        client.set_experiment_tag(str(experiment.experiment_id), key, view[key])
    return str(experiment.experiment_id)
