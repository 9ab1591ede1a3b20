import numpy as np
import pytest
import torch

from ssl_sec.evaluation.plane import plane_grid, plane_reach
from ssl_sec.figures.plane import plane_figure
from tests.figures.test_training import draw

NAMES = tuple("abcd")


def test_the_grid_is_a_square_around_0_with_all_finite_points():
    embeddings = torch.tensor([[3.0, -8.0], [torch.nan, 90.0], [torch.inf, 1.0]])
    grid = plane_grid(embeddings, side=5)
    assert plane_reach(embeddings) == pytest.approx(8.4)
    assert grid[:5, 0].tolist() == pytest.approx([-8.4, -4.2, 0, 4.2, 8.4])
    assert grid[:6, 1].tolist() == pytest.approx([-8.4] * 5 + [-4.2])
    assert grid[12].tolist() == [0, 0] and len(grid) == 25
    assert plane_reach(torch.zeros(3, 2)) == plane_reach(torch.full((3, 2), torch.nan)) == 1


def test_embeddings_are_drawn_where_they_are_beside_the_probability_of_class_0():
    embeddings, labels = 5 * draw(40, 2), torch.arange(40) % 4
    embeddings[3] = torch.nan
    grid = plane_grid(embeddings, side=11)
    figure = plane_figure(embeddings, labels, NAMES, grid[:, 0].sigmoid())
    points, plane = figure.axes[:2]
    assert points.get_title() == "embeddings of 39 training images" and plane.get_title() == "probability of class a"
    for label, dots in enumerate(points.collections):
        chosen = embeddings[labels == label]
        assert np.allclose(dots.get_offsets(), chosen[chosen.isfinite().all(1)])
    (image,) = plane.images
    assert image.origin == "lower" and image.get_extent() == pytest.approx(grid[[0, -1], 0].tolist() * 2)
    assert np.allclose(image.get_array()[4], grid[:11, 0].sigmoid())  # it rises to the right, not upward
    assert points.get_xlim() == points.get_ylim() == plane.get_xlim() == pytest.approx(tuple(grid[[0, -1], 0].tolist()))


def test_without_a_softmax_there_is_one_plot():
    assert len(plane_figure(draw(8, 2), torch.arange(8) % 4, NAMES, None).axes) == 1
    assert not plane_figure(torch.full((8, 2), torch.nan), torch.arange(8) % 4, NAMES, None).axes
