"""Exact search against a comparison of all rows at once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ssl_sec.embeddings import search as module
from ssl_sec.embeddings.search import search

CPU = torch.device("cpu")


def rows(count: int, dim: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32))


def in_blocks(base: Tensor, size: int) -> list[tuple[int, Tensor]]:
    return [(start, base[start : start + size]) for start in range(0, len(base), size)]


@given(
    num_rows=st.integers(4, 40),
    block=st.integers(1, 50),
    tile=st.integers(1, 50),
    k=st.integers(1, 3),
    first=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)
def test_the_neighbours_and_pairs_of_some_rows_are_those_of_the_whole_table(num_rows, block, tile, k, first, seed):
    base = rows(num_rows, 5, seed)
    table = functional.cosine_similarity(base.double().unsqueeze(1), base.double().unsqueeze(0), dim=2)
    wanted = [(i, j) for i in range(first, num_rows) for j in range(i + 1, num_rows) if table[i, j] >= 0.5]
    table.fill_diagonal_(-torch.inf)
    nearest = table[first:].topk(k, dim=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TILE_ROWS_ON_CPU", tile)
        found, pairs = search(
            base[first:],
            in_blocks(base, block),
            k=k,
            start=first,
            are_among=True,
            pairs_above=0.5,
            max_pairs=10_000,
            device=CPU,
        )
    torch.testing.assert_close(found.cosines.double(), nearest.values, rtol=0, atol=1e-6)
    torch.testing.assert_close(table[first:].gather(1, found.positions), nearest.values, rtol=0, atol=1e-6)
    assert sorted(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)) == wanted
    assert pairs.num_found == len(wanted)
    assert pairs.cosines.tolist() == sorted(pairs.cosines.tolist(), reverse=True)


def test_queries_of_another_set_have_neighbours_at_their_own_positions():
    base = rows(20, 4, 0)
    found, pairs = search(
        3 * base[5:8],
        in_blocks(base, 6),
        k=1,
        start=0,
        are_among=False,
        pairs_above=0.9999,
        max_pairs=10,
        device=CPU,
    )
    assert found.positions.tolist() == [[5], [6], [7]]
    torch.testing.assert_close(found.cosines, torch.ones(3, 1))
    assert sorted(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)) == [(0, 5), (1, 6), (2, 7)]


def test_of_too_many_pairs_the_most_similar_are_kept_and_all_are_counted():
    base = rows(60, 3, 1)
    options = {"k": 1, "start": 0, "are_among": True, "pairs_above": 0.0, "device": CPU}
    _, every = search(base, in_blocks(base, 7), max_pairs=10_000, **options)
    _, some = search(base, in_blocks(base, 7), max_pairs=20, **options)
    assert some.num_found == every.num_found == len(every.cosines) > 500
    for name in ("first", "second", "cosines"):
        assert torch.equal(getattr(some, name), getattr(every, name)[:20])


def test_a_row_of_zeros_is_as_far_from_all_as_a_perpendicular_one():
    base = torch.cat([torch.zeros(1, 3), torch.eye(3)])
    found, _ = search(base, [(0, base)], k=3, start=0, are_among=True, pairs_above=0.5, max_pairs=1, device=CPU)
    assert found.cosines.tolist() == [[0.0] * 3] * 4


@pytest.mark.parametrize("dim", [3, 512])
def test_equal_rows_are_pairs_at_a_cosine_of_one(dim):
    """In float32 the cosine of a row with itself is often 0.99999994."""
    rows = torch.randn(300, dim, generator=torch.Generator().manual_seed(0))
    both = torch.cat([rows, 3 * rows])
    blocks = [(0, both[:400]), (400, both[400:])]
    options = {"k": 1, "start": 0, "max_pairs": 1000, "device": torch.device("cpu")}
    _, pairs = search(both, blocks, are_among=True, pairs_above=1.0, **options)
    assert pairs.num_found == 300
    assert torch.equal((pairs.second - pairs.first), torch.full((300,), 300))
    assert (pairs.cosines == 1).all()
