"""The images to label first: one of each cluster, the most typical by a slow loop."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.embeddings import selection
from ssl_sec.embeddings.selection import select_typical
from ssl_sec.errors import ConfigError

DIM = 8


def blobs(sizes, spread=0.05, seed=0):
    """Embeddings of any norm around the axes, one cluster of each size, in a random order; the cluster of each."""
    draws = np.random.default_rng(seed)
    of = draws.permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = np.eye(DIM)[of] + spread * draws.standard_normal((len(of), DIM))
    return torch.from_numpy(rows * draws.uniform(0.5, 5, (len(of), 1))).float(), of


def select(rows, count, labelled=(), eligible=None, block=7, **options):
    is_labelled = np.isin(np.arange(len(rows)), list(labelled))
    may = np.ones(len(rows), dtype=bool) if eligible is None else eligible
    blocks = lambda: ((start, rows[start : start + block]) for start in range(0, len(rows), block))  # noqa: E731
    return select_typical(blocks, may, is_labelled, count, **options)


def slow_typicality(rows, members, k):
    """By position, with a loop over the members."""
    unit = torch.nn.functional.normalize(rows.double(), dim=1)
    found = {}
    for one in members:
        distances = sorted(float((unit[one] - unit[other]).norm()) for other in members if other != one)
        found[one] = 1 / np.mean(distances[: min(k, len(members) // 2)])
    return found


@pytest.mark.parametrize("k", [3, 20])
def test_the_most_typical_of_each_cluster_is_chosen_the_largest_first(k):
    sizes = (30, 12, 45, 20)
    rows, of = blobs(sizes)
    found = select(rows, 4, k=k)
    assert of[found.positions].tolist() == [2, 0, 3, 1]
    assert found.cluster_sizes.tolist() == [45, 30, 20, 12]
    for position, typicality in zip(found.positions, found.typicality, strict=True):
        expected = slow_typicality(rows, np.flatnonzero(of == of[position]), k)
        assert position == max(expected, key=expected.get)
        assert typicality == pytest.approx(expected[position], rel=1e-4)


def test_clusters_with_a_labelled_image_come_last():
    rows, of = blobs((30, 12, 45, 20))
    labelled = [int(np.flatnonzero(of == 2)[0]), int(np.flatnonzero(of == 3)[0])]
    found = select(rows, 2, labelled=labelled)
    assert of[found.positions].tolist() == [0, 1]
    assert not set(found.positions) & set(labelled)


def test_small_clusters_come_after_all_others():
    """Few images far from all others are outliers, which teach little."""
    rows, of = blobs((30, 20, 2))
    assert of[select(rows, 3).positions].tolist() == [0, 1, 0]
    assert selection._shares(np.repeat([0, 1, 2], (7, 6, 5)), np.zeros(18, dtype=bool), 15)[:13].count(2) == 0
    assert selection._shares(np.array([0, 0, 1, 1, 1]), np.array([True, *4 * [False]]), 4) == [1, 1, 0, 1]


def test_several_images_of_a_cluster_are_of_different_parts_of_it():
    rows, of = blobs((40, 40))
    positions, typicality = np.arange(6), np.array([0.1, 0.9, 0.8, 0.7, 0.2, 0.3], dtype=np.float32)
    free = np.array([True, True, True, True, True, False])
    parts = np.array([0, 1, 1, 1, 2, 2])
    assert [each for each, _ in selection._best(positions, typicality, parts, free, 4)] == [1, 4, 0, 2]
    found = select(rows, 10, labelled=range(30))
    assert len(set(found.positions)) == 10


def test_only_eligible_images_count():
    rows, of = blobs((30, 12, 45, 20))
    found = select(rows, 3, eligible=of != 2)
    assert of[found.positions].tolist() == [0, 3, 1] and found.cluster_sizes.tolist() == [30, 20, 12]


@given(count=st.integers(1, 25), num_labelled=st.integers(0, 5), seed=st.integers(0, 3), block=st.integers(1, 40))
@settings(max_examples=25)
def test_every_choice_is_new_and_once(count, num_labelled, seed, block):
    rows, _ = blobs((3, 9, 1, 17), spread=0.3, seed=seed)
    found = select(rows, count, labelled=range(num_labelled), seed=seed, block=block)
    assert len(set(found.positions)) == len(found.positions) == count
    assert found.positions.min() >= num_labelled


def test_all_images_can_be_chosen():
    rows, _ = blobs((5, 9))
    assert sorted(select(rows, 14).positions) == list(range(14))


def test_clusters_without_images_attract_none():
    """Their centre would be zero, to which an image far from all others is nearest."""
    centres = selection._centres(torch.eye(4)[:2], torch.tensor([3, 1]))
    assert torch.equal(centres, torch.eye(4)[[1, 0]])
    blocks = lambda: iter([(0, -torch.eye(4)[:1])])  # noqa: E731
    assert selection._nearest(blocks, centres, np.array([True])).tolist() == [0]


def test_equal_images_and_rows_of_zeros_are_chosen_too():
    rows = torch.zeros(6, DIM)
    rows[:4, 0] = 1
    found = select(rows, 6)
    assert sorted(found.positions) == list(range(6))


@pytest.mark.parametrize(("name", "value"), [("_VALUES_AT_ONCE", 8 * DIM * 20), ("_SAMPLE", 60), ("_MEMBERS", 400)])
def test_what_is_in_memory_at_once_does_not_matter(name, value, monkeypatch):
    rows, _ = blobs((40, 25, 15, 60), spread=0.02)
    expected = select(rows, 4)
    monkeypatch.setattr(selection, name, value)
    monkeypatch.setattr(selection, "_SAMPLE_PER_CLUSTER", 1)
    found = select(rows, 4, block=1000)
    assert found.positions.tolist() == expected.positions.tolist()
    np.testing.assert_array_equal(found.cluster_sizes, expected.cluster_sizes)


def test_images_of_all_clusters_of_nearly_collapsed_embeddings_are_chosen():
    _, of = blobs((60, 50, 40, 30))
    rows = 1 + 3e-4 * (torch.eye(DIM)[of] + 0.05 * torch.randn(180, DIM, generator=torch.Generator().manual_seed(0)))
    found = select(rows, 4)
    assert of[found.positions].tolist() == [0, 1, 2, 3] and found.cluster_sizes.tolist() == [60, 50, 40, 30]


def test_of_a_large_cluster_a_sample_is_compared(monkeypatch):
    monkeypatch.setattr(selection, "_MEMBERS", 10)
    rows, of = blobs((80, 30))
    found = select(rows, 2)
    assert of[found.positions].tolist() == [0, 1] and found.cluster_sizes.tolist() == [80, 30]
    draws, clusters = np.random.default_rng(0), np.zeros(80, dtype=np.int64)
    free = np.arange(80) >= 70  # images without labels are in the sample
    members = selection._members(clusters, {0: 6}, free, draws)[0]
    assert free[members].sum() >= 6 and 10 <= len(members) <= 16 and (np.diff(members) > 0).all()


@pytest.mark.parametrize("count", [0, 14])
def test_more_images_than_there_are_without_labels_are_refused(count):
    rows, _ = blobs((5, 9))
    with pytest.raises(
        ConfigError, match=f"^count: found {count}, must be 1 to 13, the number of images without a label"
    ):
        select(rows, count, labelled=[3])
