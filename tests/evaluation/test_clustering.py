import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans, kmeans_plusplus
from sklearn.metrics import normalized_mutual_info_score
from sklearn.metrics.cluster import pair_confusion_matrix
from torch.nn import functional

from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation import clustering
from ssl_sec.evaluation.clustering import kmeans_assignments, nmi_f1


def slowly(assignments, labels):
    """Mutual information over all cells, and F1 over all pairs."""
    num_images = len(labels)
    information = 0.0
    for cluster, label in itertools.product(set(assignments), set(labels)):
        both = sum(a == cluster and c == label for a, c in zip(assignments, labels, strict=True)) / num_images
        if both:
            expected = assignments.count(cluster) * labels.count(label) / num_images**2
            information += both * math.log(both / expected)

    def entropy(parts):
        return -sum(parts.count(p) / num_images * math.log(parts.count(p) / num_images) for p in set(parts))

    mean = (entropy(assignments) + entropy(labels)) / 2
    pairs = list(itertools.combinations(range(num_images), 2))
    found = {(i, j) for i, j in pairs if assignments[i] == assignments[j]}
    wanted = {(i, j) for i, j in pairs if labels[i] == labels[j]}
    right = len(found & wanted)
    if not found and not wanted:
        f1 = 1.0
    elif not right:
        f1 = 0.0
    else:
        precision, recall = right / len(found), right / len(wanted)
        f1 = 2 * precision * recall / (precision + recall)
    return (information / mean if mean else 1.0), f1


partitions = st.integers(1, 25).flatmap(
    lambda size: st.tuples(*[st.lists(st.integers(-3, 4), min_size=size, max_size=size)] * 2)
)


@given(partitions)
def test_scores_are_those_of_the_slow_loop(case):
    assignments, labels = case
    assert nmi_f1(torch.tensor(assignments), torch.tensor(labels)) == pytest.approx(slowly(assignments, labels))


@given(partitions, st.randoms(use_true_random=False))
def test_order_names_and_sides_change_nothing(case, random):
    assignments, labels = map(np.array, case)
    figures = nmi_f1(assignments, labels)
    order = np.array(random.sample(range(len(labels)), len(labels)))
    assert nmi_f1(7 - 3 * assignments[order], labels[order].astype(np.int32)) == pytest.approx(figures)
    assert nmi_f1(labels, assignments) == pytest.approx(figures)
    assert all(0 <= figure <= 1 for figure in figures)


@pytest.mark.parametrize(("num_clusters", "num_classes"), [(100, 100), (3, 700), (900, 5)])
def test_scores_are_scikit_learns(num_clusters, num_classes):
    generator = torch.Generator().manual_seed(num_clusters)
    labels = torch.randint(num_classes, (3000,), generator=generator)
    assignments = torch.where(
        torch.rand(3000, generator=generator) < 0.5,
        labels % num_clusters,
        torch.randint(num_clusters, (3000,), generator=generator),
    )
    nmi, f1 = nmi_f1(assignments, labels)
    assert nmi == pytest.approx(normalized_mutual_info_score(labels, assignments, average_method="arithmetic"))
    (_, false_positive), (false_negative, true_positive) = pair_confusion_matrix(labels, assignments).tolist()
    assert f1 == pytest.approx(2 * true_positive / (2 * true_positive + false_positive + false_negative))


def test_trivial_partitions():
    labels, one, each = torch.arange(12) // 3, torch.zeros(12, dtype=torch.int64), torch.arange(12)
    assert nmi_f1(labels + 5, labels) == pytest.approx((1, 1))
    # One cluster has every pair, and 12 of the 66 are right; where each image has its own there are none.
    assert nmi_f1(one, labels) == pytest.approx((0, 2 * 12 / (66 + 12)))
    assert nmi_f1(each, labels) == pytest.approx((2 * math.log(4) / (math.log(4) + math.log(12)), 0))
    assert nmi_f1(one, one) == nmi_f1(each, each) == pytest.approx((1, 1))
    assert nmi_f1(one[:1], one[:1]) == (1, 1)


def test_assignments_and_labels_must_have_one_length():
    with pytest.raises(DataError, match="2 assignments for 3 labels"):
        nmi_f1(torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DataError, match="0 assignments for 0 labels"):
        nmi_f1(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))


@pytest.fixture
def blobs():
    """Directions near 8 orthogonal axes, of norms from 0.1 to 100, and the axis of each."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(8, (400,), generator=generator)
    rows = torch.eye(16)[labels] + 0.05 * torch.randn(400, 16, generator=generator)
    return rows * 10 ** (3 * torch.rand(400, 1, generator=generator) - 1), labels


@pytest.mark.parametrize("seed", [0, 2**31 - 1])
def test_clusters_of_directions_are_found_whatever_their_norms(blobs, seed):
    rows, labels = blobs
    assignments = kmeans_assignments(rows, 8, seed)
    assert assignments.dtype == torch.int64
    nmi, f1 = nmi_f1(assignments, labels)
    assert nmi > 0.9 and f1 > 0.8


def test_each_image_is_with_the_nearest_mean(blobs):
    rows, _ = blobs
    directions = functional.normalize(rows)
    assignments = kmeans_assignments(rows, 8, 0, num_iterations=60)
    means = torch.stack([directions[assignments == cluster].mean(0) for cluster in range(8)])
    assert torch.equal(torch.cdist(directions, means).argmin(1), assignments)


def test_the_seed_decides(blobs):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(500, 32, generator=generator)
    first = kmeans_assignments(rows, 20, 3)
    assert torch.equal(kmeans_assignments(rows.double().numpy(), 20, 3), first)
    assert not torch.equal(kmeans_assignments(rows, 20, 4), first)


def test_the_best_of_several_starts_is_that_of_scikit_learn():
    rows = functional.normalize(torch.randn(600, 8, generator=torch.Generator().manual_seed(5)))

    def inertia(assignments):
        groups = [rows[assignments == cluster] for cluster in assignments.unique()]
        return float(sum((group - group.mean(0)).square().sum() for group in groups))

    found = {num: inertia(kmeans_assignments(rows, 30, 0, num_starts=num, num_iterations=300)) for num in (1, 4)}
    for num, ours in found.items():
        theirs = KMeans(30, n_init=num, max_iter=300, tol=0, random_state=0).fit(rows.numpy())
        assert ours == pytest.approx(theirs.inertia_, rel=1e-4)
    assert found[4] < found[1] < inertia(kmeans_assignments(rows, 30, 0, num_iterations=1))


def test_iterations_end_when_no_image_changes_its_cluster(monkeypatch, blobs):
    assigned, looks = clustering._assigned, []
    monkeypatch.setattr(clustering, "_assigned", lambda *given: looks.append(given) or assigned(*given))
    assignments = kmeans_assignments(blobs[0], 8, 0, num_iterations=1000)
    assert len(looks) < 60
    assert torch.equal(kmeans_assignments(blobs[0], 8, 0, num_iterations=60), assignments)


@given(st.integers(2, 40), st.integers(0, 2**16))
def test_the_initial_centres_are_scikit_learns(num_clusters, seed):
    rows = functional.normalize(torch.randn(200, 6, generator=torch.Generator().manual_seed(seed)).double())
    draws, theirs = np.random.RandomState(seed), np.random.RandomState(seed)
    for _ in range(2):
        expected, _ = kmeans_plusplus(rows.numpy(), num_clusters, random_state=theirs)
        assert torch.equal(clustering._greedy_centres(rows, num_clusters, draws, bool), torch.from_numpy(expected))


@pytest.mark.parametrize("tile", [1, 64, 2**24])
def test_iterations_from_given_centres_are_scikit_learns(tile, monkeypatch):
    """Many centres are far from all images, so that their clusters are empty at first."""
    monkeypatch.setattr(clustering, "_ELEMENTS_AT_ONCE", tile)
    rows = functional.normalize(torch.randn(300, 5, generator=torch.Generator().manual_seed(1)).double())
    centres = rows[:20].clone()
    centres[10:] *= 30
    for num_iterations in (1, 2, 100):
        found = clustering._lloyd(rows, centres, num_iterations, bool)
        theirs = KMeans(20, init=centres.numpy(), n_init=1, max_iter=num_iterations, tol=0).fit(rows.numpy())
        assert found.assignments.tolist() == theirs.labels_.tolist()
        assert found.inertia == pytest.approx(theirs.inertia_, rel=1e-12)


def test_as_many_clusters_as_images_and_one():
    rows = torch.eye(5)
    assert len(kmeans_assignments(rows, 5, 0).unique()) == 5
    assert len(kmeans_assignments(rows, 1, 0).unique()) == 1


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_collapsed_embeddings_make_one_cluster(value):
    labels = torch.arange(60) // 6
    assignments = kmeans_assignments(torch.full((60, 8), value), 10, 0)
    assert len(assignments.unique()) == 1
    assert nmi_f1(assignments, labels)[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("spread", "precision"), [(0.1, "float32"), (1e-4, "float32"), (1e-7, "float64")])
def test_clusters_of_nearly_collapsed_embeddings_are_found(spread, precision, monkeypatch):
    monkeypatch.setattr(clustering, "_ELEMENTS_AT_ONCE", 1000)
    generator = torch.Generator().manual_seed(2)
    labels = torch.arange(400) % 4
    rows = torch.eye(16, dtype=torch.float64)[labels]
    rows = 1 + spread * (rows + 0.05 * torch.randn(400, 16, generator=generator))
    assignments = kmeans_assignments(rows.to(getattr(torch, precision)), 4, 0)
    assert nmi_f1(assignments, labels)[0] == pytest.approx(1)


def test_embeddings_that_cannot_be_clustered_are_refused():
    rows = torch.eye(4)
    for num_clusters in (0, 5):
        with pytest.raises(ConfigError, match=f"{num_clusters} clusters; allowed: 1 to the number of images, 4"):
            kmeans_assignments(rows, num_clusters, 0)
    for key in ("num_starts", "num_iterations"):
        with pytest.raises(ConfigError, match=f"^{key}: found 0, must be ≥ 1$"):
            kmeans_assignments(rows, 2, 0, **{key: 0})
    rows[1, 2] = torch.nan
    with pytest.raises(DataError, match="1 of 4 embeddings are not finite"):
        kmeans_assignments(rows, 2, 0)


@pytest.mark.parametrize("norm", [1e-50, 1e50])
def test_embeddings_in_float64_may_have_norms_beyond_float32(norm):
    rows = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kmeans_assignments(rows * norm, 3, seed=0), kmeans_assignments(rows, 3, seed=0))
