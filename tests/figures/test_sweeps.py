import statistics

import pytest

from ssl_sec.figures.comparing import draw_norm_panels
from ssl_sec.figures.sweeps import Panel, SweepPoint, arms_figure, panels_figure
from ssl_sec.training.norms import NormHistogram

RESULTS = {
    "none": [{"probe/top1": 80.0, "train/loss": 1.0}, {"probe/top1": 84.0}],
    "eta 0.5, width 2": [{"probe/top1": 90.0, "val/knn_top1": 70.0}],
}


def test_each_run_is_a_point_and_each_arm_a_row():
    first, second = arms_figure(RESULTS, ["probe/top1", "val/knn_top1"]).axes
    assert [label.get_text() for label in first.get_yticklabels()] == list(RESULTS)
    assert sorted(x for line in first.lines for x in line.get_xdata()[:2] if line.get_marker() == "o") == [80, 84, 90]
    assert second.get_xlabel() == "held-out kNN top-1 %"


def ends_of_bars(container, axis=1):
    """The lower and upper end of each bar of points with bars."""
    (bars,) = container.lines[2]
    return [(float(segment[0][axis]), float(segment[1][axis])) for segment in bars.get_segments()]


def test_the_bar_of_an_arm_is_the_deviation_over_its_runs():
    (axes,) = arms_figure(RESULTS, ["probe/top1"]).axes
    (several, one) = axes.containers
    spread = statistics.stdev([80, 84])
    assert ends_of_bars(several, axis=0) == [pytest.approx((82 - spread, 82 + spread))]
    assert ends_of_bars(one, axis=0) == [(90, 90)]


@pytest.mark.parametrize("categories", [(), ("CUB", "Cars", "SOP")])
def test_a_point_has_its_deviation_and_that_of_one_run_none(categories):
    points = [SweepPoint(1, 50.0, 2.0, 3), SweepPoint(0, 40.0, None, 1), SweepPoint(2, 45.0, 1.5, 3)]
    single = [SweepPoint(0, 42.0, None, 1)]
    panel = Panel("x", "y", {"several": points, "one": single}, {"paper": SweepPoint(0, 44.0, None, 1)}, categories)
    (axes,) = panels_figure([panel], "title").axes
    several, one = axes.containers
    assert several.lines[0].get_xydata().tolist() == [[0, 40], [1, 50], [2, 45]]
    assert ends_of_bars(several) == [(40, 40), (48, 52), (43.5, 46.5)]
    assert one.lines[2] == ()
    # Lines would join data sets that have no order.
    assert several.lines[0].get_linestyle() == ("None" if categories else "-")
    assert [label.get_text() for label in axes.get_xticklabels()] == list(categories) or not categories
    assert set(axes.lines[-1].get_ydata()) == {44}


def test_an_arm_looks_the_same_in_all_panels_and_the_legend_covers_none():
    panels = [Panel("x", "y", {arm: [SweepPoint(0, 1, 0.1, 2)] for arm in arms}, {}) for arms in ("abc", "bcd")]
    figure = panels_figure(panels, "title")
    looks = [{bars.get_label(): bars[0].get_color() for bars in axes.containers} for axes in figure.axes]
    assert looks[0]["b"] == looks[1]["b"] != looks[0]["a"]
    assert not any(axes.get_legend() for axes in figure.axes)
    assert sorted(text.get_text() for text in figure.legends[0].get_texts()) == list("abcd")
    assert panels_figure(panels * 5, "title").get_figwidth() < 20


def test_the_norms_of_a_data_set_have_their_legend_below_them():
    arms = {f"arm {'x' * number}": [NormHistogram(1, [0.0, 1.0], [1])] for number in (1, 100)}
    figure = draw_norm_panels({"cifar10": arms, "cifar100": arms}, "title").figure
    figure.draw_without_rendering()
    for axes in figure.axes:
        legend = axes.get_legend().get_window_extent()
        assert figure.bbox.y0 <= legend.y0 and legend.y1 < axes.get_window_extent().y0
        assert [text.get_text().replace("\n", "") for text in axes.get_legend().get_texts()] == list(arms)
