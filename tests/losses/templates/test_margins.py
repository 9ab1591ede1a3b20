import math

import pytest
import torch

from ssl_sec.losses import ArcFaceLoss, CContrastiveLoss, CosFaceLoss, NormFaceLoss, SphereFaceLoss
from tests.losses.cases import rows

ANGLES = torch.linspace(0, math.pi, 2001, dtype=torch.float64)


@pytest.mark.parametrize("margin", [1, 2, 3, 4])
def test_spherefaces_target_falls_without_a_jump(margin):
    cosines = ANGLES.cos().requires_grad_()
    target = SphereFaceLoss(2, 2, margin=margin)._harder(cosines)
    (slope,) = torch.autograd.grad(target.sum(), cosines)
    assert (slope > -1e-9).all()
    target = target.detach()
    assert (target.diff() <= 1e-12).all()
    assert target.diff().min() > -0.01 * margin
    assert target[0] == pytest.approx(1)
    assert target[-1] == pytest.approx(1 - 2 * margin)


@pytest.mark.parametrize("margin", [0.0, 0.45, 0.5, 1.5, 3.0])
def test_arcfaces_target_falls_without_a_jump_also_past_pi(margin):
    target = ArcFaceLoss(2, 2, margin_radians=margin)._harder(ANGLES.cos())
    assert (target.diff() < 1e-12).all()
    assert target.diff().min() > -0.01
    before = ANGLES + margin < math.pi - 1e-6
    torch.testing.assert_close(target[before], (ANGLES + margin).cos()[before], rtol=1e-12, atol=1e-12)
    assert target[-1].item() == pytest.approx(-2 - math.cos(math.pi + margin) if margin else -1)


@pytest.mark.parametrize("loss", [ArcFaceLoss(3, 4), SphereFaceLoss(3, 4), CosFaceLoss(3, 4)])
def test_a_cosine_that_is_rounded_past_1_has_a_finite_target_and_gradient(loss):
    cosines = torch.tensor([1 + 1e-6, -1 - 1e-6]).requires_grad_()
    targets = loss._harder(cosines)
    targets.sum().backward()
    assert targets.isfinite().all()
    assert cosines.grad.isfinite().all()


def test_a_margin_makes_only_the_rows_own_class_harder():
    embeddings, labels = rows(12, 5), torch.arange(12) % 6
    plain = NormFaceLoss(6, 5, scale=8.0).double()
    plain.weight.data.normal_()
    for harder in (CosFaceLoss(6, 5, 8.0, 0.3), ArcFaceLoss(6, 5, 8.0, 0.3), SphereFaceLoss(6, 5, 8.0, 2)):
        harder = harder.double()
        harder.weight.data = plain.weight.data
        assert harder(embeddings, labels) > plain(embeddings, labels)
    without = CosFaceLoss(6, 5, 8.0, 0.0).double()
    without.weight.data = plain.weight.data
    assert without(embeddings, labels).item() == pytest.approx(plain(embeddings, labels).item(), rel=1e-12)


@pytest.mark.parametrize("loss", [ArcFaceLoss(3, 4), SphereFaceLoss(3, 4), CosFaceLoss(3, 4), CContrastiveLoss(3, 4)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_row_that_is_its_template_or_its_opposite_has_a_finite_gradient(loss, sign):
    embeddings = (sign * loss.weight.detach()).requires_grad_()
    loss.zero_grad()
    loss(embeddings, torch.arange(3)).backward()
    assert embeddings.grad.isfinite().all()
    assert loss.weight.grad.isfinite().all()
