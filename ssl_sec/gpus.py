"""Whether PyTorch can use the GPUs of a machine."""

import os

import torch

from ssl_sec.errors import ConfigError, first_line

# The kernel's driver lists NVIDIA's GPUs here, also for containers that may not use them.
_LISTED_BY_DRIVER = "/proc/driver/nvidia/gpus"


def why_no_gpu() -> str | None:
    """Why PyTorch finds no GPU on this machine; None if it finds one."""
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return first_line(error).rstrip(".")
    return "PyTorch counts no GPUs"


def has_hidden_gpu() -> bool:
    """Whether there are GPUs of NVIDIA, which the user has not hidden, though PyTorch may find none."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not is_hidden and os.path.isdir(_LISTED_BY_DRIVER) and bool(os.listdir(_LISTED_BY_DRIVER))


def require_usable(device: torch.device) -> None:
    """Computes a number on a device.

    Raises:
        ConfigError: PyTorch has no kernels for the GPU, another process has it for itself, or it fails.
    """
    try:
        torch.ones(2, device=device).sum().item()
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError) as error:  # an assertion fails in a build without CUDA
        found = f"found a GPU that PyTorch {torch.__version__} cannot use ({first_line(error).rstrip('.')})"
        raise ConfigError(f"runtime.device: {found}; runtime.device=cpu trains on the CPU") from error
