import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from ssl_sec.figures.training import (
    Curve,
    compared_curves_figure,
    curves_figure,
    features_figure,
    norm_distributions,
    norm_distributions_figure,
    norm_histograms_figure,
)
from ssl_sec.training.norms import NormHistogram, norm_histogram


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def points_of(figure: Figure) -> np.ndarray:
    return np.concatenate([dots.get_offsets() for dots in figure.axes[0].collections])


@pytest.mark.parametrize("norm", [0.0, 1e-30, 1.0, 12.5, 1e30])
def test_equal_norms_have_bins_with_a_width(norm):
    histogram = norm_histogram(torch.full((9,), norm), step=0)
    assert sum(histogram.counts) == 9
    assert all(low < high for low, high in zip(histogram.edges, histogram.edges[1:], strict=False))
    assert histogram.edges[0] == pytest.approx(norm)
    figure = norm_histograms_figure([histogram])
    figure.draw_without_rendering()
    heat_axes = figure.axes[0]
    low, high = heat_axes.get_ylim()
    assert low <= histogram.edges[0] < histogram.edges[-1] <= high
    assert heat_axes.collections[0].get_array().sum() == pytest.approx(100)


def test_each_metric_has_a_panel_with_labelled_axes():
    history = {
        "train/loss": [(20, 1.0), (0, 3.0), (10, 2.0)],
        "train/lr": [(0, 0.5), (10, 0.1)],
        "train/other": [(0, 1.0)],
        "train/empty": [],
        "train/norm_mean": [(0, 9.0), (10, 8.0)],
        "train/norm_std": [(0, 2.0), (10, 1.0)],
    }
    figure = curves_figure(history)
    names = [axes.get_ylabel() for axes in figure.axes]
    assert names == ["total loss", "learning rate", "train/other", "embedding norm (L2)"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"global step"}
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[0, 3], [10, 2], [20, 1]]
    (band,) = figure.axes[3].collections
    corners = band.get_paths()[0].vertices
    assert {tuple(corner) for corner in corners} == {(0, 7), (0, 11), (10, 7), (10, 9)}


def test_the_metrics_of_retrieval_are_named_on_their_axes():
    metrics = ("train/recall_at_1", "val/recall_at_1", "retrieval/recall_at_1", "retrieval/nmi", "retrieval/f1")
    labels = ["training Recall@1 %", "held-out Recall@1 %", "Recall@1 %", "NMI %", "F1 %"]
    figure = curves_figure({metric: [(0, 10.0), (1, 20.0)] for metric in metrics})
    assert [axes.get_ylabel() for axes in figure.axes] == labels
    compared = compared_curves_figure({metric: {"run": Curve([0, 1], [10.0, 20.0])} for metric in metrics}, "")
    assert [axes.get_ylabel() for axes in compared.axes] == labels


def test_a_std_without_a_mean_is_a_curve_and_a_mean_without_a_std_has_no_band():
    (axes,) = curves_figure({"train/norm_std": [(0, 1.0), (1, 2.0)]}).axes
    assert (axes.get_ylabel(), len(axes.lines)) == ("deviation of the embedding norm", 1)
    (axes,) = curves_figure({"train/norm_mean": [(0, 1.0), (1, 2.0)]}).axes
    assert (len(axes.lines), len(axes.collections)) == (1, 0)


def test_values_that_are_not_finite_are_drawn_as_gaps():
    values = [1.0, np.nan, 3.0, np.inf]
    (axes,) = curves_figure({"train/loss": list(enumerate(values))}).axes
    (line,) = axes.lines
    assert line.get_xdata().tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(line.get_ydata(), values)
    low, high = axes.get_ylim()
    assert 0 < low < 1 and 3 < high < 4


def test_a_panel_without_a_finite_value_says_so():
    figure = curves_figure({"train/loss": [(0, np.nan), (1, np.inf)], "train/lr": [(0, 1.0), (1, np.nan)]})
    assert [[text.get_text() for text in axes.texts] for axes in figure.axes] == [["no value is finite"], []]


def test_a_metric_that_was_measured_once_is_a_point():
    figure = curves_figure({"val/knn_top1": [(9, 50.0)], "train/loss": [(step, 1.0) for step in range(100)]})
    assert [axes.lines[0].get_marker() for axes in figure.axes] == ["o", "None"]


@pytest.mark.parametrize("history", [{}, {"train/loss": []}])
def test_a_history_without_points_says_so(history):
    assert texts(curves_figure(history)) == ["no metric was recorded"]


def test_the_heat_map_keeps_all_embeddings_of_each_step():
    histograms = [norm_histogram(10 + draw(300, seed=step) / (1 + step), step) for step in (5, 0, 20)]
    figure = norm_histograms_figure(histograms, num_bins=30)
    heat_axes, outline_axes, _ = figure.axes
    shares = heat_axes.collections[0].get_array()
    assert shares.shape == (30, 3)
    assert shares.sum(axis=0).tolist() == pytest.approx([100, 100, 100])
    legend = [text.get_text() for text in outline_axes.get_legend().get_texts()]
    assert legend == ["step 0", "step 20"]
    assert heat_axes.get_xlim() == (-2.5, 27.5)
    assert (heat_axes.get_xlabel(), heat_axes.get_ylabel()) == ("global step", "embedding norm (L2)")


def test_the_label_of_the_heat_maps_colours_is_not_beside_the_axis_of_the_outlines():
    figure = norm_histograms_figure([norm_histogram(10 + draw(300, seed=0), 0)])
    figure.draw_without_rendering()
    heat, outline, colours = (axes.get_position() for axes in figure.axes)
    assert heat.x1 < outline.x0 < outline.x1 < colours.x0


def test_common_bins_share_a_bin_out_evenly():
    histograms = [NormHistogram(0, [0.0, 2.0, 4.0], [3, 1]), NormHistogram(1, [2.0, 4.0], [8])]
    heat_axes = norm_histograms_figure(histograms, num_bins=4).axes[0]
    shares = heat_axes.collections[0].get_array().filled(0)
    assert shares.T.tolist() == [[37.5, 37.5, 12.5, 12.5], [0, 0, 50, 50]]


def test_the_later_of_two_histograms_of_a_step_is_drawn():
    histograms = [NormHistogram(3, [0.0, 1.0, 2.0], [1, 0]), NormHistogram(3, [0.0, 1.0, 2.0], [0, 1])]
    heat_axes, outline_axes, _ = norm_histograms_figure(histograms, num_bins=2).axes
    assert heat_axes.collections[0].get_array().filled(0).ravel().tolist() == [0, 100]
    assert len(outline_axes.get_legend().get_texts()) == 1


@pytest.mark.parametrize("histograms", [[], [NormHistogram(0, [0.0, 1.0], [0])]])
def test_no_norms_say_so(histograms):
    assert texts(norm_histograms_figure(histograms)) == ["no norms were recorded"]


def test_the_distribution_of_an_arm_is_the_mean_of_its_runs():
    wide, narrow = NormHistogram(0, [0.0, 2.0, 4.0], [1, 3]), NormHistogram(0, [1.0, 3.0], [5])
    edges, shares = norm_distributions({"both": [wide, narrow], "one": [narrow]}, num_bins=4)
    assert edges == [0, 1, 2, 3, 4]
    assert shares["one"] == pytest.approx([0, 50, 50, 0])
    # The wide one has 12.5, 12.5, 37.5 and 37.5 %.
    assert shares["both"] == pytest.approx([6.25, 31.25, 43.75, 18.75])
    figure = norm_distributions_figure(edges, shares, "title")
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["both", "one"]
    assert figure.axes[0].get_xlabel() == "embedding norm (L2)"


def test_a_legend_of_many_norms_is_beside_the_axes():
    arms = {f"arm {place}": [norm_histogram(10 + place + draw(50).abs(), step=0)] for place in range(7)}
    figure = norm_distributions_figure(*norm_distributions(arms), "title")
    (legend,), (axes,) = figure.legends, figure.axes
    assert [text.get_text() for text in legend.get_texts()] == list(arms)
    figure.draw_without_rendering()
    assert legend.get_window_extent().y1 < axes.get_window_extent().y0


def test_compared_curves_have_a_panel_for_each_metric_and_one_legend():
    spread = Curve([0, 5, 9], [1.0, 2.0, 4.0], [0.5, 0.5, 1.0])
    panels = {
        "train/loss": {"a": spread, "b": Curve([0], [3.0])},
        "train/lr": {"b": Curve([0, 9], [1.0, 0.0])},
        "x": {},
    }
    figure = compared_curves_figure(panels, "two runs")
    loss, rate = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == ["total loss", "learning rate"]
    assert [line.get_ydata().tolist() for line in loss.lines] == [[1, 2, 4], [3]]
    assert loss.lines[1].get_color() == rate.lines[0].get_color() != loss.lines[0].get_color()
    (band,) = loss.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.5, 5.0)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_no_curves_to_compare_say_so():
    assert texts(compared_curves_figure({"train/loss": {}}, "")) == ["the runs have no curves"]


def test_twelve_arms_look_different():
    curves = {f"arm {number}": Curve([0, 1], [0.0, 1.0]) for number in range(12)}
    lines = compared_curves_figure({"x": curves}, "").axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 12


def test_features_are_drawn_by_class_and_the_same_for_one_seed():
    labels = torch.arange(3).repeat(20)
    features = 4 * draw(3, 8, seed=1)[labels] + draw(60, 8)
    names = ["cat", "dog", "horse"]
    figure = features_figure(features, labels, names, seed=-4, max_points=45)
    points = points_of(figure)
    assert points.shape == (45, 2)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    assert np.array_equal(points, points_of(features_figure(features, labels, names, -4, max_points=45)))
    assert not np.array_equal(points, points_of(features_figure(features, labels, names, 5, max_points=45)))
    shown = [np.asarray(dots.get_offsets()) for dots in figure.axes[0].collections]
    centres = np.stack([points.mean(axis=0) for points in shown])
    for label, points in enumerate(shown):
        nearest = np.linalg.norm(points[:, None] - centres, axis=2).argmin(axis=1)
        assert (nearest == label).mean() > 0.9


def test_features_of_twenty_classes_look_different_and_of_more_have_a_colour_bar():
    labels = torch.arange(20).repeat(2)
    named = features_figure(draw(40, 4), labels, [f"class {label}" for label in range(20)], seed=0)
    looks = {(tuple(dots.get_facecolor()[0]), dots.get_paths()[0].vertices.shape) for dots in named.axes[0].collections}
    assert len(looks) == 20
    numbered = features_figure(draw(40, 4), labels, [f"class {label}" for label in range(21)], seed=0)
    assert numbered.legends == []
    assert numbered.axes[1].get_ylabel() == "number of the class"


def test_many_classes_that_do_not_all_occur_share_the_whole_colour_bar():
    labels = 98 + torch.arange(25).repeat(2)
    figure = features_figure(draw(50, 4), labels, [f"class {label}" for label in range(196)], seed=0)
    assert figure.axes[0].collections[0].get_clim() == (98, 122)
    assert figure.axes[0].get_title() == "50 images of 25 classes"


def test_names_of_classes_are_shown_letter_by_letter():
    names = ["_back", "$x_$", "a$5 to $6", "z" * 200]
    features = features_figure(draw(40, 4), torch.arange(40) % 4, names, seed=0)
    assert len(features.legends[0].get_texts()) == 4  # matplotlib leaves out labels that begin with an underscore
    features.draw_without_rendering()  # raises for what it takes for an invalid formula


@pytest.mark.parametrize("count", [5, 6, 31])
def test_few_features_are_drawn_with_a_lower_perplexity(count):
    figure = features_figure(draw(count, 3), torch.arange(count) % 2, ["a", "b"], seed=0)
    assert points_of(figure).shape == (count, 2)
    assert np.isfinite(points_of(figure)).all()


@pytest.mark.parametrize(
    ("features", "text"),
    [
        (draw(4, 3), "too few"),
        (draw(50, 1), "too few"),
        (torch.zeros(50, 3), "same direction"),
        (torch.ones(50, 3) * torch.arange(1.0, 51).unsqueeze(1), "same direction"),
        (torch.full((50, 3), torch.nan), "not finite"),
    ],
)
def test_features_that_cannot_be_drawn_say_why(features, text):
    figure = features_figure(features, torch.zeros(len(features), dtype=torch.int64), ["a"], seed=0)
    assert text in texts(figure)[0]


def test_figures_touch_no_global_state():
    modules = "sys, ssl_sec.figures.training, ssl_sec.recipes.metric_learning.figures"
    code = f"import {modules}; print([m for m in ('matplotlib.pyplot', 'sklearn') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
