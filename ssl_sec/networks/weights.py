"""Backbone weights in files: safetensors with torchvision's or timm's key names, and state dicts of others."""

import argparse
import logging
import pickle
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ssl_sec.collectives import rank
from ssl_sec.errors import MissingDataError, StorageError, first_line
from ssl_sec.files import replaced
from ssl_sec.networks.backbones.timm import resampled_weights

logger = logging.getLogger(__name__)

_UNFIT = " does not fit "
# Usual entries for the network of a checkpoint, of which others may be older or better copies.
_STATE_DICTS = ("state_dict", "model", "model_state_dict")
# The network that DINO and its successors evaluate: a moving average of the student.
_TEACHER = "teacher"
# Parts of the names of other moving averages, as in MoCo, BYOL and their reimplementations, which evaluate the network.
_AVERAGES = ("momentum", "encoder_k", "target", "ema")
# Keys that a backbone lacks: those of a classifier, of SwAV's head, of DINOv2's masked patches, and of the batch norm
# after InsightFace's linear layer (whose name, `features`, is elsewhere the prefix of whole backbones).
_NORM_VALUES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_CLASSIFIER_KEYS = (
    *("fc.", "head.", "classifier.", "head_dist.", "last_linear.", "aux1.", "aux2.", "projection_head.", "prototypes."),
    "mask_token",
    *(f"features.{name}" for name in _NORM_VALUES),
)
# Keys of the batch norms before and after the linear layer of some heads; the layer alone is not what was trained.
_HEAD_NORM_KEYS = tuple(f"{layer}.{name}" for layer in ("bn", "features") for name in _NORM_VALUES)


class UnfitWeightsError(StorageError):
    """Weights whose names or shapes are not those of the network."""

    @property
    def what(self) -> str:
        """What the weights do not fit, and why; without the file, which a user may not know."""
        return str(self).rpartition(_UNFIT)[2]


def save_weights(backbone: nn.Module, path: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a backbone's state dict as safetensors, completely or not at all.

    Args:
        backbone: the backbone to save; its key names are kept, and a weight of several layers is written for each.
        path: the file to write.
        metadata: strings kept in the file's header.

    Raises:
        StorageError: if it cannot be written; an existing file is unchanged.
    """
    # Copies, as safetensors takes no two tensors that share memory.
    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in backbone.state_dict().items()
    }
    try:
        with replaced(Path(path)) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt", **(metadata or {})})
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{path} cannot be written: {first_line(error)}") from error


def load_weights(backbone: nn.Module, path: str | Path) -> bool:
    """Loads a backbone's weights from a .safetensors file or a state dict saved by torch; never unpickles code.

    Checkpoints of other libraries are understood: the weights may be in nested entries, such as `state_dict`, `model`
    or VISSL's `classy_state_dict`, and behind a prefix of all names, such as `module.`, `_orig_mod.`, `backbone.` or
    MoCo's `module.encoder_q.`. Other weights are left out; of a network and its moving average, the network is taken,
    but of DINO's student and teacher the teacher, and one line is logged. Position embeddings of a timm model for
    images of another size are interpolated.

    Returns:
        Whether the file also has a classifier or SwAV's head, as published weights do; it is left out.

    Raises:
        MissingDataError: if there is no such file.
        StorageError: if it cannot be read.
        UnfitWeightsError: if its names or shapes are not the backbone's, or those of several networks are.
    """
    tensors, (prefix, *others), has_classifier = _backbone_weights(backbone, Path(path))
    if prefix and rank() == 0:
        left_out = f", not of {_listed(others)}" if others else ""
        logger.info("encoder.weights: the weights are those of %s%s", _listed([prefix]), left_out)
    backbone.load_state_dict(tensors)
    return has_classifier


def require_backbone_weights(backbone: nn.Module, path: Path) -> None:
    """Checks that a file has a backbone's weights.

    Args:
        backbone: a backbone with or without values: it may be on torch's meta device.
        path: the file.

    Raises:
        MissingDataError, StorageError, UnfitWeightsError: as `load_weights`.
    """
    _backbone_weights(backbone, path)


def load_head_weights(head: nn.Module, path: str | Path) -> None:
    """Loads a head's weights from its own file, or from that of a backbone that ends in the same layers.

    Raises:
        MissingDataError: if there is no such file.
        StorageError: if it cannot be read.
        UnfitWeightsError: if its names or shapes are not the head's, or its linear layer has a batch norm that the head
            lacks.
    """
    head.load_state_dict(_head_weights(head, Path(path)))


def require_head_weights(head: nn.Module, path: Path) -> None:
    """Checks that a file has a head's weights; arguments and errors as for `load_head_weights`.

    The head may be on torch's meta device.
    """
    _head_weights(head, path)


def require_weights(key: str, path: Path) -> None:
    """Checks that a file of weights, which the key gives, holds a state dict; values are read from old formats alone.

    Raises:
        MissingDataError: if there is no such file.
        StorageError: if it cannot be read.
    """
    _state_dict(key, path)


def _state_dict(key: str, path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        inside = sorted(path.glob("*.safetensors"))
        such_as = f", such as {inside[0]}" if inside else ""
        raise MissingDataError(f"{key}: {path} is a folder; allowed: a file of weights{such_as}")
    if not path.is_file():
        raise MissingDataError(f"{key}: no file {path}; give {key}=<file>")
    if path.stat().st_size == 0:
        raise StorageError(f"{key}: {path} cannot be read as weights: it is empty")
    if _is_torchscript(path):
        raise StorageError(
            f"{key}: {path} cannot be read as weights: it is TorchScript; allowed: safetensors, or a state dict that "
            "torch.save wrote"
        )
    try:
        with _harmless_types():
            if path.suffix == ".safetensors":
                tensors = load_file(path)
            else:
                tensors = torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    # torch's text for these advises to load the file without a check, or says nothing about it.
    except (pickle.UnpicklingError, LookupError, TypeError, ValueError) as error:
        raise StorageError(f"{key}: {path} cannot be read as weights: {_refused_content(path)}") from error
    except Exception as error:  # the readers raise errors of any kind for a file that holds something else
        raise StorageError(f"{key}: {path} cannot be read as weights: {first_line(error)}") from error
    named = dict(_named_tensors(tensors, ""))
    if not named and tensors != {}:  # the pixels have no weights
        raise StorageError(f"{key}: {path} holds no state dict")
    return named


def _named_tensors(content: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested dicts, by their keys joined with points; those of optimisers have numbers as keys."""
    if isinstance(content, Tensor) and name:
        yield name, content
    if isinstance(content, dict):
        for key, value in content.items():
            if isinstance(key, str):
                yield from _named_tensors(value, f"{name}.{key}" if name else key)


def _harmless_types() -> AbstractContextManager[None]:
    """Lets torch read what scripts keep beside the weights: their options, and learning rates as numbers of NumPy."""
    scalar: Any = np.float64(0).__reduce__()[0]
    types = [type(np.dtype(kind)) for kind in ("float64", "float32", "int64", "int32", "bool")]
    # NumPy 1 wrote the name of another module.
    names = [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    return torch.serialization.safe_globals([argparse.Namespace, np.dtype, *types, *names])


def _is_torchscript(path: Path) -> bool:
    """Whether torch would load a file as a program, for which it warns and advises to skip its check."""
    try:
        with zipfile.ZipFile(path) as file:
            return any(name.endswith("/constants.pkl") for name in file.namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def _refused_content(path: Path) -> str:
    """Why a file holds more than tensors, or something else."""
    try:
        with _harmless_types():
            types = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # of any kind for a file that holds something else
        types = []
    if not types:
        return "it is neither safetensors nor a state dict that torch.save wrote"
    more = f" and {len(types) - 1} more" if len(types) > 1 else ""
    return f"it needs {sorted(types)[0]}{more}, whose code is not run; allowed: a file with its state dict alone"


def _backbone_weights(backbone: nn.Module, path: Path) -> tuple[dict[str, Tensor], list[str], bool]:
    """The weights of a backbone in a file, and whether it has a classifier, too.

    Between them stand the prefix of the weights' names and those of other networks that would fit.
    """
    wanted = backbone.state_dict()
    tensors, prefixes = _without_prefix(_state_dict("encoder.weights", path), wanted.keys(), "encoder.weights", path)
    kept = {name: value for name, value in tensors.items() if name in wanted or not name.startswith(_CLASSIFIER_KEYS)}
    fitting = _fitting(backbone, resampled_weights(backbone, kept), "encoder.weights", path)
    return fitting, prefixes, len(kept) < len(tensors)


def _head_weights(head: nn.Module, path: Path) -> dict[str, Tensor]:
    layers = dict(head.named_children())
    tensors, _ = _without_prefix(_state_dict("head.weights", path), head.state_dict().keys(), "head.weights", path)
    of_head = {
        name: value for name, value in tensors.items() if name.partition(".")[0] in layers or name in _HEAD_NORM_KEYS
    }
    return _fitting(head, of_head, "head.weights", path)


def _without_prefix(
    tensors: dict[str, Tensor], wanted: Collection[str], key: str, path: Path
) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under the prefix with which most wanted names exist, it, and the others with which as many do."""
    names = {name for name in wanted if not name.endswith("num_batches_tracked")}
    counts: Counter[str] = Counter()
    for name in tensors:
        parts = name.split(".")
        counts.update(".".join([*parts[:start], ""]) for start in range(len(parts)) if ".".join(parts[start:]) in names)
    most = max(counts.values(), default=0)
    prefixes = sorted(prefix for prefix, count in counts.items() if count == most) or [""]
    # Not a layer of a network that has layers of the same names itself.
    prefixes = [each for each in prefixes if not any(each != other and each.startswith(other) for other in prefixes)]
    taken = prefixes
    for is_preferred in (
        lambda prefix: _TEACHER in prefix,
        lambda prefix: not any(part in prefix for part in _AVERAGES),
        lambda prefix: prefix.partition(".")[0] in _STATE_DICTS,
    ):
        taken = [prefix for prefix in taken if is_preferred(prefix)] or taken
    if len(taken) > 1 and most == len(names):
        raise UnfitWeightsError(
            f"{key}: {path}{_UNFIT}the {key.partition('.')[0]}: it holds several, {_listed(taken)}; allowed: one"
        )
    prefix = taken[0]
    under = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    return under, [prefix, *(each for each in prefixes if each != prefix)]


def _listed(prefixes: Collection[str]) -> str:
    return " and ".join(f"{prefix}*" for prefix in prefixes)


def _defect(name: str, found: Tensor, wanted: Tensor) -> str | None:
    """The error in the values of a tensor in a file; None if there is none."""
    if wanted.is_floating_point() and not found.is_floating_point():
        return f"{name} has type {found.dtype}, must be {wanted.dtype}"
    if wanted.is_floating_point() and not found.float().isfinite().all():
        return f"{name} has values that are not finite"
    return None


def _fitting(module: nn.Module, tensors: dict[str, Tensor], key: str, path: Path) -> dict[str, Tensor]:
    """The tensors as the state dict of a module; raises an UnfitWeightsError if they are that of another one."""
    wanted = module.state_dict()
    # Files of an old PyTorch lack the count of a batch norm's batches; even older ones store vectors as [1, width].
    for name, value in wanted.items():
        if name.endswith("num_batches_tracked"):
            tensors.setdefault(name, torch.zeros_like(value))
        elif value.ndim == 1 and name in tensors and tensors[name].shape == (1, *value.shape):
            tensors[name] = tensors[name][0]
    part = key.partition(".")[0]
    problems = [
        *(f"{name} is missing" for name in wanted.keys() - tensors.keys()),
        *(f"{name} is unknown" for name in tensors.keys() - wanted.keys()),
        *(
            f"{name} has shape {tuple(tensors[name].shape)}, the {part} {tuple(wanted[name].shape)}"
            for name in wanted.keys() & tensors.keys()
            if tensors[name].shape != wanted[name].shape
        ),
        *(
            defect
            for name in sorted(wanted.keys() & tensors.keys())
            if (defect := _defect(name, tensors[name], wanted[name])) is not None
        ),
    ]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise UnfitWeightsError(f"{key}: {path}{_UNFIT}the {part}: {sorted(problems)[0]}{more}")
    return tensors
