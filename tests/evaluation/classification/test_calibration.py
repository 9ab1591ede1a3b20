import math

import pytest
import torch

from ssl_sec.evaluation.classification.calibration import NUM_BINS, calibration_of, confidences
from ssl_sec.evaluation.classification.scores import is_in_top_k, scores_of


def calibration(logits, labels, num_bins=NUM_BINS):
    return calibration_of(confidences(logits), is_in_top_k(logits, labels, 1), num_bins)


def slowly(logits, labels, num_bins):
    """ECE by its definition, in Python's own numbers."""
    bins = [[] for _ in range(num_bins)]
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        powers = [math.exp(each - max(row)) for each in row]
        confidence = max(powers) / sum(powers)
        place = next(b for b in range(num_bins) if b / num_bins < confidence <= (b + 1) / num_bins)
        bins[place].append((confidence, row.index(max(row)) == label))
    total = 0.0
    for each in filter(None, bins):
        accuracy = sum(right for _, right in each) / len(each)
        total += len(each) / len(labels) * abs(accuracy - sum(confidence for confidence, _ in each) / len(each))
    return total


@pytest.mark.parametrize("num_bins", [1, 4, 15])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_ece_is_that_of_the_slow_loop(scale, num_bins):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (200,), generator=generator)
    logits = scale * (torch.randn(200, 5, generator=generator, dtype=torch.float64) + 2 * torch.eye(5)[labels])
    found = calibration(logits, labels, num_bins)
    assert sum(found.counts) == 200
    assert found.ece == pytest.approx(slowly(logits, labels, num_bins), abs=1e-12)


def test_a_classifier_that_is_right_as_often_as_it_says_has_no_error():
    # 3 of 4 right with a confidence of 3/4.
    logits = torch.tensor([[3.0, 1.0]]).log().repeat(4, 1)
    assert calibration(logits, torch.tensor([0, 0, 0, 1])).ece == pytest.approx(0, abs=1e-7)
    assert calibration(logits, torch.tensor([1, 1, 1, 1])).ece == pytest.approx(0.75)
    assert calibration(logits[:1], torch.tensor([1])).ece == pytest.approx(0.75)  # of one image


def test_the_accuracy_of_a_collapsed_encoder_is_that_of_its_top1():
    logits, labels = torch.zeros(4, 3), torch.tensor([0, 0, 1, 2])
    found = scores_of([(logits, labels)])
    assert found.top1 == 0 and sum(found.calibration.accuracies) == 0
    assert found.calibration.ece == pytest.approx(1 / 3)


def test_a_confidence_at_the_edge_of_two_bins_is_in_the_lower_one():
    found = calibration(torch.zeros(1, 2), torch.tensor([0]), num_bins=2)
    assert (found.counts, found.confidences) == ([1, 0], [0.5, 0.0])


def test_a_row_that_is_not_finite_is_wrong_and_certain():
    logits = torch.tensor([[torch.nan, 0.0], [0.0, 50.0]])
    found = calibration(logits, torch.tensor([0, 1]))
    assert found.counts[-1] == 2
    assert found.ece == pytest.approx(0.5)
