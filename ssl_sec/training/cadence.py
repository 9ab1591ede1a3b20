"""How often training reports, saves and monitors."""

from dataclasses import dataclass
from typing import NamedTuple


class Due(NamedTuple):
    """What there is to do after a step.

    Attributes:
        last: whether it is the last step of the run.
        epoch_end: whether it is the last step of an epoch or of the run.
        report: whether its metrics are reported.
        monitor: whether the monitor is called.
        save: whether a checkpoint is saved.
    """

    last: bool
    epoch_end: bool
    report: bool
    monitor: bool
    save: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence:
    """How often the loop reports, saves and monitors; it also does all three after the last step.

    Attributes:
        log_every_steps: steps between two reports, ≥ 1.
        save_every_steps: steps between two checkpoints, ≥ 1.
        monitor_every_steps: steps between two calls of the monitor, ≥ 1.
    """

    log_every_steps: int
    save_every_steps: int
    monitor_every_steps: int

    def after(self, step: int, steps_per_epoch: int, total_steps: int) -> Due:
        """What there is to do after the 0-based global step."""
        taken = step + 1
        last = taken == total_steps
        epoch_end = last or taken % steps_per_epoch == 0
        monitor = last or taken % self.monitor_every_steps == 0
        save = last or taken % self.save_every_steps == 0
        report = step % self.log_every_steps == 0 or epoch_end or monitor or save
        return Due(last, epoch_end, report, monitor, save)
