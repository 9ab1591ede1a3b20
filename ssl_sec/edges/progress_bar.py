"""How far a job over images is: a bar on a terminal, lines in the log elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from ssl_sec.progress import ProgressLog


@contextmanager
def progress_shown(task: str, total: int) -> Iterator[Callable[[int], object]]:
    """Shows how many images are done, by the function that it yields."""
    if not sys.stderr.isatty():
        yield ProgressLog(task, total).add
        return
    with tqdm(total=total, desc=task, unit="image", dynamic_ncols=True) as bar:
        yield bar.update
