import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssl_sec.losses import AdaFaceLoss, ArcFaceLoss, CosFaceLoss, MagFaceLoss, SphericalFeatureTransform
from ssl_sec.training.objective import Objective
from tests.losses.cases import rows

LABELS = torch.arange(12) % 6


def made(kind, **values):
    torch.manual_seed(0)
    loss = kind(6, 5, **values).double()
    loss.weight.data.normal_()
    return loss


def test_magface_with_one_margin_and_no_weight_is_arcface():
    same = made(MagFaceLoss, scale=8.0, least_margin_radians=0.5, greatest_margin_radians=0.5, norm_weight=0.0)
    arcface = made(ArcFaceLoss, scale=8.0, margin_radians=0.5)
    assert same(rows(), LABELS).item() == pytest.approx(arcface(rows(), LABELS).item(), rel=1e-14)


@pytest.mark.parametrize(("length", "margin"), [(0.5, 0.3), (1.0, 0.3), (2.0, 0.5), (3.0, 0.7), (9.0, 0.7)])
def test_magfaces_margin_rises_with_the_norm_between_its_bounds(length, margin):
    bounds = {"least_norm": 1.0, "greatest_norm": 3.0, "least_margin_radians": 0.3, "greatest_margin_radians": 0.7}
    unit = rows() / rows().norm(dim=1, keepdim=True)
    found = made(MagFaceLoss, norm_weight=0.0, **bounds)(length * unit, LABELS)
    assert found.item() == pytest.approx(made(ArcFaceLoss, margin_radians=margin)(unit, LABELS).item(), rel=1e-12)


@pytest.mark.parametrize(("length", "sign"), [(0.5, 0), (1.5, -1), (2.9, -1), (3.5, 0)])
def test_magfaces_reward_lengthens_rows_between_its_bounds(length, sign):
    """1 / a + a / u_a² falls up to a = u_a; a clipped norm has no gradient."""
    margins = {"least_margin_radians": 0.4, "greatest_margin_radians": 0.4}
    loss = made(MagFaceLoss, least_norm=1.0, greatest_norm=3.0, norm_weight=1.0, **margins)
    embeddings = (length * rows() / rows().norm(dim=1, keepdim=True)).requires_grad_()
    loss(embeddings, LABELS).backward()
    along = (embeddings.grad * embeddings.detach()).sum(1)
    along = torch.where(along.abs() < 1e-12, 0.0, along)
    assert along.sign().tolist() == [sign] * 12


def with_averages(mean, deviation):
    loss = made(AdaFaceLoss, scale=8.0, margin=0.4, concentration=0.5).eval()
    loss.averages.mean.fill_(mean)
    loss.averages.deviation.fill_(deviation)
    loss.averages.started.fill_(True)
    return loss


def test_adaface_is_cosface_at_the_mean_norm_and_arcface_far_below():
    unit = rows() / rows().norm(dim=1, keepdim=True)
    loss = with_averages(4.0, 1.0)
    cosface = made(CosFaceLoss, scale=8.0, margin=0.4)(unit, LABELS).item()
    arcface = made(ArcFaceLoss, scale=8.0, margin_radians=0.4)(unit, LABELS).item()
    assert loss(4 * unit, LABELS).item() == pytest.approx(cosface, rel=1e-12)
    assert loss(0.1 * unit, LABELS).item() == pytest.approx(arcface, rel=1e-12)
    assert loss(90 * unit, LABELS).item() == pytest.approx(loss(900 * unit, LABELS).item(), rel=1e-12)


@pytest.mark.parametrize("length", [0.1, 2.0, 3.5, 4.0, 5.0, 9.0])
def test_adafaces_target_never_rises_with_the_angle(length):
    angles = torch.linspace(0, math.pi, 501, dtype=torch.float64)
    loss = with_averages(4.0, 1.0)
    loss.weight.data = torch.eye(6, 5, dtype=torch.float64)
    circle = torch.zeros(501, 5, dtype=torch.float64)
    circle[:, 0], circle[:, 1] = angles.cos(), angles.sin()
    seen = []
    loss._cross_entropy = lambda compared, harder, labels: seen.append(harder) or harder
    loss(length * circle, torch.zeros(501, dtype=torch.int64))
    assert (seen[0].diff() <= 1e-12).all()
    assert seen[0].diff().abs().max() < 0.01  # no jump


def test_no_gradient_of_adaface_passes_through_the_norm():
    embeddings = rows().requires_grad_()
    made(AdaFaceLoss)(embeddings, LABELS).backward()
    assert (embeddings.grad * rows()).sum(1).abs().max() < 1e-14


@given(seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=5), rho=st.floats(0.01, 1.0))
def test_adafaces_averages_are_those_of_the_slow_loop(seeds, rho):
    loss, expected = made(AdaFaceLoss, rho=rho), None
    for seed in seeds:
        embeddings = rows(seed=seed)
        loss(embeddings, LABELS)
        lengths = embeddings.norm(dim=1).tolist()
        mean = sum(lengths) / len(lengths)
        batch = mean, math.sqrt(sum((length - mean) ** 2 for length in lengths) / (len(lengths) - 1))
        old = batch if expected is None else expected
        expected = tuple((1 - rho) * before + rho * now for before, now in zip(old, batch, strict=True))
        found = loss.averages.mean.item(), loss.averages.deviation.item()
        assert found == pytest.approx(expected, rel=1e-12)


def test_the_averages_stay_in_float64_and_are_saved():
    loss = made(AdaFaceLoss).bfloat16()
    loss(rows().bfloat16(), LABELS)
    assert loss.averages.mean.dtype == torch.float64
    other = made(AdaFaceLoss)
    other.load_state_dict(loss.state_dict())
    assert other.averages.mean == loss.averages.mean != 0


def test_rows_that_are_generated_do_not_move_the_averages():
    transform = SphericalFeatureTransform(6, 5, seed=3).double()
    found = []
    for each in (None, transform):
        loss = made(AdaFaceLoss, rho=0.5)
        objective = Objective(loss, None, 0.0, each).train()
        for step in range(3):
            terms = objective(rows(seed=step), LABELS, step)
        found.append(loss.averages.mean.item())
    assert terms.generated_loss > 0
    assert found[0] == found[1]
