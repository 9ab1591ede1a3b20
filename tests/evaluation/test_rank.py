import math

import numpy as np
import pytest
import torch

from ssl_sec.evaluation.rank import alpha_req, rankme


def draw(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def by_numpy(features, epsilon=1e-7):
    singular_values = np.linalg.svd(features.double().numpy(), compute_uv=False)
    shares = singular_values / singular_values.sum() + epsilon
    return float(np.exp(-(shares * np.log(shares)).sum()))


@pytest.mark.parametrize(("rows", "columns"), [(5000, 32), (300, 64), (20, 64), (64, 64), (1, 8)])
def test_rankme_is_the_entropy_of_numpys_singular_values(rows, columns):
    features = draw(rows, columns) * torch.logspace(0, -3, columns)
    assert rankme(features) == pytest.approx(by_numpy(features), rel=1e-4)


def test_epsilon_is_added_to_each_singular_value():
    features = draw(20, 64)
    assert rankme(features, epsilon=1e-2) == pytest.approx(by_numpy(features, epsilon=1e-2), rel=1e-6)


def test_rankme_of_features_on_a_line_is_1():
    features = draw(500, 1) * draw(1, 256, seed=1)
    assert rankme(features) == pytest.approx(1, abs=1e-2)


def test_rankme_of_isotropic_features_is_near_their_dimension():
    assert 31.5 < rankme(draw(20_000, 32)) <= 32.001


def test_rankme_counts_equal_orthogonal_directions():
    features = torch.zeros(12, 8)
    features[range(12), [0, 1, 2] * 4] = 5.0
    assert rankme(features) == pytest.approx(3, abs=1e-3)


def test_rankme_does_not_depend_on_scale_or_order():
    features = draw(200, 16)
    expected = pytest.approx(rankme(features), rel=1e-6)
    assert rankme(1000 * features) == expected
    assert rankme(features.flip(0)) == expected


def test_rankme_of_collapsed_features():
    assert rankme(torch.zeros(50, 16)) == pytest.approx(1, abs=1e-3)
    assert rankme(torch.full((50, 16), 3.0)) == pytest.approx(1, abs=1e-3)
    assert math.isnan(rankme(torch.full((50, 16), torch.nan)))


def test_rankme_of_half_precision_is_computed_in_more():
    features = draw(3000, 64).bfloat16()
    assert rankme(features) == pytest.approx(by_numpy(features.float()), rel=1e-6)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_alpha_req_is_the_exponent_of_the_spectrum(alpha):
    orthogonal = torch.linalg.qr(draw(1000, 32).double() - draw(1000, 32).double().mean(0)).Q
    features = orthogonal * torch.arange(1, 33).double() ** (-alpha / 2) + draw(1, 32, seed=2).double()
    assert alpha_req(features) == pytest.approx(alpha, rel=1e-6)


def test_alpha_req_of_two_dimensions_is_the_slope_between_them():
    features = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]])  # of eigenvalues 8 and 2
    assert alpha_req(features) == pytest.approx(2)


def test_alpha_req_leaves_out_dimensions_without_variance():
    features = torch.cat([draw(100, 8).double(), torch.zeros(100, 4, dtype=torch.float64)], dim=1)
    assert alpha_req(features) == pytest.approx(alpha_req(features[:, :8]))
    rows = torch.tensor([[2.0, 0, -1], [-2, 0, -1], [0, 1, 1], [0, -1, 1]], dtype=torch.float64)  # orthogonal columns
    for share, is_kept in ((2e-10, True), (0.5e-10, False)):  # of the largest eigenvalue, 8; this one is 4 at scale 1
        scaled = rows * torch.tensor([1.0, 1.0, (2 * share) ** 0.5], dtype=torch.float64)
        assert (alpha_req(scaled) > 3) is is_kept
    assert math.isnan(alpha_req(torch.zeros(10, 3)))
    assert math.isnan(alpha_req(draw(10, 1)))
    assert math.isnan(alpha_req(torch.full((4, 4), torch.inf)))
