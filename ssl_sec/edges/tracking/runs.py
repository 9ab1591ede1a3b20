"""Searches MLflow for runs."""

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from ssl_sec.edges.folder.commands import replay_command
from ssl_sec.edges.folder.finding import folder_at, joined_jobs, match_run
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.names import DIGEST_SUFFIX, WEIGHTS
from ssl_sec.edges.folder.stored_config import training_config
from ssl_sec.edges.folder.unfinished import unfinished
from ssl_sec.edges.masking import masked
from ssl_sec.edges.patience import ANSWER_S, Patience
from ssl_sec.edges.tracking.checkpoints import download_checkpoint
from ssl_sec.edges.tracking.comparing import CONTENT, deciding
from ssl_sec.edges.tracking.identity import require_workspace
from ssl_sec.edges.tracking.registry import RegisteredVersion, find_version
from ssl_sec.edges.tracking.store import (
    all_pages,
    connect_to_store,
    experiment_names,
    is_unknown,
    moved_store,
    quoted,
    sqlite_file,
    store_errors,
    tracking_uri,
)
from ssl_sec.edges.tracking.tracker import current_parameters
from ssl_sec.errors import ConfigError, StorageError, nearest, out_of_space
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.registry import PROBE, RECIPES, trainings
from ssl_sec.recipes.tracking import Checkpoint, TrackingConfig

logger = logging.getLogger("ssl_sec")

# How long to look in a store other than the one in which a run is tracked.
_LOOK_S = 10.0
_FINISHED = "attributes.status = 'FINISHED'"
_RUNS_A_PAGE = 1000


@dataclass(frozen=True, kw_only=True)
class ArchivedRun:
    """A run in MLflow.

    Attributes:
        run_id: id of the run in MLflow.
        name: name of the run.
        recipe: recipe of the run.
        job: job that made the run.
        status: FINISHED, FAILED, KILLED, RUNNING.
        started_ms: time of its start, in milliseconds since 1970.
        experiment_id: id of its experiment in MLflow.
        pretraining_run_id: id of the pretraining that it probes; None for other runs.
        params: its parameters, as strings.
        metrics: the last value of each metric.
        weights: key of a file that the network started from -> SHA-256 of the file.
        version: the registered version by which it was found, whose weights may differ from the run's last ones.
        folder: where its folder is, or was.
    """

    run_id: str
    name: str
    recipe: str
    job: str
    status: str
    started_ms: int
    experiment_id: str
    pretraining_run_id: str | None
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    weights: Mapping[str, str]
    version: RegisteredVersion | None = None
    folder: str = ""

    @property
    def settings(self) -> dict[str, str]:
        """The parameters that affect its result; files of weights count by their content."""
        contents = {key: f"{CONTENT}{digest[:16]}" for key, digest in self.weights.items()}
        return {**deciding(self.params, self.job), **contents}

    @property
    def seed(self) -> str:
        """The seed of the run."""
        return self.params.get("seed", "?")


class RunArchive:
    """The runs of a store.

    Args:
        client: client of the store.
        experiment: only runs of the experiment with this name; None for all.
    """

    def __init__(self, client: MlflowClient, experiment: str | None = None) -> None:
        self.client = client
        self._experiment = experiment
        self._of_recipe: dict[str, list[ArchivedRun]] = {}

    @classmethod
    def open(cls, config: TrackingConfig, output_dir: str) -> "RunArchive":
        """The store that runs in `output_dir` are tracked in.

        Raises:
            StorageError: if it cannot be used, or does not exist.
        """
        uri = tracking_uri(config, output_dir)
        if (file := sqlite_file(uri)) is not None and not file.is_file():
            raise StorageError(
                f"tracking.uri: found {uri}, which does not exist; allowed: a store with runs, or output_dir=<the "
                "folder of the runs>"
            )
        with store_errors(uri):
            return cls(Patience(ANSWER_S).call(lambda: connect_to_store(uri)), config.experiment)

    @cached_property
    def experiments(self) -> dict[str, str]:
        """Id -> name of the experiments that are searched.

        Raises:
            ConfigError: if there is no experiment with the given name.
        """
        with self._errors():
            found = experiment_names(self.client)
        if self._experiment is None:
            return found
        if self._experiment not in found.values():
            raise ConfigError(
                f"tracking.experiment: found {self._experiment!r}; {nearest(self._experiment, found.values())}"
            )
        return {number: name for number, name in found.items() if name == self._experiment}

    def finished(self, recipe: str) -> list[ArchivedRun]:
        """All finished runs of a recipe, newest first, including probes of their last encoders."""
        if recipe not in self._of_recipe:
            found = self._search(f"{_FINISHED} and tags.recipe = {quoted(recipe)}")
            self._of_recipe[recipe] = [run for run in found if run.params.get("checkpoint", "last") == "last"]
        return self._of_recipe[recipe]

    def finished_trainings(self, recipe: str) -> list[ArchivedRun]:
        """The finished trainings of a recipe, newest first.

        Raises:
            ConfigError: if there is none.
        """
        found = [run for run in self.finished(recipe) if run.job in trainings()]
        if not found:
            known = {run.recipe for job in trainings() for run in self._search(f"{_FINISHED} and {_of(job)}")}
            hint = nearest(recipe, known) if known else "no training of any recipe has"
            raise ConfigError(f"recipes: found {recipe!r}, for which no training has finished; {hint}")
        return found

    def newest_experiment(self) -> list[ArchivedRun]:
        """The finished trainings of the experiment with the newest one, of that one's job, newest first.

        Raises:
            ConfigError: if there is none.
        """
        newest = [run for job in trainings() for run in self._search(f"{_FINISHED} and {_of(job)}", most=1)]
        if not newest:
            raise ConfigError(f"recipes: no training has finished in MLflow at {self.client.tracking_uri}")
        last = max(newest, key=lambda run: run.started_ms)
        return self._search(f"{_FINISHED} and {_of(last.job)}", [last.experiment_id])

    def find(self, word: str, key: str, jobs: Sequence[str] = ()) -> ArchivedRun:
        """The only run with this id or name, or else with this prefix of them, or the run of a folder.

        Args:
            word: the user's input.
            key: key for which the word was given, for messages.
            jobs: jobs whose finished runs are preferred if several match.

        Raises:
            ConfigError: if there is no such run, or several.
        """
        folder = folder_at(word)
        if folder is not None:
            if folder.run_id is None:
                raise ConfigError(
                    f"{key}: {folder.location} is not in MLflow; upload it with: {replay_command(folder)}"
                )
            word = folder.run_id
        pattern = quoted(f"{word}%")
        found = {
            run.run_id: run
            for field in ("run_id", "run_name")
            for run in self._search(f"attributes.{field} LIKE {pattern}")
        }.values()
        where = f"MLflow at {self.client.tracking_uri}"
        runs = found or self._search("", most=_RUNS_A_PAGE)  # the error names the nearest of them
        return match_run(key, word, runs, where, prefers=lambda run: run.job in jobs and run.status == "FINISHED")

    def registered(self, word: str) -> ArchivedRun:
        """The run that made a version of a registered model.

        Args:
            word: its address, such as `models:/<name>@<alias>`.

        Raises:
            ConfigError: if there is no such version, or MLflow no longer has its run.
        """
        version = find_version(self.client, word)
        with self._errors():
            try:
                return replace(_archived(self.client.get_run(version.run_id)), version=version)
            except MlflowException as error:
                if not is_unknown(error):
                    raise
                raise ConfigError(f"run: found {word!r}, whose run {version.run_id} was deleted") from error

    def of_job(self, job: str, recipe: str) -> list[ArchivedRun]:
        """All runs of a job with a recipe, in any state, newest first."""
        return self._search(f"{_of(job)} and tags.recipe = {quoted(recipe)}")

    def artifacts(self, run: ArchivedRun) -> list[str]:
        """The names of a run's artifacts, without those in folders."""
        with self._errors():
            return [each.path for each in self.client.list_artifacts(run.run_id) if not each.is_dir]

    def history(self, run: ArchivedRun, metric: str) -> list[tuple[int, float]]:
        """Steps and values of a metric, sorted by step; the last value of a step that was logged twice."""
        with self._errors():
            points = self.client.get_metric_history(run.run_id, metric)
        return sorted({p.step: p.value for p in sorted(points, key=lambda p: (p.step, p.timestamp))}.items())

    def download(self, run: ArchivedRun, artifact: str, folder: Path) -> Path | None:
        """Downloads an artifact into a folder; None if the run does not have it."""
        with self._errors():
            if not any(each.path == artifact for each in self.client.list_artifacts(run.run_id)):
                return None
            return Path(self.client.download_artifacts(run.run_id, artifact, str(folder)))

    def download_network(
        self, run: ArchivedRun, jobs: Sequence[str], folder: Path, checkpoint: Checkpoint, word: str
    ) -> tuple[TrainingConfig, int | None]:
        """Downloads the configuration and the weights of a finished training into a folder.

        Args:
            run: the training.
            jobs: jobs whose runs are accepted.
            folder: an existing folder.
            checkpoint: whose weights are downloaded; `last` for a run that was found by a registered version.
            word: the user's input, for messages.

        Returns:
            The run's configuration, and the steps taken when the checkpoint was saved; None for the last weights.

        Raises:
            ConfigError: if it is a run of another job, or has no weights, or no such checkpoint.
        """
        if run.version is not None and checkpoint != "last":
            raise ConfigError(
                f"checkpoint: found {checkpoint!r}, must be 'last' with run={run.version.word}, which names the weights"
            )
        if run.job not in jobs:
            raise ConfigError(f"run: found {word!r}, a run of jobs.{run.job}; allowed: a run of {joined_jobs(jobs)}")
        recipe = RECIPES[run.job]
        try:
            weights = recipe.network_files if checkpoint == "last" else ()
            for artifact in ("config.yaml", *weights):
                self.client.download_artifacts(run.run_id, artifact, str(folder))
        except (MlflowException, OSError) as error:
            if (full := out_of_space(error)) is not None:
                raise full from error
            if run.status != "FINISHED":
                raise unfinished(word, run.status, run.job, run.folder, (), run.folder) from error
            with self._errors():
                location = self.client.get_run(run.run_id).info.artifact_uri
            if (moved := moved_store(self.client.tracking_uri, location)) is not None:
                raise ConfigError(f"run: found {word!r}, but {moved}; or give run=<folder of the run>") from error
            raise ConfigError(
                f"run: found {word!r}, but it has no encoder in MLflow at {self.client.tracking_uri}; allowed: a "
                f"finished run of {joined_jobs(jobs)}"
            ) from error
        step = None
        if checkpoint != "last":
            with self._errors():
                step = download_checkpoint(self.client, run.experiment_id, run.run_id, checkpoint, folder)
        return training_config(recipe, folder / "config.yaml"), step

    def _search(
        self, condition: str, experiment_ids: Sequence[str] | None = None, most: int | None = None
    ) -> list[ArchivedRun]:
        search = partial(
            self.client.search_runs,
            list(experiment_ids or self.experiments),
            condition,
            max_results=most or _RUNS_A_PAGE,
            order_by=["attributes.start_time DESC"],
        )
        with self._errors():
            return [_archived(run) for run in islice(all_pages(lambda token: search(page_token=token)), most)]

    def _errors(self) -> AbstractContextManager[None]:
        return store_errors(self.client.tracking_uri)


def _of(job: str) -> str:
    return f"tags.job = {quoted(job)}"


def beside(word: str, tracking: TrackingConfig) -> TrackingConfig:
    """The tracking of a job about a run: in the run's store, if the word is its folder and no store is given.

    Raises:
        ConfigError: if the run is in another workspace of that store.
    """
    folder = folder_at(word)
    if folder is None or tracking.uri is not None:
        return tracking
    require_workspace(folder.identity)
    return replace(tracking, uri=folder.identity.known_uri)


def on_its_server(folder: RunFolder, tracking: TrackingConfig) -> TrackingConfig:
    """The tracking of a resumed run: on the server that it had, unless there is an address, also of the environment.

    A sqlite file is that of the output folder, which may have been copied.
    """
    uri = folder.identity.known_uri
    if tracking.uri is not None or os.environ.get("MLFLOW_TRACKING_URI") or uri is None or sqlite_file(uri):
        return tracking
    return replace(tracking, uri=uri)


def tracked_beside(folder: RunFolder, tracking: TrackingConfig, output_dir: str) -> tuple[TrackingConfig, str | None]:
    """The tracking of a job about the run of a folder, and the id of the run in that store.

    The id is None if the store does not have the run. A sqlite file that was deleted or moved is not created again.
    """
    near = beside(folder.location, tracking)
    if tracking.uri is None and near.uri is not None and (file := sqlite_file(near.uri)) and not file.is_file():
        logger.warning("%s, the store of %s, does not exist", near.uri, folder.location)
        near = tracking
    run_id, uri = folder.run_id, tracking_uri(near, output_dir)
    if run_id is None or masked(uri) == folder.identity.uri:
        return near, run_id
    try:
        Patience(_LOOK_S).call(lambda: connect_to_store(uri).get_run(run_id))
    except Exception:  # whatever the reason, the job is tracked without the run
        logger.debug("%s has no run %s", masked(uri), run_id, exc_info=True)
        return near, None
    return near, run_id


def newest_of_each_seed(runs: Sequence[ArchivedRun]) -> list[ArchivedRun]:
    """The newest run of each seed, sorted by seed."""
    by_seed = {run.seed: run for run in sorted(runs, key=lambda run: run.started_ms)}
    return [by_seed[seed] for seed in in_order(by_seed)]


def in_order(seeds: Iterable[str]) -> list[str]:
    """Seeds in numerical order."""
    return sorted(seeds, key=lambda seed: (len(seed), seed))


def _archived(run: Run) -> ArchivedRun:
    params, pretraining_run_id = current_parameters(run), None
    if run.data.tags.get("job") == PROBE.name:
        # The parent of a probe may also be a sweep or a transfer.
        probed = params.get("run", "")
        is_id = re.fullmatch(r"[0-9a-f]{32}", probed) is not None
        pretraining_run_id = probed if is_id else run.data.tags.get(MLFLOW_PARENT_RUN_ID)
    return ArchivedRun(
        run_id=run.info.run_id,
        name=run.info.run_name or "",
        recipe=run.data.tags.get("recipe", ""),
        job=run.data.tags.get("job", ""),
        status=run.info.status,
        started_ms=run.info.start_time or 0,
        experiment_id=str(run.info.experiment_id),
        pretraining_run_id=pretraining_run_id,
        params=params,
        metrics=run.data.metrics,
        folder=run.data.tags.get("folder", ""),
        weights={key: digest for key in WEIGHTS if (digest := run.data.tags.get(key + DIGEST_SUFFIX)) is not None},
    )
