"""The formats of an export by their names, and the packages that they need."""

import importlib.metadata
import importlib.util
from collections.abc import Mapping

from ssl_sec.errors import ConfigError
from ssl_sec.exporting.formats import Format, FormatName, Safetensors, TimmFolder
from ssl_sec.exporting.hub import HubFolder
from ssl_sec.exporting.recorded import ONNX, PT2, TorchScript

FORMATS: Mapping[FormatName, Format] = {
    "safetensors": Safetensors(),
    "pt2": PT2(),
    "onnx": ONNX(),
    "torchscript": TorchScript(),
    "timm": TimmFolder(),
    "hub": HubFolder(),
}

# The files of an export, which overwriting may remove.
FILE_NAMES = frozenset(
    "README.md classes.json config.json encoder.onnx encoder.pt encoder.pt2 encoder.safetensors head.safetensors "
    "model.safetensors".split()
)


def require_packages(form: Format) -> None:
    """Checks that the packages of the format are installed.

    Raises:
        ConfigError: says which packages to install.
    """
    missing = [name for name in form.packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"format: {form.name} needs {', '.join(form.packages)}, and {', '.join(missing)} is not installed; "
            f"install with: pip install -c constraints.txt -e {form.install}"
        )


def versions(form: Format) -> dict[str, str]:
    """The versions of the packages that wrote and checked an export."""
    return {name: importlib.metadata.version(name) for name in dict.fromkeys(("torch", *form.packages))}
