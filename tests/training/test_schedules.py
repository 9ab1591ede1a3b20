import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssl_sec.errors import ConfigError
from ssl_sec.training.schedules import (
    CappedRamp,
    Constant,
    Cosine,
    FaceRamp,
    LinearRamp,
    Polynomial,
    StepDecay,
    TeacherMomentum,
    epochs_at,
)


def test_a_constant_is_the_same_at_every_step():
    assert [Constant(0.3)(step) for step in (0, 1, 10**9)] == [0.3] * 3


def test_a_teachers_momentum_rises_to_one():
    """BYOL, section 3.2."""
    momentum = TeacherMomentum(0.9, 4)
    expected = [1 - 0.1 * (math.cos(math.pi * step / 4) + 1) / 2 for step in range(5)]
    assert [momentum(step) for step in range(5)] == pytest.approx(expected, rel=1e-15)
    assert (momentum(0), momentum(4)) == (pytest.approx(0.9), 1)


def test_the_ramp_of_eta_is_0_at_the_start_and_linear():
    """SEC, Eq. 29."""
    ramp = LinearRamp(2.0, 8)
    assert [ramp(step) for step in range(9)] == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]
    assert ramp(9) == ramp(1000) == 2


@pytest.mark.parametrize(
    ("ramp", "key", "count", "allowed"),
    [
        (Cosine, "total_steps", -1, "≥ 0"),
        (Polynomial, "total_steps", -1, "≥ 0"),
        (TeacherMomentum, "total_steps", -1, "≥ 0"),
        (lambda value, count: Cosine(value, 9, count), "warmup_steps", -1, "≥ 0"),
        (LinearRamp, "total_steps", -1, "≥ 0"),
        (CappedRamp, "total_steps", -1, "≥ 0"),
        (FaceRamp, "steps_per_epoch", 0, "≥ 1"),
    ],
)
def test_a_schedule_over_a_number_of_steps_that_is_not_allowed_is_refused(ramp, key, count, allowed):
    with pytest.raises(ConfigError, match=f"^{key}: found {count}, must be {allowed}$"):
        ramp(0.25, count)


@pytest.mark.parametrize("ramp", [LinearRamp, CappedRamp])
def test_the_ramp_of_a_run_without_steps_is_at_its_end(ramp):
    assert ramp(0.25, 0)(0) == 0.25


def test_the_cosine_falls_from_its_value_to_zero():
    cosine = Cosine(0.5, 6)
    expected = [0.5 * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(7)]
    assert [cosine(step) for step in range(7)] == pytest.approx(expected, rel=1e-15, abs=1e-16)
    assert cosine(0) == 0.5
    assert cosine(3) == pytest.approx(0.25)
    assert cosine(6) == cosine(100) == 0


def test_the_warm_up_rises_linearly_and_meets_the_cosine():
    cosine = Cosine(1.0, 10, warmup_steps=4)
    assert [cosine(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [cosine(4 + step) for step in range(7)] == pytest.approx([Cosine(1.0, 6)(step) for step in range(7)])


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.0])
def test_the_polynomial_is_the_product_of_its_steps(power):
    """InsightFace's, which multiplies the rate by ((1 − t / T) / (1 − (t − 1) / T))^power at every step t."""
    total, warmup = 50, 7
    rate, expected = 0.3, [0.3 * (step + 1) / warmup for step in range(warmup)]
    for step in range(total - warmup):
        if step:
            left, before = (total - warmup - each for each in (step, step - 1))
            rate *= (left / before) ** power
        expected.append(rate)
    schedule = Polynomial(0.3, total, warmup, power)
    assert [schedule(step) for step in range(total)] == pytest.approx(expected, rel=1e-12)
    assert schedule(total) == schedule(10 * total) == 0


def test_the_polynomial_of_power_1_is_a_line_and_of_2_a_parabola():
    assert [Polynomial(2.0, 4, power=1.0)(step) for step in range(5)] == [2, 1.5, 1, 0.5, 0]
    assert [Polynomial(16.0, 4)(step) for step in range(5)] == [16, 9, 4, 1, 0]


def test_a_step_decay_falls_at_its_steps():
    decay = StepDecay(1.0, (2, 5), 0.5)
    assert [decay(step) for step in range(7)] == [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert StepDecay(0.3, (), 0.1)(10**9) == 0.3


@pytest.mark.parametrize("schedule", [Cosine, Polynomial])
@pytest.mark.parametrize("warmup_steps", [5, 8])
def test_a_run_that_is_all_warm_up_only_rises(schedule, warmup_steps):
    rates = [schedule(1.0, 5, warmup_steps)(step) for step in range(5)]
    assert rates == [(step + 1) / warmup_steps for step in range(5)]


@given(
    value=st.floats(0, 100),
    total_steps=st.integers(1, 1000),
    warmup_steps=st.integers(0, 1000),
    step=st.integers(0, 2000),
)
def test_a_falling_rate_stays_between_zero_and_its_value(value, total_steps, warmup_steps, step):
    for schedule in (Cosine, Polynomial):
        assert 0 <= schedule(value, total_steps, warmup_steps)(step) <= value


def test_the_ramp_of_faces_waits_three_epochs_and_rises_over_the_fourth():
    """SEC, appendix B.2."""
    ramp = FaceRamp(5.0, 4)
    assert [ramp(step) for step in range(12)] == [0] * 12
    assert [ramp(step) for step in range(12, 17)] == [0, 1.25, 2.5, 3.75, 5]
    assert ramp(10_000) == 5


def test_the_ramp_of_sec_ema_on_faces_is_steep_and_capped():
    """SEC, Eq. 32."""
    ramp = CappedRamp(1.0, 2000)
    assert [ramp(step) for step in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]


@given(
    shares=st.lists(st.floats(0, 1, exclude_min=True, exclude_max=True)),
    epochs=st.integers(2, 1000),
)
def test_an_epoch_at_a_share_of_a_run_is_the_nearest_and_is_reached(shares, epochs):
    for share, epoch in zip(shares, epochs_at(shares, epochs), strict=True):
        assert 1 <= epoch < epochs
        assert abs(epoch - share * epochs) <= 1


def test_the_shares_of_the_papers_probe_are_its_epochs():
    """SEC, appendix B.3."""
    assert epochs_at((0.6, 0.75, 0.9), 100) == (60, 75, 90)
    assert epochs_at((0.6, 0.75, 0.9), 20) == (12, 15, 18)
