import pytest
import torch

from ssl_sec.losses import CContrastiveLoss, CenterLoss, SoftmaxLoss, tiles
from ssl_sec.losses.template import TemplateLoss
from tests.losses.cases import ALL_LOSSES, NUM_CLASSES, rows


def test_templates_are_rows_of_weight_and_start_small_and_different():
    torch.manual_seed(0)
    loss = SoftmaxLoss(200, 64)
    assert loss.weight.shape == (200, 64)
    assert loss.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert loss.weight.mean().abs() < 1e-3


def test_the_classes_that_the_batch_has_not_repel_or_do_not():
    """Softmax pushes a row from every template; C-contrastive only from those within its margin."""
    loss = CContrastiveLoss(2, 2, margin=1.0).double()
    loss.weight.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    value = loss(torch.tensor([[0.0, 1.0]], dtype=torch.float64), torch.tensor([0]))
    assert value.item() == pytest.approx(2.0)  # d² = 2 to both: the own counts, the other is beyond 1


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


@pytest.mark.parametrize("entries", [tiles.TILE_ENTRIES, 60])
@pytest.mark.parametrize(
    "case", [case for case in ALL_LOSSES if issubclass(case.make, TemplateLoss)], ids=lambda case: case.name
)
def test_a_row_is_recognised_if_its_own_template_is_the_most_similar(case, entries, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ENTRIES", entries)
    loss = case.build()
    batch, labels = rows(30, loss.dim), torch.arange(30) % NUM_CLASSES
    raw = case.name in ("softmax", "modified_softmax")  # only these see the norm of a row, which orders nothing
    free = case.name in ("softmax", "l2softmax")
    for row, label, found in zip(batch, labels, loss.recognised(batch, labels).tolist(), strict=True):
        row = row if raw else row / row.norm()
        scores = [float(row @ (weight if free else weight / weight.norm())) for weight in loss.weight.detach()]
        assert found == (scores.index(max(scores)) == label)
    assert 0 < loss.recognised(batch, labels).sum() < 30


def test_a_tie_and_what_is_not_a_number_are_not_recognised():
    loss = SoftmaxLoss(3, 2)
    loss.weight.data = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    batch = torch.tensor([[1.0, 0.0], [0.0, 1.0], [torch.nan, 1.0]])
    assert loss.recognised(batch, torch.tensor([0, 2, 2])).tolist() == [False, True, False]
