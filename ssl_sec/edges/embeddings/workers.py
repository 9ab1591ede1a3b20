"""The parts of a job, one after the other in this process, or on the workers of a cluster."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ssl_sec.gpus import require_usable
from ssl_sec.training.config import LocalConfig, RuntimeConfig

if TYPE_CHECKING:
    from ssl_sec.edges.run.on_ray.parts import Start  # imports Ray


def done_on(
    runtime: RuntimeConfig, start: "Start", parts: Sequence[int], on_images: Callable[[int], object], job: str
) -> Iterator[int]:
    """Computes the parts; yields the result of each.

    Args:
        runtime: where the parts are computed.
        start: see `Start`; on a cluster it is sent to the workers.
        parts: the numbers of the parts.
        on_images: called with a number of finished images, on a cluster after each part.
        job: name of the job in Ray's dashboard.

    Raises:
        ConfigError: if the cluster is too small.
        UserError: the error of a part, or of the start on a worker, as where its node lacks the images.
    """
    if not parts:
        return
    if isinstance(runtime, LocalConfig):
        require_usable(device := runtime.resolve_device())
        yield from map(start(device, on_images), parts)
        return
    from ssl_sec.edges.run.on_ray.parts import done_with_ray  # imports Ray

    for rows in done_with_ray(start, parts, runtime, job):
        on_images(rows)
        yield rows
