"""Encoders, alone or with a head, in files that others read: safetensors, TorchScript, ONNX and timm's folder.

Each format writes into a folder, and states the Python that reads it back there without this package. The check of
an export runs that very text in a process of its own, so that what a model card says has been done.
"""

from ssl_sec.exporting.checking import check_export
from ssl_sec.exporting.formats import FILE_NAMES, FORMATS, Exportable, Format, FormatName, require_packages, versions

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
