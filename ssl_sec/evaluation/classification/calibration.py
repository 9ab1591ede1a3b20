"""Calibration: whether a classifier is right as often as its confidence says.

Guo et al. 2017, "On Calibration of Modern Neural Networks". The confidence of an image is its highest softmax
probability. With images in bins B of equal width over [0, 1] by confidence, ECE = Σ_B |B| / n · |acc(B) − conf(B)|.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

NUM_BINS = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Confidence and accuracy of a classifier by bins, in plain numbers for JSON.

    Attributes:
        counts: number of images in each of the equal bins over [0, 1].
        confidences: mean confidence in each bin, in [0, 1]; 0 in an empty one.
        accuracies: share of the images in each bin that is classified correctly, in [0, 1]; 0 in an empty one.
    """

    counts: list[int]
    confidences: list[float]
    accuracies: list[float]

    @property
    def ece(self) -> float:
        """The expected calibration error, in [0, 1]; 0 without images."""
        gaps = (
            count * abs(accuracy - confidence)
            for count, confidence, accuracy in zip(self.counts, self.confidences, self.accuracies, strict=True)
        )
        return sum(gaps) / max(sum(self.counts), 1)


def confidences(logits: Float[Tensor, "images classes"]) -> Float64[Tensor, " images"]:
    """The confidence of each image, in [0, 1]: its highest softmax probability, or 1 of a row that is not finite."""
    return torch.where(logits.isfinite().all(1), logits.double().softmax(1).amax(1), 1.0)


def calibration_of(
    confidence: Float64[Tensor, " images"], is_right: Bool[Tensor, " images"], num_bins: int = NUM_BINS
) -> Calibration:
    """The bins of the confidences of images.

    Args:
        confidence: confidence of each image.
        is_right: whether each is classified correctly, as `scores.is_in_top_k` says: not if classes tie.
        num_bins: number of bins, ≥ 1; each is open below and closed above.
    """
    bins = (confidence * num_bins).ceil().long().sub(1).clamp(0, num_bins - 1)
    counts = bins.bincount(minlength=num_bins)
    sums = (bins.bincount(each.double(), minlength=num_bins) for each in (confidence, is_right))
    means = [(each / counts.clamp(min=1)).tolist() for each in sums]
    return Calibration(counts=counts.tolist(), confidences=means[0], accuracies=means[1])
