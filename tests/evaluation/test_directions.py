"""Cosines, changes of directions and spreads of classes, against slow loops."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.errors import DataError
from ssl_sec.evaluation.directions import (
    ClassSpread,
    CosineDistributions,
    DirectionChanges,
    Distribution,
    class_divergences,
    class_spread,
    cosine_distributions,
    direction_changes,
    distance_distributions,
    pooled,
    within_class_energy,
)
from ssl_sec.settings import to_values
from tests.figures.test_training import draw

LABELS = torch.tensor([7, 3, 3, 7, 9, 7, 3, 7])


def cosine(first, second) -> float:
    first, second = first.double(), second.double()
    return float(first @ second / (first.norm() * second.norm()))


def slow_cosines(embeddings, labels):
    """Every pair and every triplet, one by one."""
    images = range(len(labels))
    positives, negatives, differences = [], [], []
    for a, b in itertools.combinations(images, 2):
        (positives if labels[a] == labels[b] else negatives).append(cosine(embeddings[a], embeddings[b]))
    for a, p, n in itertools.product(images, repeat=3):
        if a != p and labels[a] == labels[p] != labels[n]:
            differences.append(cosine(embeddings[a], embeddings[p]) - cosine(embeddings[a], embeddings[n]))
    return positives, negatives, differences


def assert_distribution(found: Distribution, values: list[float], low: float, high: float):
    expected, edges = np.histogram(values, bins=round((high - low) * 50), range=(low, high))
    assert found.edges == pytest.approx(edges.tolist(), abs=1e-12)
    assert found.counts == expected.tolist()
    if values:
        assert found.mean == pytest.approx(np.mean(values), abs=1e-7)
        assert found.variance == pytest.approx(np.var(values), abs=1e-7)
    else:
        assert (found.mean, found.variance) == (None, None)


@settings(max_examples=40)
@given(labels=st.lists(st.integers(0, 4), min_size=0, max_size=12), seed=st.integers(0, 99))
def test_few_pairs_and_triplets_are_all_counted_once(labels, seed):
    labels = torch.tensor(labels, dtype=torch.int64)
    embeddings = 3 * draw(len(labels), 5, seed=seed).double()
    found = cosine_distributions(embeddings, labels, seed=0, max_pairs=2000)
    positives, negatives, differences = slow_cosines(embeddings, labels)
    assert_distribution(found.positives, positives, -1, 1)
    assert_distribution(found.negatives, negatives, -1, 1)
    assert_distribution(found.differences, differences, -2, 2)
    if differences:
        assert found.violations == pytest.approx(np.mean(np.array(differences) <= 0))
    else:
        assert found.violations is None


def test_drawn_pairs_and_triplets_are_distributed_as_all_of_them():
    labels = torch.tensor([0] * 2 + [1] * 5 + [2] * 13)  # of different sizes, so that a wrong weight shows
    embeddings = 2 * draw(3, 6, seed=1)[labels] + draw(20, 6)
    num_drawn = 180
    found = [cosine_distributions(embeddings, labels, seed, max_pairs=num_drawn) for seed in range(200)]
    positives, negatives, differences = slow_cosines(embeddings, labels)
    assert len(positives) == 89 and len(negatives) == 101 and len(differences) == 1428
    for one in found:
        assert sum(one.positives.counts) == 89
        assert sum(one.negatives.counts) == 101
        assert sum(one.differences.counts) == num_drawn
    fewer = [cosine_distributions(embeddings, labels, seed, max_pairs=80) for seed in range(200)]
    for drawn, all_values in (
        ([one.positives for one in fewer], positives),
        ([one.negatives for one in fewer], negatives),
        ([one.differences for one in found], differences),
    ):
        error = np.std(all_values) / np.sqrt(200 * sum(drawn[0].counts))
        assert np.mean([one.mean for one in drawn]) == pytest.approx(np.mean(all_values), abs=4 * error)
    share = np.mean(np.array(differences) <= 0)
    error = np.sqrt(share * (1 - share) / (200 * num_drawn))
    assert 0.01 < share < 0.5
    assert np.mean([one.violations for one in found]) == pytest.approx(share, abs=4 * error)


def test_the_drawn_pairs_depend_on_the_seed():
    embeddings, labels = draw(300, 4), torch.arange(300) % 7
    first, again, other = (cosine_distributions(embeddings, labels, seed, max_pairs=50) for seed in (-3, -3, 4))
    assert first == again
    assert first.positives != other.positives
    assert first.negatives != other.negatives
    assert first.differences != other.differences


def test_cosines_depend_on_neither_norms_nor_the_order_of_the_images():
    embeddings, labels = draw(40, 4).double(), torch.arange(40) % 7
    lengths = torch.linspace(1e-3, 1e3, 40).double().unsqueeze(1)
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    found = cosine_distributions(embeddings, labels, seed=0)
    moved = cosine_distributions((embeddings * lengths)[shuffled], labels[shuffled], seed=0)
    assert moved.positives.counts == found.positives.counts
    assert moved.differences.counts == found.differences.counts
    assert moved.negatives.variance == pytest.approx(found.negatives.variance)


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf])
def test_embeddings_without_a_direction_are_refused(bad):
    embeddings = draw(6, 3)
    embeddings[[1, 4]] = bad
    labels = torch.zeros(6, dtype=torch.int64)
    message = "^embeddings: found 2 of 6 rows that are zero or not finite; allowed: rows with a direction$"
    with pytest.raises(DataError, match=message):
        cosine_distributions(embeddings, labels, seed=0)
    with pytest.raises(DataError, match=message):
        direction_changes(draw(6, 3), embeddings, 0, 1)
    with pytest.raises(DataError, match=message):
        direction_changes(embeddings, draw(6, 3), 0, 1)
    with pytest.raises(DataError, match=message):
        class_spread(embeddings, labels)


def test_a_direction_change_is_one_minus_the_cosine():
    before, after = draw(50, 6).double(), 9 * draw(50, 6, seed=1).double()
    found = direction_changes(before, after, 1000, 2000, num_bins=12)
    changes = [1 - cosine(*pair) for pair in zip(before, after, strict=True)]
    assert (found.first_step, found.last_step) == (1000, 2000)
    expected, edges = np.histogram(changes, bins=12)
    assert found.changes.counts == expected.tolist()
    assert found.changes.edges == pytest.approx(edges.tolist())
    assert found.changes.mean == pytest.approx(np.mean(changes))
    assert found.changes.variance == pytest.approx(np.var(changes))


def test_small_direction_changes_are_not_lost_to_rounding():
    angle = 1e-4
    before = torch.tensor([[1.0, 0.0]])
    after = torch.tensor([[np.cos(angle), np.sin(angle)]], dtype=torch.float32)
    assert direction_changes(before, after, 0, 1).changes.mean == pytest.approx(angle**2 / 2, rel=1e-3)


def test_unmoved_and_reversed_directions_are_the_ends_of_the_range():
    embeddings = draw(9, 4)
    still = direction_changes(embeddings, 3 * embeddings, 0, 1).changes
    assert (sum(still.counts), still.mean) == (9, pytest.approx(0, abs=1e-12))
    assert all(low < high for low, high in itertools.pairwise(still.edges))
    turned = direction_changes(embeddings, -embeddings, 0, 1).changes
    assert turned.mean == pytest.approx(2)
    none = direction_changes(embeddings[:0], embeddings[:0], 0, 1).changes
    assert (sum(none.counts), none.mean, none.variance) == (0, None, None)


def test_class_spread_is_that_of_the_directions():
    embeddings, labels = 5 * draw(9, 4).double(), torch.tensor([7, 3, 3, 7, 9, 7, 3, 5, 5])
    spread = class_spread(embeddings, labels)
    unit = torch.stack([row / row.norm() for row in embeddings])
    within, means, expected = torch.zeros(4, 4).double(), [], []
    for label in (3, 5, 7, 9):
        members = unit[labels == label]
        means.append(members.mean(0))
        scatter = sum(torch.outer(x - means[-1], x - means[-1]) for x in members) / len(members)
        within += scatter / 4
        expected.append(scatter.trace().item())
    assert spread.classes == [3, 5, 7]  # class 9 has one image, whose divergence of 0 would count as the least spread
    assert spread.divergences == pytest.approx(expected[:3])
    values, vectors = torch.linalg.eigh(sum(torch.outer(mean, mean) for mean in means))
    axes = next(k for k in range(1, 5) if values[-k:].sum() >= 0.99 * values.sum())
    leading = vectors[:, -axes:]
    assert spread.within_class_energy == pytest.approx(((leading.T @ within @ leading).trace() / within.trace()).item())


def test_the_numbers_survive_json():
    cosines = cosine_distributions(draw(8, 4), LABELS, seed=0)
    restored = json.loads(json.dumps(to_values(cosines), allow_nan=False))
    parts = {key: Distribution(**value) for key, value in restored.items() if key != "violations"}
    assert CosineDistributions(**parts, violations=restored["violations"]) == cosines
    spread = class_spread(draw(8, 4), LABELS)
    assert ClassSpread(**json.loads(json.dumps(dataclasses.asdict(spread), allow_nan=False))) == spread
    changes = direction_changes(draw(8, 4), draw(8, 4, seed=1), 0, 1000)
    restored = json.loads(json.dumps(dataclasses.asdict(changes), allow_nan=False))
    assert DirectionChanges(**restored | {"changes": Distribution(**restored["changes"])}) == changes


def test_a_distribution_needs_one_edge_more_than_bins():
    with pytest.raises(AssertionError, match="one edge more"):
        Distribution([0.0, 1.0], [1, 2], None, None)


def of(values, num_bins=4, low=0.0, high=8.0):
    counts, edges = np.histogram(values, bins=num_bins, range=(low, high))
    return Distribution(edges.tolist(), counts.tolist(), float(np.mean(values)), float(np.var(values)))


def test_pooled_values_have_the_mean_the_variance_and_the_bins_of_all():
    one, other = [1.0, 3.0, 7.0, 7.5], [0.5, 5.0]
    found, expected = pooled([of(one), of(other)]), of(one + other)
    assert (found.edges, found.counts) == (expected.edges, expected.counts)
    assert (found.mean, found.variance) == pytest.approx((expected.mean, expected.variance))


def test_pooled_bins_that_differ_span_all_values():
    one, other = of([1.0] * 6 + [3.0] * 2, 2, 0.0, 4.0), of([9.0] * 4, 2, 8.0, 10.0)
    found = pooled([one, other])
    assert (found.edges, found.counts) == ([0.0, 5.0, 10.0], [8, 4])
    assert found.mean == pytest.approx((6 + 6 + 36) / 12)


def test_a_run_without_a_value_changes_nothing_when_pooled():
    nothing = Distribution([0.0, 1.0], [0], None, None)
    assert pooled([of([1.0]), nothing]) == of([1.0])
    assert pooled([nothing, nothing]) == nothing


def test_distances_are_those_of_the_pairs_of_the_cosines():
    embeddings = torch.randn(len(LABELS), 4, generator=torch.Generator().manual_seed(3))
    found = distance_distributions(embeddings, LABELS, seed=0)
    positives, negatives, _ = slow_cosines(embeddings, LABELS)
    for pairs, cosines in ((found.positives, positives), (found.negatives, negatives)):
        assert_distribution(pairs, [(2 - 2 * each) ** 0.5 for each in cosines], 0, 2)
    shares = [np.array(pairs.counts) / sum(pairs.counts) for pairs in (found.positives, found.negatives)]
    assert found.overlap == pytest.approx(np.minimum(*shares).sum())


def test_distances_that_do_not_overlap():
    apart = distance_distributions(torch.eye(2).repeat(2, 1), torch.tensor([0, 1, 0, 1]), seed=0)
    assert apart.overlap == 0 and apart.positives.mean == 0 and apart.negatives.mean == pytest.approx(2**0.5)
    assert distance_distributions(torch.eye(2), torch.tensor([0, 1]), seed=0).overlap == 0


def scatter_matrices(embeddings, labels):
    """SFT's Eqs. 7 and 11, class by class."""
    means, matrices = [], []
    for label in labels.unique():
        members = embeddings[labels == label]
        means.append(members.mean(0))
        matrices.append(sum(torch.outer(x - means[-1], x - means[-1]) for x in members) / len(members))
    return torch.stack(means), torch.stack(matrices)


def test_a_divergence_is_the_trace_of_the_scatter_matrix():
    embeddings = draw(8, 4).double()
    labels, divergences = class_divergences(embeddings, LABELS)
    _, matrices = scatter_matrices(embeddings, LABELS)
    assert labels.tolist() == [3, 7, 9]
    torch.testing.assert_close(divergences, torch.stack([matrix.trace() for matrix in matrices]))
    assert divergences[2] == 0  # one row


@pytest.mark.parametrize(("energy", "axes"), [(0.5, 1), (0.95, 2), (1.0, 3)])
def test_the_energy_within_is_that_in_the_leading_axes_of_the_means(energy, axes):
    embeddings = draw(8, 4).double()
    means, matrices = scatter_matrices(embeddings, LABELS)
    values, vectors = torch.linalg.eigh(sum(torch.outer(mean, mean) for mean in means) / 3)
    values, vectors = values.flip(0), vectors.flip(1)
    assert next(k for k in range(1, 5) if values[:k].sum() >= energy * values.sum() * (1 - 1e-9)) == axes
    leading, within = vectors[:, :axes], matrices.mean(0)
    expected = (leading.T @ within @ leading).trace() / within.trace()
    assert 0.05 < expected < 0.95
    assert within_class_energy(embeddings, LABELS, energy) == pytest.approx(expected.item(), rel=1e-10)


def test_means_and_spread_in_orthogonal_subspaces_have_no_energy_in_common():
    embeddings = torch.tensor([[3.0, 0.0, 1.0], [3.0, 0.0, -1.0], [0.0, 2.0, 2.0], [0.0, 2.0, -2.0]])
    labels = torch.tensor([0, 0, 1, 1])
    assert within_class_energy(embeddings, labels) == pytest.approx(0, abs=1e-6)
    assert within_class_energy(embeddings.roll(1, 0), labels) > 0.1
    assert within_class_energy(embeddings[::2], torch.tensor([0, 1])) == 0  # no spread
    with pytest.raises(ValueError, match=r"energy: found 1.5, must be in \(0, 1\]"):
        within_class_energy(embeddings, labels, 1.5)
