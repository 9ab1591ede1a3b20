"""Checks for the compilers that GPU kernels need."""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch


def why_no_triton(device: torch.device) -> str | None:
    """Why Triton kernels, including those of torch.compile, cannot run on a GPU of this machine; None if they can.

    Triton compiles its launcher when a kernel first runs: with $CC, gcc or clang, and Python's headers.
    """
    if find_spec("triton") is None:
        return "Triton is not installed"
    given = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([given] if given else ["gcc", "clang"])):
        return f"Triton needs the C compiler CC={given}, which is not found" if given else "Triton needs gcc or clang"
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if not Path(headers, "Python.h").exists():
        return f"Triton needs {headers}/Python.h (on Debian: the package python3-dev)"
    return why_too_old(device)


def why_too_old(device: torch.device) -> str | None:
    """Why Triton has no kernels for a GPU of an early generation; None for other devices."""
    if device.type != "cuda" or (capability := torch.cuda.get_device_capability(device)) >= (7, 0):
        return None
    found = ".".join(map(str, capability))
    return f"{torch.cuda.get_device_name(device)} has compute capability {found}, and Triton needs 7.0"
