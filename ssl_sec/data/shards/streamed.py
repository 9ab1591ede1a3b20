"""A set that is read by blocks and may be larger than the memory and the disk."""

import itertools
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_sec.batch import Batch
from ssl_sec.collectives import world_size
from ssl_sec.data.decode import Decoding
from ssl_sec.data.encoded_images import MAX_BAD_IN_A_ROW, Candidate, DecodedImages, first_readable, record_bad
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.log import log_once
from ssl_sec.data.samplers import Sampler, ShuffledBatches
from ssl_sec.data.shards.blocks import BlockReader, Blocks
from ssl_sec.data.shards.order import MOST_LANES, BlockShuffledBatches
from ssl_sec.errors import ConfigError
from ssl_sec.seeding import derived_seed

# Largest number of batches whose blocks are read ahead.
_BATCHES_AHEAD = 16

# A sample of a sorted set may need this many times as many images to be read, so that it has most classes.
_MOST_SAMPLED = 16


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StreamedImages(DecodedImages):
    """Images whose blocks are read when they are needed, and decoded whenever they are read.

    In the order of `BlockShuffledBatches` each block is read once an epoch; in any other order, it is read as often as
    it leaves the memory. An unreadable image is replaced by the next readable one of its block, the first following the
    last. The rows of this set are in ascending order; each image is both a query and in the gallery.

    Attributes:
        reader: reader of the blocks.
        window: number of images shuffled at once.
    """

    reader: BlockReader
    window: int

    def batches(self, global_batch_size: int, seed: int) -> BlockShuffledBatches:
        """The sampler of this set."""
        return BlockShuffledBatches(
            sizes=self._sizes, global_batch_size=global_batch_size, window=self.window, seed=seed
        )

    def sample(self, num_images: int, seed: int) -> Int64[Tensor, " chosen"]:
        """The first `num_images` images, ascending, of just enough blocks drawn by `seed`; all if there are no more."""
        if num_images >= len(self):
            return torch.arange(len(self))
        sizes = self._sizes
        order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(derived_seed(seed, "sample")))
        chosen = order[: int((sizes[order].cumsum(0) < num_images).sum()) + 1].sort().values
        return self._images_of(chosen)[:num_images]

    def sample_of_classes(self, num_images: int, seed: int) -> Int64[Tensor, " chosen"]:
        """`num_images` images, ascending, of blocks drawn by `seed`; all if there are no more.

        Blocks of new classes come first, as in a sorted set each block holds few of them: until nine tenths of the
        classes are seen, if ten images of each are wanted, or `_MOST_SAMPLED` times as many images would be read.
        """
        if num_images >= len(self):
            return torch.arange(len(self))
        sizes, generator = self._sizes, torch.Generator().manual_seed(derived_seed(seed, "sample"))
        ends = sizes.cumsum(0)
        num_wanted = 0.9 * min(len(self.class_names), num_images // 10)
        seen, of_new_classes, others, num_read = set[int](), list[int](), list[int](), 0
        for block in torch.randperm(len(sizes), generator=generator).tolist():
            size, end = int(sizes[block]), int(ends[block])
            if len(seen) < num_wanted and num_read + size <= _MOST_SAMPLED * num_images:
                classes = set(self.labels[end - size : end].tolist())
                if not classes <= seen:
                    seen |= classes
                    of_new_classes.append(block)
                    num_read += size
                    continue
            others.append(block)
        order = torch.tensor(of_new_classes + others)
        num_blocks = max(len(of_new_classes), int((sizes[order].cumsum(0) < num_images).sum()) + 1)
        read = self._images_of(order[:num_blocks])
        return read[torch.randperm(len(read), generator=generator)[:num_images]].sort().values

    def apart(self) -> "StreamedImages":
        """The same images with a separate cache of blocks: reading them does not evict the blocks of the training."""
        return replace(self, reader=BlockReader(self.reader.blocks, self.reader.capacity))

    def read(self, indices: Int64[Tensor, " batch"], draws: Int64[Tensor, " batch"] | None = None) -> Batch:
        """The images at `indices`, on the CPU; `Batch.indices` are those of the images actually read."""
        self.reader.prefetch(self._blocks_of(indices))
        return self._decode(indices, draws)

    def candidates(self, indices: Int64[Tensor, " chosen"]) -> Iterator[Candidate]:
        """The encoded images at `indices`, ascending, with their names; the next block is read ahead.

        Raises:
            DataError: a block cannot be read.
        """
        blocks = self._blocks_of(indices)
        for place, block in enumerate(blocks):
            self.reader.prefetch(blocks[place : place + 2])
            encoded, end = self.reader[block], int(self._ends[block])
            rows = indices if self.rows is None else self.rows[indices]
            is_here = (rows >= end - len(encoded)) & (rows < end)
            for index, row in zip(
                indices[is_here].tolist(), (rows[is_here] - end + len(encoded)).tolist(), strict=True
            ):
                yield index, self.reader.blocks.image_name(block, row), partial(encoded.__getitem__, row)

    def image_name(self, index: int) -> str:
        """The name of an image in errors."""
        row = index if self.rows is None else int(self.rows[index])
        block = int(torch.searchsorted(self._ends, row, right=True))
        return self.reader.blocks.image_name(block, row - int(self._ends[block] - self.reader.blocks.sizes[block]))

    def stream(
        self,
        index_batches: Iterable[tuple[Tensor, Tensor | None]],
        device: torch.device,
        num_threads: int,
        prefetch: int,
    ) -> Iterator[Batch]:
        """A batch for each element of `index_batches`, in that order; blocks and images are prepared ahead.

        Args:
            index_batches: indices and draws of each batch; read ahead by some batches.
            device: device of the batches.
            num_threads: number of threads that decode.
            prefetch: batches that are decoded ahead for each thread, ≥ 1.

        Raises:
            DataError: a block or an image cannot be read; raised at its batch's turn.
        """
        wanted = iter(index_batches)
        ahead: deque[tuple[Tensor, Tensor | None]] = deque()
        decoding: deque[Future[Batch]] = deque()
        most_ahead = most_decoding = 1  # as in half a window, and in two; known after the first batch
        pool = ThreadPoolExecutor(max(num_threads, 1), thread_name_prefix="decode")
        try:
            while True:
                while len(decoding) < most_decoding:
                    for indices, draws in itertools.islice(wanted, max(most_ahead - len(ahead), 0)):
                        most_ahead = max(1, min(_BATCHES_AHEAD, self.window // (2 * len(indices))))
                        most_decoding = max(1, min(prefetch * max(num_threads, 1), 2 * self.window // len(indices)))
                        self.reader.prefetch(self._blocks_of(indices))
                        ahead.append((indices, draws))
                    if not ahead:
                        break
                    decoding.append(pool.submit(self._decode, *ahead.popleft()))
                if not decoding:
                    return
                batch = decoding.popleft().result()
                if device.type == "cuda":
                    batch = batch.pin_memory()
                yield batch.to(device)
        finally:
            for future in decoding:
                future.cancel()
            pool.shutdown(wait=True, cancel_futures=True)

    @cached_property
    def _sizes(self) -> Int64[Tensor, " blocks"]:
        """Images of this set in each block."""
        if self.rows is None:
            return self.reader.blocks.sizes
        ends = torch.searchsorted(self.rows, self._ends)
        return ends.diff(prepend=ends.new_zeros(1))

    @cached_property
    def _ends(self) -> Int64[Tensor, " blocks"]:
        return self.reader.blocks.sizes.cumsum(0)

    def _images_of(self, blocks: Int64[Tensor, " some"]) -> Int64[Tensor, " images"]:
        """The images of this set that are in some blocks, block by block."""
        sizes = self._sizes
        ends = sizes.cumsum(0)
        return torch.cat([torch.arange(int(ends[block] - sizes[block]), int(ends[block])) for block in blocks])

    def _blocks_of(self, indices: Tensor) -> list[int]:
        rows = indices if self.rows is None else self.rows[indices]
        return torch.searchsorted(self._ends, rows, right=True).unique().tolist()

    def _decode(self, indices: Tensor, draws: Tensor | None) -> Batch:
        bad: dict[int, str] = {}
        images = self.empty_batch(len(indices), draws)
        read = indices.clone()
        rows = indices if self.rows is None else self.rows[indices]
        blocks = torch.searchsorted(self._ends, rows, right=True)
        each_draw = [None] * len(indices) if draws is None else draws.tolist()
        # Block by block: a block may be evicted while the thread waits for another.
        for place in blocks.argsort(stable=True).tolist():
            index, block = int(indices[place]), int(blocks[place])
            image, read[place] = self._next_readable(index, block, each_draw[place], bad)
            images.numpy()[place] = image.numpy()  # torch would start its own threads in each decoding thread
        record_bad(self, bad)
        return Batch(images=images, labels=self.labels[read], indices=read)

    def _next_readable(self, index: int, block: int, draw: int | None, bad: dict[int, str]) -> tuple[Tensor, int]:
        encoded, end = self.reader[block], int(self._ends[block])
        numbers = torch.arange(end - len(encoded), end)  # numbers of the block's images among those of all blocks
        first_index = int(numbers[0])
        if self.rows is not None:
            first_index, stop = torch.searchsorted(self.rows, torch.tensor([first_index, end])).tolist()
            numbers = self.rows[first_index:stop]

        def candidates() -> Iterator[Candidate]:
            for offset in range(min(len(numbers), MAX_BAD_IN_A_ROW)):
                place = (index - first_index + offset) % len(numbers)
                row = int(numbers[place]) - (end - len(encoded))
                yield first_index + place, self.reader.blocks.image_name(block, row), partial(encoded.__getitem__, row)

        return first_readable(self, candidates(), draw, bad)


def streamed(
    blocks: Blocks,
    labels: Int64[Tensor, " images"],
    class_names: tuple[str, ...],
    image_shape: tuple[int, int, int],
    name: str,
    description: str,
    *,
    decoding: Decoding,
    window: int,
) -> StreamedImages:
    """A set that is read by blocks; memory holds at most four windows of encoded images, or two blocks if larger."""
    return StreamedImages(
        reader=BlockReader(blocks, capacity=max(4 * window, 2 * int(blocks.sizes.max()))),
        labels=labels,
        class_names=class_names,
        image_shape=image_shape,
        crop=decoding.square,
        value_ranges=decoding.value_ranges,
        name=name,
        description=f"{description}; read by blocks, {window} images shuffled at once",
        window=window,
        on_bad_image=decoding.on_bad_image,
    )


def require_any_order(image_set: ImageSet, purpose: str) -> None:
    """Refuses a set that is read by blocks.

    Args:
        image_set: the images.
        purpose: purpose that reads images in an order of its own.

    Raises:
        ConfigError: the set is read by blocks.
    """
    if isinstance(image_set, StreamedImages):
        needed = f"null: {purpose} reads images in an order of its own"
        raise ConfigError(f"data.shuffle_window: found {image_set.window}, must be {needed}")


def shuffled_batches(image_set: ImageSet, global_batch_size: int, seed: int) -> Sampler:
    """Every image once an epoch, in an order that the seed determines; a set read by blocks is shuffled by windows.

    Raises:
        ConfigError: there are fewer images than a batch holds.
    """
    if isinstance(image_set, StreamedImages):
        sampler = image_set.batches(global_batch_size, seed)
        _warn_of_large_blocks(image_set.name, sampler)
        return sampler
    return ShuffledBatches(num_images=len(image_set), global_batch_size=global_batch_size, seed=seed)


def _warn_of_large_blocks(name: str, sampler: BlockShuffledBatches) -> None:
    """Warns where workers read the same blocks and would not with more lanes, which a larger window has."""
    workers, batch_size, now = world_size(), sampler.global_batch_size, sampler.num_lanes

    def reads(lanes: int) -> float:
        """How often a block is read: by each worker that has rows of its lane."""
        return (lanes + workers - math.gcd(lanes, workers)) / lanes

    more = [lanes for lanes in range(now + 1, MOST_LANES + 1) if batch_size % lanes == 0]
    best = min(more, key=reads, default=now)
    if reads(best) >= reads(now):
        return
    log_once(
        logging.WARNING,
        "%s: blocks of %s images in the mean are too large for data.shuffle_window=%s and %s workers: each is read "
        "about %s times, and %s with a window of %s, or with blocks of %s, such as row groups of Parquet",
        name,
        f"{sampler.mean_size:,}",
        str(sampler.window),
        str(workers),
        f"{reads(now):.3g}",
        "once" if reads(best) == 1 else f"{reads(best):.3g}",
        str(best * sampler.mean_size),
        str(max(sampler.window // best, 1)),
    )
