import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from ssl_sec.evaluation.faces.quality import pair_quality, quality_auc, refused_after_discards
from ssl_sec.evaluation.faces.roc import accepted_at_far, tar_at_far


@st.composite
def refusals(draw):
    """Few different qualities, so that ties are common."""
    count = draw(st.integers(1, 30))
    refused = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    quality = draw(st.lists(st.integers(-4, 4), min_size=count, max_size=count))
    return torch.tensor(quality, dtype=torch.float32) / 4, torch.tensor(refused)


def test_the_quality_of_a_pair_is_the_lesser_norm():
    first = torch.tensor([[3.0, 4.0], [1.0, 0.0], [math.nan, 0.0], [math.inf, 0.0], [math.inf, 0.0]])
    second = torch.tensor([[0.0, 6.0], [0.0, 0.5], [1.0, 0.0], [2.0, 0.0], [math.inf, 0.0]])
    assert pair_quality(first, second).tolist() == [5.0, 0.5, *[-math.inf] * 3]


@given(refusals())
def test_the_rates_after_discards_are_those_of_the_slow_loop(case):
    quality, refused = case
    left = sorted(zip(quality.tolist(), refused.tolist(), strict=True))
    expected = [sum(is_refused for _, is_refused in left[taken:]) / len(left[taken:]) for taken in range(len(left))]
    assert refused_after_discards(quality, refused).tolist() == pytest.approx(expected)


@given(refusals())
def test_the_probability_is_that_of_all_comparisons(case):
    quality, refused = case
    found = quality_auc(quality, refused)
    if len(set(refused.tolist())) == 1:
        assert found is None
    else:
        assert found == pytest.approx(roc_auc_score(refused, -quality), abs=1e-12)


def test_a_quality_that_foretells_every_refusal_leaves_none():
    quality, refused = torch.linspace(1, 2, 10), torch.arange(10) < 3
    assert quality_auc(quality, refused) == 1
    assert refused_after_discards(quality, refused)[3:].max() == 0
    assert quality_auc(-quality, refused) == 0
    assert quality_auc(torch.ones(10), refused) == 0.5


@given(st.integers(0, 10_000), st.sampled_from([0.0, 1e-3, 0.1, 0.25, 1.0]))
def test_the_share_of_accepted_pairs_is_the_true_accept_rate(seed, far):
    generator = torch.Generator().manual_seed(seed)
    scores, same = torch.randn(40, generator=generator), torch.arange(40) % 3 == 0
    accepted = accepted_at_far(scores, same, far)
    assert accepted.double().mean().item() == pytest.approx(tar_at_far(scores, same, [far])[far])
    order = scores[same].argsort()
    assert (accepted[order].long().diff() >= 0).all()
