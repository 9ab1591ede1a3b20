"""Blocks of encoded images, read as a whole: the next ones ahead in threads, with few of them in memory."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, runtime_checkable

from jaxtyping import Int64
from torch import Tensor

from ssl_sec.errors import DataError, MissingDataError

logger = logging.getLogger("ssl_sec.data")

# Seconds before each new attempt to read a block; a missing or damaged file is not tried again.
RETRY_AFTER_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_READERS = 8


@runtime_checkable
class Blocks(Protocol):
    """Encoded images in blocks, for example the row groups of Parquet files."""

    @property
    def sizes(self) -> Int64[Tensor, " blocks"]:
        """Images of each block."""
        ...

    def image_name(self, block: int, row: int) -> str:
        """The name of an image in errors."""
        ...

    def read(self, block: int) -> Sequence[bytes]:
        """The encoded images of a block, in order; empty bytes where there is none.

        Raises:
            DataError: the file cannot be read; the message names it in one line.
        """
        ...


class BlockReader:
    """Reads blocks in threads, each once while it is needed, and keeps those that were used last.

    Args:
        blocks: blocks of images.
        capacity: number of images in memory, besides the block that was read last.
    """

    def __init__(self, blocks: Blocks, capacity: int) -> None:
        self.blocks = blocks
        self.capacity = capacity
        self._kept: OrderedDict[int, Future[Sequence[bytes]]] = OrderedDict()
        self._num_kept = 0  # images
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Starts to read those of the blocks that are not in memory."""
        for number in numbers:
            self._future(number)

    def __getitem__(self, number: int) -> Sequence[bytes]:
        """The encoded images of a block; waits until it is read.

        Raises:
            DataError: the block cannot be read.
        """
        try:
            return self._future(number).result()
        except DataError:
            with self._lock:  # so that a later call tries again
                if self._kept.pop(number, None) is not None:
                    self._num_kept -= int(self.blocks.sizes[number])
            raise

    def _future(self, number: int) -> Future[Sequence[bytes]]:
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
            self._num_kept += int(self.blocks.sizes[number])
            while self._num_kept > self.capacity and self._kept:
                oldest, _ = self._kept.popitem(last=False)
                self._num_kept -= int(self.blocks.sizes[oldest])
            self._pool = self._pool or ThreadPoolExecutor(_READERS, thread_name_prefix="read-blocks")
            self._kept[number] = self._pool.submit(self._read, number)
            return self._kept[number]

    def _read(self, number: int) -> Sequence[bytes]:
        for wait_s in RETRY_AFTER_S:
            try:
                return self.blocks.read(number)
            except MissingDataError:
                raise
            except DataError as error:
                if _is_damage(error):
                    raise
                logger.warning("%s; trying again in %g s", error, wait_s)
                time.sleep(wait_s)
        return self.blocks.read(number)


def _is_damage(error: DataError) -> bool:
    """Whether the content of a file is wrong: Arrow's errors about it have no number, unlike those of the system."""
    cause = error.__cause__
    return isinstance(cause, ValueError | NotImplementedError) or (type(cause) is OSError and cause.errno is None)
