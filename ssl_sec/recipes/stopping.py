"""Stops of an evaluation between its parts."""

from collections.abc import Callable
from functools import partial

from ssl_sec.collectives import max_int_over_workers
from ssl_sec.errors import Stopped
from ssl_sec.evaluation.feature_table import FeatureTable
from ssl_sec.training.step import Request, Runtime


def stop_if_requested(runtime: Runtime, *, alone: bool = False) -> None:
    """Ends an evaluation if a stop was requested: a training has its weights in a checkpoint by then, a probe nothing.

    Args:
        runtime: this worker's runtime.
        alone: whether worker 0 alone calls it; otherwise all workers do.

    Raises:
        Stopped: a stop was requested.
    """
    request = runtime.request() if alone else max_int_over_workers(runtime.request(), runtime.device)
    if request == Request.STOP:
        raise Stopped("stopped during an evaluation")


def until_a_stop(extract: Callable[..., FeatureTable], runtime: Runtime) -> Callable[..., FeatureTable]:
    """`feature_table` with a network; a request to stop ends it before a batch of all workers."""
    return partial(extract, before_batch=partial(stop_if_requested, runtime))
