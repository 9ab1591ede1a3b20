"""A batch: images with their labels and their indices in the data set."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A worker's rows of one global batch.

    Attributes:
        images: pixels, 0-255; of images whose views are cut as they are decoded (`ssl_sec.data.crops.ViewCrops`), the
            pixels of all parts in one dimension.
        labels: class of each image, ≥ 0.
        indices: position of each image in its data set.
    """

    images: UInt8[Tensor, "batch channels height width"] | UInt8[Tensor, "batch values"]
    labels: Int64[Tensor, " batch"]
    indices: Int64[Tensor, " batch"]

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; the copy overlaps with work there if the memory is pinned."""
        return self._each(lambda values: values.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory (called by the data loader)."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(images=change(self.images), labels=change(self.labels), indices=change(self.indices))
