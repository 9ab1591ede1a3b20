"""The features of a large set are held once."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ssl_sec.evaluation.classification import knn
from ssl_sec.evaluation.classification.linear_probe import shuffled
from ssl_sec.evaluation.feature_table import FeatureTable
from tests.recipes.probing.test_probing import QUICK, Pixels, probe


class Copies(TorchDispatchMode):
    """Counts new tensors with a row for each of many images.

    Args:
        num_images: images from which they are many.
        dim: width of their features.
    """

    def __init__(self, num_images, dim):
        super().__init__()
        self._num_images, self._dim = num_images, dim
        self.storages = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim == 2 and tensor.shape[1] == self._dim:
                if len(tensor) >= self._num_images:
                    self.storages.add(tensor.untyped_storage().data_ptr())
        return made


@pytest.mark.parametrize("options", [{}, {"labels_per_class": 100}, {"few_shot": (5,), "few_shot_draws": 10}])
def test_no_step_copies_the_features(monkeypatch, options):
    """Those of 1,437 images with 64 pixels; kNN and the probe take them in parts."""
    monkeypatch.setattr(knn, "BANK_ROWS", 128)
    with Copies(1000, 64) as large:
        assert probe(Pixels(), replace(QUICK, **options)).knn_top1 > 0.85
    assert len(large.storages) == 1


@pytest.mark.parametrize("batch_size", [7, 100])
def test_chosen_rows_are_trained_on_as_a_copy_of_them_would_be(batch_size):
    features, labels, chosen = torch.randn(200, 5), torch.arange(200), torch.arange(0, 200, 3).flip(0)
    copied = shuffled(FeatureTable(features[chosen], labels[chosen]), batch_size, 1)
    chosen_ones = shuffled(FeatureTable(features, labels), batch_size, 1, chosen)
    for epoch in range(3):
        for ours, theirs in zip(chosen_ones(epoch), copied(epoch), strict=True):
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
