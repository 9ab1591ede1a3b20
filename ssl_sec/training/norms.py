"""Histograms of the norms of embeddings, counted in training and drawn by `ssl_sec.figures.training`."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class NormHistogram:
    """The distribution of the embeddings' norms at one step, in plain lists for JSON.

    Attributes:
        step: the global step.
        edges: bounds of the bins, ascending; one more than there are bins.
        counts: number of embeddings in each bin.
    """

    step: int
    edges: list[float]
    counts: list[int]

    def __post_init__(self) -> None:
        assert len(self.edges) == len(self.counts) + 1, "a histogram has one edge more than bins"


def norm_histogram(norms: Float[Tensor, " images"], step: int, num_bins: int = 40) -> NormHistogram:
    """Counts norms in equal bins from the smallest to the largest.

    Args:
        norms: L2 norms of the raw embeddings, ≥ 0; values that are not finite are left out.
        step: global step of the embeddings.
        num_bins: number of bins, ≥ 1.
    """
    values = norms.detach().double().cpu().numpy()
    values = values[np.isfinite(values)]
    low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
    # Bins need a width even if all norms are equal.
    high = max(high, low * 1.001, low + 1e-6)
    counts, edges = np.histogram(values, bins=num_bins, range=(low, high))
    return NormHistogram(step, edges.tolist(), counts.tolist())
