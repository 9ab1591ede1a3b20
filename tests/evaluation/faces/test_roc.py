import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve

from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.faces.roc import accepted_at_far, equal_error_rate, roc, tar_at_far, thresholds_at_far

FARS = [1.0, 0.5, 0.3, 0.1, 1e-2, 1e-3, 1e-6, 0.0]


def slowly(scores, same, far):
    """The best TAR of all thresholds that accept at most far · impostors, with FAR in whole millionths."""
    genuine = [score for score, is_same in zip(scores, same, strict=True) if is_same]
    impostors = [score for score, is_same in zip(scores, same, strict=True) if not is_same]
    allowed = round(far * 10**6) * len(impostors) // 10**6
    best = 0.0
    for threshold in scores:
        if sum(score >= threshold for score in impostors) <= allowed:
            best = max(best, sum(score >= threshold for score in genuine) / len(genuine))
    return best


def case_of(seed, num_pairs=400, separation=1.0):
    generator = torch.Generator().manual_seed(seed)
    same = torch.rand(num_pairs, generator=generator) < 0.4
    return torch.randn(num_pairs, generator=generator) + separation * same, same


def area(scores, same) -> float:
    """Under the ROC: how often a genuine pair beats an impostor, where a tie counts one half."""
    fpr, tpr, _ = roc(scores, same)
    return torch.trapezoid(tpr, fpr).item()


@st.composite
def pairs(draw):
    """Few different scores, so that ties are common."""
    count = draw(st.integers(2, 30))
    same = draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(lambda same: len(set(same)) == 2))
    scores = draw(st.lists(st.integers(-4, 4), min_size=count, max_size=count))
    return torch.tensor(scores, dtype=torch.float32) / 4, torch.tensor(same)


@settings(max_examples=80)
@given(pairs())
def test_tar_is_that_of_the_best_threshold(case):
    scores, same = case
    expected = {far: slowly(scores.tolist(), same.tolist(), far) for far in FARS}
    assert tar_at_far(scores, same, FARS) == expected
    assert {far: accepted_at_far(scores, same, far).double().mean().item() for far in FARS} == expected
    thresholds = thresholds_at_far(scores, same, FARS)
    assert {far: (scores[same] > thresholds[far]).double().mean().item() for far in FARS} == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_tar_of_ordinary_scores(dtype):
    scores, same = case_of(0, separation=2.0)
    scores = scores.to(dtype)
    rates = tar_at_far(scores, same, FARS)
    assert rates == {far: slowly(scores.tolist(), same.tolist(), far) for far in FARS}
    assert 1 == rates[1.0] > rates[0.3] > rates[1e-2] > rates[0.0] > 0
    assert tar_at_far(scores.numpy(), same.numpy(), FARS) == rates


@settings(max_examples=40)
@given(pairs(), st.randoms(use_true_random=False))
def test_order_and_scale_change_nothing(case, random):
    scores, same = case
    order = random.sample(range(len(same)), len(same))
    mixed = 3 * scores[order] + 1
    assert tar_at_far(mixed, same[order], FARS) == tar_at_far(scores, same, FARS)
    assert torch.equal(roc(mixed, same[order]).tpr, roc(scores, same).tpr)
    assert equal_error_rate(mixed, same[order]) == equal_error_rate(scores, same)


def test_a_far_is_the_decimal_number_that_it_prints_as():
    # 0.29 · 100 is 28.999999999999996 in binary.
    scores = torch.cat([torch.arange(100.0), torch.tensor([70.5])])
    same = torch.arange(101) == 100
    assert tar_at_far(scores, same, [0.29, 0.28]) == {0.29: 1, 0.28: 0}


def test_with_too_few_impostors_all_of_them_must_be_beaten():
    scores, same = torch.tensor([0.9, 0.5, 0.7]), torch.tensor([True, True, False])
    assert tar_at_far(scores, same, [1e-3, 0.0]) == {1e-3: 0.5, 0.0: 0.5}


def test_equal_scores_are_chance():
    same = torch.arange(40) < 10
    scores = torch.full((40,), 0.3)
    assert tar_at_far(scores, same, [0.999, 0.1, 0.0]) == {0.999: 0, 0.1: 0, 0.0: 0}
    assert equal_error_rate(scores, same) == 0.5
    assert area(scores, same) == 0.5
    assert [each.tolist() for each in roc(scores, same)[:2]] == [[0, 1], [0, 1]]


@settings(max_examples=80)
@given(pairs())
def test_the_roc_is_scikit_learns_without_collinear_points(case):
    scores, same = case
    fpr, tpr, thresholds = roc(scores, same)
    theirs = roc_curve(same.numpy(), scores.numpy(), drop_intermediate=False)
    points = set(zip(*(each.tolist() for each in theirs), strict=True))
    assert set(zip(fpr.tolist(), tpr.tolist(), thresholds.tolist(), strict=True)) <= points
    slopes = torch.atan2(tpr.diff() * int(same.sum()), fpr.diff() * int((~same).sum())).round(decimals=9)
    assert (slopes.diff() != 0).all()
    assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)
    # Sums of both coordinates separate the points of a vertical line.
    ours, all_of_theirs = (fpr + tpr).numpy(), theirs[0] + theirs[1]
    assert np.allclose(np.interp(all_of_theirs, ours, tpr.numpy()), theirs[1])
    assert area(scores, same) == pytest.approx(roc_auc_score(same.numpy(), scores.numpy()))


def test_equal_error_rate_is_where_the_errors_meet():
    scores, same = case_of(1, 4000)
    genuine, impostors = scores[same], scores[~same]
    gaps = [(abs((impostors >= s).double().mean() - (genuine < s).double().mean()).item(), s) for s in scores]
    threshold = min(gaps)[1]
    rate = equal_error_rate(scores, same)
    assert 0.2 < rate < 0.4
    assert rate == pytest.approx((impostors >= threshold).double().mean().item(), abs=1e-3)
    assert equal_error_rate(torch.tensor([0.0, 1.0]), torch.tensor([False, True])) == 0
    assert equal_error_rate(torch.tensor([1.0, 0.0]), torch.tensor([False, True])) == 1


@pytest.mark.usefixtures("unchecked_types")
def test_scores_may_be_whole_numbers():
    scores, same = torch.tensor([3, 2, 1, 0]), torch.tensor([1, 0, 1, 0])
    for found, expected in zip(roc(scores, same), roc(scores.double(), same), strict=True):
        assert torch.equal(found, expected)


def test_nan_scores_never_help():
    same = torch.tensor([True, True, False, False])
    assert tar_at_far(torch.tensor([0.9, math.nan, 0.1, 0.2]), same, [0.0, 1.0]) == {0.0: 0.5, 1.0: 0.5}
    assert tar_at_far(torch.tensor([0.9, math.inf, 0.1, math.nan]), same, [0.0, 0.5]) == {0.0: 0, 0.5: 1}
    assert tar_at_far(torch.tensor([0.9, -math.inf, 0.1, -math.inf]), same, [0.0, 0.5]) == {0.0: 0.5, 0.5: 0.5}
    assert area(torch.tensor([math.nan, math.nan, 0.1, 0.2]), same) == 0
    assert area(torch.full((4,), math.nan), same) == 0
    assert equal_error_rate(torch.full((4,), math.nan), same) == 1


def test_wrong_arguments_are_refused():
    scores, same = case_of(0, 10)
    with pytest.raises(ConfigError, match="TAR at FAR = 1.5; allowed: 0 to 1"):
        tar_at_far(scores, same, [0.1, 1.5])
    with pytest.raises(DataError, match="9 scores for 10 pairs"):
        tar_at_far(scores[:9], same, [0.1])
    with pytest.raises(DataError, match="0 genuine pairs and 10 impostors; 1 or more of each"):
        roc(scores, torch.zeros_like(same))
