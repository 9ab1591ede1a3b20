"""What figures show of long names, and of few or many arms, lies within them and covers no curve."""

import pytest
import torch

from ssl_sec.evaluation.classification.scores import confusion_from
from ssl_sec.evaluation.directions import ClassSpread, CosineDistributions, Distribution
from ssl_sec.figures.confusion import confusion_figure
from ssl_sec.figures.directions import cosine_difference_figure
from ssl_sec.figures.images import Retrieved, retrieved_figure
from ssl_sec.figures.study import ArmInterval, Cause, causes_figure, forest_figure, values_figure
from ssl_sec.figures.sweeps import arms_figure
from ssl_sec.figures.training import norm_distributions_figure
from ssl_sec.figures.tuning import Axis, tuning_figure
from ssl_sec.recipes.face.figures import Discards, Verification, discards_figure, roc_figure
from ssl_sec.recipes.metric_learning.figures import class_divergences_figure
from ssl_sec.recipes.metric_learning.variation_figures import draw_variation

NAME = "SEC with a weight of 0.25, batch norm in the head and a temperature of 0.1, seeds 0 to 2"
LABELS = torch.arange(20) % 4
BINS = Distribution([-2.0, 0.0, 2.0], [1, 3], 0.5, 0.1)
COSINES = CosineDistributions(BINS, BINS, BINS, 0.25)
PIXELS = torch.zeros(1, 1, 2, 2, dtype=torch.uint8)
LONE = ArmInterval(NAME, 1.0, 0.5, [1.0])


def arms(value, count=3):
    return {f"{NAME} {number}": value for number in range(count)}


def confused():
    cells = {"true": [0, 1, 2], "predicted": [1, 2, 2], "count": [50, 50, 1234567]}
    return confusion_figure(confusion_from(cells, 1500), [f"{NAME} {number}" for number in range(1500)])


def varied():
    rows = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    return draw_variation(rows, LABELS, [f"{number} {NAME}" for number in range(4)])["class_covariances"]


@pytest.mark.parametrize(
    "figure",
    [
        lambda: norm_distributions_figure([0.0, 1.0], arms([100.0]), "norms of the embeddings"),
        lambda: cosine_difference_figure(arms(COSINES), "differences"),
        confused,
        lambda: forest_figure({f"temperature=0.1 {NAME}": [LONE, LONE], "b": [LONE]}, "probe top-1 %", NAME),
        lambda: values_figure({"key": {NAME: [(1.0, LONE)]}}, "probe top-1 %", NAME),
        lambda: causes_figure([Cause(NAME, "", {"norm": 2.0}, 1.0, 0.1)], {"norm": "norm"}, "probe top-1 %", "none"),
        lambda: arms_figure(arms([{"probe/top1": 80.0}]), ["probe/top1"]),
        lambda: tuning_figure([Axis(name="lr", values=[0.1])], "held-out kNN top-1 %", [80.0], [0], [0]),
        lambda: roc_figure(arms(Verification(torch.tensor([0.1, 0.9]), torch.tensor([False, True]))), "ROC"),
        lambda: discards_figure(arms(Discards(torch.rand(4), torch.arange(4) < 2, 0.1)), "refusals"),
        lambda: class_divergences_figure(arms(ClassSpread([1, 2], [0.1, 0.2], 0.1), 12), "divergences"),
        varied,
        lambda: retrieved_figure({"run": Retrieved(PIXELS, PIXELS[:, None], None)}, "images with the nearest features"),
    ],
)
def test_all_that_is_written_is_in_the_figure(figure):
    drawn = figure()
    drawn.draw_without_rendering()
    box = drawn.get_tightbbox()
    width, height = drawn.get_size_inches()
    assert -0.02 < box.x0 and -0.02 < box.y0 and box.x1 < width + 0.02 and box.y1 < height + 0.02


@pytest.mark.parametrize(
    "figure",
    [
        lambda: forest_figure({"": [LONE] * 12}, "probe top-1 %", "none"),
        lambda: arms_figure(arms([{"probe/top1": 80.0}]), ["probe/top1"]),
        lambda: cosine_difference_figure(arms(COSINES), "differences"),
    ],
)
def test_long_names_leave_half_of_the_width_to_the_axes_and_do_not_meet(figure):
    drawn = figure()
    drawn.draw_without_rendering()
    (axes,) = drawn.axes
    assert axes.get_window_extent().width > 0.5 * drawn.bbox.width
    names = [label.get_window_extent() for label in axes.get_yticklabels() if label.get_text()]
    assert all(one.y0 > below.y1 or one.y1 < below.y0 for one, below in zip(names, names[1:], strict=False))


def test_the_keys_of_a_search_do_not_meet():
    keys = [Axis(name=f"augment.probability_of_a_grey_image_{number}", values=[0.1]) for number in range(3)]
    drawn = tuning_figure(keys, "held-out kNN top-1 %", [80.0], [0], [0])
    drawn.draw_without_rendering()
    boxes = [label.get_window_extent() for label in drawn.axes[0].get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in zip(boxes, boxes[1:], strict=False))


@pytest.mark.parametrize("count", [4, 12])
def test_a_legend_of_many_test_sets_covers_no_curve(count):
    scores = Verification(torch.linspace(0, 1, 40), torch.arange(40) % 3 == 0)
    discards = Discards(torch.linspace(0, 1, 40), torch.arange(40) % 3 == 0, 0.1)
    for drawn in (roc_figure(arms(scores, count), "ROC"), discards_figure(arms(discards, count), "refusals")):
        drawn.draw_without_rendering()
        (legend,) = drawn.legends
        assert legend.get_window_extent().y1 < drawn.axes[0].get_window_extent().y0


def test_an_arm_has_one_look_in_the_panels_of_all_keys():
    every, some = ["a", "b", "c"], ["c"]
    panels = {
        key: {arm: [(1.0, ArmInterval(arm, 1.0, 0.5, [1.0]))] for arm in names}
        for key, names in (("temperature", every), ("rate", some))
    }
    first, second = values_figure(panels, "metric", "none").axes
    looks = [{line.get_label(): line.get_color() for line in axes.lines} for axes in (first, second)]
    assert looks[0]["c"] == looks[1]["c"] and len({looks[0][arm] for arm in every}) == 3
