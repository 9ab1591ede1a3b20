"""Checks for what torch.compile and Triton need on a machine."""

import os
import shutil
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch


def why_not_compiled(device: torch.device) -> str | None:
    """Why torch.compile cannot compile for a device of this machine; None if it can."""
    reason = _why_no_triton(device) if device.type == "cuda" else _why_no_cpp()
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()  # its own default is below this one
    return reason or _why_not_loaded(folder, "TORCHINDUCTOR_CACHE_DIR")


def why_no_kernels(device: torch.device) -> str | None:
    """Why our Triton kernels cannot run on a GPU of this machine; None if they can."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton")
    return _why_no_triton(device) or _why_not_loaded(folder, "TRITON_CACHE_DIR")


def _why_no_triton(device: torch.device) -> str | None:
    """Why Triton cannot compile for a GPU of this machine.

    Triton compiles its launcher when a kernel first runs: with $CC, gcc or clang, and Python's headers.
    """
    if find_spec("triton") is None:
        return "Triton is not installed"
    given = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([given] if given else ["gcc", "clang"])):
        return f"Triton needs the C compiler CC={given}, which is not found" if given else "Triton needs gcc or clang"
    return _why_no_headers("Triton") or _why_too_old(device)


def _why_no_cpp() -> str | None:
    """Why TorchInductor cannot compile for CPUs: with $CXX, or the system's compiler, and Python's headers."""
    given = os.environ.get("CXX")
    compiler = given or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        needed = f"the C++ compiler CXX={given}, which is not found" if given else compiler
        return f"torch.compile needs {needed}"
    return _why_no_headers("torch.compile")


def _why_no_headers(user: str) -> str | None:
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if Path(headers, "Python.h").exists():
        return None
    return f"{user} needs {headers}/Python.h (on Debian: the package python3-dev)"


def _why_too_old(device: torch.device) -> str | None:
    if (capability := torch.cuda.get_device_capability(device)) >= (7, 0):
        return None
    found = ".".join(map(str, capability))
    return f"{torch.cuda.get_device_name(device)} has compute capability {found}, and Triton needs 7.0"


def _why_not_loaded(folder: str, variable: str) -> str | None:
    """Why compiled code cannot be written to a folder, or loaded from there.

    Docker mounts `--tmpfs /tmp` with noexec, as do hardened machines: no code is loaded from there.
    """
    place = Path(folder)
    existing = next(each for each in (place, *place.parents) if os.path.exists(each))  # False where it may not look
    if os.statvfs(existing).f_flag & getattr(os, "ST_NOEXEC", 0):
        found = "is mounted with noexec"
    elif not os.access(existing, os.W_OK):
        found = "cannot be written"
    else:
        return None
    return f"{folder}, from which compiled code is loaded, {found} (set {variable} to another folder)"
