import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from ssl_sec.batch import Batch
from ssl_sec.collectives import rank, world_size
from ssl_sec.data.samplers import worker_rows
from ssl_sec.evaluation.classification import online_probe
from ssl_sec.evaluation.classification.online_probe import OnlineProbe
from tests.fakes import assert_identical
from tests.workers import on_workers

NUM_CLASSES, DIM, IMAGES, STEPS = 4, 6, 24, 5
LEFT_OUT = torch.tensor([3, 7, 22])


def drawn(step=0):
    """Features of two views of 24 images in float64, around a centre for each class, and the images."""
    generator = torch.Generator().manual_seed(step)
    centres = torch.randn(NUM_CLASSES, DIM, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    labels = torch.arange(IMAGES) % NUM_CLASSES
    noise = torch.randn(2 * IMAGES, DIM, generator=generator, dtype=torch.float64)
    pixels = torch.zeros(IMAGES, 1, 1, 1, dtype=torch.uint8)
    return centres[labels.repeat(2)] + noise, Batch(images=pixels, labels=labels, indices=torch.arange(IMAGES))


def probe():
    return OnlineProbe(DIM, NUM_CLASSES, LEFT_OUT).double()


def trained(steps=STEPS, scale=1.0, shift=0.0):
    found = probe()
    for step in range(steps):
        features, batch = drawn(step)
        found.update(scale * features + shift, batch)
    return found


def test_steps_are_torchs_sgd_on_the_images_that_are_not_left_out():
    classifier = nn.Linear(DIM, NUM_CLASSES, dtype=torch.float64)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    optimiser = torch.optim.SGD(classifier.parameters(), online_probe._LEARNING_RATE, momentum=online_probe._MOMENTUM)
    for step in range(STEPS):
        features, batch = drawn(step)
        variance, mean = torch.var_mean(features, 0, correction=0)
        rows = (features - mean) / (DIM * (variance + 1e-5)).sqrt()
        kept = ~torch.isin(batch.indices, LEFT_OUT).repeat(2)
        optimiser.zero_grad()
        functional.cross_entropy(classifier(rows[kept]), batch.labels.repeat(2)[kept]).backward()
        optimiser.step()
    found = trained()
    torch.testing.assert_close(found.weight, classifier.weight.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.bias, classifier.bias.detach(), rtol=1e-10, atol=1e-12)


def test_labels_of_the_images_left_out_have_no_effect():
    features, batch = drawn()
    first, second = probe(), probe()
    first.update(features, batch)
    others = batch.labels.clone()
    others[LEFT_OUT] = (others[LEFT_OUT] + 1) % NUM_CLASSES
    second.update(features, Batch(images=batch.images, labels=others, indices=batch.indices))
    assert_identical(dict(first.state_dict()), dict(second.state_dict()))


def test_a_batch_of_images_left_out_alone_changes_nothing():
    features, batch = drawn()
    only = Batch(images=batch.images[LEFT_OUT], labels=batch.labels[LEFT_OUT], indices=LEFT_OUT)
    found = probe()
    found.update(features[:6], only)
    assert found.weight.eq(0).all() and found.bias.eq(0).all()


def test_a_probe_that_leaves_out_other_images_starts_anew(caplog):
    state = trained().state_dict()
    other = OnlineProbe(DIM, NUM_CLASSES, torch.tensor([3, 7])).double()
    other.load_state_dict(state)
    assert not other.weight.any() and "the online probe starts anew" in caplog.text
    same = probe()
    same.load_state_dict(state)
    assert_identical(same.state_dict(), state)
    older = {name: value for name, value in state.items() if name != "left_out"}
    same = probe()
    same.load_state_dict(older)
    assert_identical(same.state_dict(), state)


def test_the_features_get_no_gradient():
    features, batch = drawn()
    features.requires_grad_()
    found = probe()
    found.update(features, batch)
    assert features.grad is None and not found.weight.requires_grad


@given(scale=st.floats(0.1, 1e4), shift=st.floats(-100, 100))
def test_scale_and_shift_of_the_features_have_no_effect(scale, shift):
    torch.testing.assert_close(trained(scale=scale, shift=shift).weight, trained().weight, rtol=2e-2, atol=2e-3)


@given(columns=st.integers(1, 64), seed=st.integers(0, 2**31))
@settings(max_examples=40)  # of fifty steps each
def test_the_probe_is_stable_for_any_features(columns, seed):
    """As many equal columns as there may be: the greatest curvature."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (IMAGES,), generator=generator)
    pixels = torch.zeros(IMAGES, 1, 1, 1, dtype=torch.uint8)
    features = torch.randn(IMAGES, 1, generator=generator, dtype=torch.float64).expand(-1, columns)
    found = OnlineProbe(columns, NUM_CLASSES, torch.tensor([IMAGES])).double()
    for _ in range(50):
        found.update(features, Batch(images=pixels, labels=labels, indices=torch.arange(IMAGES)))
    assert found.velocity.abs().max() < 0.2


def test_the_probe_learns_and_is_measured_on_other_images():
    found = trained(60)
    features, batch = drawn(1000)
    shown, others = features[:IMAGES], 3 * drawn(1001)[0] + 5
    mean, std = others.mean(0), (others.var(0, correction=0) + 1e-5).sqrt()
    predicted = ((shown - mean) / std @ found.weight.T / DIM**0.5 + found.bias).argmax(1)
    expected = float((predicted == batch.labels).double().mean())
    assert found.top1(shown, batch.labels, others) == pytest.approx(expected)
    assert found.top1(3 * shown + 5, batch.labels, others) > 0.7


def test_an_untrained_probe_has_accuracy_0():
    features, batch = drawn()
    assert probe().top1(features[:IMAGES], batch.labels, features) == 0


def on_own_rows():
    rows = worker_rows(IMAGES, rank(), world_size())
    found = probe()
    for step in range(STEPS):
        features, batch = drawn(step)
        own = torch.cat([view[rows] for view in features.split(IMAGES)])
        found.update(own, Batch(images=batch.images[rows], labels=batch.labels[rows], indices=batch.indices[rows]))
    return dict(found.state_dict())


@pytest.mark.distributed
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_workers_trains_the_same(tmp_path, workers):
    alone = on_own_rows()
    for state in on_workers(workers, tmp_path, on_own_rows):
        assert state.keys() == alone.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-10, atol=1e-12)
