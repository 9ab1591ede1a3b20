"""The trained network that a job uses: that of a run, in its folder or in MLflow, or of a registered model."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mlflow.artifacts import download_artifacts
from mlflow.models import Model
from mlflow.tracking import MlflowClient

from ssl_sec.edges.folder.checkpoints import described_checkpoint, network_files
from ssl_sec.edges.folder.finding import folder_at, usable_folder
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored_config import training_config
from ssl_sec.edges.storage.places import is_remote, local_folder
from ssl_sec.edges.tracking.registry import is_registered, take_weights
from ssl_sec.edges.tracking.runs import ArchivedRun, RunArchive, beside, tracked_beside
from ssl_sec.edges.tracking.store import quoted, store_errors
from ssl_sec.errors import ConfigError, UserError
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.registry import RECIPES, RecipeRow
from ssl_sec.recipes.tracking import Checkpoint, TrackingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundNetwork:
    """The network of a run, for a job about the run.

    Attributes:
        word: the job's `run`.
        tracking: tracking of the job, as configured.
        output_dir: output folder of the job.
        recipe: the run's recipe.
        config: the run's configuration.
        files: folder with the weights.
        run_id: id of the run in MLflow; None if the run is in no store.
        folder: the run's folder, if the network was found there.
        archive: the store, if the network was found there instead.
        checkpoint: the chosen checkpoint; the best one with its step.
        version: the registered version that was given, if its weights are not the run's last ones.
    """

    word: str
    tracking: TrackingConfig
    output_dir: str
    recipe: RecipeRow
    config: TrainingConfig
    files: Path
    run_id: str | None
    folder: RunFolder | None = None
    archive: RunArchive | None = None
    checkpoint: Checkpoint | str = "last"
    version: str | None = None

    @property
    def short_name(self) -> str:
        """The beginning of the run's id, or the name of its folder."""
        if self.run_id is not None:
            return self.run_id[:8]
        assert self.folder is not None
        return self.folder.path.name

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """Channels, height and width of the images that it was trained on; None if that is not known."""
        if self.folder is not None:
            return self.folder.data().image_shape
        assert self.archive is not None and self.run_id is not None
        return recorded_shape(self.archive.client, self.run_id)

    def tracking_of_job(self) -> tuple[TrackingConfig, str | None]:
        """The tracking of the job, in the run's store if none is configured, and the run's id there."""
        if self.folder is not None:
            return tracked_beside(self.folder, self.tracking, self.output_dir)
        return beside(self.word, self.tracking), self.run_id


def recorded_shape(client: MlflowClient, run_id: str) -> tuple[int, ...] | None:
    """Channels, height and width of the images that a run was trained on, as its models in MLflow have them.

    A registered network has them in its signature, and a kept checkpoint in a file; None if the run has neither.

    Raises:
        StorageError: if the store cannot be used.
    """
    with tempfile.TemporaryDirectory() as made, store_errors(client.tracking_uri):
        experiment_id, condition = client.get_run(run_id).info.experiment_id, f"source_run_id = {quoted(run_id)}"
        described = RunFolder(Path(made))
        for model in client.search_logged_models([experiment_id], condition):
            names = {artifact.path for artifact in client.list_logged_model_artifacts(model.model_id)}
            for name in names & {"MLmodel", described.data_path.name}:
                place = f"{model.artifact_location}/{name}"
                path = download_artifacts(artifact_uri=place, dst_path=made, tracking_uri=client.tracking_uri)
                if described.holds_data:
                    return described.data().image_shape
                if (signature := Model.load(path).signature) is not None:
                    return tuple(signature.inputs.inputs[0].shape[1:])
    return None


def located_run(
    word: str, checkpoint: Checkpoint, tracking: TrackingConfig, output_dir: str, jobs: Sequence[str]
) -> RunFolder | tuple[RunArchive, ArchivedRun]:
    """The folder of a run that is given by it, else the run in MLflow with its store.

    MLflow has the weights and checkpoints of a run once it has finished; before that the run's folder is taken if it
    can be read here.

    Args:
        word: the value of `run`, as for `found_network`.
        checkpoint: the checkpoint whose weights are used.
        tracking: tracking of the job; its experiment is ignored.
        output_dir: folder of the default store.
        jobs: jobs whose runs are accepted; finished ones are preferred if several match.

    Raises:
        ConfigError: if there is no such run or registered model, or it has no such network.
        StorageError: if the store cannot be used.
    """
    folder = folder_at(word)
    if folder is not None and (usable := usable_folder(folder, word, jobs, checkpoint)) is not None:
        return usable
    if folder is None and "/" in word and not is_registered(word):
        place = word if is_remote(word) else local_folder(word)
        raise ConfigError(f"run: {place} holds no run; allowed: a run's folder, its id, its name, or a prefix of one")
    archive = RunArchive.open(replace(beside(word, tracking), experiment=None), output_dir)
    run = archive.registered(word) if is_registered(word) else archive.find(word, "run", jobs)
    near = _folder_of(run)
    usable = None if near is None else usable_folder(near, word, jobs, checkpoint)
    return usable or (archive, run)


def _folder_of(run: ArchivedRun) -> RunFolder | None:
    """The folder of a run that has not finished; None if it cannot be read here."""
    if run.status == "FINISHED" or run.version is not None or not run.folder:
        return None
    with contextlib.suppress(UserError):
        folder = folder_at(run.folder)
        return folder if folder is not None and folder.run_id == run.run_id else None
    return None


@contextmanager
def found_network(
    word: str, checkpoint: Checkpoint, tracking: TrackingConfig, output_dir: str, jobs: Sequence[str]
) -> Iterator[FoundNetwork]:
    """The network of a run, with its files until the context ends.

    Args:
        word: the value of `run`: an id, a name, the beginning of either, the folder of a run, or a registered model.
        checkpoint: the checkpoint whose weights are used.
        tracking: tracking of the job.
        output_dir: folder of the default store.
        jobs: jobs whose runs are accepted.

    Raises:
        ConfigError: if there is no such run or registered model, or it has no such network.
        StorageError: if the store cannot be used.
    """
    network = partial(FoundNetwork, word=word, tracking=tracking, output_dir=output_dir)
    with tempfile.TemporaryDirectory() as made:
        located = located_run(word, checkpoint, tracking, output_dir, jobs)
        if isinstance(folder := located, RunFolder):
            recipe = RECIPES[str(folder.identity.job)]
            files, step = network_files(folder, recipe, checkpoint, Path(made))
            yield network(
                recipe=recipe,
                config=training_config(recipe, folder.config_path),
                files=files,
                checkpoint=described_checkpoint(checkpoint, step),
                run_id=folder.run_id,
                folder=folder,
            )
            return
        archive, found = located
        config, step = archive.download_network(found, jobs, Path(made), checkpoint, word)
        differs = found.version is not None and take_weights(
            archive.client, found.version, RECIPES[found.job], Path(made)
        )
        yield network(
            config=config,
            recipe=RECIPES[found.job],
            files=Path(made),
            run_id=found.run_id,
            archive=archive,
            checkpoint=described_checkpoint(checkpoint, step),
            version=word if differs else None,
        )
