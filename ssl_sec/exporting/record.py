"""The record of an exported network as JSON, from which this package builds it again with the folder alone."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from ssl_sec.data.bands import ValueRanges
from ssl_sec.data.crops import CentreCrop
from ssl_sec.errors import ConfigError, StorageError, first_line
from ssl_sec.networks.config import ClassifierConfig, EncoderConfig, HeadConfig
from ssl_sec.settings import from_values, to_values

# The key of the record: in the header of safetensors, in config.json, and as a file in TorchScript.
RECORD = "ssl_sec"


@dataclass(frozen=True, kw_only=True)
class Record:
    """How to build an exported network, and the images that it takes.

    Attributes:
        run: id of the run in MLflow, or the name of its folder.
        encoder: configuration of the encoder, without its weights.
        head: configuration of the head or classifier, likewise; None if features are exported.
        image_shape: channels, height and width of the training images.
        crop: crop of evaluated images; None if all have one size.
        value_ranges: lowest and highest value of the pixels of the files, which become 0 and 1; None for others.
    """

    run: str
    encoder: EncoderConfig
    head: HeadConfig | ClassifierConfig | None
    image_shape: tuple[int, ...]
    crop: CentreCrop | None = None
    value_ranges: ValueRanges | None = None

    def as_json(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(to_values(self))


def read_record(folder: Path) -> tuple[Path, Record] | None:
    """The file of an export that holds its network, and its record; None if the folder is no export.

    Raises:
        ConfigError: if the export holds no network that can be built here.
        StorageError: if a file cannot be read.
    """
    readers = {
        "encoder.safetensors": _in_header,
        "model.safetensors": _in_config,
        "encoder.pt": _in_script,
        "encoder.pt2": lambda path: None,
        "encoder.onnx": lambda path: None,
    }
    path = next((folder / name for name in readers if (folder / name).is_file()), None)
    if path is None or not (folder / "README.md").is_file():
        return None
    try:
        found = readers[path.name](path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        read = path.with_name("config.json") if readers[path.name] is _in_config else path
        raise StorageError(f"run: {read} cannot be read: {first_line(error)}") from error
    if found is None:
        raise ConfigError(
            f"run: {folder} holds an export whose {path.name} does not say how to build its network; allowed: an "
            "export of this version as safetensors, torchscript, timm or hub, or the run itself"
        )
    return path, from_values(Record, json.loads(found))


def load_script(file: str | BinaryIO, more: dict[str, Any] | None = None) -> torch.jit.ScriptModule:
    """A TorchScript file on the CPU, without torch's warning: the user chose this format, and an export is checked.

    It says that the format is deprecated, and from Python 3.14 on that it is not supported and may break.

    Args:
        file: its path, or the opened file.
        more: name -> content of other files in it, which are filled in.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.load` is (deprecated|not supported)", FutureWarning)
        return torch.jit.load(file, "cpu", _extra_files=more)


def _in_header(path: Path) -> str | None:
    with safe_open(path, "pt") as file:
        return (file.metadata() or {}).get(RECORD)


def _in_script(path: Path) -> str | None:
    files: dict[str, Any] = {RECORD: ""}
    load_script(str(path), files)
    text = files[RECORD]
    return (text.decode() if isinstance(text, bytes) else text) or None


def _in_config(path: Path) -> str | None:
    found = json.loads((path.parent / "config.json").read_text(encoding="utf-8")).get(RECORD)
    return None if found is None else json.dumps(found)
