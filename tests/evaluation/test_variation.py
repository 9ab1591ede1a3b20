"""Covariances of classes and shifts of rotations, against slow loops."""

import itertools

import pytest
import torch

from ssl_sec.errors import DataError
from ssl_sec.evaluation.directions import within_class_energy
from ssl_sec.evaluation.variation import ENERGIES, class_covariances, relative_deviation, rotation_shifts
from tests.losses.cases import rows
from tests.losses.test_transform import matrix

LABELS = torch.tensor([4, 2, 2, 4, 9, 4, 2, 4, 7, 7, 2, 4, 9, 7])


def unit(count=14, dim=5, seed=0):
    embeddings = rows(count, dim, seed)
    return embeddings / embeddings.norm(dim=1, keepdim=True)


@pytest.mark.parametrize(("num_classes", "classes"), [(4, [4, 2, 7, 9]), (2, [4, 2])])
def test_covariances_are_those_of_the_largest_classes_directions(num_classes, classes):
    found = class_covariances(3 * rows(14, 5), LABELS, num_classes)
    assert found.classes == classes and found.sizes == [int((LABELS == label).sum()) for label in classes]
    for label, diagonal, eigenvalues in zip(classes, found.diagonals, found.eigenvalues, strict=True):
        own = unit()[LABELS == label]
        covariance = (own - own.mean(0)).T @ (own - own.mean(0)) / len(own)
        assert diagonal == pytest.approx(covariance.diagonal().tolist(), abs=1e-12)
        expected = torch.linalg.eigvalsh(covariance).flip(0).tolist()
        assert eigenvalues == pytest.approx(expected[: min(found.sizes) - 1], abs=1e-12)
        assert len(eigenvalues) == min(found.sizes) - 1


def test_a_class_of_one_image_has_no_covariance():
    assert class_covariances(rows(4, 3), torch.tensor([1, 2, 2, 3])).classes == [2]
    assert class_covariances(rows(2, 3), torch.tensor([1, 2])).classes == []


def test_a_rotated_class_has_other_diagonals_and_the_same_eigenvalues():
    """SFT, Section 3.3: what its Fig. 2 shows."""
    own = unit(40, 5)
    turned = own @ matrix(*rows(2, 5, seed=3)).T
    found = class_covariances(torch.cat([own, turned]), torch.arange(2).repeat_interleave(40))
    assert relative_deviation(found.eigenvalues) < 1e-10 < 0.02 < relative_deviation(found.diagonals)


def test_the_deviation_is_relative_and_averaged_over_positions():
    assert relative_deviation([[1.0, 4.0, 0.0], [3.0, 4.0, 0.0]]) == pytest.approx((1 / 2 + 0) / 2)
    assert relative_deviation([[0.0], [0.0]]) == 0
    assert relative_deviation([[], []]) == 0


@pytest.mark.parametrize("labels", [LABELS, (LABELS > 4).long()])
def test_shifts_are_those_of_drawn_rows_and_other_classes(labels):
    found = rotation_shifts(rows(14, 5), labels, seed=1, num_draws=20_000)
    means = {label: unit()[labels == label].mean(0) for label in labels.unique().tolist()}
    expected, weights = [], []
    for row, label in itertools.product(range(14), means):
        if label != labels[row]:
            variation = unit()[row] - means[int(labels[row])]
            expected.append(float((matrix(means[int(labels[row])], means[label]) @ variation - variation).norm()))
            weights.append(1 / 14 / (len(means) - 1))
    mean = sum(value * weight for value, weight in zip(expected, weights, strict=True))
    assert found.shifts.mean == pytest.approx(mean, rel=0.02)
    assert sum(found.shifts.counts) == 20_000
    occupied = {place for place, count in enumerate(found.shifts.counts) if count}
    assert occupied == {int(value * 100) for value in expected}
    assert found.energies == list(ENERGIES)
    assert found.within_class_energies == [within_class_energy(unit(), labels, energy) for energy in ENERGIES]
    assert rotation_shifts(rows(14, 5), labels, seed=1, num_draws=20_000) == found
    assert rotation_shifts(rows(14, 5), labels, seed=2, num_draws=20_000) != found


def test_a_variation_across_the_means_plane_stays():
    """SFT, Prop. 2: Aσ = σ where σ is orthogonal to both means; classes along two axes, spread along a third."""
    embeddings = torch.tensor([[1.0, 0, 0.3], [1, 0, -0.3], [0, 1, 0.2], [0, 1, -0.2]], dtype=torch.float64)
    found = rotation_shifts(embeddings, torch.tensor([0, 0, 1, 1]), seed=0, num_draws=100)
    assert found.shifts.counts[0] == 100
    assert max(found.within_class_energies) < 1e-12


def test_one_class_has_nothing_to_rotate_to():
    found = rotation_shifts(rows(4, 3), torch.zeros(4, dtype=torch.int64), seed=0)
    assert (sum(found.shifts.counts), found.shifts.mean) == (0, None)


@pytest.mark.parametrize("measure", [class_covariances, lambda *args: rotation_shifts(*args, seed=0)])
def test_a_row_without_a_direction_is_refused(measure):
    with pytest.raises(DataError, match="found 1 of 2 rows that are zero or not finite"):
        measure(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
