import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ssl_sec.losses import (
    CContrastiveLoss,
    CenterLoss,
    CombinedLoss,
    CTripletLoss,
    ProxyAnchorLoss,
    SoftmaxLoss,
    tiles,
)
from ssl_sec.losses.agents import RATE, AgentDistortion, agent_distortion, agent_distortion_bound
from ssl_sec.losses.template import TemplateLoss
from ssl_sec.training.objective import Objective
from ssl_sec.training.schedules import Constant
from tests.losses import slow
from tests.losses.cases import ALL_LOSSES, DIM, NUM_CLASSES, rows

LABELS = torch.tensor([3, 0, 2, 0, 3, 3, 1, 5])


def test_templates_are_rows_of_weight_and_start_small_and_different():
    torch.manual_seed(0)
    loss = SoftmaxLoss(200, 64)
    assert loss.weight.shape == (200, 64)
    assert loss.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert loss.weight.mean().abs() < 1e-3


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
    near = torch.tensor([[1.0, 0.1]], dtype=torch.float64)
    labels = torch.tensor([0])
    assert [name for name, _ in loss.named_parameters()] == ["weight"]
    assert loss(between, labels).item() == _without_center(loss)(between, labels).item()
    assert _without_center(loss)(near, labels).item() == 0
    assert loss(near, labels).item() == pytest.approx(2 - 2 / 1.01**0.5)


def _without_center(loss):
    other = CTripletLoss(loss.num_classes, loss.dim, loss.margin).double()
    other.load_state_dict(loss.state_dict())
    return other


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


@given(seed=st.integers(0, 10_000), count=st.integers(2, 9), cut=st.integers(0, 9), near=st.floats(0, 1))
def test_the_agents_distortion_and_its_bound_are_those_of_the_slow_loop(seed, count, cut, near):
    embeddings = rows(count, seed=seed)
    agents = near * embeddings + (1.001 - near) * rows(count, seed=seed + 1)
    terms, bound = slow.agent_distortion(embeddings.tolist(), agents.tolist())
    parts = [agent_distortion(embeddings, agents, part).item() for part in (slice(0, cut), slice(cut, count))]
    assert parts == pytest.approx([sum(terms[:cut]), sum(terms[cut:])], abs=1e-12)
    assert agent_distortion_bound(embeddings, agents).item() == pytest.approx(bound, abs=1e-12)
    assert 0 <= sum(parts) <= bound + 1e-12


def test_agents_that_are_the_rows_distort_nothing():
    embeddings = rows()
    assert agent_distortion(embeddings, 7 * embeddings).item() == pytest.approx(0, abs=1e-12)
    assert agent_distortion(embeddings[:1], rows(1, seed=1)) == 0  # a single row has no distances


@pytest.mark.parametrize(
    "loss",
    [
        CTripletLoss(NUM_CLASSES, DIM),
        CombinedLoss(SoftmaxLoss(NUM_CLASSES, DIM), CContrastiveLoss(NUM_CLASSES, DIM), 0.1),
    ],
)
def test_a_training_has_moving_averages_of_the_distortion(loss):
    objective = Objective(loss.double(), None, Constant(0.0))
    weight = loss.weight if isinstance(loss, CTripletLoss) else loss.second.weight
    averages = []
    for step in range(3):
        terms, bound = slow.agent_distortion(rows(8, seed=step).tolist(), weight[LABELS].tolist())
        now = (sum(terms), bound)
        old = averages[-1] if averages else now
        averages.append([(1 - RATE) * before + RATE * value for before, value in zip(old, now, strict=True)])
        objective(rows(8, seed=step), LABELS, step)
        found = (objective.distortion.distortion.item(), objective.distortion.bound.item())
        assert found == pytest.approx(averages[-1], rel=1e-10)
    objective.eval()(rows(8, seed=9), LABELS, 3)
    assert objective.distortion.bound.item() == found[1]


@pytest.mark.parametrize("first", [False, True])
def test_a_batch_that_overflowed_does_not_move_these_averages(first):
    objective, other = (Objective(CTripletLoss(NUM_CLASSES, DIM).double(), None, 0.0) for _ in range(2))
    other.load_state_dict(objective.state_dict())
    broken = rows(8)
    broken[0, 0] = torch.inf
    for each in [broken, rows(8)] if first else [rows(8), broken]:
        objective(each, LABELS, 0)
    other(rows(8), LABELS, 0)
    for each in (objective, other):
        each(rows(8, seed=1), LABELS, 1)
    assert torch.equal(objective.distortion.distortion, other.distortion.distortion)
    assert torch.equal(objective.distortion.bound, other.distortion.bound)


def test_these_averages_are_computed_in_full_precision_under_autocast():
    plain, under = (Objective(CTripletLoss(NUM_CLASSES, DIM), None, Constant(0.0)) for _ in range(2))
    under.load_state_dict(plain.state_dict())
    plain(rows(8).float(), LABELS, 0)
    with torch.autocast("cpu", torch.bfloat16):
        under(rows(8).float(), LABELS, 0)
    assert torch.equal(under.distortion.distortion, plain.distortion.distortion)
    assert torch.equal(under.distortion.bound, plain.distortion.bound)


def test_a_checkpoint_without_these_averages_is_resumed_and_one_with_them_exactly():
    objective, other = (Objective(CTripletLoss(NUM_CLASSES, DIM), None, Constant(0.0)) for _ in range(2))
    objective(rows(8).float(), LABELS, 0)
    state = objective.state_dict()
    other.load_state_dict(state)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in state.items())
    older = Objective(CTripletLoss(NUM_CLASSES, DIM), None, Constant(0.0))
    older.load_state_dict({"loss.weight": state["loss.weight"]})
    assert not older.distortion.started and older.distortion.bound == 0


def test_losses_without_agents_have_no_distortion():
    assert Objective(SoftmaxLoss(NUM_CLASSES, DIM), None, Constant(0.0)).distortion is None
    assert [name for name, _ in AgentDistortion().named_parameters()] == []
    assert {value.dtype for value in AgentDistortion().half().buffers()} == {torch.float64, torch.bool}


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
        scores = [float(row @ (weight if free else weight / weight.norm())) for weight in loss.weight.detach()]
        assert found == (scores.index(max(scores)) == label)
    assert 0 < loss.recognised(batch, labels).sum() < 30


def test_ties_and_nan_are_not_recognised():
    loss = SoftmaxLoss(3, 2)
    loss.weight.data = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    batch = torch.tensor([[1.0, 0.0], [0.0, 1.0], [torch.nan, 1.0]])
    assert loss.recognised(batch, torch.tensor([0, 2, 2])).tolist() == [False, True, False]


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
