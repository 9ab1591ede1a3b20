"""MLflow: one run for one run, made by the driver, whose state tells the truth.

Tracking never stops training: whatever MLflow says, the figures are in the run's `metrics.jsonl`.
"""

import contextlib
import getpass
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # MLflow asks for git; a machine without it is fine
# A server that is away is asked again by us; MLflow itself would hold a call back for minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
# A job says what it does in its own words.
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import mlflow
import numpy as np
import torch
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunStatus, SourceType
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient
from mlflow.types import Schema, TensorSpec
from mlflow.utils.mlflow_tags import (
    MLFLOW_PARENT_RUN_ID,
    MLFLOW_RUN_NAME,
    MLFLOW_RUN_NOTE,
    MLFLOW_SOURCE_NAME,
    MLFLOW_SOURCE_TYPE,
    MLFLOW_USER,
)
from torch import nn

from ssl_sec import __version__
from ssl_sec.edges.masking import masked, masked_values
from ssl_sec.edges.packaging import JOB_ID_VARIABLE
from ssl_sec.edges.tracking.addresses import require_store
from ssl_sec.edges.tracking.following import Record
from ssl_sec.edges.tracking.notes import description, how_it_ended, resumed, with_end
from ssl_sec.edges.tracking.pages import scores_view
from ssl_sec.edges.tracking.provenance import DIRTY_TAG, code_files, process_tags
from ssl_sec.errors import StorageError, first_line
from ssl_sec.locking import locked
from ssl_sec.recipes.config import TrackingConfig
from ssl_sec.settings import flattened

logger = logging.getLogger(__name__)
# It tells of its tables whenever it makes a database; errors still come through.
logging.getLogger("mlflow").setLevel(logging.ERROR)
logging.getLogger("alembic").setLevel(logging.ERROR)
logging.getLogger("mlflow.system_metrics").setLevel(logging.CRITICAL)  # they are missed if the store is away, no more

# Of the job of a Ray cluster that makes the run.
JOB_ID_TAG = "ray.job_id"
# How a run ended.
ENDED_TAG = "ended"

_POINTS_A_CALL = 1000
_PARAMS_A_CALL = 100
_TAG_LIMIT = 5_000


def tracking_uri(config: TrackingConfig, output_dir: Path) -> str:
    """The store's address: the configured one, the environment's, or sqlite in the output folder.

    Raises:
        ConfigError: for a scheme that MLflow has no store for.
        StorageError: for a sqlite file that cannot be one.
    """
    if config.uri:
        uri, key = config.uri, "tracking.uri"
    elif from_environment := os.environ.get("MLFLOW_TRACKING_URI"):
        uri, key = from_environment, "MLFLOW_TRACKING_URI"
    else:
        uri, key = f"sqlite:///{output_dir.resolve()}/mlflow.db", "output_dir"
    require_store(uri, key)
    return uri


class UnknownRun(StorageError):
    """The store has no run of this id: it was deleted, or it is another store."""


class TrackedRun:
    """One MLflow run.

    Args:
        client: of the store.
        run_id: the run's.
        experiment_id: its experiment's.
    """

    def __init__(self, client: MlflowClient, run_id: str, experiment_id: str) -> None:
        self.client = client
        self.run_id = run_id
        self.experiment_id = experiment_id
        self._newest_step: dict[str, int] = {}
        self._certain = True

    @classmethod
    def start(
        cls,
        uri: str,
        *,
        experiment: str,
        name: str,
        values: Mapping[str, Any],
        output_dir: Path,
        tags: Mapping[str, str],
        parent_run_id: str | None = None,
    ) -> "TrackedRun":
        """Makes a run with its parameters and tags, `job` among them.

        Raises:
            StorageError: if the store cannot be used.
        """
        try:
            client = connected(uri)
            experiment_id = _experiment_id(client, experiment, uri, output_dir, tags["job"])
            parent = {} if parent_run_id is None else {MLFLOW_PARENT_RUN_ID: parent_run_id}
            about = {
                MLFLOW_RUN_NAME: name,
                MLFLOW_USER: getpass.getuser(),
                MLFLOW_SOURCE_NAME: f"jobs.{tags['job']}",
                MLFLOW_SOURCE_TYPE: SourceType.to_string(SourceType.JOB),
                "ssl_sec.version": __version__,
                **process_tags(),
                **({JOB_ID_TAG: os.environ[JOB_ID_VARIABLE]} if JOB_ID_VARIABLE in os.environ else {}),
                **tags,
                **parent,
            }
            about[MLFLOW_RUN_NOTE] = description(about)
            about = {key: value[:_TAG_LIMIT] for key, value in about.items()}
            run = client.create_run(experiment_id, tags=about, run_name=name)
            tracked = cls(client, run.info.run_id, experiment_id)
            parameters = [Param(key, str(value)) for key, value in flattened(masked_values(values)).items()]
            for start in range(0, len(parameters), _PARAMS_A_CALL):
                client.log_batch(run.info.run_id, params=parameters[start : start + _PARAMS_A_CALL])
        except Exception as error:
            raise StorageError(f"tracking.uri: MLflow at {uri} cannot be used: {first_line(error)}") from error
        return tracked

    @classmethod
    def take_up(cls, uri: str, run_id: str) -> "TrackedRun":
        """Goes on with a run, leaving out the points that it has.

        Raises:
            UnknownRun: if the store does not know the run.
            StorageError: if the store cannot be used.
        """
        try:
            client = connected(uri)
            client.update_run(run_id, status=RunStatus.to_string(RunStatus.RUNNING))
            run = client.get_run(run_id)
            if ENDED_TAG in run.data.tags:
                client.delete_tag(run_id, ENDED_TAG)
            tracked = cls(client, run_id, run.info.experiment_id)
            tracked._look_up_newest_steps()
        except Exception as error:
            if isinstance(error, MlflowException) and error.error_code == "RESOURCE_DOES_NOT_EXIST":
                raise UnknownRun(f"MLflow at {uri} has no run {run_id}") from error
            raise StorageError(f"MLflow at {uri} cannot be used for run {run_id}: {first_line(error)}") from error
        return tracked

    def note_changes(self, values: Mapping[str, Any]) -> None:
        """Notes in tags what a resume has changed: parameters stay as they were at first."""
        parameters = self.client.get_run(self.run_id).data.params
        for key, value in flattened(masked_values(values)).items():
            if key != "resume" and parameters.get(key, str(value)) != str(value):
                self.client.set_tag(self.run_id, f"resumed.{key}", str(value))

    def __call__(self, records: Sequence[Record]) -> None:
        """Logs the figures of new steps; after an error, again with the same records, each point still once."""
        if not self._certain:  # the store may have taken what it did not answer
            self._look_up_newest_steps()
        now = int(time.time() * 1000)
        points: list[Metric] = []
        newest = dict(self._newest_step)
        for record in records:
            for key, value in record.get("metrics", {}).items():
                if record["step"] > newest.get(key, -1):
                    newest[key] = record["step"]
                    points.append(Metric(key, float(value), now, record["step"]))
        self._certain = False
        for start in range(0, len(points), _POINTS_A_CALL):
            self.client.log_batch(self.run_id, metrics=points[start : start + _POINTS_A_CALL])
        self._certain = True
        self._newest_step = newest

    def _look_up_newest_steps(self) -> None:
        for key in self.client.get_run(self.run_id).data.metrics:
            history = self.client.get_metric_history(self.run_id, key)
            self._newest_step[key] = max(point.step for point in history)

    @property
    def _last_step(self) -> int:
        # MLflow counts the figures of the machine by itself.
        return max((step for key, step in self._newest_step.items() if not key.startswith("system/")), default=0)

    def log_data(self, data: Dataset, context: str) -> None:
        """Names a data set as an input of the run."""
        self.client.log_inputs(self.run_id, [DatasetInput(data, [InputTag("mlflow.data.context", context)])])

    def log_file(self, path: Path, folder: str | None = None) -> None:
        """Uploads a file."""
        self.client.log_artifact(self.run_id, str(path), folder)

    def has_file(self, name: str) -> bool:
        """Whether a file was uploaded."""
        return any(artifact.path == name for artifact in self.client.list_artifacts(self.run_id))

    def resume(self, tags: Mapping[str, str]) -> None:
        """Says in the description with what the run is taken up, and takes back that it has ended."""
        self._set_note(lambda note: resumed(note, tags))
        if tags.get(DIRTY_TAG) == "true":
            self.client.set_tag(self.run_id, DIRTY_TAG, "true")

    def end(self, status: str, reason: str | None = None) -> None:
        """Ends the run: FINISHED, FAILED or KILLED; the tag `ended` and the description say it with the reason."""
        self.client.set_terminated(self.run_id, status)
        ended = masked(how_it_ended(status, reason))
        self.client.set_tag(self.run_id, ENDED_TAG, ended)
        self._set_note(lambda note: with_end(note, ended))

    def begin_note(self, text: str) -> None:
        """Puts a paragraph of Markdown before the description."""
        self._set_note(lambda note: f"\n{text}\n\n{note}")

    def _set_note(self, change: Callable[[str], str]) -> None:
        note = change(self.client.get_run(self.run_id).data.tags.get(MLFLOW_RUN_NOTE, ""))
        self.client.set_tag(self.run_id, MLFLOW_RUN_NOTE, note[:_TAG_LIMIT])

    def log_network(self, network: nn.Module, image_shape: tuple[int, ...], width: int, name: str | None) -> None:
        """Logs a network as a model (an exported program, no pickle), and registers it as `name` if given.

        The figures of the run's last step become the model's.

        Args:
            network: images in [0, 1] -> features or embeddings, on the CPU.
            image_shape: channels, height and width that it was trained on.
            width: of what it returns.
            name: of the registered model, whose newest version MLflow finds as `models:/<name>/latest`.
        """
        example = np.zeros((2, *image_shape), dtype=np.float32)
        signature = ModelSignature(
            inputs=Schema([TensorSpec(np.dtype(np.float32), (-1, *image_shape))]),
            outputs=Schema([TensorSpec(np.dtype(np.float32), (-1, width))]),
        )
        with _without_lightning():
            from mlflow.pytorch import log_model
        with _fluent(self.client.tracking_uri), mlflow.start_run(run_id=self.run_id):
            log_model(
                network.float().eval(),
                name="encoder",
                step=self._last_step,
                signature=signature,
                input_example=example,
                pip_requirements=[f"torch=={torch.__version__.split('+')[0]}", f"numpy=={np.__version__}"],
                registered_model_name=name,
            )


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What makes up a run in MLflow, besides its figures; kept in the run's folder.

    Attributes:
        uri: of the store.
        experiment: its name.
        name: of the run.
        tags: of the run, `job` among them.
        parent_run_id: of the run that it belongs to.
    """

    uri: str
    experiment: str
    name: str
    tags: Mapping[str, str]
    parent_run_id: str | None


class LateRun:
    """A run in MLflow that is made, or taken up, as soon as the store can be had; a sink of figures.

    Args:
        identity: of the run.
        values: its parameters.
        output_dir: of the job.
        run_id_path: where the run's id is kept once it is known.
        system_metrics: whether the use of this machine is followed while figures come.
        on_run: called once with the run.
    """

    def __init__(
        self,
        identity: RunIdentity,
        values: Mapping[str, Any],
        output_dir: Path,
        run_id_path: Path,
        system_metrics: bool = False,
        on_run: Callable[[TrackedRun], None] = lambda run: None,
    ) -> None:
        self._identity = identity
        self._values = values
        self._output_dir = output_dir
        self._run_id_path = run_id_path
        self._system_metrics = system_metrics
        self._monitor: SystemMetricsMonitor | None = None
        self._on_run = on_run
        self._connected = threading.Event()
        self.run: TrackedRun | None = None

    def connect(self) -> TrackedRun:
        """The run.

        Raises:
            StorageError: if the store cannot be used.
        """
        if self.run is None:
            resumed = self._taken_up()
            self.run = resumed or self._started()
            if resumed is None:
                with contextlib.suppress(FileNotFoundError):  # the run's folder was removed, which ends the run
                    self._run_id_path.write_text(self.run.run_id)
            self._tell_origin(self.run, is_resumed=resumed is not None)
            self._connected.set()
            self._on_run(self.run)
        return self.run

    def _taken_up(self) -> TrackedRun | None:
        if not self._run_id_path.exists():
            return None
        try:
            run = TrackedRun.take_up(self._identity.uri, self._run_id_path.read_text().strip())
        except UnknownRun as error:
            logger.warning("%s; it is made anew", error)
            return None
        run.note_changes(self._values)
        return run

    def _started(self) -> TrackedRun:
        return TrackedRun.start(
            self._identity.uri,
            experiment=self._identity.experiment,
            name=self._identity.name,
            values=self._values,
            output_dir=self._output_dir,
            tags=self._identity.tags,
            parent_run_id=self._identity.parent_run_id,
        )

    def ask(self) -> None:
        """Asks the store for the run, as soon as there is one; raises if the store cannot be used."""
        self._connected.wait()
        assert self.run is not None
        self.run.client.get_run(self.run.run_id)

    def _tell_origin(self, run: TrackedRun, is_resumed: bool) -> None:
        try:
            if is_resumed:
                run.resume(self._identity.tags)
            for path in code_files(self._run_id_path.parent):
                run.log_file(path)
        except Exception as error:  # the figures are worth more
            logger.warning("MLflow: %s", first_line(error))

    def __call__(self, records: Sequence[Record]) -> None:
        """Logs the figures of new steps."""
        run = self.connect()
        if self._system_metrics and self._monitor is None:
            uri = self._identity.uri
            self._monitor = SystemMetricsMonitor(run.run_id, resume_logging=True, tracking_uri=uri)
            self._monitor.start()
        run(records)

    def close(self) -> None:
        """Ends what follows the machine; no figure is held back."""
        if self._monitor is not None:
            self._monitor.finish()


def connected(uri: str) -> MlflowClient:
    """A client of the store; a sqlite file gets its tables from one process, not from several at once."""
    if not uri.startswith("sqlite:///"):
        return MlflowClient(uri)
    path = Path(uri.removeprefix("sqlite:///"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(path.name + ".lock")):
        client = MlflowClient(uri)
        client.search_experiments(max_results=1)
    return client


@contextlib.contextmanager
def _fluent(uri: str) -> Iterator[None]:
    """The fluent interface, which alone logs models, at `uri`; its global address is put back afterwards."""
    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        # Setting the address writes the variable, and the next run of this process would read it.
        mlflow.set_tracking_uri(None)  # pyright: ignore[reportArgumentType]
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before


@contextlib.contextmanager
def _without_lightning() -> Iterator[None]:
    """`mlflow.pytorch` imports Lightning where it can, and does without where it cannot: it takes seconds."""
    if "pytorch_lightning" in sys.modules:
        yield
        return
    sys.modules["pytorch_lightning"] = None  # pyright: ignore[reportArgumentType]  # an ImportError to whoever asks
    try:
        yield
    finally:
        del sys.modules["pytorch_lightning"]


def _experiment_id(client: MlflowClient, name: str, uri: str, output_dir: Path, job: str) -> str:
    """The experiment's id; a new one in our own sqlite keeps its artifacts beside it, and has a view of the scores."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        for key, value in scores_view(job).items():
            if key not in experiment.tags:
                client.set_experiment_tag(str(experiment.experiment_id), key, value)
        return str(experiment.experiment_id)
    beside = uri == f"sqlite:///{output_dir.resolve()}/mlflow.db"
    location = (output_dir.resolve() / "mlartifacts").as_uri() if beside else None
    try:
        # The UI opens an experiment of this kind on its training runs.
        tags = {"mlflow.experimentKind": "custom_model_development", **scores_view(job)}
        return client.create_experiment(name, artifact_location=location, tags=tags)
    except MlflowException:  # another run was faster
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise
        return str(experiment.experiment_id)
