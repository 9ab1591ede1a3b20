"""Evaluation on a GPU gives the results of the CPU."""

import pytest
import torch

from ssl_sec.evaluation.classification.logistic import tuned_logistic
from ssl_sec.evaluation.clustering import kmeans_assignments, nmi_f1
from ssl_sec.evaluation.faces.identification import (
    all_pairs_tar_at_far,
    open_set_identification,
    random_open_set_trials,
    rank_1_identification,
)
from ssl_sec.evaluation.feature_table import FeatureTable
from ssl_sec.evaluation.retrieval import nearest, recall_at_k

FARS = [1.0, 0.3, 0.1, 0.01, 0.0]
KS = [1, 2, 4, 8, 1000]


def clusters(num_classes, per_class, noise, dim=64):
    """Embeddings around centres, of any norm, and their classes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num_classes).repeat_interleave(per_class)
    rows = torch.randn(num_classes, dim, generator=generator)[labels]
    rows = rows + noise * torch.randn(len(labels), dim, generator=generator)
    return rows * (0.1 + 10 * torch.rand(len(labels), 1, generator=generator)), labels


def test_recall_and_neighbours(device):
    embeddings, labels = clusters(200, 20, noise=2.0)
    is_query = torch.arange(len(labels)) % 2 == 0
    for query in (None, is_query):
        found = recall_at_k(embeddings.to(device), labels, KS, query)
        assert found == recall_at_k(embeddings, labels, KS, query)
        assert 0.1 < found[1] < 1
    found = nearest(embeddings.to(device), torch.tensor([3, 5]), 4)
    assert torch.equal(found.cpu(), nearest(embeddings, torch.tensor([3, 5]), 4))


def test_identification(device):
    rows, labels = clusters(60, 10, noise=1.5)
    distractors = torch.randn(5000, 64, generator=torch.Generator().manual_seed(0))
    trial = random_open_set_trials(labels, 0, num_trials=1, num_gallery=20, num_training_people=10)[0]
    here = rows.to(device)
    assert all_pairs_tar_at_far(here, labels, FARS) == all_pairs_tar_at_far(rows, labels, FARS)
    assert open_set_identification(here, labels, trial, FARS) == open_set_identification(rows, labels, trial, FARS)
    found = rank_1_identification(here, labels, distractors.split(700), [100, 5000])
    assert found == rank_1_identification(rows, labels, distractors.split(700), [100, 5000])


def test_clusters(device):
    pytest.importorskip("sklearn")  # for NMI
    rows, labels = clusters(8, 40, noise=0.3, dim=16)
    assignments = kmeans_assignments(rows.to(device), 8, 0)
    assert torch.equal(assignments, kmeans_assignments(rows, 8, 0))
    found = nmi_f1(assignments.to(device), labels.to(device))
    assert found == nmi_f1(assignments, labels)


def test_logistic_regression(device):
    rows, labels = clusters(10, 60, noise=2.0)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    found, expected = (
        tuned_logistic(FeatureTable(rows[order].to(where), labels[order].to(where)), 500, 10, penalties=(100.0, 1.0))
        for where in (device, torch.device("cpu"))
    )
    assert found.validation_scores == expected.validation_scores and min(expected.validation_scores.values()) > 0.3
    assert found.classifier.weight.device.type == device.type
    torch.testing.assert_close(found.classifier.weight.cpu(), expected.classifier.weight, rtol=0.01, atol=1e-3)
    torch.testing.assert_close(found.classifier.bias.cpu(), expected.classifier.bias, rtol=0.01, atol=1e-3)
