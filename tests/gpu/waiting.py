"""Whether the host may wait for the device."""

from contextlib import contextmanager

import torch


def forbid(device, is_forbidden):
    """Makes a wait of the host for a GPU an error, or allows it again; nothing waits for a CPU."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error" if is_forbidden else "default")


@contextmanager
def forbidden(device):
    forbid(device, True)
    try:
        yield
    finally:
        forbid(device, False)
