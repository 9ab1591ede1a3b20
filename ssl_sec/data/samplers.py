r"""The images of step t as a function of (seed, t) alone, in memory of a few batches.

Epoch e of a set of N images is a permutation π_e of {0, …, N-1}, and the global batch of step t holds
π_e(jB), …, π_e(jB + B - 1), where B is the global batch size, S = ⌊N / B⌋ the steps of an epoch,
e = ⌊t / S⌋ and j = t mod S. Different positions give different images because π_e is a bijection, and
π_e is never stored: it is evaluated where it is needed.

A balanced Feistel network permutes {0, …, 4^k - 1}, with the least k for which 4^k ≥ N. A number is
split into halves of k bits, (l, r), and round i maps

    (l, r) ↦ (r, l ⊕ f_i(r)),    f_i(r) = mix(r + key_i) mod 2^k,

which is undone by (r, s) ↦ (s ⊕ f_i(r), r), whatever f_i is: each round is a bijection, hence all of
them. mix is the finaliser of splitmix64 (Steele, Lea and Flood, 2014), and the keys are drawn with it from
(seed, e, i).

Cycle-walking (Black and Rogaway, 2002) restricts that permutation P to {0, …, N-1}: P is applied until the
value is below N. Along the cycle of P that contains x < N, this goes to the next element below N. It ends,
since x itself is on that cycle, and different values stay different, since a cycle has one
predecessor below N for each element below N. As 4^k < 4N, fewer than four applications are expected.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_sec.errors import ConfigError
from ssl_sec.rules import check
from ssl_sec.seeding import mix

NUM_ROUNDS = 10
BATCHES_AT_ONCE = 16
_SEARCHED_AT_ONCE = 4096


@runtime_checkable
class Sampler(Protocol):
    """Chooses the images of step t, for any number of workers."""

    @property
    def global_batch_size(self) -> int:
        """Number of images in one step over all workers."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch: the number of whole batches in the set."""
        ...

    def indices(self, step: int) -> Int64[Tensor, " global_batch"]:
        """The images of global step `step` ≥ 0, on the CPU; a function of the step alone."""
        ...


@dataclass(frozen=True, kw_only=True)
class ShuffledBatches:
    """Global batches of indices; every epoch visits the images in another order.

    The images of an epoch's last, partial batch are left out; these differ between epochs.

    Attributes:
        num_images: number of images, N.
        global_batch_size: number of images in one step over all workers, B ≤ N.
        seed: seed of the order, any int64.

    Raises:
        ConfigError: there are fewer images than a batch holds.
    """

    num_images: int
    global_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        check_batch_size(self.global_batch_size, self.num_images)

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole batches in one pass over the images."""
        return self.num_images // self.global_batch_size

    def indices(self, step: int) -> Int64[Tensor, " global_batch"]:
        """The images of global step `step` ≥ 0: different ones, 0 ≤ index < num_images, on the CPU."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        block, place = divmod(batch, BATCHES_AT_ONCE)
        return _block(self, epoch, block)[place * self.global_batch_size :][: self.global_batch_size].clone()


def check_batch_size(global_batch_size: int, num_images: int, any_fits: bool = True) -> None:
    """Raises a ConfigError if there are fewer images than a batch holds.

    Args:
        global_batch_size: the batch.
        num_images: number of images.
        any_fits: whether any smaller batch fits the sampler, so that a power of two can be suggested.
    """
    suggested = 2 ** (num_images.bit_length() - 1) if num_images > 1 and any_fits else None
    hint = "" if suggested is None or global_batch_size < 1 else f"; set global_batch_size={suggested}"
    allowed = f"1 to {num_images}, the number of images{hint}"
    check(1 <= global_batch_size <= num_images, "global_batch_size", global_batch_size, allowed)


@lru_cache(maxsize=2)
def _block(sampler: ShuffledBatches, epoch: int, block: int) -> Int64[Tensor, " images"]:
    """The images of some consecutive steps, since permuting many numbers takes little longer than permuting a few."""
    images_at_once = BATCHES_AT_ONCE * sampler.global_batch_size
    end = min((block + 1) * images_at_once, sampler.steps_per_epoch * sampler.global_batch_size)
    positions = torch.arange(block * images_at_once, end)
    return permute(positions, sampler.num_images, sampler.seed, epoch)


def worker_rows(global_batch_size: int, rank: int, world_size: int) -> slice:
    """The contiguous rows of every global batch that belong to one worker.

    Raises:
        ConfigError: the workers cannot have equal shares; the message lists the counts that can.
    """
    assert 0 <= rank < world_size
    if global_batch_size % world_size != 0:
        raise ConfigError(
            f"{world_size} workers cannot share global_batch_size = {global_batch_size} equally; "
            f"allowed: {', '.join(map(str, worker_counts(global_batch_size)))} workers"
        )
    rows = global_batch_size // world_size
    return slice(rank * rows, (rank + 1) * rows)


def worker_counts(global_batch_size: int) -> list[int]:
    """The numbers of workers that can share a batch equally, ascending."""
    return [n for n in range(1, global_batch_size + 1) if global_batch_size % n == 0]


def permute(
    positions: Int64[Tensor, " positions"], num_images: int, seed: int, epoch: int
) -> Int64[Tensor, " positions"]:
    """The images at some positions of an epoch's order: the bijection π_e of the module's docstring.

    Args:
        positions: 0 ≤ position < num_images.
        num_images: N, at most 2^62.
        seed: seed of the order, any int64.
        epoch: e ≥ 0.
    """
    half_bits = ((num_images - 1).bit_length() + 1) // 2
    keys = mix(mix(mix(torch.tensor([seed])) + epoch) + torch.arange(NUM_ROUNDS)).tolist()
    images = _feistel(positions, half_bits, keys)
    while (outside := images >= num_images).any():
        images[outside] = _feistel(images[outside], half_bits, keys)
    return images


def _feistel(numbers: Int64[Tensor, " n"], half_bits: int, keys: list[int]) -> Int64[Tensor, " n"]:
    mask = (1 << half_bits) - 1
    left, right = numbers >> half_bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (mix(right + key) & mask)
    return (left << half_bits) | right


def own_class_first(labels: Int64[Tensor, " images"], index: int) -> Iterator[Int64[Tensor, " some"]]:
    """An image, the others of its class from the next one on, and then the rest likewise; the first follows the last.

    They come in parts as they are needed, since a set may have very many images.

    Args:
        labels: class of each image, on the CPU.
        index: the image.
    """
    yield torch.tensor([index])
    for of_own_class in (True, False):
        for start in range(1, len(labels), _SEARCHED_AT_ONCE):
            part = (index + torch.arange(start, min(start + _SEARCHED_AT_ONCE, len(labels)))) % len(labels)
            yield part[(labels[part] == labels[index]) == of_own_class]
