"""How far a job is: a bar on a terminal, lines in the log elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from ssl_sec.progress import ProgressLog


@contextmanager
def progress_shown(task: str, total: int, unit: str = "images") -> Iterator[Callable[[int], object]]:
    """Shows how many units, by their plural, are done, by the function that it yields."""
    if not sys.stderr.isatty():
        yield ProgressLog(task, total, unit).add
        return
    with tqdm(total=total, desc=task, unit=f" {unit}", dynamic_ncols=True) as bar:
        yield bar.update
