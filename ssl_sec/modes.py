"""Evaluation mode for the time of a call."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode, after which every module has its own mode again, also after an error.

    Modules of a network in training may be in evaluation mode, as frozen batch norms are.
    """
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        network.train(modes[0][1])
        for module, mode in modes:
            module.training = mode
