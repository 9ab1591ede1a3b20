r"""The images of step t of a set that is read by blocks, as a function of (seed, t) alone.

The seed and the epoch determine the order of a set's blocks and the image at which reading of each block starts; so
the N images form a sequence, and those outside of whole batches differ between epochs. The B rows of a global batch
belong to L lanes, B / L rows each. With S = ⌊N / B⌋ steps an epoch, lane l takes the images l S B / L, …,
(l + 1) S B / L - 1 of the sequence, and windows of R images in a row are shuffled, W = L R images in all lanes. L is
the largest divisor of B up to 16 for which R is at least the mean size of a block. Windows of different lanes end at
different steps.

So an image is drawn at most once in an epoch; a worker reads the blocks of the lanes of its rows alone, each once, and
holds the blocks of a window of each lane; and any step's images are known without those before. Workers share lanes,
and read the same blocks, where their number does not divide that of the lanes.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_sec.data.samplers import check_batch_size, permute
from ssl_sec.seeding import derived_seed

MOST_LANES = 16
_MOST_TURNED = 1 << 40  # so that sums stay within int64


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockShuffledBatches:
    """Global batches of indices of a set that is read by blocks.

    Attributes:
        sizes: images of each block; the images of a set are numbered block by block.
        global_batch_size: number of images in one step over all workers, B ≤ N.
        window: number of images shuffled at once in all lanes together, W ≥ 1.
        seed: seed of the order, any int64.

    Raises:
        ConfigError: there are fewer images than a batch holds.
    """

    sizes: Int64[Tensor, " blocks"]
    global_batch_size: int
    window: int
    seed: int

    def __post_init__(self) -> None:
        check_batch_size(self.global_batch_size, self._num_images)

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole batches in one pass over the images."""
        return self._num_images // self.global_batch_size

    @cached_property
    def _num_images(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def mean_size(self) -> int:
        """Images of a block in the mean, rounded up."""
        return max(1, math.ceil(self._num_images / max(1, int((self.sizes > 0).sum()))))

    @cached_property
    def num_lanes(self) -> int:
        """L, the number of parts of a batch that are read independently."""
        most = max(1, min(MOST_LANES, self.global_batch_size, self.window // self.mean_size))
        return next(lanes for lanes in range(most, 0, -1) if self.global_batch_size % lanes == 0)

    @property
    def window_of_a_lane(self) -> int:
        """R, the number of images shuffled at once in a lane."""
        return max(self.window // self.num_lanes, 1)

    def indices(self, step: int) -> Int64[Tensor, " global_batch"]:
        """The images of global step `step` ≥ 0: different ones, 0 ≤ index < N, on the CPU."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        rows = self.global_batch_size // self.num_lanes
        taken = range(batch * rows, (batch + 1) * rows)
        places = torch.cat([self._places(epoch, lane, taken) for lane in range(self.num_lanes)])
        order, ends, starts = _blocks_in_order(self, epoch)
        numbers = torch.searchsorted(ends, places, right=True)
        sizes = self.sizes[order[numbers]]
        within = (places - ends[numbers] + derived_seed(self.seed, "turn", epoch) % _MOST_TURNED) % sizes
        return starts[order[numbers]] + within

    def _places(self, epoch: int, lane: int, rows: range) -> Int64[Tensor, " rows"]:
        """The positions in the epoch's sequence of the images of some rows of a lane."""
        size, length = self.window_of_a_lane, self.steps_per_epoch * len(rows)
        shift = lane * size // self.num_lanes
        found: list[Tensor] = []
        for window in range((rows.start + shift) // size, (rows.stop - 1 + shift) // size + 1):
            first, last = max(window * size - shift, 0), min((window + 1) * size - shift, length)
            shuffled = _shuffled(last - first, self.seed, epoch, lane, window)
            found.append(first + shuffled[max(rows.start - first, 0) : rows.stop - first])
        return lane * length + torch.cat(found)


@lru_cache(maxsize=2)
def _blocks_in_order(sampler: BlockShuffledBatches, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks in an epoch's order, the end of each in the sequence, and the number of each block's first image."""
    sizes = sampler.sizes
    order = permute(torch.arange(len(sizes)), len(sizes), derived_seed(sampler.seed, "blocks"), epoch)
    return order, sizes[order].cumsum(0), sizes.cumsum(0) - sizes


@lru_cache(maxsize=4 * MOST_LANES)
def _shuffled(count: int, seed: int, epoch: int, lane: int, window: int) -> Int64[Tensor, " images"]:
    """The numbers 0, …, count - 1 in the shuffled order of a window."""
    return permute(torch.arange(count), count, derived_seed(seed, "window", lane, window), epoch)
