"""The memory that training a network needs at least."""

import os

from torch import nn

from ssl_sec.rules import check


def check_memory(key: str, found: object, module: nn.Module) -> None:
    """Raises a ConfigError if this machine cannot hold a module's weights, their gradients and momenta."""
    needed = 3 * sum(each.numel() * each.element_size() for each in module.parameters())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = f"less: training its layers needs {needed / 2**30:.0f} GiB, and this machine has {memory / 2**30:.0f}"
    check(needed <= memory, key, found, allowed)
