import pytest
import torch
from torch import nn

from ssl_sec.losses import CenterLoss
from tests.losses.cases import rows


def test_centres_move_after_they_were_used_and_only_in_training():
    """SFT, Eq. 9: Δμ = Σ (μ − x) / (1 + n)."""
    loss = CenterLoss(3, 2).double()
    batch = torch.tensor([[3.0, 0.0], [0.0, 6.0], [3.0, 3.0]], dtype=torch.float64)
    labels = torch.tensor([0, 2, 0])
    assert loss(batch, labels).item() == pytest.approx((9 + 36 + 18) / 2 / 3)
    # Class 0: 0 − (0·2 − (6, 3)) / 3; class 2: (0, 6) / 2.
    assert loss.centres.tolist() == [[2, 1], [0, 0], [0, 3]]
    assert loss(batch, labels).item() == pytest.approx((1 + 1 + 9 + 1 + 4) / 2 / 3)
    expected = torch.tensor([2.0, 1.0]) - (2 * torch.tensor([2.0, 1.0]) - torch.tensor([6.0, 3.0])) / 3
    assert loss.centres[0].tolist() == pytest.approx(expected.tolist())
    before = loss.centres.clone()
    loss.eval()(batch, labels)
    assert torch.equal(loss.centres, before)


def test_centres_are_saved_and_get_no_gradient():
    loss = CenterLoss(3, 2)
    loss(rows(4, 2).float(), torch.tensor([0, 1, 2, 0]))
    assert set(loss.state_dict()) == {"centres"}
    other = CenterLoss(3, 2)
    other.load_state_dict(loss.state_dict())
    assert torch.equal(other.centres, loss.centres)
    assert not loss.centres.requires_grad
    assert list(loss.parameters()) == []


def test_centres_come_to_rest_at_the_means():
    loss = CenterLoss(2, 3).double()
    batch, labels = rows(10, 3), torch.arange(10) % 2
    for _ in range(200):
        loss(batch, labels)
    means = torch.stack([batch[labels == label].mean(0) for label in (0, 1)])
    torch.testing.assert_close(loss.centres, means, rtol=1e-10, atol=1e-12)


def test_centres_of_rows_that_overflowed_stay_and_the_training_goes_on():
    """Under a GradScaler, which leaves out the step."""
    loss, network, labels = CenterLoss(4, 8), nn.Linear(8, 8), torch.arange(12) // 3
    optimiser, scaler = torch.optim.SGD(network.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    values = []
    for step in range(4):
        optimiser.zero_grad()
        before = loss.centres.clone()
        with torch.autocast("cpu", torch.float16):
            embeddings = network(rows(12, 8, seed=step).float())
            if step == 1:
                embeddings = torch.where(labels.unsqueeze(1) == 2, embeddings * 1e6, embeddings)
            values.append(loss(embeddings, labels))
        scaler.scale(values[-1]).backward()
        scaler.step(optimiser)
        scaler.update()
        assert torch.equal((loss.centres != before).any(1), torch.arange(4) != (2 if step == 1 else -1))
    assert torch.stack(values).isfinite().tolist() == [True, False, True, True]
