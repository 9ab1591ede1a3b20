import pytest
import torch

from ssl_sec.losses import ProxyAnchorLoss
from ssl_sec.training.class_sharding import draw_templates


@pytest.mark.parametrize("scale", [1e-3, 32.0, 1e4])
def test_proxy_anchor_neither_overflows_nor_vanishes(scale):
    """In float32, at the similarities 1 and -1."""
    loss, batch = ProxyAnchorLoss(3, 2, scale=scale), torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).requires_grad_()
    loss.weight.data = torch.tensor([[1.0, 1e-3], [1.0, -1e-3], [-1.0, 1e-3]])
    value = loss(batch, torch.tensor([0, 1]))
    (gradient,) = torch.autograd.grad(value, batch)
    exact = ProxyAnchorLoss(3, 2, scale=scale).double()
    exact.weight.data = loss.weight.detach().double()
    assert value.item() == pytest.approx(exact(batch.detach().double(), torch.tensor([0, 1])).item(), rel=1e-5)
    assert gradient.isfinite().all() and gradient.any()


def test_proxies_are_drawn_by_hes_rule_for_as_many_outputs_as_classes():
    torch.manual_seed(0)
    loss = ProxyAnchorLoss(50, 400)
    assert loss.weight.std().item() == pytest.approx((2 / 50) ** 0.5, rel=0.02)
    draw_templates(loss, seed=1, sharded=False)  # as a run does
    assert loss.weight.std().item() == pytest.approx((2 / 50) ** 0.5, rel=0.02)
