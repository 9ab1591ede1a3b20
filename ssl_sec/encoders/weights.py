"""Backbone weights in files: safetensors with torchvision's or timm's key names, and state dicts of others."""

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ssl_sec.errors import MissingDataError, StorageError, first_line

# A classifier in the file has no place in a backbone.
_CLASSIFIER_KEYS = ("fc.", "head.", "classifier.", "head_dist.", "last_linear.", "aux1.", "aux2.")


def save_weights(backbone: nn.Module, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a backbone's state dict as safetensors, whole or not at all.

    Args:
        backbone: its key names are kept.
        path: the file to write.
        metadata: strings kept in the file's header.

    Raises:
        StorageError: if it cannot be written; a file that was there is untouched.
    """
    tensors = {name: value.detach().cpu().contiguous() for name, value in backbone.state_dict().items()}
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file(tensors, temporary, metadata={"format": "pt", **(metadata or {})})
        os.replace(temporary, path)
    except (SafetensorError, OSError) as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written: {first_line(error)}") from error


def load_weights(backbone: nn.Module, path: Path) -> None:
    """Loads a backbone's weights from a .safetensors file or a state dict saved by torch; never unpickles code.

    Raises:
        MissingDataError: if there is no such file.
        StorageError: if it cannot be read, or its names or shapes are not the backbone's.
    """
    if not path.is_file():
        raise MissingDataError(f"encoder.weights: no file {path}")
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # the readers raise whatever they stumble over in a file of anything
        raise StorageError(f"encoder.weights: {path} cannot be read as weights: {first_line(error)}") from error
    if isinstance(tensors, dict) and isinstance(tensors.get("state_dict"), dict):
        tensors = tensors["state_dict"]
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in tensors.items()
    ):
        raise StorageError(f"encoder.weights: {path} holds no state dict")
    wanted = backbone.state_dict()
    tensors = {
        name.removeprefix("module."): value
        for name, value in tensors.items()
        if name.removeprefix("module.") in wanted or not name.removeprefix("module.").startswith(_CLASSIFIER_KEYS)
    }
    # Files of an old PyTorch do not count a batch norm's batches; those of an older one keep its vectors as [1, width].
    for name, value in wanted.items():
        if name.endswith("num_batches_tracked"):
            tensors.setdefault(name, torch.zeros_like(value))
        elif value.ndim == 1 and name in tensors and tensors[name].shape == (1, *value.shape):
            tensors[name] = tensors[name][0]
    problems = [
        *(f"{name} is missing" for name in wanted.keys() - tensors.keys()),
        *(f"{name} is unknown" for name in tensors.keys() - wanted.keys()),
        *(
            f"{name} has shape {tuple(tensors[name].shape)}, the encoder {tuple(wanted[name].shape)}"
            for name in wanted.keys() & tensors.keys()
            if tensors[name].shape != wanted[name].shape
        ),
    ]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise StorageError(f"encoder.weights: {path} does not fit the encoder: {sorted(problems)[0]}{more}")
    backbone.load_state_dict(tensors)
