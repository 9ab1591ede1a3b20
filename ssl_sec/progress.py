"""How far a long task is, in the log."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ssl_sec.collectives import rank

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

LOG_EVERY_S = 20.0


def logged(
    items: Iterable[Item], task: str, total: int, unit: str = "images", size: Callable[[Item], int] = lambda _: 1
) -> Iterator[Item]:
    """The items; worker 0 logs every LOG_EVERY_S how many have been taken, and so nothing about a short task.

    Args:
        items: what the task takes one by one.
        task: what is done with them, for the message.
        total: number of units in all items.
        unit: plural of the unit.
        size: item -> number of units in it.
    """
    started = last = time.monotonic()
    done = 0
    for item in items:
        yield item
        done += size(item)
        now = time.monotonic()
        if now - last > LOG_EVERY_S and done < total and rank() == 0:
            last = now
            left = (now - started) * (total - done) / done
            logger.info("%s: %s of %s %s, %s left", task, f"{done:,}", f"{total:,}", unit, duration(left))


def duration(seconds: float) -> str:
    """For example 1 h 02 min, or 2 min 03 s."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left:02d} min" if hours else f"{minutes} min {seconds_left:02d} s"
