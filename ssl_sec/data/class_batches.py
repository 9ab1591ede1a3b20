"""Batches composed by class: the images of step t as a function of (seed, t) alone.

Unlike in `samplers`, an epoch is not a pass over the images: each step draws anew, so that the steps between two uses
of an image vary. An epoch has as many steps as a pass would have.

Draws without replacement are partial Fisher-Yates shuffles that store only the moved cards: k cards out of n take time
and memory of k. The random numbers are the finaliser of splitmix64 at consecutive counters, the same on every machine
and version.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_sec.data.samplers import check_batch_size
from ssl_sec.errors import ConfigError, DataError, counted
from ssl_sec.seeding import derived_seed, mix

# Random numbers that are computed at once; a batch takes some hundreds.
NUMBERS_PER_BLOCK = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class _BatchesByClass:
    """The common fields of both samplers.

    Attributes:
        labels: class of each image, on the CPU, ≥ 0.
        global_batch_size: images of one step over all workers.
        seed: seed of the draws, any integer.
    """

    labels: Int64[Tensor, " images"]
    global_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if len(self._sizes) < 2:
            raise DataError(f"{len(self._sizes)} class found in the labels; batches by class need two or more")
        check_batch_size(self.global_batch_size, len(self.labels), any_fits=False)

    @property
    def steps_per_epoch(self) -> int:
        """⌊images / global_batch_size⌋: as in a pass, although some images come twice and some not at all."""
        return len(self.labels) // self.global_batch_size

    @cached_property
    def _by_class(self) -> Int64[Tensor, " images"]:
        """The images, sorted by class."""
        return self.labels.argsort(stable=True)

    @cached_property
    def _sizes(self) -> list[int]:
        """Number of images of each class that has any; a class is identified by its place here."""
        return self.labels.unique(return_counts=True)[1].tolist()

    @cached_property
    def _starts(self) -> list[int]:
        """Index in `_by_class` where each class begins."""
        return [0, *itertools.accumulate(self._sizes)][:-1]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassBatches(_BatchesByClass):
    """C classes and K images of each, where C · K = `global_batch_size` (SEC, appendix B.1).

    The C classes are distinct, drawn uniformly among those that have images, and so are the K images of a
    class. If a class has only n < K images, they are repeated, each ⌊K / n⌋ or ⌈K / n⌉ times. The rows of a class
    are adjacent.

    K = 2 is the sampling of the N-pair loss, and that of Triplet-II in the angular loss's paper (sections 3.3, 4.2).

    Attributes:
        images_per_class: number K of images of each class.

    Raises:
        ConfigError: K does not divide the batch, or leaves fewer than two classes or more than there are; the
            message lists the valid values.
        DataError: there is only one class.
    """

    images_per_class: int

    def __post_init__(self) -> None:
        super().__post_init__()
        batch, num_classes = self.global_batch_size, len(self._sizes)
        allowed = [k for k in range(1, batch) if batch % k == 0 and batch // k <= num_classes]
        if self.images_per_class not in allowed:
            listed = ", ".join(map(str, allowed)) or "none; change global_batch_size"
            raise ConfigError(
                f"sampler.images_per_class = {self.images_per_class} with global_batch_size = {batch} and "
                f"{counted(num_classes, 'class')}; a batch has equal shares of two or more different classes; "
                f"allowed: {listed}"
            )

    def indices(self, step: int) -> Int64[Tensor, " global_batch"]:
        """The images of global step `step` ≥ 0: 0 ≤ index < images, on the CPU."""
        numbers = _random_numbers(derived_seed(self.seed, "classes", step))
        classes = _Deck(len(self._sizes), numbers)
        places: list[int] = []
        for _ in range(self.global_batch_size // self.images_per_class):
            chosen = classes.deal()
            deck = _Deck(self._sizes[chosen], numbers)
            images = [self._starts[chosen] + deck.deal() for _ in range(min(self.images_per_class, deck.left))]
            places += itertools.islice(itertools.cycle(images), self.images_per_class)
        return self._by_class[torch.tensor(places)]


@dataclass(frozen=True, kw_only=True, eq=False)
class TripletBatches(_BatchesByClass):
    """Disjoint triplets: Triplet-I of the angular loss's paper (Wang et al., 2017, Fig. 4a and section 4.2).

    Rows 3i, 3i + 1 and 3i + 2 are an anchor, a positive of its class and a negative of another one. No two rows of a
    batch are the same image, while a class may be in several triplets. The paper does not say how a triplet is drawn:
    here the anchor's class is drawn uniformly among those with two images not yet in the batch, then the negative's
    among the others with one, then the images.

    Raises:
        ConfigError: the batch is no multiple of 3, or so large that some order of drawing runs out of images.
        DataError: there is only one class.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # Before the last triplet, B - 3 images are taken. Two of one class are left if more images are left than there
        # are classes, and one of another class if there are more than B - 3 images outside of the largest.
        num_images = len(self.labels)
        largest_batch = num_images - max(len(self._sizes), max(self._sizes)) + 2
        if self.global_batch_size % 3 != 0 or self.global_batch_size > largest_batch:
            raise ConfigError(
                f"global_batch_size = {self.global_batch_size} for disjoint triplets of {num_images} images in "
                f"{len(self._sizes)} classes; allowed: multiples of 3 up to {largest_batch // 3 * 3}"
            )

    def indices(self, step: int) -> Int64[Tensor, " global_batch"]:
        """The images of global step `step` ≥ 0: different ones, 0 ≤ index < images, on the CPU."""
        classes = _Classes(self._sizes, _random_numbers(derived_seed(self.seed, "triplets", step)))
        every = range(len(self._sizes))
        places: list[int] = []
        for _ in range(self.global_batch_size // 3):
            own = classes.choose(self._with_pairs, least_left=2)
            other = classes.choose(every, least_left=1, other_than=own)
            places += [self._starts[chosen] + classes.deal(chosen) for chosen in (own, own, other)]
        return self._by_class[torch.tensor(places)]

    @cached_property
    def _with_pairs(self) -> list[int]:
        """The classes with two images or more."""
        return [place for place, size in enumerate(self._sizes) if size > 1]


class _Classes:
    """A deck of images for each class, created at its first use."""

    def __init__(self, sizes: list[int], numbers: Iterator[int]) -> None:
        self._sizes = sizes
        self._numbers = numbers
        self._decks: dict[int, _Deck] = {}

    def choose(self, classes: Sequence[int], least_left: int, other_than: int | None = None) -> int:
        """A random one of `classes` with `least_left` images or more, but not `other_than`; there must be one."""
        while True:
            chosen = classes[next(self._numbers) % len(classes)]
            if chosen != other_than and self._deck(chosen).left >= least_left:
                return chosen

    def deal(self, chosen: int) -> int:
        """Deals an image of a class; returns its place in the class."""
        return self._deck(chosen).deal()

    def _deck(self, chosen: int) -> "_Deck":
        if chosen not in self._decks:
            self._decks[chosen] = _Deck(self._sizes[chosen], self._numbers)
        return self._decks[chosen]


class _Deck:
    """The numbers below `size` in random order.

    Attributes:
        left: how many numbers have not been dealt.
    """

    def __init__(self, size: int, numbers: Iterator[int]) -> None:
        self.left = size
        self._numbers = numbers
        self._moved: dict[int, int] = {}

    def deal(self) -> int:
        """Deals a number that was not dealt before; `left` must not be 0."""
        place = next(self._numbers) % self.left
        self.left -= 1
        card = self._moved.get(place, place)
        self._moved[place] = self._moved.get(self.left, self.left)
        return card


def _random_numbers(key: int) -> Iterator[int]:
    """An endless stream of numbers, uniform in [0, 2^63)."""
    for first in itertools.count(0, NUMBERS_PER_BLOCK):
        block = mix(torch.arange(first, first + NUMBERS_PER_BLOCK) + key)
        yield from (block & (2**63 - 1)).tolist()
