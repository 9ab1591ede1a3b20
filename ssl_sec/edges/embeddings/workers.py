"""The parts of a job, one after the other in this process, or on the workers of a cluster."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from ssl_sec.training.config import LocalConfig, RuntimeConfig


class Start(Protocol):
    """Makes the function that computes a part: it takes the part's number, and returns how many rows it made."""

    def __call__(self, device: torch.device, on_images: Callable[[int], object] = ...) -> Callable[[int], int]:
        """The function for parts on a device.

        Args:
            device: device of this process.
            on_images: called with a number of finished images.
        """
        ...


def done_on(
    runtime: RuntimeConfig, start: Start, parts: Sequence[int], on_images: Callable[[int], object], job: str
) -> Iterator[int]:
    """Computes the parts; yields the result of each.

    Args:
        runtime: where the parts are computed.
        start: makes the function for parts; on a cluster it is sent to the workers.
        parts: the numbers of the parts.
        on_images: called with a number of finished images, on a cluster after each part.
        job: name of the job in Ray's dashboard.

    Raises:
        ConfigError: if the cluster is too small.
        UserError: the error of a part.
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
