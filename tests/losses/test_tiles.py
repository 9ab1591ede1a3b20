import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.losses import ArcFaceLoss, DCLLoss, MoCoV3Loss, NTXentLoss, tiles
from tests.losses.cases import rows

BOUNDED, UNBOUNDED = 30.0, 1e6


def at_once(x, anchors, groups=None):
    groups = torch.arange(len(x)) if groups is None else groups
    return (x @ x.T).masked_fill(groups.unsqueeze(1) == groups, -torch.inf).logsumexp(1)[anchors]


@given(
    count=st.integers(2, 23),
    tile=st.integers(1, 25),
    cut=st.none() | st.tuples(st.integers(0, 23), st.integers(0, 23)),
    bound=st.sampled_from([BOUNDED, UNBOUNDED]),
    num_groups=st.none() | st.integers(2, 8),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100)
def test_value_and_gradient_are_those_of_the_whole_matrix(count, tile, cut, bound, num_groups, seed):
    groups = None if num_groups is None else torch.arange(count) % num_groups
    first, last = (0, count) if cut is None else (min(*cut, count), min(max(cut), count))
    anchors = slice(first, last)
    ours, theirs = rows(count, seed=seed).requires_grad_(), rows(count, seed=seed).requires_grad_()
    weights = torch.linspace(-1, 2, count, dtype=torch.float64)[anchors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CPU_TILE_ROWS", tile)
        sums = tiles.log_sum_exp_of_others(ours, anchors, bound, groups)
        (sums * weights).sum().backward()
    expected = at_once(theirs, anchors, groups)
    (expected * weights).sum().backward()
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bound", [BOUNDED, UNBOUNDED])
def test_all_anchors_can_be_given_by_any_slice(bound):
    expected = at_once(rows(9), slice(None))
    for anchors in (slice(None), slice(0, 9), slice(0, 100)):
        torch.testing.assert_close(tiles.log_sum_exp_of_others(rows(9), anchors, bound), expected)


def test_a_row_that_is_alone_has_no_others():
    for bound in (BOUNDED, UNBOUNDED):
        assert tiles.log_sum_exp_of_others(rows(1), slice(None), bound).tolist() == [-torch.inf]
        one_group = torch.zeros(3, dtype=torch.int64)
        assert tiles.log_sum_exp_of_others(rows(3), slice(None), bound, one_group).tolist() == [-torch.inf] * 3
    groups = torch.tensor([0, 1])
    of_rows = tiles.log_sum_exp_of_keys(rows(2), rows(3), groups, torch.tensor([1, 1, 1]))
    assert of_rows.isneginf().tolist() == [False, True]


def test_half_of_the_matrix_is_made_where_all_rows_are_anchors(monkeypatch):
    monkeypatch.setattr(tiles, "CPU_TILE_ROWS", 4)
    made = [(above.start, left.start) for above, left, _ in tiles._upper_tiles(rows(12))]
    assert made == [(0, 0), (0, 4), (0, 8), (4, 4), (4, 8), (8, 8)]


@pytest.mark.parametrize(("temperature", "is_half"), [(0.5, True), (0.05, True), (0.01, False)])
def test_half_of_the_matrix_is_enough_unless_the_temperature_is_very_low(temperature, is_half, monkeypatch):
    made = []
    monkeypatch.setattr(
        tiles, "_upper_tiles", lambda *inputs, whole=tiles._upper_tiles: made.append(1) or whole(*inputs)
    )
    NTXentLoss(temperature)(rows(12, 8).float(), LABELS)
    assert bool(made) == is_half


@pytest.mark.parametrize("sub_centres", [1, 2, 5])
def test_a_tile_of_classes_has_a_bounded_number_of_similarities(sub_centres, monkeypatch):
    """Each sub-centre of a class has its own."""
    monkeypatch.setattr(tiles, "TILE_ENTRIES", 40)
    made = []

    def part(rows, templates, places, own):
        made.append(len(rows) * len(templates) * sub_centres)
        return own

    tiles.over_tiles(part, rows(4), rows(20, 5 * sub_centres), torch.arange(4), torch.ones(4, dtype=torch.float64))
    assert made == [40] * (20 // (10 // sub_centres))


LABELS = torch.arange(12) // 3
IN_TILES = {
    "symmetric": NTXentLoss,
    "groups": DCLLoss,
    "rows": partial(NTXentLoss, temperature=0.01),
    "keys": MoCoV3Loss,
    "classes": partial(ArcFaceLoss, 4, 8),
}


@pytest.mark.parametrize("name", IN_TILES)
def test_a_second_derivative_is_refused_by_each_form(name, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ENTRIES", 24)
    loss, others = IN_TILES[name](), (rows(12, 8, seed=1).float(),) if name == "keys" else ()
    embeddings = rows(12, 8).float().requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True: found a loss that is summed in tiles"):
        torch.autograd.grad(loss(embeddings, *others, LABELS), embeddings, create_graph=True)


@pytest.mark.parametrize("name", IN_TILES)
def test_a_backward_pass_under_autocast_is_in_single_precision(name, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ENTRIES", 24)
    monkeypatch.setattr(tiles, "CPU_TILE_CLASSES", 2)
    loss, others = IN_TILES[name](), (rows(12, 8, seed=1).float(),) if name == "keys" else ()

    def gradient(under_autocast):
        embeddings = rows(12, 8).float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast):
            loss(embeddings, *others, LABELS).backward()
        return embeddings.grad

    # Products of a loss outside of its tiles are torch's, which halves them in such a backward pass.
    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-6 if name != "classes" else 1e-2, atol=1e-6)


COMPILED = """
import torch
from ssl_sec import NTXentLoss

def gradient(loss):
    rows = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(rows, torch.arange(12) // 3)
    value.backward()
    return rows.grad

for temperature in (0.5, 0.01):
    loss = NTXentLoss(temperature)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradient(compiled), gradient(loss))
print("equal")
"""


@pytest.mark.slow
def test_a_loss_compiled_under_autocast_has_its_gradient_in_single_precision():
    """In a program of its own: the checks of shapes in the tests' process cannot be compiled."""
    program = [sys.executable, "-W", "ignore", "-c", COMPILED]
    done = subprocess.run(program, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.stdout == "equal\n", done.stderr
