"""The networks in the kept checkpoints of a run."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.registry import RecipeRow
from ssl_sec.recipes.tracking import Checkpoint
from ssl_sec.training.checkpoint import best_of, checkpoint_name, load_checkpoint, score_of, step_of

# File in a run's folder -> part of the network and prefix of its weights, as named in a checkpoint.
_PARTS = {"encoder.safetensors": ("encoder", "backbone."), "head.safetensors": ("head", "")}


def kept_checkpoints(folder: RunFolder) -> dict[int, float | None]:
    """Steps taken -> score of each whole checkpoint of a run, oldest first.

    Raises:
        StorageError: if the storage cannot be used.
    """
    manifests = {name: folder.read_manifest(name) for name in folder.checkpoint_names()}
    return {step_of(name): score_of(manifest) for name, manifest in manifests.items() if manifest is not None}


def chosen_step(checkpoint: Checkpoint, kept: Mapping[int, float | None], where: str) -> int:
    """The number of steps after which the chosen checkpoint was saved.

    Args:
        checkpoint: the value of the key `checkpoint`.
        kept: steps taken -> score of each checkpoint.
        where: place of the checkpoints, for messages.

    Raises:
        ConfigError: if there is no such checkpoint.
    """
    listed = ", ".join(f"{step}" if score is None else f"{step} ({score:.4g})" for step, score in kept.items())
    if not kept:
        raise ConfigError(f"checkpoint: found {checkpoint!r}, but {where} has no checkpoints")
    if checkpoint == "last":
        return max(kept)
    if checkpoint == "best":
        best = best_of({checkpoint_name(step): score for step, score in kept.items()})
        if best is None:
            raise ConfigError(f"checkpoint: found 'best', but no checkpoint of {where} has a score; allowed: {listed}")
        return step_of(best)
    if checkpoint not in kept:
        raise ConfigError(f"checkpoint: found {checkpoint}, but {where} keeps only those of the steps {listed}")
    return checkpoint


def write_network(folder: RunFolder, recipe: RecipeRow, step: int, to: Path) -> None:
    """Writes the weights of a kept checkpoint in the form of the run's last weights, with the files that readers need.

    Args:
        folder: the run's folder.
        recipe: the run's recipe.
        step: step of the checkpoint.
        to: an existing folder.

    Raises:
        StorageError: if the checkpoint is not whole, or the storage cannot be used.
    """
    state = load_checkpoint(folder.fetch_checkpoint(checkpoint_name(step)), torch.device("cpu"))
    for name in recipe.network_files:
        part, prefix = _PARTS[name]
        weights = {key: value for key, value in state[part].items() if key.startswith(prefix)}
        save_file({key.removeprefix(prefix): value.contiguous() for key, value in weights.items()}, to / name)
    for path in folder.described_in:
        shutil.copy(path, to)


def network_files(folder: RunFolder, recipe: RecipeRow, checkpoint: Checkpoint, to: Path) -> Path:
    """The folder with the weights of a run's chosen checkpoint: the run's own for the last ones, else `to`.

    Args:
        folder: the run's folder.
        recipe: the run's recipe.
        checkpoint: the value of the key `checkpoint`.
        to: an existing folder for the weights of a checkpoint.

    Raises:
        ConfigError: if there is no such checkpoint.
        StorageError: if the checkpoint is not whole, or the storage cannot be used.
    """
    if checkpoint == "last":
        return folder.path
    write_network(folder, recipe, chosen_step(checkpoint, kept_checkpoints(folder), folder.location), to)
    return to
