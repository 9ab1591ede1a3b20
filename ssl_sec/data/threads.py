"""A function of many images, computed in threads."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# Images held at once: enough for every thread, and few enough for memory.
IMAGES_AT_ONCE = 1024
# A thread computes many small images in the time that it takes to hand it one.
IMAGES_PER_TASK = 32

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
    """Yields each item with its result, in order.

    Args:
        function: function of one image; the first error that it raises is raised here.
        items: images, which are taken as they are needed.
    """

    def compute(part: list[Item]) -> list[Result]:
        return [function(item) for item in part]

    remaining = iter(items)
    with ThreadPoolExecutor() as pool:
        while held := list(itertools.islice(remaining, IMAGES_AT_ONCE)):
            parts = [held[first : first + IMAGES_PER_TASK] for first in range(0, len(held), IMAGES_PER_TASK)]
            yield from zip(held, itertools.chain.from_iterable(pool.map(compute, parts)), strict=True)
