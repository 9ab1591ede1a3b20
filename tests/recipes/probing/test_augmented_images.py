"""Probes that train on new crops and flips in every epoch."""

import dataclasses

import torch
from torch import nn

from ssl_sec.recipes.probing import recipe as probing
from tests.fakes import FakeRuntime
from tests.recipes.probing.test_probing import QUICK, probe


def test_a_probe_on_augmented_images_scores_sensibly():
    runtime = FakeRuntime()
    findings = probe(config=dataclasses.replace(QUICK, augment=True), runtime=runtime)
    assert 0.3 < findings.probe.top1 <= 1
    losses = list(runtime.series("probe/loss").values())
    assert losses[7] < losses[0]


class Brightness(nn.Module):
    """One feature of an image, the mean of its pixels, which flips do not change."""

    def forward(self, images):
        return images.mean((1, 2, 3)).unsqueeze(1)


def augmented_features(monkeypatch, encoder=None, **settings):
    """The features of epochs 0, 1 and 0 again that a probe of 30 images trains on."""
    batches = []
    train = probing.train_linear_probes

    def spy(feature_batches, *arguments, **options):
        batches.append([torch.cat([rows for rows, _ in feature_batches(epoch)]) for epoch in (0, 1, 0)])
        return train(feature_batches, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(probing, "train_linear_probes", spy)
        probe(encoder, dataclasses.replace(QUICK, epochs=1, augment=True, labels_per_class=3, **settings))
    return batches[0]


def test_augmented_images_are_redrawn_in_every_epoch(monkeypatch):
    first, second, again = augmented_features(monkeypatch)
    assert torch.equal(first, again)
    assert not torch.equal(first.sort(0).values, second.sort(0).values)


def test_crops_of_the_whole_image_keep_its_brightness(monkeypatch):
    def change(min_scale):
        first, second, _ = augmented_features(monkeypatch, Brightness(), min_scale=min_scale)
        return float((first.sort(0).values - second.sort(0).values).abs().mean())

    assert change(1.0) < 1e-6
    assert change(0.08) > 0.01


def test_small_sets_make_one_batch():
    findings = probe(config=dataclasses.replace(QUICK, augment=True, labels_per_class=1, epochs=3))
    assert findings.probe.top1 > 0.1
