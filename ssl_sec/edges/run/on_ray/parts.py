"""Independent parts of a job, each computed by one of several workers of a Ray cluster; Ray Data distributes them."""

import contextlib
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import ray
import ray.data
import torch
from ray.data import ActorPoolStrategy

from ssl_sec.edges.run.on_ray.joining import connect
from ssl_sec.edges.run.on_ray.scaling import describe_workers, make_scaling, node_resources
from ssl_sec.errors import UserError, out_of_memory, out_of_space
from ssl_sec.gpus import require_usable
from ssl_sec.training.config import RayConfig

logger = logging.getLogger("ssl_sec")

# Makes the function that computes a part on a device: called with the part's number, it returns the number of rows. The
# other function takes numbers of finished images.
Start = Callable[[torch.device, Callable[[int], object]], Callable[[int], int]]


def done_with_ray(start: Start, parts: Sequence[int], options: RayConfig, job: str) -> Iterator[int]:
    """Computes the parts on the workers of a cluster; yields the results in the order in which they are ready.

    A worker that dies is restarted, and its part is computed again.

    Args:
        start: it is sent to the workers; finished images are not counted there.
        parts: the numbers of the parts.
        options: options of the runtime.
        job: name of the job in Ray's dashboard.

    Raises:
        ConfigError: if the cluster is too small.
        UserError: the error of a part, or of the start on a worker, as where its node lacks the images.
    """
    connect(options.address, job)
    scaling = make_scaling(options, node_resources())
    logger.info("starting %s", describe_workers(scaling))
    count = scaling.num_workers
    least, most = count if isinstance(count, tuple) else (count, count)
    most = min(most, len(parts))
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # the job has its own progress bar
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors of workers are raised here
    done = ray.data.from_items([{"part": part} for part in parts], override_num_blocks=len(parts)).map_batches(
        _Worker,
        fn_constructor_args=(ray.put(start), scaling.use_gpu, os.getcwd()),
        batch_size=1,
        compute=ActorPoolStrategy(min_size=min(least, most), max_size=most),
        num_gpus=1 if scaling.use_gpu else 0,
        num_cpus=cast(dict[str, float], scaling.resources_per_worker)["CPU"],
    )
    for row in done.iter_rows():
        if row["mistake"]:
            raise pickle.loads(row["mistake"])
        yield int(row["rows"])


class _Worker:
    """An actor of Ray Data; its work starts with its first part, so that an error of the user can be returned."""

    def __init__(self, start: "ray.ObjectRef[Start]", use_gpu: bool, folder: str) -> None:
        # Ray starts workers in another folder; paths of a configuration are relative to the driver's folder.
        with contextlib.suppress(OSError):  # it may not exist on another machine
            os.chdir(folder)
        self._device = torch.device("cuda" if use_gpu else "cpu")
        self._start = partial(ray.get(start), self._device, lambda count: None)

    @cached_property
    def _work(self) -> Callable[[int], int]:
        require_usable(self._device)
        return self._start()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Computes the part of a batch of one; returns an error of the user as a value, since Ray would wrap it."""
        (part,) = batch["part"]
        try:
            return {"rows": [self._work(int(part))], "mistake": [b""]}
        except Exception as error:
            mistake = error if isinstance(error, UserError) else out_of_memory(error) or out_of_space(error)
            if mistake is None:
                raise
            return {"rows": [0], "mistake": [pickle.dumps(mistake)]}
