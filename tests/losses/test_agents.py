import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssl_sec.losses import CContrastiveLoss, CombinedLoss, CTripletLoss, SoftmaxLoss
from ssl_sec.losses.agents import RATE, AgentDistortion, agent_distortion, agent_distortion_bound
from ssl_sec.training.objective import Objective
from ssl_sec.training.schedules import Constant
from tests.losses.cases import DIM, NUM_CLASSES, rows
from tests.losses.slow import classes

LABELS = torch.tensor([3, 0, 2, 0, 3, 3, 1, 5])


@given(seed=st.integers(0, 10_000), count=st.integers(2, 9), cut=st.integers(0, 9), near=st.floats(0, 1))
def test_the_agents_distortion_and_its_bound_are_those_of_the_slow_loop(seed, count, cut, near):
    embeddings = rows(count, seed=seed)
    agents = near * embeddings + (1.001 - near) * rows(count, seed=seed + 1)
    terms, bound = classes.agent_distortion(embeddings.tolist(), agents.tolist())
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
        terms, bound = classes.agent_distortion(rows(8, seed=step).tolist(), weight[LABELS].tolist())
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
