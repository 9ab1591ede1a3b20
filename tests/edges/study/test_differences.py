import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from ssl_sec.edges.study.differences import Difference, adjusted, difference
from ssl_sec.edges.tables import mean_and_std

FIGURES = st.dictionaries(st.integers(0, 20), st.floats(0, 100), min_size=3, max_size=12)


@given(baseline=FIGURES, shifts=st.lists(st.integers(-500, 500), min_size=12, max_size=12, unique=True))
def test_the_interval_and_p_are_scipys(baseline, shifts):
    arm = {seed: value + shift / 100 for (seed, value), shift in zip(baseline.items(), shifts, strict=False)}
    ours = difference(arm, baseline)
    theirs = ttest_rel([arm[seed] for seed in baseline], list(baseline.values()))
    interval = theirs.confidence_interval(0.95)
    assert ours.num_pairs == len(baseline)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-9)
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-5, abs=1e-12)


def test_only_seeds_of_both_are_paired():
    ours = difference({0: 3.0, 1: 5.0, 7: 100.0}, {1: 4.0, 0: 1.0, 2: -50.0})
    assert (ours.mean, ours.num_pairs) == (1.5, 2)
    assert difference({0: 1.0}, {1: 1.0}) is None


def test_one_pair_has_no_interval():
    ours = difference({3: 2.0}, {3: 1.0})
    assert (ours.mean, ours.num_pairs, str(ours)) == (1.0, 1, "+1.00")
    assert math.isnan(ours.half_width) and math.isnan(ours.p)


@pytest.mark.parametrize(
    ("arm", "baseline", "shown"),
    [
        ({0: 1.0, 1: 4.0}, {0: 1.0, 1: 4.0}, "+0.00"),
        ({0: 0.0, 1: 0.0}, {0: 0.0, 1: 0.0}, "+0.00"),
        ({0: 3.0, 1: 6.0}, {0: 1.0, 1: 4.0}, "+2.00"),
        ({0: 85.28, 1: 87.5}, {0: 84.44, 1: 86.66}, "+0.84"),
        # Three of 360 images, as they are measured and as they are kept.
        ({0: 100 * 307 / 360, 1: 100 * 315 / 360}, {0: 100 * 304 / 360, 1: 100 * 312 / 360}, "+0.83"),
        ({0: 85.2778, 1: 87.5}, {0: 84.4444, 1: 86.6667}, "+0.83"),
        ({0: 9.44444, 1: 85.2778}, {0: 8.61111, 1: 84.4444}, "+0.83"),  # the larger values have fewer digits
        ({0: 0.300001, 1: 0.4}, {0: 0.1, 1: 0.2}, "+0.20"),  # a loss below 1
    ],
)
def test_equal_differences_have_no_interval(arm, baseline, shown):
    """Else two runs that differ by as many images would have p = 0."""
    ours = difference(arm, baseline)
    assert (ours.num_pairs, str(ours)) == (2, shown)
    assert math.isnan(ours.half_width) and math.isnan(ours.p)


@pytest.mark.parametrize("num_images", [360, 10_000, 50_000])
def test_differences_of_one_image_have_an_interval(num_images):
    right = {0: 0.85 * num_images, 1: 0.87 * num_images}
    baseline = {seed: 100 * value / num_images for seed, value in right.items()}
    arm = {seed: 100 * (value + 3 + seed) / num_images for seed, value in right.items()}
    ours = difference(arm, baseline)
    assert ours.half_width > 0 and 0 < ours.p < 1


def test_p_is_adjusted_by_holm():
    """The example of p = 0.01, 0.04, 0.03, 0.005: 4 x 0.005, 3 x 0.01, 2 x 0.03, and never less than one before."""
    given_p = [0.01, 0.04, math.nan, 0.03, 0.005]
    found = adjusted([Difference(mean=1.0, half_width=1.0, p=p, num_pairs=2) for p in given_p], 4)
    assert [one.p for one in found] == pytest.approx([0.03, 0.06, math.nan, 0.06, 0.02], nan_ok=True)


def test_an_adjusted_p_is_at_most_one():
    found = adjusted([Difference(mean=1.0, half_width=1.0, p=0.6, num_pairs=2)] * 3, 3)
    assert [one.p for one in found] == [1.0, 1.0, 1.0]


def test_a_difference_is_shown_with_its_interval():
    assert str(Difference(mean=-0.254, half_width=1.0, p=0.5, num_pairs=4)) == "-0.25 [-1.25, +0.75]"
    assert str(Difference(mean=0.03, half_width=0.1, p=0.5, num_pairs=4)) == "+0.03 [-0.07, +0.13]"


def test_small_values_are_shown_with_two_digits():
    assert str(Difference(mean=-0.0019, half_width=0.0001, p=0.1, num_pairs=3)) == "-0.0019 [-0.0020, -0.0018]"
    assert mean_and_std([0.0032, 0.0031, 0.0033]) == "0.0032 ± 0.0001"
    assert mean_and_std([0.0]) == "0.00" and mean_and_std([0.1, 0.2]) == "0.15 ± 0.07"
    assert mean_and_std([1e-300]) == "0.00000000" and mean_and_std([math.nan, 0.001]) == "nan ± nan"


@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_a_figure_that_is_not_finite_leaves_no_difference(figure):
    found = difference({0: 1.0, 1: figure, 2: 3.0}, {0: 0.0, 1: 0.0, 2: 0.5})
    assert (str(found), found.num_pairs) == ("+nan", 3)
    assert adjusted([found], family=2) == [found]
    assert mean_and_std([1.0, figure]) == f"{figure:.2f} ± nan"


def test_infinities_of_an_arm_and_of_the_baseline_leave_no_difference():
    assert str(difference({0: math.inf, 1: 2.0}, {0: 1.0, 1: math.inf})) == "+nan"
