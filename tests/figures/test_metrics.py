import re

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ssl_sec.figures.training import curves_figure
from ssl_sec.metrics import METRICS, RESULT_GROUPS, Metric, chosen_metrics, known_metrics, metric, metric_label
from ssl_sec.recipes.pretraining.config import MONITORED
from ssl_sec.recipes.registry import RECIPES, compared_metrics


@pytest.mark.parametrize(
    ("name", "meaning", "label"),
    [
        ("probe/top1", "linear probe top-1 on the test set (%)", "probe top-1 %"),
        ("retrieval/recall_at_10", "Recall@10 on the test classes (%)", "Recall@10 %"),
        ("probe/few_shot_5", "top-1 on the test set with 5 labels per class (%)", "5 labels per class %"),
        ("face/cfp_fp_1e6_rank1", "cfp_fp rank-1 among 1e6 distractors (%)", None),
        ("face/blufr_tar_at_far_1e-3", "blufr TAR at FAR = 1e-3 (%)", None),
        ("face/blufr_tar_at_far_1e-3_mean", "mean of such a measure over the trials (%)", None),
        ("face/blufr_tar_at_far_2.5e-3", "blufr TAR at FAR = 2.5e-3 (%)", None),
        (
            "probe/held_out_top1_lr_0.3",
            "linear probe top-1 on these images with a learning rate of 0.3 (%)",
            None,
        ),
        ("face/lfw_norm_mean", "mean norm of the embeddings of lfw", None),
        ("face/head_classes_accuracy", "accuracy on other images of the head classes (%)", None),
        ("probe/corruption/gaussian_noise_3_top1", "linear probe top-1 with gaussian_noise of strength 3 (%)", None),
    ],
)
def test_the_meaning_and_the_label_of_a_name(name, meaning, label):
    found = metric(name)
    assert isinstance(found, Metric)
    assert (found.meaning, found.label) == (meaning, label or meaning)


def test_the_label_of_every_curve_fits_the_height_of_its_panel():
    figure = curves_figure({name: [(0, 1.0)] for name in METRICS if name.startswith(("train/", "val/"))})
    renderer = FigureCanvasAgg(figure).get_renderer()
    specification = figure.axes[0].get_subplotspec()
    assert specification is not None
    panel = figure.bbox.height / specification.get_gridspec().nrows
    heights = {axes.get_ylabel(): axes.yaxis.label.get_window_extent(renderer).height for axes in figure.axes}
    assert {label for label, height in heights.items() if height > panel} == set()


def test_the_most_specific_row_is_taken():
    found = metric("probe/few_shot_5_interval")
    assert found is not None and "interval" in found.meaning


def test_an_unknown_name_is_its_own_label():
    assert metric("train/other") is None
    assert metric("face/_eer") is None
    assert metric_label("train/other") == "train/other"


def test_known_metrics_are_in_order_and_test_sets_together():
    names = ["face/z_eer", "retrieval/recall_at_10", "face/b_eer", "x", "retrieval/recall_at_2", "face/b_accuracy"]
    assert [name for name, _ in known_metrics([*names, "train/loss"])] == [
        "train/loss", "retrieval/recall_at_2", "retrieval/recall_at_10", "face/b_accuracy", "face/b_eer", "face/z_eer",
    ]  # fmt: skip


def test_metrics_are_chosen_in_the_order_of_keys_and_then_of_numbers():
    names = ["retrieval/recall_at_1", "retrieval/recall_at_2", "probe/few_shot_10", "probe/few_shot_5", "x"]
    chosen = ["probe/few_shot_{labels}", "retrieval/recall_at_1", "train/loss"]
    assert chosen_metrics(chosen, names) == ["probe/few_shot_5", "probe/few_shot_10", "retrieval/recall_at_1"]
    # Those of several test sets, by set; one by its own name, at its own place.
    names = ["face/z_eer", "face/b_tar_at_far_1e-3", "face/b_eer", "face/b_tar_at_far_1e-4", "face/c_eer"]
    chosen = ["face/{test_set}_tar_at_far_{far}", "face/c_eer", "face/{test_set}_eer"]
    assert chosen_metrics(chosen, names) == [
        "face/b_tar_at_far_1e-4", "face/b_tar_at_far_1e-3", "face/c_eer", "face/b_eer", "face/z_eer",
    ]  # fmt: skip


def test_the_metrics_of_tables_and_recipes_are_known():
    rows = RECIPES.values()
    named = {name for row in rows for name in (*row.view_metrics, *row.curves)}
    named |= {name for row in rows for name in (row.score, row.score_without_labels) if name is not None}
    named |= {row.paper_figure[0] for row in rows if row.paper_figure is not None}
    named |= set(MONITORED)
    assert {name for name in named if metric(name) is None} == set()
    assert {name for name in compared_metrics() if name not in METRICS and metric(name) is None} == set()


def test_metrics_are_of_the_training_or_measured_once():
    assert {name.partition("/")[0] for name in METRICS} - {"train", "val", "test"} == RESULT_GROUPS


def test_each_row_names_its_variable_parts():
    for name in METRICS:
        filled = metric(
            re.sub(r"\{(\w+)\}", lambda part: "blur" if part[1] in ("test_set", "kind", "measure") else "5", name)
        )
        assert filled is not None
        assert not {"{", "}"} & {*filled.meaning, *filled.label}, name
