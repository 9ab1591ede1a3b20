import pytest
import torch

from ssl_sec.losses import CContrastiveLoss, CTripletLoss


def test_absent_classes_repel_depending_on_the_loss():
    """Softmax pushes a row from every template; C-contrastive only from those within its margin."""
    loss = CContrastiveLoss(2, 2, margin=1.0).double()
    loss.weight.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    value = loss(torch.tensor([[0.0, 1.0]], dtype=torch.float64), torch.tensor([0]))
    assert value.item() == pytest.approx(2.0)  # d² = 2 to both: the own counts, the other is beyond 1


def test_the_own_agent_pulls_a_row_once_whether_or_not_a_hinge_acts():
    """NormFace, section 5.2, of C-triplet with center loss: one set of agents."""
    loss = CTripletLoss(3, 2, margin=0.8, add_center=True).double()
    loss.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    between = torch.tensor([[1.0, 0.9]], dtype=torch.float64)
    just_within = torch.tensor([[1.0, 0.5446]], dtype=torch.float64)  # of the margin
    near = torch.tensor([[1.0, 0.1]], dtype=torch.float64)
    labels = torch.tensor([0])
    assert [name for name, _ in loss.named_parameters()] == ["weight"]
    assert loss(between, labels).item() == _without_center(loss)(between, labels).item()
    assert loss(just_within, labels).item() == _without_center(loss)(just_within, labels).item() < 1e-3
    assert _without_center(loss)(near, labels).item() == 0
    assert loss(near, labels).item() == pytest.approx(2 - 2 / 1.01**0.5)


def _without_center(loss):
    other = CTripletLoss(loss.num_classes, loss.dim, loss.margin).double()
    other.load_state_dict(loss.state_dict())
    return other
