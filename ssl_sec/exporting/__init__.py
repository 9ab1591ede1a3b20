"""Exports encoders, alone or with a head, as safetensors, pt2, ONNX, TorchScript, or a folder of timm or the Hub.

Each format writes to a folder, and has the Python code that loads its files without this package. The check of an
export runs this code in a separate process, so that the code in a model card is known to work.
"""

from ssl_sec.exporting.checking import check_export
from ssl_sec.exporting.formats import Exportable, Format, FormatName
from ssl_sec.exporting.registry import FILE_NAMES, FORMATS, require_packages, versions

__all__ = [
    "FILE_NAMES",
    "FORMATS",
    "Exportable",
    "Format",
    "FormatName",
    "check_export",
    "require_packages",
    "versions",
]
