"""Records the GPU launches of a function of tensors once, and replays them (CUDA graphs).

A step of a small network has hundreds of launches, each of which takes the host longer than the GPU. A replay is a
single launch. It repeats the recorded operations on the recorded memory: numbers that change must be tensors, and the
shapes of the inputs are fixed.
"""

import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ssl_sec.errors import first_line

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)

# Calls before the recording, in which networks are compiled, algorithms chosen and optimisers' states created.
WARM_UP_CALLS = 3


@runtime_checkable
class Graphs(Protocol):
    """A recorder of launches."""

    def warm_up(self, function: Callable[[], Result]) -> Result:
        """Calls the function in the way that it will be recorded."""
        ...

    def record(self, function: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Records a call without computing anything; returns its result and a function that computes it."""
        ...


class CUDAGraphs:
    """Records on a stream of its own, as CUDA requires.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def warm_up(self, function: Callable[[], Result]) -> Result:
        """Calls the function on the stream; the device's next operations wait for it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = function()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def record(self, function: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Records a call; its memory is kept for the replays."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the one that pins batches, are not recorded.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            result = function()
        return result, graph.replay


class Replayed(Generic[Result_co]):
    """A function that is replayed from its fourth call on; every call computes once.

    If it cannot be recorded, as when memory is short, every call runs the function itself, after a warning.

    Args:
        function: function of tensors on the device that does not read their values. Later calls overwrite its result.
        graphs: recorder of its launches.
    """

    def __init__(self, function: Callable[..., Result_co], graphs: Graphs) -> None:
        self._function = function
        self._graphs = graphs
        self._calls = 0
        self._inputs: tuple[Tensor, ...] = ()
        self._recorded: tuple[Result_co, Callable[[], None]] | None = None

    def __call__(self, *inputs: Tensor) -> Result_co:
        """The function's result.

        Args:
            inputs: tensors with the same shapes, layouts and types at each call.
        """
        if self._calls == WARM_UP_CALLS:
            self._record(inputs)
        self._calls += 1
        if self._recorded is None:
            return self._graphs.warm_up(lambda: self._function(*inputs))
        for recorded, value in zip(self._inputs, inputs, strict=True):
            recorded.copy_(value)
        result, replay = self._recorded
        replay()
        return result

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = tuple(value.clone() for value in inputs)
        try:
            self._recorded = self._graphs.record(lambda: self._function(*self._inputs))
        except RuntimeError as error:
            self._inputs = ()  # memory may be short
            logger.warning("the steps are not recorded as CUDA graphs: %s", first_line(error))
