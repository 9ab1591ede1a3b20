"""Contenders of a benchmark that take turns until they fail."""

import contextlib
import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from benchmarks.measure import describe_error
from benchmarks.simclr import Contender

Result = TypeVar("Result")


class Contest:
    """Contenders that take turns; one that fails leaves, and its error is kept.

    Attributes:
        contenders: the contenders that have not failed, by name.
        errors: the errors of the others, by name.
    """

    def __init__(self) -> None:
        self.contenders: dict[str, Contender] = {}
        self.errors: dict[str, str] = {}

    def enter(self, name: str, make: Callable[[], Contender]) -> None:
        """Makes a contender."""
        try:
            self.contenders[name] = make()
            return
        except Exception as error:
            self.errors[name] = describe_error(error)
        free_memory()  # after the handler, as the error holds what the contender had allocated

    def attempt(self, name: str, turn: Callable[[Contender], Result]) -> Result | None:
        """Returns the result of a function of a contender; None if it fails, or the contender has failed before."""
        if name not in self.contenders:
            return None
        try:
            return turn(self.contenders[name])
        except Exception as error:
            self.errors[name] = describe_error(error)
        with contextlib.suppress(Exception):
            self.contenders[name].close()
        del self.contenders[name]
        free_memory()
        return None

    def close(self) -> None:
        """Ends all contenders."""
        for contender in self.contenders.values():
            contender.close()
        self.contenders.clear()


def free_memory() -> None:
    """Frees the memory of contenders that have ended."""
    gc.collect()
    torch.cuda.empty_cache()
