"""The parts of a job, one after the other in this process, or on the workers of a cluster."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from ssl_sec.training.config import LocalConfig, RuntimeConfig


class Start(Protocol):
    """Makes what does a part, called with its number, and returns how many rows it made."""

    def __call__(self, device: torch.device, on_images: Callable[[int], object] = ...) -> Callable[[int], int]:
        """What does parts on a device.

        Args:
            device: of this process.
            on_images: called with a number of images that are done.
        """
        ...


def done_on(
    runtime: RuntimeConfig, start: Start, parts: Sequence[int], on_images: Callable[[int], object], job: str
) -> Iterator[int]:
    """Does the parts; yields what each returns.

    Args:
        runtime: where.
        start: on a cluster it travels to the workers.
        parts: their numbers.
        on_images: called with a number of images that are done, on a cluster after each part.
        job: the name in Ray's dashboard.

    Raises:
        ConfigError: if the cluster is too small.
        UserError: of a part.
    """
    if not parts:
        return
    if isinstance(runtime, LocalConfig):
        yield from map(start(runtime.resolve_device(), on_images), parts)
        return
    from ssl_sec.edges.run.on_ray.parts import done_with_ray  # imports Ray

    for rows in done_with_ray(start, parts, runtime, job):
        on_images(rows)
        yield rows
