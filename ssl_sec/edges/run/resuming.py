"""Checks whether a run can be resumed with a configuration, and whether a probe has to start again."""

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.names import weights_digest
from ssl_sec.edges.folder.stored import open_folder
from ssl_sec.edges.folder.stored_config import stored_values
from ssl_sec.edges.folder.text import text_of
from ssl_sec.edges.masking import masked_values
from ssl_sec.edges.run.running import remove_at_exit, running
from ssl_sec.effects import image_files, is_among, kept_by_resume, without_effect, without_keys
from ssl_sec.errors import ConfigError, DataError, shown, writing
from ssl_sec.files import replace_text
from ssl_sec.recipes.config import RunConfig, TrainingConfig
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.recipes.registry import PROBE, RecipeRow
from ssl_sec.settings import flattened, from_values, to_values


def resume_run(recipe: RecipeRow, folder: RunFolder, config: TrainingConfig) -> bool:
    """Prepares the folder of a run for a resume, unless the run is finished.

    Args:
        recipe: the run's recipe.
        folder: the run's folder.
        config: configuration of the resume: that of the run, except for settings that may change; with more epochs or
            steps if no schedule depends on their number.

    Returns:
        Whether there is anything left to do.

    Raises:
        ConfigError: if there is no run, or other settings differ.
    """
    if not folder.holds_run:
        raise ConfigError(f"resume: {folder.location} holds no run; allowed: resume=auto or false, or an existing run")
    before = to_values(from_values(recipe.config, stored_values(folder.config_path)))
    now = to_values(config)
    length = recipe.length
    is_longer = now[length] > before[length]
    if is_longer and (dependent := config.tied_to_the_length()):
        raise ConfigError(
            f"{length}: found {now[length]}, but the run to resume has {before[length]}; more are possible only "
            f"where no schedule depends on their number; here these do: {', '.join(dependent)}; a new run can begin "
            "with the weights of a finished one, encoder.weights=<folder of the run>/encoder.safetensors"
        )
    free = free_keys(recipe.config)
    require_same_settings(before, now, free | {length} if is_longer else free)
    if folder.is_complete and not is_longer:
        return False
    folder.resume(now)
    return True


@contextmanager
def settings_kept(folder: RunFolder) -> Iterator[None]:
    """Keeps the settings of a run if the block refuses its resume, as with other images, before it saves anything.

    Otherwise the next resume would have them. A finished run, which was to become longer, stays finished if its workers
    have not dropped its results.
    """
    before, identity = text_of(folder.config_path), text_of(folder.identity_path)
    newest = folder.newest_step() if before else None
    records = folder.records() if folder.is_complete else None
    try:
        yield
    except (ConfigError, DataError):
        if before and folder.holds_run and folder.newest_step() == newest:
            with writing("output_dir", folder.path):
                replace_text(folder.config_path, before)
                replace_text(folder.identity_path, identity)
            if folder.records() == records:
                folder.restore_end()
        raise


def probe_folder(
    paths: Iterable[Path], config: ProbeJobConfig, trained: TrainingConfig, encoder: Path
) -> RunFolder | None:
    """The folder of a probe: that of a finished one with these settings and weights, a free or an interrupted one.

    Args:
        paths: the folders that the probe may have; the first that fits is taken.
        config: configuration of the probe.
        trained: configuration of the training.
        encoder: file with the weights.

    Returns:
        The folder; None if all are those of other runs.
    """

    def fits(folder: RunFolder) -> bool:
        folder.refresh()
        remove_at_exit(folder)
        if folder.is_complete:
            return _is_probe_of(folder, config, trained, encoder)
        return folder.identity.job in (None, PROBE.name)  # an interrupted training is resumed

    return next(filter(fits, map(open_folder, paths)), None)


def _is_probe_of(folder: RunFolder, config: ProbeJobConfig, trained: TrainingConfig, encoder: Path) -> bool:
    """Whether the probe in a folder is of these weights, with these settings, on these images."""
    if not folder.is_probe or not folder.encoder_path.is_file():
        return False
    if weights_digest(folder.encoder_path) != weights_digest(encoder):
        return False
    probed = from_values(ProbeJobConfig, stored_values(folder.config_path))
    one, other = to_values(probed.probe), to_values(config.probe)
    found, wanted = (masked_values(to_values(each.data or trained.data)) for each in (probed, config))
    return found == wanted and all(one[key] == other[key] for key in one if key != "enabled")


def is_probed(folder: RunFolder) -> bool:
    """Whether the probe of a folder is finished; one that was interrupted is removed, since it has no checkpoints.

    Raises:
        ConfigError: if another process runs it.
        StorageError: if the storage cannot be used.
    """
    with running(folder) as lock:
        folder.refresh()
        if folder.is_complete:
            return True
        if folder.holds_run or folder.is_probe:
            lock.leave_run(folder)
            folder.remove()
        return False


def free_keys(kind: type[RunConfig]) -> frozenset[str]:
    """The keys and groups that a resume may change: those without effect on the trained network.

    The layout of the checkpoints stays the same. Files of images may have other names, too, as the workers compare the
    images; a probe follows the training.
    """
    return (without_effect(kind) - kept_by_resume(kind)) | image_files(kind) | {"probe"}


def require_same_settings(before: Mapping[str, Any], now: Mapping[str, Any], free: Set[str]) -> None:
    """Raises a ConfigError with all settings that differ, except for the keys and groups in `free`."""
    flat_before, flat_now = (
        {key: _without(value, key, free) for key, value in flattened(masked_values(values)).items()}
        for values in (before, now)
    )
    differing = [
        f"{key}: found {shown(flat_now.get(key))}, but the run to resume has {shown(flat_before.get(key))}"
        for key in sorted(flat_before.keys() | flat_now.keys())
        if not is_among(key, free) and flat_before.get(key) != flat_now.get(key)
    ]
    if differing:
        raise ConfigError("; ".join(differing))


def _without(value: Any, path: str, free: Set[str]) -> Any:
    """A value; the groups of a list, such as test sets, without their keys in `free`."""
    if not isinstance(value, list) or not all(isinstance(group, Mapping) for group in value):
        return value
    return without_keys(value, path, free)
