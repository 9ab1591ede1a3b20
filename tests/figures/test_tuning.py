"""The picture of a search."""

import numpy as np
import pytest
from matplotlib import colormaps

from ssl_sec.figures.tuning import Axis, tuning_figure


def test_values_are_placed_by_their_logarithm_and_names_evenly():
    places, ticks = Axis(name="lr", values=[0.01, 0.1, 1.0], is_log=True).places()
    np.testing.assert_allclose(places, [0, 0.5, 1])
    assert ticks == [(0.0, "0.01"), (1.0, "1")]
    places, ticks = Axis(name="constraint", values=["sec", "none", "sec"]).places()
    assert places.tolist() == [1, 0, 1]
    assert ticks == [(0.0, "none"), (1.0, "sec")]
    assert Axis(name="same", values=[2.0, 2.0]).places()[0].tolist() == [0.5, 0.5]


def test_numbers_of_a_choice_are_in_their_order():
    """The values of a choice are texts, as `range(5,20,5)` gives them."""
    places, ticks = Axis(name="neighbours", values=["10", "5", "1e-3", "15", "-2", "5"]).places()
    np.testing.assert_allclose(places, [0.75, 0.5, 0.25, 1, 0, 0.5])
    assert [name for _, name in ticks] == ["-2", "1e-3", "5", "10", "15"]
    _, ticks = Axis(name="temperature", values=["10", "5", "null", "nan", 7.0]).places()
    assert [name for _, name in ticks] == ["5", "7.0", "10", "nan", "null"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_trial_without_a_finite_metric_hides_no_other(bad: float):
    axes = [Axis(name="lr", values=[0.1, 0.2, 0.3])]
    lines, history = tuning_figure(axes, "train/loss", [50.0, bad, 80.0], [2, 0, 1], [1, 2, 3]).axes
    drawn = {tuple(line.get_ydata()) for line in lines.lines if len(line.get_ydata()) == 2}
    assert {(0.0, 0.0), (1.0, 1.0)} <= drawn
    assert [text.get_text() for text in lines.texts[-2:]] == ["50", "80"]
    assert all(tick == int(tick) for tick in history.get_xticks())
    assert Axis(name="m", values=[bad, bad]).places()[1] == []


@pytest.mark.parametrize(
    ("order", "so_far"), [([1, 0, 2], [50, 80, 80]), ([2, 0, 1], [50, 50, 40]), ([0, 2, 1], [50, 50, 50])]
)
def test_the_best_trial_stands_out(order: list[int], so_far: list[float]):
    axes = [Axis(name="lr", values=[0.1, 0.2, 0.3]), Axis(name="constraint", values=["none", "sec", "none"])]
    figure = tuning_figure(axes, "val/knn_top1", [50.0, 80.0, 40.0], order, [1, 3, 4])
    lines, history = figure.axes
    colours = [line.get_color() for line in lines.lines[:2]]
    assert colours == [colormaps["viridis"](0.95), colormaps["viridis"](0.95 * 0.5)]  # the worst is drawn first
    thick = [line for line in lines.lines if line.get_linewidth() == 2.5]
    (line,) = thick
    np.testing.assert_allclose(line.get_ydata()[0], [0, 0.5, 1][order[0]])
    assert [text.get_text() for text in lines.get_xticklabels()] == ["lr", "constraint", "val/knn_top1"]
    assert history.lines[1].get_ydata().tolist() == so_far
    assert [list(line.get_xdata()) for line in history.lines] == [[1, 3, 4]] * 2  # the second has failed
