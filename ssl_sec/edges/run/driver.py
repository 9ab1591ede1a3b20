"""Trains, probes, and uploads again what is missing in MLflow."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ssl_sec.edges.config import ReplayConfig
from ssl_sec.edges.environment import cluster_address
from ssl_sec.edges.folder.commands import replay_command, resume_command
from ssl_sec.edges.folder.finding import find_folder
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.names import (
    CHECKPOINT_TAG,
    claim_name,
    run_name_of,
    training_tags,
    weights_tags,
    with_numbers,
)
from ssl_sec.edges.folder.stored import StoredFolder, open_folder
from ssl_sec.edges.folder.stored_config import require_whole_data, stored_values, training_config, with_credentials
from ssl_sec.edges.folder.unfinished import named_run_checkpoint
from ssl_sec.edges.masking import masked, masked_values
from ssl_sec.edges.run.execution import Execution
from ssl_sec.edges.run.resuming import is_probed, probe_folder, resume_run, settings_kept
from ssl_sec.edges.run.running import running
from ssl_sec.edges.run.signals import stopped_by_signals
from ssl_sec.edges.run.spec import RunSpec
from ssl_sec.edges.run.summary import Finished
from ssl_sec.edges.storage.places import local_folder
from ssl_sec.edges.tracking.identity import identity_of, require_workspace
from ssl_sec.edges.tracking.networks import found_network
from ssl_sec.edges.tracking.provenance import keep_code
from ssl_sec.edges.tracking.runs import on_its_server
from ssl_sec.edges.tracking.store import require_store, sqlite_file, tracking_uri
from ssl_sec.errors import ConfigError, Stopped, writing
from ssl_sec.recipes.config import UNLEARNED, RunConfig, TrainingConfig
from ssl_sec.recipes.finetuning.config import FinetuneConfig
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.recipes.registry import FINETUNE, PROBE, RECIPES, RecipeRow, probed, trainings
from ssl_sec.recipes.tracking import TrackingConfig
from ssl_sec.rules import check
from ssl_sec.settings import from_values, to_values
from ssl_sec.training.config import LocalConfig, RayConfig, RuntimeConfig

logger = logging.getLogger("ssl_sec")

_Config = TypeVar("_Config", bound=TrainingConfig | ProbeJobConfig)


def run_recipe(recipe: RecipeRow, config: RunConfig) -> Finished:
    """Trains, or probes a trained encoder.

    Raises:
        UserError: for mistakes of the user.
        Stopped: if a stop was requested; the state is saved.
    """
    if isinstance(config, FinetuneConfig):
        return run_finetuning(config)
    if isinstance(config, TrainingConfig):
        return run_training(recipe, config)
    assert isinstance(config, ProbeJobConfig)
    return run_probe(config)


def run_finetuning(config: FinetuneConfig) -> Finished:
    """Trains the encoder of another run further, or one from random weights.

    The weights that it starts from are copied to its own folder, so that it can be resumed without the other run.

    Raises:
        UserError: for mistakes of the user.
        Stopped: if a stop was requested; the state is saved.
    """
    if config.run is None or config.resume is True:
        return run_training(FINETUNE, config)
    with ExitStack() as opened:
        with named_run_checkpoint():
            network = found_network(config.run, config.run_checkpoint, config.tracking, config.output_dir, trainings())
            found = opened.enter_context(network)
        tracking, _ = found.tracking_of_job()
        config = replace(config.started_from(found.config), tracking=tracking)
        return run_training(FINETUNE, config, found.files / "encoder.safetensors")


def run_training(recipe: RecipeRow, config: TrainingConfig, initial: Path | None = None) -> Finished:
    """Trains, and probes if the configuration says so; the result then has the metrics of the probe too.

    Args:
        recipe: the run's recipe.
        config: the run's configuration.
        initial: file with the weights of another run's encoder, which a new fine-tuning starts from.

    Raises:
        UserError: for mistakes of the user.
        Stopped: if a stop was requested; the state is saved.
    """
    if not config.resume:
        # before a folder and a run are made
        require_files(config)
    config = _named(replace(config, recipe=config.recipe_name), config.recipe_name, run_name_of(config))
    finished = _train(recipe, config, initial)
    if config.linear_probe is None or not config.linear_probe.enabled:
        return finished
    trained = finished.run_id or finished.folder.location
    probe_it = f"{config.run_name} is finished; probe it with: {resume_command(recipe.name, finished.folder)}"
    if finished.folder.stop_path.exists():  # requested after the last step
        raise Stopped(f"stopped; {probe_it}")
    data = to_values(config.data)
    probe = ProbeJobConfig(
        run=trained,
        data=config.data if masked_values(data) != data else None,  # the run's folder has it without its secrets
        probe=config.linear_probe,
        runtime=config.runtime,
        output_dir=config.output_dir,
        tracking=on_its_server(finished.folder, config.tracking),
        run_name=f"{config.run_name}-probe" if config.resume else None,
    )
    with _started_again(probe_it):
        probed = _probe(recipe, probe, finished.run_id, finished.folder.path)
    return replace(finished, metrics={**finished.metrics, **probed.metrics})


def require_files(config: TrainingConfig) -> None:
    """Checks the files that a run reads, unless it is on a cluster, whose disks this process may not see.

    Raises:
        DataError: if one does not exist, or a list cannot be read.
        StorageError: if a file of weights cannot be read as such, or has those of another encoder.
    """
    if is_here(config.runtime):
        config.require_files()


def is_here(runtime: RuntimeConfig) -> bool:
    """Whether the workers run on this machine, so that it can check the files that they read."""
    return isinstance(runtime, LocalConfig) or cluster_address(runtime.address) is None


def run_probe(config: ProbeJobConfig, sweep_id: str | None = None) -> Finished:
    """Probes the encoder of a training: of a run in MLflow, of the folder of a run, or of a registered model.

    The probe of a folder does not wait for MLflow. One with a name that was interrupted starts again, and one that has
    finished with these settings and weights is not measured again.

    Args:
        config: the probe's configuration.
        sweep_id: the MLflow run that becomes its parent; None for the run that is probed.

    Raises:
        UserError: for mistakes of the user.
        Stopped: if a stop was requested; nothing is kept.
    """
    with (
        _started_again("the same command starts it again"),
        found_network(config.run, config.checkpoint, config.tracking, config.output_dir, probed()) as found,
    ):
        if found.version is not None:
            raise ConfigError(
                f"run: found {found.version!r}, whose weights are not the last ones of its run "
                f"{found.config.run_name or found.short_name}, to which MLflow would add the scores; allowed: the run, "
                "with checkpoint=<steps> for one that it has kept"
            )
        tracking, run_id = found.tracking_of_job()
        word = config.run if found.folder is None else found.folder.location
        config = replace(config, run=run_id or word, tracking=tracking)
        return _probe(found.recipe, config, sweep_id or run_id, found.files)


@contextmanager
def _started_again(how: str) -> Iterator[None]:
    """Adds to the message of a stopped probe how it is started again."""
    try:
        yield
    except Stopped as stop:
        raise Stopped(f"{stop}; {how}") from None


def run_replay(config: ReplayConfig) -> Finished:
    """Uploads the metrics, artifacts and status of an ended run that are missing in MLflow.

    Raises:
        UserError: for mistakes of the user.
    """
    folder = find_folder("folder", config.folder, config.output_dir)
    if (job := folder.identity.job) is None:
        raise ConfigError(
            f"folder: {folder.location} holds no run that was started; allowed: the folder that a job has printed"
        )
    identity = replace(folder.identity, uri=config.uri or with_credentials(folder.identity.uri, "uri"))
    require_store(identity.uri, "uri")
    if config.uri is None:
        require_workspace(identity)
    file, before = sqlite_file(identity.uri), folder.identity.tags.get("folder", folder.location)
    if config.uri is None and before != folder.location and file is not None and not file.exists():
        raise ConfigError(
            f"uri: found null, but the store that the run had in {before}, {identity.uri}, is not there; allowed: the "
            "store's new address, or this one, which makes it again"
        )
    recipe = RECIPES[job]
    config_of_run = from_values(recipe.config, stored_values(folder.config_path))
    with _reserved(folder, "the upload is completed first", key="folder"):
        return Execution(RunSpec(recipe=recipe, config=config_of_run, folder=folder, identity=identity)).replay()


def _named(config: _Config, group: str, default: str) -> _Config:
    """The configuration with a run name: the given one, or a free one in the folder of the group."""
    tracking_uri(config.tracking, config.output_dir)  # checked before a folder is made
    if config.run_name is not None:
        return config
    return replace(config, run_name=claim_name(local_folder(config.output_dir) / group, default))


def _train(recipe: RecipeRow, config: TrainingConfig, initial: Path | None) -> Finished:
    assert config.run_name is not None
    path = local_folder(config.output_dir) / config.recipe_name / config.run_name
    # A service that starts jobs again passes resume=auto, maybe before the lease of a killed process has expired.
    waits, key = config.resume == "auto", "resume" if config.resume is True else "run_name"
    with _reserved(open_folder(path), config.runtime, waits=waits, key=key) as folder, settings_kept(folder):
        was_finished = folder.is_complete
        tracking = on_its_server(folder, config.tracking)
        if not (folder.holds_run if config.resume == "auto" else config.resume):
            if config.resume == "auto":  # else they have been checked
                require_files(config)
            folder.start(to_values(config), {} if initial is None else {folder.initial_path: initial})
        elif not resume_run(recipe, folder, config):
            logger.info(
                "%s is finished: there is nothing to resume; if MLflow misses part of it, upload it with: %s",
                folder.name,
                replay_command(folder),
            )
            return as_before(folder, tracking, config.output_dir)
        tags = {**training_tags(config), **weights_tags(config, folder.initial_path)}
        return _execute(recipe, config, folder, tags, tracking, was_finished)


def as_before(folder: RunFolder, tracking: TrackingConfig, output_dir: str) -> Finished:
    """The result of a run that had finished before."""
    uri = tracking_uri(tracking, output_dir)
    return Finished(folder=folder, uri=uri, run_id=folder.run_id, experiment_id=None, metrics=folder.last_metrics())


def _probe(recipe: RecipeRow, config: ProbeJobConfig, parent_id: str | None, trained_path: Path) -> Finished:
    """Probes an encoder.

    Args:
        recipe: recipe that trained the encoder.
        config: the probe's configuration.
        parent_id: id of the parent in MLflow, the encoder's run or a sweep; None if MLflow does not know it.
        trained_path: folder with the encoder and the configuration of its run.
    """
    trained = training_config(recipe, trained_path / "config.yaml")
    of = "" if config.checkpoint == "last" else f"-{config.checkpoint}"
    default = f"{trained.run_name or run_name_of(trained)}{of}-probe"
    if config.run_name is not None:
        group = local_folder(config.output_dir) / trained.recipe_name
        names = with_numbers(default) if config.run_name == default else (config.run_name,)
        found = probe_folder((group / name for name in names), config, trained, trained_path / "encoder.safetensors")
        if found is not None and is_probed(found):
            logger.info("%s is finished: taking its results", found.location)
            return as_before(found, config.tracking, config.output_dir)
        config = config if found is None else replace(config, run_name=found.name)
    if config.data is None:
        require_whole_data(to_values(trained.data))
    data, share = config.data or trained.data, config.probe.test_share
    is_learned = trained.has_learned(data, share, config.probe.seed)
    check(not is_learned, "probe.test_share", share, UNLEARNED.format(data.title))
    if is_here(config.runtime):
        data.require_places(with_test=share is None)
    config = _named(config, trained.recipe_name, default)
    assert config.run_name is not None
    path = local_folder(config.output_dir) / trained.recipe_name / config.run_name
    with _reserved(open_folder(path), "a probe has no checkpoints, so nothing of it is kept") as folder:
        copied = {folder.encoder_path: "encoder.safetensors", folder.probed_config_path: "config.yaml"}
        folder.start(to_values(config), {path: trained_path / name for path, name in copied.items()})
        tags = {**training_tags(trained), "data": data.title}
        if config.checkpoint != "last":
            tags[CHECKPOINT_TAG] = str(config.checkpoint)
        return _execute(PROBE, config, folder, tags, replace(config.tracking, parent_run=parent_id))


@contextmanager
def _reserved(
    folder: RunFolder, at_stop: str | RuntimeConfig, *, waits: bool = False, key: str = "run_name"
) -> Iterator[RunFolder]:
    """Locks the folder of a run; signals of this process then request a stop.

    Args:
        folder: the run's folder.
        at_stop: what happens after such a signal while workers are active, for the message; the runtime of a training.
        waits: whether to wait for a lease that a killed process seems to have left.
        key: key that names the run, for the refusal while another process runs it.
    """
    other = "another run_name" if key == "run_name" else "another run"

    def what() -> str:
        if folder.outcome() == "finished":
            return "the results are uploaded first"
        if isinstance(at_stop, str):
            return at_stop
        if isinstance(at_stop, RayConfig) and not folder.is_training:
            return "no worker trains, so nothing is saved"
        return "what is not saved yet is saved first"

    kept = folder.held(waits=waits, key=key, other=other) if isinstance(folder, StoredFolder) else nullcontext()
    with running(folder, key, other), kept:
        for request in (folder.stop_path, folder.save_path):  # left for an earlier process
            request.unlink(missing_ok=True)
        with stopped_by_signals(folder.stop_path, what):
            yield folder


def _execute(
    recipe: RecipeRow,
    config: RunConfig,
    folder: RunFolder,
    tags: Mapping[str, str],
    tracking: TrackingConfig,
    was_finished: bool = False,
) -> Finished:
    with writing("output_dir", folder.path):
        code = keep_code(folder.path)
    identity = identity_of(
        tracking,
        config.output_dir,
        recipe=folder.path.parent.name,
        job=recipe.name,
        name=folder.name,
        code=code,
        tags={**tags, "folder": folder.location},
    )
    if folder.run_id is not None and folder.identity.uri == masked(identity.uri):
        require_workspace(folder.identity)
    spec = RunSpec(recipe=recipe, config=config, folder=folder, identity=identity, was_finished=was_finished)
    return Execution(spec).run()
