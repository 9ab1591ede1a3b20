import pytest
import torch

from ssl_sec.losses import CTripletLoss, ProxyAnchorLoss, SoftmaxLoss, tiles
from ssl_sec.losses.templates.base import TemplateLoss
from tests.losses.cases import ALL_LOSSES, NUM_CLASSES, rows


@pytest.mark.parametrize("bias", [False, True])
def test_templates_are_rows_of_weight_and_start_small_and_different(bias):
    torch.manual_seed(0)
    loss = SoftmaxLoss(200, 64, bias)
    assert loss.weight.shape == (200, 64 + bias)
    assert loss.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert loss.weight.mean().abs() < 1e-3


@pytest.mark.parametrize("entries", [tiles.TILE_ENTRIES, 60])
@pytest.mark.parametrize(
    "case", [case for case in ALL_LOSSES if issubclass(case.make, TemplateLoss)], ids=lambda case: case.name
)
def test_a_row_is_recognised_if_its_own_template_is_the_most_similar(case, entries, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ENTRIES", entries)
    loss = case.build()
    batch, labels = rows(30, loss.dim), torch.arange(30) % NUM_CLASSES
    # Only these see the norm of a row, which orders nothing without a bias.
    raw = case.name in ("softmax", "softmax_bias", "modified_softmax")
    free = case.name in ("softmax", "softmax_bias", "l2softmax")
    for row, label, found in zip(batch, labels, loss.recognised(batch, labels).tolist(), strict=True):
        row = row if raw else row / row.norm()
        row = torch.cat([row, torch.ones(1)]) if case.name == "softmax_bias" else row
        parts = loss.weight.detach().unflatten(1, (loss.sub_centres, -1))
        parts = parts if free else parts / parts.norm(dim=2, keepdim=True)
        scores = (parts @ row).amax(1).tolist()
        assert found == (scores.index(max(scores)) == label)
    assert 0 < loss.recognised(batch, labels).sum() < 30


@pytest.mark.parametrize("of_rows", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("of_templates", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "case", [case for case in ALL_LOSSES if issubclass(case.make, TemplateLoss)], ids=lambda case: case.name
)
def test_templates_and_rows_may_have_any_precision(case, of_templates, of_rows):
    loss, exact, labels = case.build().to(of_templates), case.build(), torch.arange(12) % NUM_CLASSES
    exact.load_state_dict({name: value.double() for name, value in loss.state_dict().items()})
    batch = rows().to(of_rows)
    value = loss(batch, labels)
    assert value.dtype == (torch.float64 if of_rows == torch.float64 else torch.float32)
    assert value.item() == pytest.approx(exact(batch.double(), labels).item(), rel=1e-4)
    assert torch.equal(loss.recognised(batch, labels), exact.recognised(batch.double(), labels))


def test_the_templates_of_rows_are_read_without_gradients():
    loss = SoftmaxLoss(3, 2)
    found = loss.templates_of(torch.tensor([2, 0, 2]))
    assert torch.equal(found, loss.weight[[2, 0, 2]]) and not found.requires_grad


def test_ties_and_nan_are_not_recognised():
    loss = SoftmaxLoss(3, 2)
    loss.weight.data = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    batch = torch.tensor([[1.0, 0.0], [0.0, 1.0], [torch.nan, 1.0]])
    assert loss.recognised(batch, torch.tensor([0, 2, 2])).tolist() == [False, True, False]


def test_a_row_is_recognised_also_if_it_is_opposite_to_all_templates():
    loss = SoftmaxLoss(2, 2)
    loss.weight.data = torch.tensor([[-1.0, -1.0], [-2.0, -2.0]])
    assert loss.recognised(torch.ones(2, 2), torch.tensor([0, 1])).tolist() == [True, False]


@pytest.mark.parametrize("kind", [CTripletLoss, ProxyAnchorLoss])
def test_the_gradient_in_tiles_is_that_at_once(kind, monkeypatch):
    """Each tile of classes also has a gradient by the similarity to the own template."""
    loss, labels = kind(6, 5).double(), torch.tensor([0, 3, 5, 5])
    gradients = []
    for entries in (tiles.TILE_ENTRIES, 8):
        monkeypatch.setattr(tiles, "TILE_ENTRIES", entries)
        embeddings = rows(4, 5).requires_grad_()
        gradients.append(torch.autograd.grad(loss(embeddings, labels), [embeddings, loss.weight]))
    torch.testing.assert_close(gradients[1], gradients[0])
