"""Schedules over the global step t of a run of T steps: learning rate, constraint's weight η, teacher's momentum.

    cosine        (1 + cos(π t / T)) / 2 · value, after an optional linear warm-up
    polynomial    (1 − t / T)^power · value, after an optional linear warm-up
    step decay    value · factor^n after n of the given steps
    linear ramp   value · t / T, then value                                  (SEC, Eq. 29)
    face ramp     0 for 3 epochs, linear over the 4th, then value        (SEC, appendix B.2)
    capped ramp   min(value, 500 t / T)                                      (SEC, Eq. 32)
    teacher       1 − (1 − value) (1 + cos(π t / T)) / 2, which rises to 1      (BYOL, section 3.2)

Each depends on the step alone. After a warm-up, t and T are counted from its end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ssl_sec.rules import check

Schedule = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Constant:
    """The same value at every step."""

    value: float

    def __call__(self, step: int) -> float:
        """The value at the 0-based global step."""
        return self.value


@dataclass(frozen=True, slots=True)
class Cosine:
    """From `value` to 0 along half a cosine, after `warmup_steps` of linear rise."""

    value: float
    total_steps: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _require_lengths(self.total_steps, self.warmup_steps)

    def __call__(self, step: int) -> float:
        """The value at the 0-based global step."""
        if step < self.warmup_steps:
            return self.value * (step + 1) / self.warmup_steps
        return self.value * (1 + math.cos(math.pi * _progress(step, self.total_steps, self.warmup_steps))) / 2


@dataclass(frozen=True, slots=True)
class Polynomial:
    """From `value` to 0 as the `power` of the share of steps that are left, after `warmup_steps` of linear rise."""

    value: float
    total_steps: int
    warmup_steps: int = 0
    power: float = 2.0

    def __post_init__(self) -> None:
        _require_lengths(self.total_steps, self.warmup_steps)

    def __call__(self, step: int) -> float:
        """The value at the 0-based global step."""
        if step < self.warmup_steps:
            return self.value * (step + 1) / self.warmup_steps
        return self.value * (1 - _progress(step, self.total_steps, self.warmup_steps)) ** self.power


def _require_lengths(total_steps: int, warmup_steps: int = 0) -> None:
    """Checks numbers of steps; a run without steps, which only measures its network, has schedules, too."""
    check(total_steps >= 0, "total_steps", total_steps, "≥ 0")
    check(warmup_steps >= 0, "warmup_steps", warmup_steps, "≥ 0")


def _progress(step: int, total_steps: int, warmup_steps: int) -> float:
    """The share of the steps after the warm-up that are taken, at most 1."""
    return min((step - warmup_steps) / max(1, total_steps - warmup_steps), 1.0)


@dataclass(frozen=True, slots=True)
class TeacherMomentum:
    """From `value` to 1 along half a cosine."""

    value: float
    total_steps: int

    def __post_init__(self) -> None:
        _require_lengths(self.total_steps)

    def __call__(self, step: int) -> float:
        """The value at the 0-based global step."""
        return 1 - Cosine(1 - self.value, self.total_steps)(step)


@dataclass(frozen=True, slots=True)
class StepDecay:
    """`value`, multiplied by `factor` at each of `at_steps`."""

    value: float
    at_steps: tuple[int, ...]
    factor: float

    def __call__(self, step: int) -> float:
        """The value at the 0-based global step."""
        return self.value * self.factor ** sum(step >= at_step for at_step in self.at_steps)


@dataclass(frozen=True, slots=True)
class LinearRamp:
    """From 0 to `value` over the whole run: value · t / T (SEC, Eq. 29)."""

    value: float
    total_steps: int

    def __post_init__(self) -> None:
        _require_lengths(self.total_steps)

    def __call__(self, step: int) -> float:
        """The value at the 0-based global step; `value` from the end of the run on."""
        return self.value * step / self.total_steps if step < self.total_steps else self.value


@dataclass(frozen=True, slots=True)
class FaceRamp:
    """0 for three epochs, linear over the fourth, then `value` (SEC, appendix B.2)."""

    value: float
    steps_per_epoch: int

    def __post_init__(self) -> None:
        check(self.steps_per_epoch >= 1, "steps_per_epoch", self.steps_per_epoch, "≥ 1")

    def __call__(self, step: int) -> float:
        """The value at the 0-based global step."""
        epochs = step / self.steps_per_epoch - 3
        # Without min and max: torch 2.11 compiles those of a fraction of a step as whole numbers.
        if epochs <= 0:
            return 0.0
        return self.value * epochs if epochs < 1 else self.value


@dataclass(frozen=True, slots=True)
class CappedRamp:
    """min(value, 500 t / T): steep, for SEC-EMA on faces (SEC, Eq. 32)."""

    value: float
    total_steps: int

    def __post_init__(self) -> None:
        _require_lengths(self.total_steps)

    def __call__(self, step: int) -> float:
        """The value at the 0-based global step."""
        if self.total_steps == 0:
            return self.value
        risen = 500 * step / self.total_steps
        return risen if risen < self.value else self.value  # without min, as above


def epochs_at(shares: Sequence[float], epochs: int) -> tuple[int, ...]:
    """The 0-based epochs that begin nearest to given shares of a run.

    None of them is the first epoch and, in a run of two epochs or more, all are reached.

    Args:
        shares: shares of the run, in (0, 1).
        epochs: epochs of the run, ≥ 1.
    """
    last = max(epochs - 1, 1)
    return tuple(min(max(round(share * epochs), 1), last) for share in shares)
