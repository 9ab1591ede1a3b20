import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssl_sec.losses import (
    CContrastiveLoss,
    CombinedLoss,
    CosFaceLoss,
    CrossEntropyLoss,
    NormFaceLoss,
    SoftmaxLoss,
    normalized_softmax_lower_bound,
)
from ssl_sec.losses.templates.softmax import class_probabilities
from tests.losses.cases import rows


def test_the_bound_is_the_papers_for_casia():
    """NormFace, Section 3.3: 8.27 for 10,575 classes."""
    assert normalized_softmax_lower_bound(10_575, 1.0) == pytest.approx(8.2663, abs=5e-5)


@given(num_classes=st.integers(2, 1000), squared_norm=st.floats(0.0, 200.0))
def test_the_bound_falls_from_the_logarithm_of_the_number_of_classes(num_classes, squared_norm):
    bound = normalized_softmax_lower_bound(num_classes, squared_norm)
    assert 0 <= bound <= math.log(num_classes) * (1 + 1e-12)
    assert normalized_softmax_lower_bound(num_classes, squared_norm + 1) <= bound


def test_the_bound_is_reached_by_templates_that_are_spread_evenly():
    corners = torch.eye(5, dtype=torch.float64) - 1 / 5
    loss = NormFaceLoss(5, 5, scale=7.0).double()
    loss.weight.data = corners
    value = loss(corners, torch.arange(5)).item()
    assert value == pytest.approx(normalized_softmax_lower_bound(5, 7.0), rel=1e-12)


@given(scale=st.floats(0.5, 40.0), seed=st.integers(0, 1000))
def test_no_features_and_templates_have_a_loss_below_the_bound(scale, seed):
    loss = NormFaceLoss(6, 3, scale=scale).double()
    loss.weight.data = rows(6, 3, seed)
    assert loss(loss.weight.detach(), torch.arange(6)).item() >= normalized_softmax_lower_bound(6, scale) - 1e-12


@pytest.mark.parametrize(("num_classes", "reachable_loss"), [(10, 1e-3), (10_575, 1e-3), (85_000, 0.01)])
def test_a_learned_scale_starts_where_the_bound_is_the_stated_loss(num_classes, reachable_loss):
    loss = NormFaceLoss(num_classes, 4, reachable_loss=reachable_loss)
    assert [name for name, _ in loss.named_parameters()] == ["weight", "scale"]
    bound = normalized_softmax_lower_bound(num_classes, loss.scale.item())
    assert bound == pytest.approx(reachable_loss, rel=1e-5)


def test_a_fixed_scale_is_no_parameter():
    assert [name for name, _ in NormFaceLoss(10, 4, scale=30.0).named_parameters()] == ["weight"]


@pytest.mark.parametrize("scale", [1.5, 4.0])
def test_a_longer_row_never_makes_its_class_less_probable_without_a_bias(scale):
    """NormFace, Proposition 1, and why it does not hold with a bias."""
    embeddings = rows(40, 5)
    without, with_bias = (SoftmaxLoss(6, 5, bias=bias).double() for bias in (False, True))
    for loss in (without, with_bias):
        loss.weight.data = rows(6, loss.weight.shape[1], seed=1)
    before, after = (class_probabilities(without, each) for each in (embeddings, scale * embeddings))
    assert torch.equal(before.argmax(1), after.argmax(1))
    assert (after.amax(1) >= before.amax(1)).all()
    before, after = (class_probabilities(with_bias, each) for each in (embeddings, scale * embeddings))
    own = before.argmax(1, keepdim=True)
    assert (after.gather(1, own) < before.gather(1, own)).any()


def test_probabilities_are_those_that_the_loss_takes_without_its_margin():
    embeddings, labels = rows(12, 5), torch.arange(12) % 6
    for loss in (SoftmaxLoss(6, 5, bias=True), NormFaceLoss(6, 5), CosFaceLoss(6, 5, margin=0.0)):
        loss.double().weight.data.normal_(generator=torch.Generator().manual_seed(0))
        own = class_probabilities(CombinedLoss(CContrastiveLoss(6, 5), loss, 1.0), embeddings)[torch.arange(12), labels]
        assert -own.log().mean().item() == pytest.approx(loss(embeddings, labels).item(), rel=1e-10)
    assert class_probabilities(CContrastiveLoss(6, 5), embeddings) is None
    loss.hold(0, loss.weight.detach()[:3], OnlyWorker())  # probabilities of a part of the classes are none
    assert class_probabilities(loss, embeddings) is None


CLASSES_OF_ROWS = torch.tensor([0, 3, 1, 1, 2, 5, 5, 0, 4, 3, 2, 1])


def slow_cross_entropy(rows, labels, smoothing):
    """Term by term from the equation of the module."""
    terms = []
    for row, label in zip(rows, labels, strict=True):
        normaliser = math.log(sum(math.exp(value) for value in row))
        wanted = [smoothing / len(row) + (1 - smoothing) * (k == label) for k in range(len(row))]
        terms.append(-sum(q * (value - normaliser) for q, value in zip(wanted, row, strict=True)))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("sizes", [None, [40, 1, 3, 9, 2, 2]])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_cross_entropy_is_the_slow_loop_and_its_shares_add_up(smoothing, sizes):
    """Balanced by the sizes of the classes, exp f_k is multiplied by n_k (Ren et al. 2020, Eq. 4)."""
    loss, logits = CrossEntropyLoss(smoothing, sizes), 3 * rows(dim=6)
    shifted = [[z + math.log(n) for z, n in zip(row, sizes or [1] * 6, strict=True)] for row in logits.tolist()]
    expected = slow_cross_entropy(shifted, CLASSES_OF_ROWS.tolist(), smoothing)
    assert loss(logits, CLASSES_OF_ROWS).item() == pytest.approx(expected, rel=1e-12)
    shares = [loss(logits, CLASSES_OF_ROWS, anchors=part).item() for part in (slice(0, 5), slice(5, 6), slice(6, 12))]
    assert sum(shares) == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda z: loss(z, CLASSES_OF_ROWS), rows(dim=6).requires_grad_())


def test_cross_entropy_of_equal_logits_is_the_log_of_the_number_of_classes():
    assert CrossEntropyLoss(0.3)(torch.zeros(4, 7), torch.arange(4)).item() == pytest.approx(math.log(7))


def test_any_batch_of_logits_has_something_to_compare():
    assert bool(CrossEntropyLoss().compares(torch.zeros(1, dtype=torch.long)))
    assert not bool(CrossEntropyLoss().compares(torch.zeros(0, dtype=torch.long)))


@pytest.mark.parametrize("label", [-100, -1, 6])
def test_a_label_that_is_no_column_of_the_logits_is_refused(label):
    labels = torch.cat([CLASSES_OF_ROWS[1:], torch.tensor([label])])
    with pytest.raises(ValueError, match=rf"CrossEntropyLoss has 6 classes: found label {label}, must be in \[0, 5\]"):
        CrossEntropyLoss()(rows(dim=6), labels)


def test_no_logits_are_refused():
    with pytest.raises(ValueError, match=r"CrossEntropyLoss needs one row or more: the batch is \[0, 6\]"):
        CrossEntropyLoss()(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))


@pytest.mark.parametrize("sizes", [[], [3, 0], [-1, 2]])
def test_a_class_without_rows_is_refused(sizes):
    with pytest.raises(ValueError, match=r"class_sizes: found \[.*, must be one row or more of each class"):
        CrossEntropyLoss(class_sizes=sizes)


def test_the_sizes_of_the_classes_are_no_part_of_the_state():
    """They are the data's, which a resumed run reads again."""
    assert not CrossEntropyLoss(class_sizes=[3, 2]).state_dict()


@pytest.mark.parametrize(("sizes", "named"), [([4], "1 class"), ([4] * 5, "5 classes")])
def test_sizes_of_another_number_of_classes_than_the_logits_have_are_refused(sizes, named):
    with pytest.raises(ValueError, match=rf"CrossEntropyLoss has the sizes of {named}: the batch is \[12, 6\]"):
        CrossEntropyLoss(class_sizes=sizes)(rows(dim=6), CLASSES_OF_ROWS)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, math.nan])
def test_a_smoothing_outside_its_range_is_refused(smoothing):
    with pytest.raises(ValueError, match="label_smoothing: found "):
        CrossEntropyLoss(smoothing)


class OnlyWorker:
    """The parts of a single worker."""

    def sum(self, values):
        return values

    def highest(self, values):
        return values.detach()


@pytest.mark.parametrize(("factor", "expected"), [(200, 100), (-1e5, 5e4)])
def test_large_logits_are_exact_also_of_sharded_templates(factor, expected):
    loss, templates = SoftmaxLoss(3, 2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    embeddings, labels = factor * torch.tensor([[1.0, 0.5], [0.5, 1.0]]), torch.tensor([0, 1])
    values = []
    for parts in (None, OnlyWorker()):
        loss.hold(0, templates, parts)
        values.append(loss(embeddings, labels).item())
    assert values[0] == values[1] == pytest.approx(expected)
