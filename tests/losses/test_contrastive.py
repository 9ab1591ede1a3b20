import math

import lightly.loss
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.losses import NTXentLoss

PAIRS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])


def rows(count=8, dim=5, seed=0):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slowly(embeddings, labels, temperature, anchors=None) -> float:
    """SimCLR's Eq. 1, term by term."""
    embeddings, labels = embeddings.tolist(), labels.tolist()
    count = len(labels)

    def similarity(i, j):
        product = sum(a * b for a, b in zip(embeddings[i], embeddings[j], strict=True))
        return product / (math.hypot(*embeddings[i]) * math.hypot(*embeddings[j]))

    total = 0.0
    for i in range(count) if anchors is None else anchors:
        denominator = sum(math.exp(similarity(i, k) / temperature) for k in range(count) if k != i)
        positives = [j for j in range(count) if labels[j] == labels[i] and j != i]
        terms = [-math.log(math.exp(similarity(i, j) / temperature) / denominator) for j in positives]
        total += sum(terms) / len(terms)
    return total / count


@pytest.mark.parametrize("temperature", [0.07, 0.5, 3.0])
@pytest.mark.parametrize(
    "labels", [PAIRS, torch.tensor([0, 0, 1, 1, 2, 2, 9, 9]), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])]
)
def test_the_value_is_that_of_the_slow_loop(labels, temperature):
    value = NTXentLoss(temperature)(rows(), labels)
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(slowly(rows(), labels, temperature), rel=1e-12)


@given(
    num_images=st.integers(1, 9),
    num_views=st.integers(2, 4),
    dim=st.integers(1, 6),
    temperature=st.floats(0.05, 10),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_the_value_is_that_of_the_slow_loop_for_any_shape(num_images, num_views, dim, temperature, seed):
    embeddings, labels = rows(num_images * num_views, dim, seed), torch.arange(num_images).repeat(num_views)
    value = NTXentLoss(temperature)(embeddings, labels).item()
    assert value == pytest.approx(slowly(embeddings, labels, temperature), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_value_and_gradient_are_lightlys(temperature):
    ours, theirs = rows(64, 16).requires_grad_(), rows(64, 16).requires_grad_()
    value = NTXentLoss(temperature)(ours, torch.arange(32).repeat(2))
    oracle = lightly.loss.NTXentLoss(temperature)(theirs[:32], theirs[32:])
    assert value.item() == pytest.approx(oracle.item(), rel=1e-12)
    value.backward()
    oracle.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)


def test_equal_rows_give_the_logarithm_of_the_number_of_others():
    value = NTXentLoss(0.5)(torch.ones(8, 5), PAIRS)
    assert value.item() == pytest.approx(math.log(7), rel=1e-6)


def test_one_pair_alone_gives_zero():
    assert NTXentLoss(0.5)(rows(2), torch.tensor([3, 3])).item() == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("labels", [PAIRS, torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])])
def test_the_gradient_is_that_of_finite_differences(labels):
    loss = NTXentLoss(0.3)
    assert torch.autograd.gradcheck(lambda embeddings: loss(embeddings, labels), rows().requires_grad_())


def test_the_order_of_rows_changes_nothing():
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    loss = NTXentLoss(0.2)
    assert loss(rows()[order], PAIRS[order]).item() == pytest.approx(loss(rows(), PAIRS).item(), rel=1e-13)


def test_the_scale_of_each_row_changes_nothing():
    scale = torch.logspace(-6, 6, 8, dtype=torch.float64)[:, None]
    loss = NTXentLoss(0.2)
    assert loss(scale * rows(), PAIRS).item() == pytest.approx(loss(rows(), PAIRS).item(), rel=1e-13)


def test_a_rotation_changes_nothing():
    rotation, _ = torch.linalg.qr(rows(5, 5, seed=2))
    loss = NTXentLoss(0.2)
    assert loss(rows() @ rotation, PAIRS).item() == pytest.approx(loss(rows(), PAIRS).item(), rel=1e-13)


def test_new_names_for_the_images_change_nothing():
    loss = NTXentLoss(0.2)
    assert loss(rows(), 7 * PAIRS + 100).item() == loss(rows(), PAIRS).item()


def test_the_gradient_is_orthogonal_to_the_embedding_and_falls_with_its_norm():
    """SEC, Proposition 1 and Eq. 9."""
    loss = NTXentLoss(0.2)

    def gradient(embeddings):
        embeddings = embeddings.requires_grad_()
        return torch.autograd.grad(loss(embeddings, PAIRS), embeddings)[0]

    at_rows = gradient(rows())
    assert at_rows.norm(dim=1).min() > 1e-3
    assert (at_rows * rows()).sum(1).abs().max() < 1e-15
    torch.testing.assert_close(gradient(10 * rows()), at_rows / 10, rtol=1e-10, atol=0)


@pytest.mark.parametrize("cuts", [(0, 8), (0, 1, 8), (0, 2, 4, 6, 8), (0, 3, 3, 8)])
def test_the_shares_of_the_anchors_add_up_to_the_loss(cuts):
    loss = NTXentLoss(0.2)
    whole, parts = rows().requires_grad_(), rows().requires_grad_()
    shares = [loss(parts, PAIRS, anchors=slice(start, stop)) for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]
    for share, start, stop in zip(shares, cuts[:-1], cuts[1:], strict=True):
        assert share.item() == pytest.approx(slowly(rows(), PAIRS, 0.2, range(start, stop)), rel=1e-12, abs=1e-15)
    assert sum(shares).item() == pytest.approx(loss(whole, PAIRS).item(), rel=1e-14)
    sum(shares).backward()
    loss(whole, PAIRS).backward()
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("dead", [[0], [0, 4], list(range(8))])
def test_zero_rows_give_a_finite_value_and_gradient(dead):
    embeddings = rows().float()
    embeddings[dead] = 0
    embeddings.requires_grad_()
    value = NTXentLoss(0.1)(embeddings, PAIRS)
    value.backward()
    assert value.isfinite()
    assert embeddings.grad.isfinite().all()
    assert embeddings.grad.norm() < 100


def test_huge_logits_do_not_overflow():
    value = NTXentLoss(1e-4)(rows().float(), PAIRS)
    assert value.isfinite()
    assert value.item() == pytest.approx(NTXentLoss(1e-4)(rows(), PAIRS).item(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_in_single_precision_under_autocast(dtype):
    embeddings = rows(64, 16).to(dtype)
    labels = torch.arange(32).repeat(2)
    loss = NTXentLoss(0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(embeddings, labels)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(loss(embeddings.double(), labels).item(), rel=1e-6)


def test_a_label_that_occurs_once_is_named():
    with pytest.raises(ValueError, match=r"NT-Xent needs a positive for every row: label 7 occurs once"):
        NTXentLoss()(rows(5), torch.tensor([1, 1, 7, 2, 2]))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature: found"):
        NTXentLoss(temperature)


def test_the_default_is_simclrs_and_is_shown():
    assert repr(NTXentLoss()) == "NTXentLoss(temperature=0.5)"
