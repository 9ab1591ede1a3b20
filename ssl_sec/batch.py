"""What travels along the flow: images with the labels and the indices that they had in their data set."""

from dataclasses import dataclass

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A worker's rows of one global batch.

    Attributes:
        images: pixels, 0-255.
        labels: class of each image, ≥ 0.
        indices: position of each image in its data set.
    """

    images: UInt8[Tensor, "batch channels height width"]
    labels: Int64[Tensor, " batch"]
    indices: Int64[Tensor, " batch"]

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; the copy overlaps with work there if the memory is pinned."""
        return Batch(
            images=self.images.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            indices=self.indices.to(device, non_blocking=True),
        )

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory (called by the data loader)."""
        return Batch(
            images=self.images.pin_memory(),
            labels=self.labels.pin_memory(),
            indices=self.indices.pin_memory(),
        )
