"""A run from its configuration to its results: folder, tracking, workers, artifacts, probe."""

import contextlib
import json
import logging
import os
import shlex
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from torch import nn

from ssl_sec.edges.config import ReplayConfig
from ssl_sec.edges.folder.finding import find_folder, id_of, trained_folder
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.names import claimed, own_tags, run_name_of, what_tags
from ssl_sec.edges.folder.record import data_set
from ssl_sec.edges.folder.stored_config import stored_values, training_config, with_credentials
from ssl_sec.edges.masking import masked
from ssl_sec.edges.overrides import assigned
from ssl_sec.edges.packaging import command
from ssl_sec.edges.patience import ANSWER_S, NoAnswer, Patience
from ssl_sec.edges.run.resuming import resume_run
from ssl_sec.edges.run.running import close_abandoned, running
from ssl_sec.edges.run.worker import Worker, load_encoder, load_head, work
from ssl_sec.edges.tracking.addresses import require_store
from ssl_sec.edges.tracking.following import Follower, Progress
from ssl_sec.edges.tracking.provenance import keep_code
from ssl_sec.edges.tracking.runs import beside, find_run, tracked_beside
from ssl_sec.edges.tracking.scores import (
    PROTOCOL_TAG,
    copy_probe_figures,
    describe_versions,
    mark_best,
    model_name,
    probe_protocol,
)
from ssl_sec.edges.tracking.tracker import LateRun, RunIdentity, TrackedRun, tracking_uri
from ssl_sec.errors import ConfigError, Stopped, StorageError, UserError, first_line
from ssl_sec.recipes.config import RunConfig, TrainingConfig
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.recipes.registry import PRETRAIN, PROBE, RECIPES, RecipeRow
from ssl_sec.settings import from_values, to_values
from ssl_sec.training.config import LocalConfig, RuntimeConfig

logger = logging.getLogger("ssl_sec")

# How long a run that has ended waits for those that it closes for others.
_CLOSE_WITHIN_S = 5.0
# A terminal's Ctrl-C may come twice, by way of another process; a person's second one comes later.
_SAME_SIGNAL_S = 0.5

_Config = TypeVar("_Config", bound=TrainingConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """What a run leaves.

    Attributes:
        folder: of the run.
        uri: of MLflow's store.
        run_id: in MLflow; None if MLflow was not to be had.
        experiment_id: likewise.
        metrics: the last value of each.
    """

    folder: RunFolder
    uri: str
    run_id: str | None
    experiment_id: str | None
    metrics: Mapping[str, float]


def run_recipe(recipe: RecipeRow, config: RunConfig) -> Finished:
    """Trains, or probes what was trained.

    Raises:
        UserError: for what the user can mend.
        Stopped: if a stop was asked for; the state is saved.
    """
    if isinstance(config, TrainingConfig):
        return run_training(recipe, config)
    assert isinstance(config, ProbeJobConfig)
    return run_probe(config)


def run_training(recipe: RecipeRow, config: TrainingConfig) -> Finished:
    """Trains, and probes if that is asked for; the probe's figures are then in the result.

    Raises:
        UserError: for what the user can mend.
        Stopped: if a stop was asked for; the state is saved.
    """
    config = _named(config)
    finished = _train(recipe, config)
    if config.linear_probe is None or not config.linear_probe.enabled:
        return finished
    if finished.folder.stop_path.exists():  # it came after the last step
        meant = shlex.quote(assigned("run", finished.run_id or str(finished.folder.path)))
        raise Stopped(f"stopped; {config.run_name} is finished; probe it with: {command(PROBE.name)} {meant}")
    probe = ProbeJobConfig(
        run=finished.run_id or str(finished.folder.path),
        probe=config.linear_probe,
        runtime=config.runtime,
        output_dir=config.output_dir,
        tracking=config.tracking,
    )
    folder = RunFolder(finished.folder.path.with_name(f"{config.run_name}-probe"))
    if config.resume and folder.is_complete:
        return replace(finished, metrics={**finished.metrics, **_last_figures(folder)})
    if config.resume and folder.holds_run:
        shutil.rmtree(folder.path)  # a probe that was interrupted starts again
    probed = _probe(probe, finished.folder.path, config)
    return replace(finished, metrics={**finished.metrics, **probed.metrics})


def _named(config: _Config) -> _Config:
    """The run with its recipe and a name: the one that is given, or one that is free in the recipe's folder."""
    config = replace(config, recipe=config.recipe_name)
    output_dir = Path(config.output_dir).expanduser().resolve()
    tracking_uri(config.tracking, output_dir)  # one that cannot work is refused before a folder is made
    if config.run_name is not None:
        return config
    return replace(config, run_name=claimed(output_dir / config.recipe_name, run_name_of(config)))


def _train(recipe: RecipeRow, config: TrainingConfig) -> Finished:
    assert config.run_name is not None
    output_dir = Path(config.output_dir).expanduser().resolve()
    folder = RunFolder(output_dir / config.recipe_name / config.run_name)
    with running(folder), _stopped_by_signals(folder):
        return _train_in(folder, recipe, config)


def _train_in(folder: RunFolder, recipe: RecipeRow, config: TrainingConfig) -> Finished:
    assert config.run_name is not None
    output_dir = Path(config.output_dir).expanduser().resolve()
    values = to_values(config)
    uri = tracking_uri(config.tracking, output_dir)
    if not (folder.holds_run if config.resume == "auto" else config.resume):
        folder.start(values)
    elif not resume_run(recipe, folder, config):
        return _nothing_to_do(folder, uri)
    run = _Run(
        recipe=recipe,
        group=config.recipe_name,
        folder=folder,
        values=values,
        runtime=config.runtime,
        uri=uri,
        output_dir=output_dir,
    )
    return run.to_its_end(
        experiment=config.tracking.experiment or config.recipe_name,
        name=config.run_name,
        progress=Progress(config.length, config.run_name, recipe.unit, said=folder.messages()),
        global_batch_size=config.global_batch_size,
        tags={**own_tags(config.tracking), **what_tags(config), "recipe": config.recipe_name, "job": recipe.name},
        parent_run_id=config.tracking.parent_run,
    )


def _nothing_to_do(folder: RunFolder, uri: str) -> Finished:
    logger.info(
        "%s is finished, so that there is nothing to resume; if MLflow lacks something of it: %s",
        folder.path.name,
        _replay_command(folder),
    )
    return Finished(folder=folder, uri=uri, run_id=id_of(folder), experiment_id=None, metrics=_last_figures(folder))


def _last_figures(folder: RunFolder) -> dict[str, float]:
    return {key: value for record in folder.records() for key, value in record["metrics"].items()}


def _replay_command(folder: RunFolder) -> str:
    return f"{command('replay')} {shlex.quote(assigned('folder', str(folder.path)))}"


def run_probe(config: ProbeJobConfig) -> Finished:
    """Probes the encoder of a pretraining run: of one that MLflow knows, wherever it ran, or of a run's folder.

    A folder has all that is needed, so that its probe does not wait for MLflow.

    Raises:
        UserError: for what the user can mend.
    """
    folder = trained_folder(config.run, (PRETRAIN.name,))
    if folder is not None:
        trained = training_config(PRETRAIN, folder.config_path)
        tracking, run_id = tracked_beside(folder, config.tracking, Path(config.output_dir).expanduser())
        return _probe(replace(config, run=run_id or str(folder.path), tracking=tracking), folder.path, trained)
    store, run = find_run(config.run, config.tracking, config.output_dir, (PRETRAIN.name,))
    with tempfile.TemporaryDirectory() as downloads:
        trained = download_run(store.client, run.run_id, Path(downloads), (PRETRAIN.name,))
        config = replace(config, run=run.run_id, tracking=beside(config.run, config.tracking))
        return _probe(config, Path(downloads), trained)


def _id_in_mlflow(run: str) -> str | None:
    """The id of the run that is probed; None for a folder whose run MLflow does not know."""
    return None if "/" in run or run == "untracked" else run  # as version 0.1 has it


def download_run(client: MlflowClient, run_id: str, folder: Path, jobs: Sequence[str]) -> TrainingConfig:
    """Lays `config.yaml` and `encoder.safetensors` of a finished training run, and an embedding's head, into a folder.

    Args:
        client: of the store.
        run_id: the run's.
        folder: that exists.
        jobs: whose runs will do.

    Returns:
        The run's configuration.

    Raises:
        ConfigError: if the store has no such run, or the run no encoder.
    """
    try:
        job = client.get_run(run_id).data.tags.get("job")
        if job is None or job not in jobs:
            raise ConfigError(f"run: found {run_id!r}, a run of jobs.{job}; allowed: a run of {_either(jobs)}")
        for artifact in ("config.yaml", *RECIPES[job].network_files):
            client.download_artifacts(run_id, artifact, str(folder))
    except (MlflowException, OSError) as error:
        raise ConfigError(
            f"run: found {run_id!r}, but MLflow at {client.tracking_uri} has no encoder of it; allowed: a finished run "
            f"of {_either(jobs)}"
        ) from error
    return training_config(RECIPES[job], folder / "config.yaml")


def _either(jobs: Sequence[str]) -> str:
    return " or ".join(f"jobs.{job}" for job in jobs)


def run_replay(config: ReplayConfig) -> Finished:
    """Sends to MLflow what it has not of a run that has ended: its figures, artifacts and state.

    Raises:
        UserError: for what the user can mend.
    """
    folder = find_folder("folder", config.folder, Path(config.output_dir).expanduser().resolve())
    if not folder.identity_path.is_file():
        raise ConfigError(
            f"folder: {folder.path} holds no run that was started; allowed: the folder that a job printed"
        )
    identity = RunIdentity(**json.loads(folder.identity_path.read_text()))
    identity = replace(identity, uri=config.uri or with_credentials(identity.uri, "uri"))
    require_store(identity.uri, "uri")
    recipe = RECIPES[identity.tags["job"]]
    values = stored_values(folder.config_path)
    runtime = from_values(recipe.config, values).runtime
    run = _Run(
        recipe=recipe,
        group=identity.tags["recipe"],
        folder=folder,
        values=values,
        runtime=runtime,
        uri=identity.uri,
        output_dir=Path(values["output_dir"]).expanduser().resolve(),
    )
    with running(folder):
        return run.replay(identity)


def _probe(config: ProbeJobConfig, trained_path: Path, trained: TrainingConfig) -> Finished:
    output_dir = Path(config.output_dir).expanduser().resolve()
    group = trained.recipe_name
    if config.run_name is None:
        name = f"{trained.run_name or run_name_of(trained)}-probe"
        config = replace(config, run_name=claimed(output_dir / group, name))
    assert config.run_name is not None
    folder = RunFolder(output_dir / group / config.run_name)
    with running(folder), _stopped_by_signals(folder):
        return _probe_in(folder, config, trained_path, trained)


def _probe_in(folder: RunFolder, config: ProbeJobConfig, trained_path: Path, trained: TrainingConfig) -> Finished:
    assert config.run_name is not None
    group = trained.recipe_name
    output_dir = Path(config.output_dir).expanduser().resolve()
    values = to_values(config)
    folder.start(values)
    shutil.copy(trained_path / "encoder.safetensors", folder.encoder_path)
    shutil.copy(trained_path / "config.yaml", folder.probed_config_path)
    run = _Run(
        recipe=PROBE,
        group=group,
        folder=folder,
        values=values,
        runtime=config.runtime,
        uri=tracking_uri(config.tracking, output_dir),
        output_dir=output_dir,
    )
    passes = 2 if config.probe.labels_per_class is None else 1
    return run.to_its_end(
        experiment=config.tracking.experiment or group,
        name=config.run_name,
        progress=Progress(passes * config.probe.epochs, config.run_name),
        global_batch_size=None,
        tags={
            **own_tags(config.tracking),
            **what_tags(trained),
            "data": (config.data or trained.data).title,
            "recipe": group,
            "job": PROBE.name,
        },
        parent_run_id=_id_in_mlflow(config.run),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A run that is launched, followed and tracked.

    Attributes:
        recipe: what it does.
        group: what its experiment, the folder of its runs and its registered model are called.
        folder: of the run.
        values: its configuration.
        runtime: where it runs.
        uri: of MLflow's store.
        output_dir: of the job.
        sending: what is sent to the store.
    """

    recipe: RecipeRow
    group: str
    folder: RunFolder
    values: Mapping[str, Any]
    runtime: RuntimeConfig
    uri: str
    output_dir: Path
    sending: "_Sending" = field(default_factory=lambda: _Sending())

    def to_its_end(
        self,
        *,
        experiment: str,
        name: str,
        progress: Progress,
        global_batch_size: int | None,
        tags: Mapping[str, str],
        parent_run_id: str | None,
    ) -> Finished:
        identity = RunIdentity(
            uri=self.uri,
            experiment=experiment,
            name=name,
            tags={**keep_code(self.folder.path), **tags, "folder": str(self.folder.path)},
            parent_run_id=parent_run_id,
        )
        self.folder.identity_path.write_text(json.dumps(asdict(replace(identity, uri=masked(identity.uri)))))
        others: list[threading.Thread] = []

        def begun(tracked: TrackedRun) -> None:
            self._say_where(tracked)
            others.append(close_abandoned(self.folder, tracked.client, self.uri))

        tracking = self._tracking(identity, begun)
        logger.info("folder: %s", self.folder.path)
        logger.info("connecting to MLflow at %s", masked(self.uri))
        status, reason = "FAILED", None
        try:
            with _noticing_removal(self.folder):
                with (
                    Follower(self.folder.metrics_path, progress),
                    Follower(
                        self.folder.metrics_path,
                        tracking,
                        on_error=self._tell_outage,
                        on_loss=self.sending.note_loss,
                        patience=self.sending.patience,
                        asks_at_once=True,
                    ),
                ):
                    self._launch(global_batch_size)
                told = self.folder.error()
                if told is not None:
                    raise told
                if self.folder.outcome() == "stopped":
                    raise Stopped(self._stopped())
                # A store that does not take the figures is not asked for more; a replay sends all of it.
                self._leave_artifacts(None if self.sending.num_lost else tracking.run)
            status = "FINISHED"
        except (Stopped, KeyboardInterrupt) as stop:
            status, reason = "KILLED", "as asked, after saving" if isinstance(stop, Stopped) else "interrupted at once"
            raise
        except UserError as error:
            reason = first_line(error)
            raise
        except Exception as error:
            found = self.folder.error() or error
            reason = first_line(found)
            raise found from None
        finally:
            tracked = tracking.run
            if tracked is not None:
                self._tolerated(lambda: self._tell_data(tracked))
                self._tolerated(lambda: tracked.end(status, reason))
                if status == "FINISHED":
                    self._tolerated(lambda: self._compare(tracked))
            if status == "FAILED":
                self.folder.discard_unstarted()
            if self.folder.holds_run:
                self.sending.warn(self._replay_command)
            for thread in others:
                thread.join(_CLOSE_WITHIN_S)
        self.folder.close()
        return self._finished(tracked)

    def _say_where(self, tracked: TrackedRun) -> None:
        from ssl_sec.edges.run.summary import how_to_look  # which imports this module

        for line in how_to_look(self._finished(tracked)).splitlines():
            logger.info(line.strip())

    def _stopped(self) -> str:
        if not self.recipe.is_training:
            again = shlex.quote(assigned("run", str(self.values["run"])))
            return f"stopped; a probe saves nothing: start it again with: {command(self.recipe.name)} {again}"
        return f"stopped; resume it with: {self._resume_command}"

    def _finished(self, tracked: TrackedRun | None) -> Finished:
        return Finished(
            folder=self.folder,
            uri=self.uri,
            run_id=tracked.run_id if tracked else None,
            experiment_id=tracked.experiment_id if tracked else None,
            metrics=_last_figures(self.folder),
        )

    def _tracking(self, identity: RunIdentity, on_run: Callable[[TrackedRun], None] = lambda run: None) -> LateRun:
        system_metrics = bool(self.values["tracking"]["system_metrics"])
        tracking = LateRun(identity, self.values, self.output_dir, self.folder.run_id_path, system_metrics, on_run)
        self.sending.answers = tracking.ask
        return tracking

    def _tell_outage(self, error: Exception) -> None:
        logger.warning(
            "MLflow: %s; it is tried again, and the figures are in %s", first_line(error), self.folder.metrics_path
        )

    def replay(self, identity: RunIdentity) -> Finished:
        """Sends to MLflow what it has not of a run that has ended.

        Raises:
            StorageError: if the store cannot be used.
        """
        tracking = self._tracking(identity)
        try:
            tracked = self.sending.patience.call(tracking.connect)
            self.sending.patience.call(lambda: tracked(self.folder.records()))
            is_whole = self.sending.patience.call(lambda: tracked.has_file(self.recipe.last_artifact))
        except NoAnswer as error:
            raise StorageError(f"MLflow at {self.uri} did not answer for {ANSWER_S:g} s") from error
        except UserError:
            raise
        except Exception as error:
            raise StorageError(f"MLflow at {self.uri} cannot be used: {first_line(error)}") from error
        outcome = self.folder.outcome()
        if outcome == "finished" and not is_whole:
            self._leave_artifacts(tracked)
        status = {"finished": "FINISHED", "stopped": "KILLED"}.get(outcome or "", "FAILED")
        error = self.folder.error()
        self._tolerated(lambda: self._tell_data(tracked))
        self._tolerated(lambda: tracked.end(status, None if error is None else first_line(error)))
        if status == "FINISHED":
            self._tolerated(lambda: self._compare(tracked))
            self.folder.close()
        self.sending.warn(self._replay_command)
        return self._finished(tracked)

    def _launch(self, global_batch_size: int | None) -> None:
        if isinstance(self.runtime, LocalConfig):
            worker = Worker(rank=0, world_size=1, device=self.runtime.resolve_device())
            work(self.recipe.name, self.values, str(self.folder.path), worker)
        else:
            from ssl_sec.edges.run.ray_runtime import run_with_ray  # the local runtime does without Ray

            run_with_ray(self.recipe.name, self.values, self.folder, self.runtime, global_batch_size)

    def _leave_artifacts(self, tracked: TrackedRun | None) -> None:
        """Draws the pictures, and leaves in MLflow all that the run made; last the file that says that all is there."""
        logger.info("drawing the plots")
        pictures = self._draw()
        if tracked is None:
            return
        logger.info("sending plots and weights to MLflow")
        for picture in pictures:
            self._tolerated(lambda picture=picture: tracked.log_file(picture, "plots"))
        self._tolerated(lambda: tracked.log_file(self.folder.config_path))
        if isinstance(self._config, TrainingConfig):
            self._leave_training(tracked, self._config)
        self._tolerated(lambda: tracked.log_file(self.folder.path / self.recipe.last_artifact))

    def _draw(self) -> list[Path]:
        """Draws the figures of the run; returns the files."""
        plots = self.folder.path / "plots"
        plots.mkdir(exist_ok=True)
        paths: list[Path] = []
        for name, figure in self.recipe.draw(self.folder).items():
            paths.append(plots / f"{name}.png")
            figure.savefig(paths[-1], dpi=110)
        return paths

    @property
    def _config(self) -> RunConfig:
        return from_values(self.recipe.config, self.values)

    def _leave_training(self, tracked: TrackedRun, config: TrainingConfig) -> None:
        """Leaves the norms and the network."""
        histograms = [asdict(histogram) for histogram in self.folder.histograms()]
        self.folder.norms_path.write_text(json.dumps(histograms))
        self._tolerated(lambda: tracked.log_file(self.folder.norms_path))
        data = self.folder.data()
        if self.recipe.leaves_head:
            self._tolerated(lambda: tracked.log_file(self.folder.head_path))
        if not config.tracking.register_model:
            return
        logger.info("registering the network in MLflow as %s", model_name(self.group))
        encoder = load_encoder(config, data.image_shape, self.folder.encoder_path)
        network, width = encoder, encoder.num_features
        if self.recipe.leaves_head:
            head = load_head(config, encoder.num_features, self.folder.head_path)
            network, width = nn.Sequential(encoder, head), config.head.dim
        self._tolerated(lambda: tracked.log_network(network, data.image_shape, width, model_name(self.group)))

    def _tell_data(self, tracked: TrackedRun) -> None:
        """Names the data as an input of the run, however it ended; for a probe its test images, and the protocol."""
        if not self.folder.holds_data:
            return
        data = self.folder.data()
        config = self._config
        if isinstance(config, ProbeJobConfig):
            title, context = (config.data or self.folder.probed().data).title, "evaluation"
            protocol = probe_protocol(config.probe, title, data)
            tracked.client.set_tag(tracked.run_id, PROTOCOL_TAG, protocol)
        else:
            assert isinstance(config, TrainingConfig)
            title, context = config.data.title, "training"
        tracked.log_data(data_set(data, title), context)

    def _compare(self, tracked: TrackedRun) -> None:
        """Puts a probe's figures on the run that it probed, and looks which registered encoder is the best now."""
        client, trained_id = tracked.client, tracked.run_id
        config = self._config
        if isinstance(config, ProbeJobConfig):
            probed_id = _id_in_mlflow(config.run)
            if probed_id is None:
                return
            trained_id = probed_id
            copy_probe_figures(client, trained_id, self.folder.probed(), config, client.get_run(tracked.run_id))
        describe_versions(client, self.group, trained_id)
        mark_best(client, self.group)

    def _tolerated(self, call: Callable[[], object]) -> None:
        """Does what tracking asks for; its failure does not fail the run, and is reported at the end."""
        self.sending(call)

    @property
    def _replay_command(self) -> str:
        return _replay_command(self.folder)

    @property
    def _resume_command(self) -> str:
        path = self.folder.path
        near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{command(self.recipe.name)} {shlex.quote(assigned('resume', str(near)))}"


class _Sending:
    """What is sent to MLflow at the end of a run, and what of it did not arrive."""

    def __init__(self) -> None:
        self.patience = Patience(ANSWER_S, lambda: self.answers())
        self.answers: Callable[[], object] = lambda: None
        self._errors: list[str] = []
        self.num_lost = 0

    def __call__(self, call: Callable[[], object]) -> None:
        try:
            self.patience.call(call)
        except NoAnswer:
            pass
        except Exception as error:
            self._errors.append(first_line(error))

    def note_loss(self, count: int) -> None:
        """Takes note of figures that MLflow did not take."""
        self.num_lost = count

    def warn(self, replay_command: str) -> None:
        """Says once what did not arrive, and how it is sent later."""
        if self.patience.is_over:
            what = f"MLflow did not answer for {ANSWER_S:g} s; send what is missing with"
        elif self.num_lost:
            what = f"{self.num_lost} figures are not in MLflow; send them with"
        elif self._errors:
            what = f"MLflow: {self._errors[0]}; send what is missing with"
        else:
            return
        logger.warning("%s: %s", what, replay_command)


@contextmanager
def _stopped_by_signals(folder: RunFolder) -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into a request to save and stop, until the run has ended altogether.

    Only a later SIGINT interrupts; all else after the first changes nothing, so that no save is lost. A SIGHUP that was
    ignored from the start, as by nohup, stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked_at: float | None = None
    driver = os.getpid()

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if os.getpid() != driver:  # loaders, whom a terminal asks as well, end with the driver
            return
        if asked_at is None:
            asked_at = time.monotonic()
            try:
                folder.stop_path.touch()
            except OSError:  # there is no run yet, or no more
                raise KeyboardInterrupt from None
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(2, b"\nstopping: the state is saved first (Ctrl-C again to stop at once)\n")
        elif number == signal.SIGINT and time.monotonic() - asked_at > _SAME_SIGNAL_S:
            raise KeyboardInterrupt

    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [signal.SIGINT, signal.SIGTERM, *([] if under_nohup else [signal.SIGHUP])]
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _noticing_removal(folder: RunFolder) -> Iterator[None]:
    """Says of any error after the run's folder was removed that this is why."""
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        if folder.holds_run:
            raise
        raise folder.removal() from error


def new_name(what: str) -> str:
    """A name that ends with the time; what the run is comes first, where lists cut names off."""
    return f"{what}-{time.strftime('%Y%m%d-%H%M%S')}"
