"""The networks in the kept checkpoints of a run."""

import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.errors import ConfigError
from ssl_sec.files import replaced
from ssl_sec.recipes.registry import SCORES, RecipeRow
from ssl_sec.recipes.tracking import Checkpoint
from ssl_sec.training.checkpoint import best_of, checkpoint_name, load_checkpoint, score_of, step_of

logger = logging.getLogger("ssl_sec")

# File in a run's folder -> part of the network and prefix of its weights, as named in a checkpoint.
_PARTS = {"encoder.safetensors": ("encoder", "backbone."), "head.safetensors": ("head", "")}


def kept_checkpoints(folder: RunFolder) -> dict[int, float | None]:
    """Steps taken -> score of each whole checkpoint of a run, oldest first.

    Raises:
        StorageError: if the storage cannot be used.
    """
    manifests = {name: folder.read_manifest(name) for name in folder.checkpoint_names()}
    return {step_of(name): score_of(manifest) for name, manifest in manifests.items() if manifest is not None}


def score_among(metrics: Collection[str]) -> str:
    """The name of the metric that ranks the checkpoints of a run with these metrics."""
    return next((name for name in SCORES if name in metrics), "score")


def chosen_step(
    checkpoint: Checkpoint, kept: Mapping[int, float | None], where: str, score: Callable[[], str] = lambda: "score"
) -> int:
    """The number of steps after which the chosen checkpoint was saved.

    Args:
        checkpoint: the value of the key `checkpoint`.
        kept: steps taken -> score of each checkpoint.
        where: place of the checkpoints, for messages.
        score: name of the metric that ranks them, for messages.

    Raises:
        ConfigError: if there is no such checkpoint.
    """
    if not kept:
        raise ConfigError(f"checkpoint: found {checkpoint!r}, but {where} has no checkpoints")
    best = _best_step(kept)
    if checkpoint == "last":
        return max(kept)
    if checkpoint == "best":
        if best is None:
            listed = ", ".join(map(str, kept))
            raise ConfigError(f"checkpoint: found 'best', but no checkpoint of {where} has a score; allowed: {listed}")
        logger.info("the best checkpoint of %s is that of step %d", where, best)
        return best
    if checkpoint not in kept:
        listed = _listed(kept, best, score())
        raise ConfigError(f"checkpoint: found {checkpoint}, but {where} keeps only those of the steps {listed}")
    return checkpoint


def _best_step(kept: Mapping[int, float | None]) -> int | None:
    best = best_of({checkpoint_name(step): score for step, score in kept.items()})
    return None if best is None else step_of(best)


def _listed(kept: Mapping[int, float | None], best: int | None, metric: str) -> str:
    """For example `35 (val/rankme 17.2), 42 (best: val/rankme 18.93)`."""
    scores = {step: "" if score is None else f"{metric} {score:.4g}" for step, score in kept.items()}
    shown = {step: f"best: {score}" if step == best else score for step, score in scores.items()}
    return ", ".join(f"{step} ({score})" if score else f"{step}" for step, score in shown.items())


def write_network(folder: RunFolder, recipe: RecipeRow, step: int, to: Path) -> None:
    """Writes the weights of a kept checkpoint in the form of the run's last weights, with the files that readers need.

    Raises:
        StorageError: if the checkpoint is not whole, or the storage cannot be used.
    """
    state = load_checkpoint(folder.fetch_checkpoint(checkpoint_name(step)), torch.device("cpu"))
    for name in recipe.network_files:
        part, prefix = _PARTS[name]
        weights = {key: value for key, value in state[part].items() if key.startswith(prefix)}
        with replaced(to / name, sync=False) as temporary:
            save_file({key.removeprefix(prefix): value.contiguous() for key, value in weights.items()}, temporary)
    for path in (folder.config_path, folder.data_path):
        shutil.copyfile(path, to / path.name)


def described_checkpoint(checkpoint: Checkpoint, step: int | None) -> Checkpoint | str:
    """The value of the key `checkpoint`, with the step if it does not name it: `best (step 35)`."""
    return f"{checkpoint} (step {step})" if checkpoint == "best" and step is not None else checkpoint


def network_files(folder: RunFolder, recipe: RecipeRow, checkpoint: Checkpoint, to: Path) -> tuple[Path, int | None]:
    """The folder with the weights of a run's chosen checkpoint: the run's own for the last ones, else `to`.

    Args:
        folder: the run's folder.
        recipe: the run's recipe.
        checkpoint: the value of the key `checkpoint`.
        to: an existing folder for the weights of a checkpoint.

    Returns:
        The folder, and the steps taken when the checkpoint was saved; None for the last weights.

    Raises:
        ConfigError: if there is no such checkpoint.
        StorageError: if the checkpoint is not whole, or the storage cannot be used.
    """
    if checkpoint == "last":
        return folder.path, None
    kept = kept_checkpoints(folder)
    step = chosen_step(checkpoint, kept, folder.location, lambda: score_among(folder.last_metrics()))
    write_network(folder, recipe, step, to)
    return to, step
