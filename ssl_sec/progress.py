"""How far a long task is, in the log."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ssl_sec.collectives import rank

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

LOG_EVERY_S = 20.0


class ProgressLog:
    """Worker 0 logs every LOG_EVERY_S how far a task is, and so nothing about a short one.

    Args:
        task: what is done, for the message.
        total: number of units, from 1.
        unit: plural of the unit.
    """

    def __init__(self, task: str, total: int, unit: str = "images") -> None:
        self._task = task
        self._total = total
        self._unit = unit
        self._done = 0
        self._started = self._logged = time.monotonic()

    def add(self, count: int) -> None:
        """Counts units that are done."""
        self._done += count
        now = time.monotonic()
        if now - self._logged > LOG_EVERY_S and 0 < self._done < self._total and rank() == 0:
            self._logged = now
            left = (now - self._started) * (self._total - self._done) / self._done
            counts = f"{self._done:,} of {self._total:,} {self._unit}"
            logger.info("%s: %s, %s left", self._task, counts, duration(left))


def logged(
    items: Iterable[Item], task: str, total: int, unit: str = "images", size: Callable[[Item], int] = lambda _: 1
) -> Iterator[Item]:
    """The items; a ProgressLog logs how many of them have been processed.

    Args:
        items: what the task takes one by one.
        task: what is done with them, for the message.
        total: number of units in all items.
        unit: plural of the unit.
        size: item -> number of units in it.
    """
    progress = ProgressLog(task, total, unit)
    for item in items:
        yield item
        progress.add(size(item))


def duration(seconds: float) -> str:
    """For example 1 h 02 min, or 2 min 03 s."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left:02d} min" if hours else f"{minutes} min {seconds_left:02d} s"
