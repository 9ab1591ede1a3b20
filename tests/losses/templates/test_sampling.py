"""Partial FC: the loss of the drawn classes and the batch's, and the draws."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec import losses
from ssl_sec.collectives import average_parameter_gradients, own_rows, world_size
from ssl_sec.losses import tiles
from ssl_sec.losses.templates.sampling import ClassSample
from ssl_sec.losses.templates.softmax import draw_classes, sample_classes
from ssl_sec.training.class_sharding import draw_templates, held_templates
from ssl_sec.training.objective import Objective
from tests.losses.cases import rows
from tests.workers import on_workers

CPU = torch.device("cpu")
DIM = 5
LOSSES = {
    "softmax": lambda n: losses.SoftmaxLoss(n, DIM, bias=True),
    "l2softmax": lambda n: losses.L2SoftmaxLoss(n, DIM, scale=4.0),
    "modified_softmax": lambda n: losses.ModifiedSoftmaxLoss(n, DIM),
    "normface": lambda n: losses.NormFaceLoss(n, DIM, scale=6.0),
    "sphereface": lambda n: losses.SphereFaceLoss(n, DIM, scale=6.0),
    "cosface": lambda n: losses.CosFaceLoss(n, DIM, scale=6.0),
    "arcface": lambda n: losses.ArcFaceLoss(n, DIM, scale=6.0),
    "sub_centres": lambda n: losses.ArcFaceLoss(n, DIM, scale=6.0, sub_centres=3),
    "magface": lambda n: losses.MagFaceLoss(n, DIM, scale=6.0, least_norm=0.3, greatest_norm=0.9),
    "adaface": lambda n: losses.AdaFaceLoss(n, DIM, scale=6.0),
}


def built(name, num_classes):
    loss = LOSSES[name](num_classes).double()
    loss.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    return loss


def drawn_at(sample, step, held):
    sample.draw(step, held, CPU)
    return {held.start + place for place in sample.places.tolist() if place >= 0}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15)  # of each of ten losses
@given(num_classes=st.integers(3, 30), rate=st.floats(0.01, 0.99), step=st.integers(0, 9), seed=st.integers(0, 99))
def test_it_is_the_loss_with_the_drawn_classes_and_those_of_the_batch_alone(name, num_classes, rate, step, seed):
    batch = rows(8, DIM, seed).requires_grad_()
    labels = torch.randint(num_classes, (8,), generator=torch.Generator().manual_seed(seed))
    sampled = built(name, num_classes)
    sampled.sample_classes(rate, seed)
    sampled.draw_classes(step)
    compared = sorted({*labels.tolist(), *sampled.sample.places.tolist()} - {-1})
    of_part = LOSSES[name](max(2, len(compared))).double()
    of_part.hold(0, sampled.weight.detach()[compared].clone(), None)
    renamed = torch.tensor([compared.index(label) for label in labels.tolist()])

    value, expected = sampled(batch, labels), of_part(batch, renamed)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    of_batch, of_templates = torch.autograd.grad(value, [batch, sampled.weight])
    expected_of_batch, of_compared = torch.autograd.grad(expected, [batch, of_part.weight])
    torch.testing.assert_close(of_batch, expected_of_batch, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(of_templates[compared], of_compared, rtol=1e-6, atol=1e-8)
    others = torch.ones(num_classes, dtype=torch.bool)
    others[compared] = False
    assert not of_templates[others].any()

    shares = [sampled.eval()(batch, labels, anchors) for anchors in (slice(0, 3), slice(3, 8))]
    torch.testing.assert_close(sum(shares), built(name, num_classes).eval()(batch, labels))  # of all classes


@pytest.mark.parametrize("entries", [tiles.TILE_ENTRIES, 20])
def test_the_shares_of_anchors_add_up_also_in_tiles_of_classes(entries, monkeypatch):
    batch, labels = rows(9, DIM, 1).requires_grad_(), torch.arange(9) % 4
    loss = built("cosface", 20)
    sample_classes(loss, 0.2, seed=3)
    draw_classes(loss, step=5)
    found = []
    for parts in ([slice(None)], [slice(0, 2), slice(2, 9)]):
        value = sum(loss(batch, labels, part) for part in parts)
        found.append((value, *torch.autograd.grad(value, [batch, loss.weight])))
        monkeypatch.setattr(tiles, "TILE_ENTRIES", entries)
    torch.testing.assert_close(found[1], found[0])


@given(
    num_classes=st.integers(2, 200),
    rate=st.floats(0.001, 0.999),
    step=st.integers(0, 10**9),
    cuts=st.lists(st.integers(1, 199), max_size=4),
)
def test_workers_together_draw_what_one_worker_draws(num_classes, rate, step, cuts):
    sample = ClassSample(num_classes, rate, seed=7)
    whole = drawn_at(sample, step, range(num_classes))
    assert len(whole) == sample.num_drawn
    edges = sorted({0, *(cut for cut in cuts if cut < num_classes), num_classes})
    parts = [drawn_at(sample, step, range(*held)) for held in zip(edges, edges[1:], strict=False)]
    assert set.union(*parts) == whole
    assert sum(map(len, parts)) == len(whole)
    num_places = len(sample.places)
    drawn_at(sample, step + 1, range(edges[-2], num_classes))
    assert len(sample.places) == num_places  # no other number of columns in another step


def test_every_class_is_drawn_as_often_as_the_rate_says():
    sample = ClassSample(50, 0.3, seed=0)
    drawn = torch.zeros(50)
    for step in range(2000):
        drawn[list(drawn_at(sample, step, range(50)))] += 1
    assert ((drawn / 2000 - 0.3).abs() < 0.04).all()  # four standard deviations
    assert drawn_at(sample, 0, range(50)) != drawn_at(ClassSample(50, 0.3, seed=1), 0, range(50))


def test_a_rate_of_one_compares_with_all_and_a_rate_of_zero_is_refused():
    loss = built("cosface", 6)
    loss.sample_classes(1.0, seed=0)
    loss.draw_classes(step=0)
    assert loss.sample is None
    with pytest.raises(ValueError, match="rate: found 0"):
        loss.sample_classes(0.0, seed=0)


def test_a_step_without_a_draw_is_an_error():
    loss = built("arcface", 6)
    loss.sample_classes(0.5, seed=0)
    with pytest.raises(RuntimeError, match=r"ArcFaceLoss: no classes were drawn; before each step call draw_classes"):
        loss(rows(4, DIM), torch.arange(4))


def gradients(sharded):
    """The loss, and the gradients of this worker's rows and templates, as a network and an optimiser get them."""
    loss = losses.CosFaceLoss(23, DIM, scale=6.0)
    draw_templates(loss, 3, sharded)
    loss.weight.data *= 30
    sample_classes(loss, 0.3, seed=1)
    objective = Objective(loss, losses.SphericalConstraint(), 0.1).double()
    average_parameter_gradients(objective, [each.rows for each in held_templates(objective).values()])
    draw_classes(loss, step=2)
    batch, labels = rows(12, DIM).requires_grad_(), torch.tensor([0, 3, 3, 22, 11, 7, 0, 9, 15, 2, 2, 17])
    own = own_rows(12)
    total = objective(batch[own], labels[own], step=2).total
    total.backward()
    return total.item(), batch.grad[own] / world_size(), loss.weight.grad


@pytest.mark.distributed
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_have_the_gradients_of_one(tmp_path, sharded, num_workers):
    value, of_rows, of_templates = gradients(sharded=False)
    parts = on_workers(num_workers, tmp_path, gradients, sharded)
    assert [part[0] for part in parts] == pytest.approx([value] * num_workers, rel=1e-12)
    found = torch.cat([part[1] for part in parts])
    torch.testing.assert_close(found, of_rows, rtol=1e-9, atol=1e-12)
    found = torch.cat([part[2] for part in parts]) if sharded else parts[-1][2]
    torch.testing.assert_close(found, of_templates, rtol=1e-9, atol=1e-12)
