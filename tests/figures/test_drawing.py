import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text

from ssl_sec.evaluation.directions import ClassSpread
from ssl_sec.figures.comparing import draw_norm_panels
from ssl_sec.figures.drawing import add_legend, arm_look, arm_panels, message, percentages_between, small_plots
from ssl_sec.figures.images import Retrieved, retrieved_figure
from ssl_sec.figures.study import ArmInterval, Cause, causes_figure, values_figure
from ssl_sec.figures.study import curves_figure as study_curves_figure
from ssl_sec.figures.sweeps import Panel, SweepPoint, arms_figure, panels_figure
from ssl_sec.figures.training import Curve, compared_curves_figure, norm_distributions_figure
from ssl_sec.recipes.metric_learning.figures import class_divergences_figure
from ssl_sec.training.norms import NormHistogram


def test_percentages_are_shared_out_evenly_within_a_bin():
    assert percentages_between([0.0, 2.0, 4.0], [3, 1], [0.0, 1.0, 2.0, 3.0, 4.0]) == pytest.approx(
        [37.5, 37.5, 12.5, 12.5]
    )
    assert percentages_between([0.0, 2.0, 4.0], [3, 1], [1.0, 3.0]) == pytest.approx([50])
    assert percentages_between([0.0, 2.0], [4], np.array([-1.0, 0.0, 5.0])) == pytest.approx([0, 100])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any), st.integers(1, 30))
def test_bins_over_the_whole_range_hold_everything(counts, num_bins):
    edges = np.linspace(-1, 3, len(counts) + 1).tolist()
    shares = percentages_between(edges, counts, np.linspace(-1, 3, num_bins + 1))
    assert shares.sum() == pytest.approx(100)
    assert (shares >= 0).all()


def test_twenty_one_arms_look_different():
    assert len({arm_look(place) for place in range(21)}) == 21
    assert len({arm_look(place)[0] for place in range(7)}) == 7


@pytest.mark.parametrize("letters", [3, 30, 300])
@pytest.mark.parametrize(("num_panels", "num_arms"), [(1, 4), (2, 2), (3, 100)])
def test_a_legend_below_covers_nothing_and_the_panels_keep_their_size(num_panels, num_arms, letters):
    names = [f"{number} ".ljust(letters, "x") for number in range(num_arms)]
    heights = []
    for shown in ([], names):
        figure, panels = small_plots(num_panels, (4.2, 2.8))
        for panel in panels:
            for place, name in enumerate(shown):
                panel.plot([0, 1], [place, 0], label=name)
        if shown:
            add_legend(figure, panels)
        figure.draw_without_rendering()
        heights.append([panel.get_window_extent().height for panel in panels])
    (legend,) = figure.legends
    assert ["".join(text.get_text().split()) for text in legend.get_texts()] == [
        "".join(name.split()) for name in names
    ]
    box = legend.get_window_extent()
    assert box.y1 < min(panel.get_tightbbox().y0 for panel in panels)
    assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and figure.bbox.y0 <= box.y0
    np.testing.assert_allclose(heights[1], heights[0], rtol=0.2)


def test_a_message_figure_has_only_its_message():
    figure = message("nothing to see")
    assert [text.get_text() for text in figure.texts] == ["nothing to see"]
    assert figure.axes == []


def test_the_panels_of_many_arms_are_in_rows():
    figure, panels = arm_panels([f"arm {number}" for number in range(10)], "title", "share (%)")
    assert figure.get_figwidth() < 20 and len(panels) == len(figure.axes) == 10
    assert [axes.get_ylabel() for axes in panels] == ["share (%)", "", "", ""] * 2 + ["share (%)", ""]
    figure.draw_without_rendering()
    labelled = [any(label.get_visible() for label in axes.get_xticklabels()) for axes in panels]
    assert labelled == [False] * 6 + [True] * 4


NAME = r"_a$b^{$c"  # between the two, no formula; a label that begins with an underscore is in no legend
POINTS = [SweepPoint(0, 1, None, 1)]
DIFFERENCE = ArmInterval(NAME, 1.0, 0.1, [1.0])
PIXELS = torch.zeros(1, 1, 2, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    "figure",
    [
        lambda: arm_panels([NAME], "title", "share (%)")[0],
        lambda: arms_figure({NAME: [{"probe/top1": 80.0}]}, ["probe/top1"]),
        lambda: panels_figure([Panel("x", "y", {NAME: [SweepPoint(0, 1, None, 1)]}, {})], "title"),
        lambda: panels_figure(
            [Panel("x", "y", dict.fromkeys([NAME, *"bcd"], [SweepPoint(0, 1, None, 1)]), {})], "title"
        ),
        lambda: norm_distributions_figure([0.0, 1.0], {NAME: [100.0]}, "title"),
        lambda: compared_curves_figure({"loss": {NAME: Curve([0, 1], [1.0, 2.0])}}, "title"),
        lambda: compared_curves_figure({NAME: {"arm": Curve([0, 1], [1.0, 2.0])}}, "title", "loss"),
        lambda: retrieved_figure({NAME: Retrieved(PIXELS, PIXELS[:, None], None)}, "title"),
        lambda: class_divergences_figure({NAME: ClassSpread([1, 2], [0.1, 0.2], 0.1)}, "title"),
        lambda: study_curves_figure({NAME: {"loss": [[(0, 1.0)]], "other": [[(0, 1.0)]]}}, "title"),
        lambda: values_figure({"key": {NAME: [(1.0, DIFFERENCE)], "b": [(1.0, DIFFERENCE)]}}, "metric", "none"),
        lambda: causes_figure([Cause(NAME, "", {"norm": 2.0}, 1.0, 0.1)], {"norm": "norm"}, "metric", "none"),
        lambda: draw_norm_panels({"cifar10": {NAME: [NormHistogram(1, [0.0, 1.0], [1])]}}, "title").figure,
    ],
)
def test_names_are_shown_letter_by_letter_and_in_legends(figure):
    drawn = figure()
    drawn.draw_without_rendering()
    assert [text for text in drawn.findobj(Text) if text.get_text().strip() == NAME.replace("$", r"\$")]
