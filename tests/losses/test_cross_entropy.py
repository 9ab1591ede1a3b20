import math

import pytest
import torch

from ssl_sec.losses import CrossEntropyLoss
from tests.losses.cases import rows

LABELS = torch.tensor([0, 3, 1, 1, 2, 5, 5, 0, 4, 3, 2, 1])


def slow_cross_entropy(rows, labels, smoothing):
    """Term by term from the equation of the module."""
    terms = []
    for row, label in zip(rows, labels, strict=True):
        normaliser = math.log(sum(math.exp(value) for value in row))
        wanted = [smoothing / len(row) + (1 - smoothing) * (k == label) for k in range(len(row))]
        terms.append(-sum(q * (value - normaliser) for q, value in zip(wanted, row, strict=True)))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_it_is_the_slow_loop_and_its_shares_add_up(smoothing):
    loss, logits = CrossEntropyLoss(smoothing), 3 * rows(dim=6)
    expected = slow_cross_entropy(logits.tolist(), LABELS.tolist(), smoothing)
    assert loss(logits, LABELS).item() == pytest.approx(expected, rel=1e-12)
    shares = [loss(logits, LABELS, anchors=part).item() for part in (slice(0, 5), slice(5, 6), slice(6, 12))]
    assert sum(shares) == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda z: loss(z, LABELS), rows(dim=6).requires_grad_())


def test_equal_logits_cost_the_logarithm_of_the_number_of_classes():
    assert CrossEntropyLoss(0.3)(torch.zeros(4, 7), torch.arange(4)).item() == pytest.approx(math.log(7))


def test_any_batch_has_something_to_compare():
    assert bool(CrossEntropyLoss().compares(torch.zeros(3, dtype=torch.long)))
    assert not bool(CrossEntropyLoss().compares(torch.zeros(0, dtype=torch.long)))


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, math.nan])
def test_a_smoothing_outside_its_range_is_refused(smoothing):
    with pytest.raises(ValueError, match="label_smoothing: found "):
        CrossEntropyLoss(smoothing)
