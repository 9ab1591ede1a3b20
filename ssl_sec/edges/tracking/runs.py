"""The runs that MLflow has, for reports: found by their tags, page by page."""

import json
import logging
import shlex
import tempfile
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

from ssl_sec.edges.folder.finding import either, folder_named, the_one
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored_config import training_config
from ssl_sec.edges.masking import masked
from ssl_sec.edges.overrides import assigned
from ssl_sec.edges.packaging import command
from ssl_sec.edges.patience import ANSWER_S, Patience
from ssl_sec.edges.tracking.store import all_pages, connected, quoted, sqlite_file, store_errors, tracking_uri
from ssl_sec.errors import ConfigError, StorageError, nearest
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.registry import PROBE, RECIPES
from ssl_sec.recipes.tracking import TrackingConfig
from ssl_sec.training.norms import NormHistogram

logger = logging.getLogger("ssl_sec")

# For another store than a run was tracked in, which may know it all the same.
_LOOK_S = 10.0
_FINISHED = "attributes.status = 'FINISHED'"
_RUNS_A_PAGE = 1000

# What a run may have otherwise and still be the same experiment: where and how it ran, and where its files lie.
_FREE_KEYS = {
    "seed",
    "probe.seed",
    "probe.enabled",
    "run",
    "run_name",
    "output_dir",
    "resume",
    "log_every_steps",
    "data.root",
    "data.download",
    "data.cache_folder",
    "data.resident_limit_mib",
}
_FREE_GROUPS = ("runtime.", "tracking.", "checkpoint.", "monitor.")


@dataclass(frozen=True, kw_only=True)
class ArchivedRun:
    """A run in MLflow.

    Attributes:
        run_id: in MLflow.
        name: of the run.
        recipe: that it says it is of.
        job: that made it.
        status: FINISHED, FAILED, KILLED, RUNNING.
        started_ms: since 1970.
        experiment_id: in MLflow.
        pretraining_run_id: of the pretraining that it probes; None for a pretraining.
        params: as MLflow keeps them, as words.
        metrics: the value of each at its last step.
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

    @property
    def settings(self) -> dict[str, str]:
        """The parameters that make it the experiment that it is."""
        return deciding(self.params)

    @property
    def seed(self) -> str:
        """As it was told."""
        return self.params.get("seed", "?")


def deciding(params: Mapping[str, str]) -> dict[str, str]:
    """The parameters that decide what a run gives, without its seed."""
    return {key: value for key, value in params.items() if key not in _FREE_KEYS and not key.startswith(_FREE_GROUPS)}


class RunArchive:
    """The runs of a store.

    Args:
        client: of the store.
        experiment: only the runs of the experiment of this name; None for all.
    """

    def __init__(self, client: MlflowClient, experiment: str | None = None) -> None:
        self.client = client
        self._experiment = experiment
        self._of_recipe: dict[str, list[ArchivedRun]] = {}

    @classmethod
    def open(cls, config: TrackingConfig, output_dir: str | Path) -> "RunArchive":
        """The store that runs in `output_dir` are tracked in.

        Raises:
            StorageError: if it cannot be used; none is made.
        """
        uri = tracking_uri(config, output_dir)
        if (file := sqlite_file(uri)) is not None and not file.is_file():
            raise StorageError(
                f"tracking.uri: found {uri}, which is not there; allowed: a store that runs were tracked in, or "
                "output_dir=<their folder>"
            )
        with store_errors(uri):
            return cls(Patience(ANSWER_S).call(lambda: connected(uri)), config.experiment)

    @cached_property
    def experiments(self) -> dict[str, str]:
        """Id -> name of the experiments whose runs count.

        Raises:
            ConfigError: if there is none of the name asked for.
        """
        search = partial(self.client.search_experiments, max_results=_RUNS_A_PAGE)
        with self._errors():
            found = {str(each.experiment_id): each.name for each in all_pages(lambda token: search(page_token=token))}
        if self._experiment is None:
            return found
        if self._experiment not in found.values():
            raise ConfigError(
                f"tracking.experiment: found {self._experiment!r}; {nearest(self._experiment, found.values())}"
            )
        return {number: name for number, name in found.items() if name == self._experiment}

    def finished(self, recipe: str) -> list[ArchivedRun]:
        """All finished runs of a recipe, pretraining and what was measured on it, newest first."""
        if recipe not in self._of_recipe:
            self._of_recipe[recipe] = self._search(f"{_FINISHED} and tags.recipe = {quoted(recipe)}")
        return self._of_recipe[recipe]

    def finished_pretraining(self, recipe: str) -> list[ArchivedRun]:
        """The finished pretraining runs of a recipe, newest first.

        Raises:
            ConfigError: if there is none.
        """
        found = self._search(f"{_FINISHED} and tags.job = 'pretrain' and tags.recipe = {quoted(recipe)}")
        if not found:
            known = {run.recipe for run in self._search(f"{_FINISHED} and tags.job = 'pretrain'")}
            hint = nearest(recipe, known) if known else "there is none of any"
            raise ConfigError(f"recipes: found {recipe!r}, of which no pretraining has finished; {hint}")
        return found

    def newest_experiment(self) -> list[ArchivedRun]:
        """The finished pretraining runs of the experiment that has the newest one, newest first.

        Raises:
            ConfigError: if there is none.
        """
        pretraining = f"{_FINISHED} and tags.job = 'pretrain'"
        newest = self._search(pretraining, most=1)
        if not newest:
            raise ConfigError(f"recipes: no pretraining has finished in MLflow at {self.client.tracking_uri}")
        return self._search(pretraining, [newest[0].experiment_id])

    def find(self, word: str, key: str, jobs: Sequence[str] = ()) -> ArchivedRun:
        """The one run with this id or name, or whose id or name alone begins so, or whose folder this is.

        Args:
            word: what the user wrote.
            key: that it was given for.
            jobs: whose finished runs are meant, where there are several; none for any.

        Raises:
            ConfigError: if there is none, or several.
        """
        folder = folder_named(word)
        if folder is not None:
            if folder.run_id is None:
                raise ConfigError(
                    f"{key}: {folder.path} is not in MLflow; send it there with: "
                    f"{command('replay')} {shlex.quote(assigned('folder', str(folder.path)))}"
                )
            word = folder.run_id
        pattern = quoted(f"{word}%")
        found = {
            run.run_id: run
            for field in ("run_id", "run_name")
            for run in self._search(f"attributes.{field} LIKE {pattern}")
        }.values()
        where = f"MLflow at {self.client.tracking_uri}"
        return the_one(key, word, found, where, prefers=lambda run: run.job in jobs and run.status == "FINISHED")

    def history(self, run: ArchivedRun, metric: str) -> list[tuple[int, float]]:
        """Step and value of a metric, in order of the steps; of a step told twice, what was told last."""
        with self._errors():
            points = self.client.get_metric_history(run.run_id, metric)
        return sorted({p.step: p.value for p in sorted(points, key=lambda p: (p.step, p.timestamp))}.items())

    def download(self, run: ArchivedRun, artifact: str, folder: Path) -> Path | None:
        """A file of the run, brought into the folder; None if the run has none of that name."""
        with self._errors():
            if not any(each.path == artifact for each in self.client.list_artifacts(run.run_id)):
                return None
            return Path(self.client.download_artifacts(run.run_id, artifact, str(folder)))

    def download_network(self, run: ArchivedRun, jobs: Sequence[str], folder: Path) -> TrainingConfig:
        """Brings the configuration and the weights of a finished training into a folder.

        Args:
            run: the training.
            jobs: whose runs will do.
            folder: that exists.

        Returns:
            The run's configuration.

        Raises:
            ConfigError: if it is another job's run, or has no weights.
        """
        if run.job not in jobs:
            raise ConfigError(f"run: found {run.run_id!r}, a run of jobs.{run.job}; allowed: a run of {either(jobs)}")
        recipe = RECIPES[run.job]
        try:
            for artifact in ("config.yaml", *recipe.network_files):
                self.client.download_artifacts(run.run_id, artifact, str(folder))
        except (MlflowException, OSError) as error:
            raise ConfigError(
                f"run: found {run.run_id!r}, but MLflow at {self.client.tracking_uri} has no encoder of it; allowed: a "
                f"finished run of {either(jobs)}"
            ) from error
        return training_config(recipe, folder / "config.yaml")

    def last_histogram(self, run: ArchivedRun) -> NormHistogram | None:
        """How the norms of the last batch were distributed; None if the run did not keep it."""
        with tempfile.TemporaryDirectory() as folder:
            path = self.download(run, "norms.json", Path(folder))
            if path is None:
                return None
            told = json.loads(path.read_text())
        return next((NormHistogram(**one) for one in reversed(told) if sum(one["counts"])), None)

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


def find_run(
    word: str, tracking: TrackingConfig, output_dir: str, jobs: Sequence[str]
) -> tuple[RunArchive, ArchivedRun]:
    """The run that `run=<word>` means, and the store that it is in.

    Args:
        word: an id, a name, the beginning of one, or a run's folder.
        tracking: which store; its experiment is that of the new run.
        output_dir: where the runs' folders are, with their store.
        jobs: whose finished runs are meant.

    Raises:
        ConfigError: if there is no such run, or several.
        StorageError: if the store cannot be used.
    """
    store = replace(beside(word, tracking), experiment=None)
    archive = RunArchive.open(store, output_dir)
    return archive, archive.find(word, "run", jobs)


def beside(word: str, tracking: TrackingConfig) -> TrackingConfig:
    """The tracking of what belongs to a run: in its folder's store, if the word is a folder and no other is given."""
    folder = folder_named(word)
    if folder is None or tracking.uri is not None:
        return tracking
    return replace(tracking, uri=folder.identity.known_uri)


def tracked_beside(
    folder: RunFolder, tracking: TrackingConfig, output_dir: str | Path
) -> tuple[TrackingConfig, str | None]:
    """The tracking of what belongs to a folder's run, which the store need not be asked for, and the run's id there.

    The id is None if the run is not known there. A sqlite file that is gone, or has moved, is not made anew.

    Args:
        folder: of the run.
        tracking: as it was asked for.
        output_dir: of what belongs to the run.
    """
    near = beside(str(folder.path), tracking)
    if tracking.uri is None and near.uri is not None and (file := sqlite_file(near.uri)) and not file.is_file():
        logger.warning("%s, the store of %s, is not there", near.uri, folder.path)
        near = tracking
    run_id, uri = folder.run_id, tracking_uri(near, output_dir)
    if run_id is None or masked(uri) == folder.identity.uri:
        return near, run_id
    try:
        Patience(_LOOK_S).call(lambda: connected(uri).get_run(run_id))
    except Exception:  # whatever the reason is, the run is not known there
        return near, None
    return near, run_id


def newest_of_each_seed(runs: Sequence[ArchivedRun]) -> list[ArchivedRun]:
    """The newest of the runs for each seed, in order of the seeds."""
    by_seed = {run.seed: run for run in sorted(runs, key=lambda run: run.started_ms)}
    return [by_seed[seed] for seed in in_order(by_seed)]


def in_order(seeds: Iterable[str]) -> list[str]:
    """Seeds as numbers go."""
    return sorted(seeds, key=lambda seed: (len(seed), seed))


def _archived(run: Run) -> ArchivedRun:
    return ArchivedRun(
        run_id=run.info.run_id,
        name=run.info.run_name or "",
        recipe=run.data.tags.get("recipe", ""),
        job=run.data.tags.get("job", ""),
        status=run.info.status,
        started_ms=run.info.start_time or 0,
        experiment_id=str(run.info.experiment_id),
        # A pretraining may have a parent too: the sweep that it is a point of.
        pretraining_run_id=run.data.tags.get(MLFLOW_PARENT_RUN_ID) if run.data.tags.get("job") == PROBE.name else None,
        params=run.data.params,
        metrics=run.data.metrics,
    )
