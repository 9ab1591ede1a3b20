import math

import pytest
import torch

from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.rank import alpha_req, rankme
from ssl_sec.evaluation.uniformity import alignment, uniformity
from tests.evaluation.test_rank import draw


def test_alignment_is_the_mean_squared_distance_of_directions():
    first, second = draw(50, 8), draw(50, 8, seed=1)
    pairs = zip(first.double(), second.double(), strict=True)
    slow = sum(float(((x / x.norm() - y / y.norm()) ** 2).sum()) for x, y in pairs) / 50
    assert alignment(first, second) == pytest.approx(slow)
    assert alignment(first, 3 * first) == pytest.approx(0, abs=1e-12)
    assert alignment(first, -first) == pytest.approx(4)


@pytest.mark.parametrize("chunk_size", [7, 1024])
def test_uniformity_is_the_mean_potential_of_pairs(chunk_size):
    embeddings = draw(40, 8) * torch.linspace(0.1, 9, 40).unsqueeze(1)
    rows = [row / row.norm() for row in embeddings.double()]
    potentials = [float((-2 * ((x - y) ** 2).sum()).exp()) for i, x in enumerate(rows) for y in rows[:i]]
    slow = math.log(sum(potentials) / len(potentials))
    assert uniformity(embeddings, chunk_size=chunk_size) == pytest.approx(slow)


def test_uniformity_is_0_for_one_direction_and_lower_the_more_the_directions_spread():
    assert uniformity(draw(1, 16).expand(30, 16)) == pytest.approx(0, abs=1e-12)
    on_a_circle = uniformity(draw(2000, 2))
    assert uniformity(draw(2000, 16)) < on_a_circle < 0
    assert uniformity(torch.tensor([[1.0, 0], [-1, 0]])) == pytest.approx(-8)


def test_zero_rows_have_the_distances_that_alignment_gives_them():
    assert uniformity(torch.zeros(30, 16)) == 0  # a collapsed encoder is no uniform one
    rows = torch.tensor([[0.0, 0], [0, 0], [2, 0]])
    assert uniformity(rows) == pytest.approx(math.log((1 + 2 * math.exp(-2)) / 3))
    assert alignment(rows[:1], rows[2:]) == 1


@pytest.mark.parametrize("t", [2.0, 10.0, 20.0, 500.0])
def test_uniformity_of_opposite_directions_is_exact_however_small_their_potential(t):
    assert uniformity(torch.tensor([[1.0, 0], [-1, 0]]), t) == pytest.approx(-4 * t, rel=1e-12)


def test_too_few_rows_are_refused():
    with pytest.raises(DataError, match="^uniformity: found 1 row, must be two or more$"):
        uniformity(draw(1, 8))
    with pytest.raises(DataError, match="^alignment: found no rows, must be one or more$"):
        alignment(draw(0, 8), draw(0, 8))
    for measure in (rankme, alpha_req):
        with pytest.raises(DataError, match="^rank of features: found no rows, must be one or more$"):
            measure(draw(0, 8))


@pytest.mark.parametrize("t", [0.0, -1.0, math.nan])
def test_a_factor_that_is_not_above_0_is_refused(t):
    with pytest.raises(ConfigError, match=r"^t: found (0.0|-1.0|nan), must be > 0"):
        uniformity(draw(5, 3), t)


def test_views_of_different_shapes_are_refused():
    with pytest.raises(DataError, match=r"alignment: found \[50, 8\] and \[1, 8\], must be views of one shape"):
        alignment(draw(50, 8), draw(1, 8))


def test_arrays_of_numpy_are_taken():
    first, second = draw(50, 8), draw(50, 8, seed=1)
    for measure, rows in (
        (alignment, (first, second)),
        (uniformity, (first,)),
        (rankme, (first,)),
        (alpha_req, (first,)),
    ):
        assert measure(*(each.numpy() for each in rows)) == measure(*rows)
