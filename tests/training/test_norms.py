import dataclasses
import json

import numpy as np
import pytest
import torch

from ssl_sec.training.norms import NormHistogram, norm_histogram


def test_a_norm_histogram_counts_every_norm_and_survives_json():
    norms = 10 + torch.randn(500, generator=torch.Generator().manual_seed(0))
    histogram = norm_histogram(norms, step=7, num_bins=12)
    assert (histogram.step, len(histogram.counts), sum(histogram.counts)) == (7, 12, 500)
    expected, edges = np.histogram(norms.double().numpy(), bins=12)
    assert histogram.counts == expected.tolist()
    assert histogram.edges == pytest.approx(edges.tolist())
    assert NormHistogram(**json.loads(json.dumps(dataclasses.asdict(histogram)))) == histogram


def test_norms_that_are_not_finite_are_left_out():
    assert sum(norm_histogram(torch.tensor([1.0, torch.nan, torch.inf, 2.0]), step=0).counts) == 2
    assert sum(norm_histogram(torch.full((3,), torch.nan), step=0).counts) == 0


def test_a_histogram_needs_one_edge_more_than_bins():
    with pytest.raises(AssertionError, match="one edge more"):
        NormHistogram(0, [0.0, 1.0], [1, 2])
