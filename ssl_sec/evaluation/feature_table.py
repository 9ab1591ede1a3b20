"""Features and labels of images, which each worker holds, or of which each worker holds a part."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ssl_sec.collectives import own_rows, sum_over_workers
from ssl_sec.evaluation.arrays import tiles

LabelledRows = tuple[Float[Tensor, "images dim"], Int64[Tensor, " images"]]

# Largest number of values that are computed or exchanged at once: 64 MiB in float32.
VALUES_AT_ONCE = 2**24


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """One row of features and one label for each image.

    Where the rows are divided among the workers, all workers call `at` and iterate over `parts` together.

    Attributes:
        features: the rows that this worker holds: all, or a part without gaps.
        labels: class of each image, of all images.
        first: place of the first of this worker's rows.
        is_divided: whether the other workers hold the other rows.
    """

    features: Float[Tensor, "own dim"]
    labels: Int64[Tensor, " images"]
    first: int = 0
    is_divided: bool = False

    def __len__(self) -> int:
        """The number of images."""
        return len(self.labels)

    @property
    def dim(self) -> int:
        """The width of the features."""
        return self.features.shape[1]

    @property
    def rows(self) -> LabelledRows:
        """Features and labels of all images, of a table that each worker holds."""
        assert not self.is_divided
        return self.features, self.labels

    def at(self, places: Int64[Tensor, " images"]) -> LabelledRows:
        """Features and labels of the images at some places, in that order, on every worker."""
        labels = self.labels[places.to(self.labels.device)]
        places = places.to(self.features.device) - self.first
        if not self.is_divided:
            return self.features[places], labels
        is_own = (places >= 0) & (places < len(self.features))
        found = self.features.new_zeros(len(places), self.dim)
        found[is_own] = self.features[places[is_own]]
        return sum_over_workers(found), labels

    def parts(self, size: int) -> Iterator[LabelledRows]:
        """Features and labels of `size` images after the others, on every worker; views where it holds all."""
        for some in tiles(len(self), size):
            yield (
                self.at(torch.arange(some.start, some.stop))
                if self.is_divided
                else (self.features[some], self.labels[some])
            )

    def share(self) -> LabelledRows:
        """Features and labels of this worker's share of the images: each image is in the share of one worker."""
        if self.is_divided:
            return self.features, self.labels[self.first : self.first + len(self.features)]
        return self.features[own_rows(len(self))], self.labels[own_rows(len(self))]

    def between(self, start: int, stop: int) -> "FeatureTable":
        """The images from `start` up to, without, `stop`, as views."""
        begin, end = (min(max(place - self.first, 0), len(self.features)) for place in (start, stop))
        return FeatureTable(
            self.features[begin:end], self.labels[start:stop], self.first + begin - start, self.is_divided
        )

    def only(self, is_chosen: Bool[Tensor, " images"]) -> "FeatureTable":
        """The chosen images, as a copy."""
        own = self.features[is_chosen[self.first : self.first + len(self.features)]]
        return FeatureTable(own, self.labels[is_chosen], int(is_chosen[: self.first].sum()), self.is_divided)


def rows_at_once(values: int) -> int:
    """The number of images that are handled at once if each has this many values; 1 or more."""
    return max(1, VALUES_AT_ONCE // values)
