"""The log of what was found as images are opened."""

import logging
from functools import cache

from ssl_sec.collectives import rank

logger = logging.getLogger("ssl_sec.data")


def log_once(level: int, message: str, *shown: str) -> None:
    """Worker 0 logs a message, once in a process; a job opens its images several times."""
    if rank() == 0:
        _log(level, message, *shown)


@cache
def _log(level: int, message: str, *shown: str) -> None:
    logger.log(level, message, *shown)
