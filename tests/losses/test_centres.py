import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.losses.centres import move_centres, pick_centres
from tests.losses.cases import DIM, rows

# Most classes are in no batch, and the numbers of most are larger than the batch.
NUM_CLASSES = 100
batches = st.lists(st.integers(0, NUM_CLASSES - 1) | st.sampled_from([7, 99]), min_size=1, max_size=8)


def some_centres():
    return rows(NUM_CLASSES, seed=1)


@given(labels=batches, seed=st.integers(0, 1000))
@settings(max_examples=50)
def test_centres_move_as_by_the_slow_loop(labels, seed):
    """SFT, Eq. 9."""
    centres, batch = some_centres(), rows(len(labels), seed=seed)
    move_centres(centres, batch, torch.tensor(labels))
    expected = some_centres().tolist()
    for label in set(labels):
        before, own = (
            expected[label],
            [row for row, other in zip(batch.tolist(), labels, strict=True) if other == label],
        )
        expected[label] = [
            before[place] - sum(before[place] - row[place] for row in own) / (1 + len(own)) for place in range(DIM)
        ]
    torch.testing.assert_close(centres, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@given(labels=batches, draws=st.lists(st.integers(0, 3) | st.just(2**63 - 1), min_size=8, max_size=8))
@settings(max_examples=50)
def test_the_row_with_the_largest_draw_is_picked_of_each_class(labels, draws):
    centres, batch, draws = some_centres(), rows(len(labels)), draws[: len(labels)]
    pick_centres(centres, batch, torch.tensor(labels), torch.tensor(draws))
    for label in range(NUM_CLASSES):
        own = [place for place, other in enumerate(labels) if other == label]
        largest = [batch[place] for place in own if draws[place] == max(draws[other] for other in own)]
        allowed = largest or [some_centres()[label]]
        assert any(torch.equal(centres[label], row) for row in allowed)


def updated(kind, centres, batch, labels):
    if kind == "moved":
        move_centres(centres, batch, labels)
    else:
        pick_centres(centres, batch, labels, torch.arange(len(labels)))


@pytest.mark.parametrize("kind", ["moved", "picked"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_may_have_another_precision_than_the_centres(kind, dtype):
    """In half precision their sum would overflow, or lose its digits."""
    centres, labels = torch.ones(NUM_CLASSES, DIM), torch.full((64,), 99)
    batch = (4000 * rows(64).abs()).to(dtype)
    updated(kind, centres, batch, labels)
    expected = (1 + batch.double().sum(0)) / 65 if kind == "moved" else batch[63].double()
    assert centres.dtype == torch.float32
    torch.testing.assert_close(centres[99].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["moved", "picked"])
def test_centres_have_no_gradient(kind):
    centres = torch.zeros(NUM_CLASSES, DIM, dtype=torch.float64)
    updated(kind, centres, rows(4).requires_grad_(), torch.tensor([0, 0, 5, 99]))
    assert centres.any() and not centres.requires_grad


@pytest.mark.parametrize("kind", ["moved", "picked"])
@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_a_centre_that_would_not_be_finite_stays(kind, broken):
    centres, batch = some_centres(), rows(4)
    batch[1, 2] = broken
    updated(kind, centres, batch, torch.tensor([0, 99, 99, 5] if kind == "moved" else [0, 99, 5, 5]))
    assert torch.equal((centres != some_centres()).any(1).nonzero().flatten(), torch.tensor([0, 5]))
