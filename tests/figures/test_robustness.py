import pytest

from ssl_sec.figures.robustness import corruption_figure, reliability_figure


def test_reliability_shows_accuracies_over_confidences():
    figure = reliability_figure([0, 1, 3], [0.0, 0.5, 0.9], [0.0, 0.0, 1.0])
    axes, below = figure.axes
    assert axes.get_title() == "expected calibration error 20.0 %"
    assert axes.lines[0].get_xydata().tolist() == [[50, 0], [90, 100]]
    assert (axes.get_ylabel(), below.get_xlabel()) == ("accuracy (%)", "confidence (%)")
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 100), (0, 100))
    assert axes.lines[1].get_xydata().tolist() == [[0, 0], [100, 100]]  # right as often as it is sure
    for drawn, heights in ((axes, [0, 0, 100]), (below, [0, 25, 75])):
        bars = drawn.patches[0].get_data()
        assert bars.values.tolist() == heights
        assert bars.edges.tolist() == pytest.approx([0, 100 / 3, 200 / 3, 100])


def test_corruptions_begin_with_the_clean_accuracy():
    (axes,) = corruption_figure(0.9, {"blur": [0.8, 0.5], "noise": [0.7, 0.6]}).axes
    assert {line.get_label(): line.get_ydata().tolist() for line in axes.lines} == {
        "blur": pytest.approx([90, 80, 50]),
        "noise": pytest.approx([90, 70, 60]),
    }
    assert all(line.get_xdata().tolist() == [0, 1, 2] for line in axes.lines) and axes.get_ylim()[0] == 0
