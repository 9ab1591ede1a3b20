import math

import pytest
import torch
from torch.nn import functional

from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.classification import knn
from ssl_sec.evaluation.classification.knn import knn_top1, knn_votes
from ssl_sec.evaluation.feature_table import FeatureTable

NUM_CLASSES = 5


@pytest.fixture
def sets():
    """Overlapping clusters: bank, its labels, queries, their labels."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(NUM_CLASSES, 8, generator=generator)

    def draw(count):
        labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
        features = centres[labels] + 1.2 * torch.randn(count, 8, generator=generator)
        return features * (0.1 + 10 * torch.rand(count, 1, generator=generator)), labels

    return *draw(400), *draw(97)


def slowly(bank, bank_labels, query, k, temperature):
    cosines = [
        sum(a * b for a, b in zip(query, row, strict=True)) / (math.hypot(*query) * math.hypot(*row)) for row in bank
    ]
    votes = [0.0] * NUM_CLASSES
    for i in sorted(range(len(bank)), key=lambda i: -cosines[i])[:k]:
        votes[bank_labels[i]] += math.exp(cosines[i] / temperature)
    return votes.index(max(votes))


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.1), (7, 0.1), (50, 0.5), (10_000, 0.07)])
def test_predictions_are_those_of_the_slow_loop(sets, k, temperature):
    bank, bank_labels, queries, query_labels = sets
    expected = [slowly(bank.tolist(), bank_labels.tolist(), query, k, temperature) for query in queries.tolist()]
    settings = {"num_classes": NUM_CLASSES, "k": k, "temperature": temperature}
    assert knn_votes(FeatureTable(bank, bank_labels), queries, **settings).argmax(1).tolist() == expected
    accuracy = sum(map(int.__eq__, expected, query_labels.tolist())) / len(expected)
    assert 0.4 < accuracy < 1
    assert knn_top1(bank, bank_labels, queries, query_labels, **settings) == pytest.approx(accuracy)


def test_predictions_are_lightlys(sets):
    peer = pytest.importorskip("lightly.utils.benchmarking.knn")
    bank, bank_labels, queries, _ = sets
    theirs = peer.knn_predict(
        functional.normalize(queries), functional.normalize(bank).T, bank_labels, NUM_CLASSES, knn_k=200
    )
    assert torch.equal(knn_votes(FeatureTable(bank, bank_labels), queries, NUM_CLASSES).argmax(1), theirs[:, 0])


@pytest.mark.parametrize("chunk_size", [1, 96, 97, 1000])
def test_chunks_change_nothing(sets, chunk_size):
    bank, bank_labels, queries, _ = sets
    whole = knn_votes(FeatureTable(bank, bank_labels), queries, num_classes=NUM_CLASSES, chunk_size=97)
    parts = knn_votes(FeatureTable(bank, bank_labels), queries, num_classes=NUM_CLASSES, chunk_size=chunk_size)
    assert torch.equal(parts.argmax(1), whole.argmax(1))
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("bank_rows", [1, 150, 399])
@pytest.mark.parametrize("k", [1, 200, 1000])
def test_parts_of_the_bank_change_nothing(sets, monkeypatch, bank_rows, k):
    bank, bank_labels, queries, _ = sets
    bank[::7] = math.nan
    whole = knn_votes(FeatureTable(bank, bank_labels), queries, NUM_CLASSES, k=k)
    monkeypatch.setattr(knn, "BANK_ROWS", bank_rows)
    parts = knn_votes(FeatureTable(bank, bank_labels), queries, NUM_CLASSES, k=k)
    assert torch.equal(parts.argmax(1), whole.argmax(1))
    torch.testing.assert_close(parts, whole)


def test_a_low_temperature_leaves_the_nearest_neighbour(sets):
    bank, bank_labels, queries, _ = sets
    cold = knn_votes(FeatureTable(bank, bank_labels), queries, NUM_CLASSES, temperature=1e-6)
    assert torch.equal(cold.argmax(1), knn_votes(FeatureTable(bank, bank_labels), queries, NUM_CLASSES, k=1).argmax(1))


@pytest.mark.parametrize("value", [0.0, 1.0, -2.0])
@pytest.mark.parametrize("k", [1, 20, 200])
def test_collapsed_features_do_not_score_above_chance(value, k):
    labels = torch.arange(NUM_CLASSES).repeat_interleave(20)
    features = torch.full((len(labels), 8), value)
    assert knn_top1(features, labels, features, labels, num_classes=NUM_CLASSES, k=k) <= 1 / NUM_CLASSES


def test_features_that_are_not_finite_score_0(sets):
    bank, bank_labels, queries, query_labels = sets
    nowhere = torch.full_like(queries, torch.nan)
    assert knn_top1(bank, bank_labels, nowhere, query_labels, num_classes=NUM_CLASSES) == 0
    nowhere = torch.full_like(bank, torch.inf)
    assert knn_top1(nowhere, bank_labels, queries, query_labels, num_classes=NUM_CLASSES) == 0


@pytest.mark.parametrize("k", [1, 20, 400])
def test_rows_of_the_bank_that_are_not_finite_are_left_out(sets, k):
    bank, bank_labels, queries, query_labels = sets
    expected = knn_top1(bank[2:], bank_labels[2:], queries, query_labels, num_classes=NUM_CLASSES, k=k)
    bank[0, 1], bank[1] = torch.nan, torch.inf
    assert knn_top1(bank, bank_labels, queries, query_labels, num_classes=NUM_CLASSES, k=k) == expected > 0.4


def test_arrays_of_numpy_and_labels_of_any_integers_are_taken(sets):
    expected = knn_top1(*sets, num_classes=NUM_CLASSES)
    assert knn_top1(*(each.numpy() for each in sets), num_classes=NUM_CLASSES) == expected
    bank, bank_labels, queries, query_labels = sets
    for dtype in (torch.int32, torch.uint8):
        found = knn_top1(bank, bank_labels.to(dtype), queries, query_labels.to(dtype), num_classes=NUM_CLASSES)
        assert found == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k: found 0, must be ≥ 1"),
        ({"temperature": 0.0}, "temperature: found 0.0, must be > 0"),
        ({"temperature": -0.1}, "temperature: found -0.1, must be > 0"),
        ({"chunk_size": 0}, "chunk_size: found 0, must be ≥ 1"),
    ],
)
def test_a_setting_outside_its_range_is_refused(sets, settings, message):
    with pytest.raises(ConfigError, match=message):
        knn_top1(*sets, num_classes=NUM_CLASSES, **settings)


def test_rows_and_labels_that_do_not_fit_are_refused(sets):
    bank, bank_labels, queries, query_labels = sets
    with pytest.raises(DataError, match=r"kNN, bank: found features of shape \[400, 8\] and labels of shape \[399\]"):
        knn_top1(bank, bank_labels[1:], queries, query_labels, num_classes=NUM_CLASSES)
    with pytest.raises(DataError, match=r"kNN, queries: found features of shape \[0, 8\] .* one image or more"):
        knn_top1(bank, bank_labels, queries[:0], query_labels[:0], num_classes=NUM_CLASSES)
    with pytest.raises(DataError, match=r"kNN, bank: found label 4, must be in \[0, 3\] \(num_classes\)"):
        knn_top1(*sets, num_classes=4)
    with pytest.raises(DataError, match=r"kNN, queries: found label -1, must be in \[0, 4\]"):
        knn_top1(bank, bank_labels, queries, query_labels - 1, num_classes=NUM_CLASSES)


@pytest.mark.usefixtures("unchecked_types")
def test_queries_of_other_dimensions_than_the_bank_are_refused(sets):
    bank, bank_labels, queries, query_labels = sets
    message = "^kNN, bank and queries: found rows of 8 and of 4 dimensions, must be one number$"
    with pytest.raises(DataError, match=message):
        knn_top1(bank, bank_labels, queries[:, :4], query_labels, num_classes=NUM_CLASSES)
