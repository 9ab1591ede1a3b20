"""NormFace's figures."""

import math
import statistics

import pytest

from ssl_sec.edges.config import ReportConfig
from ssl_sec.edges.report.report import make_report
from ssl_sec.errors import ConfigError
from tests.edges.report.test_compared_settings import add

RECIPE, ACCURACY = "casia_normface_c_contrastive_wen", "face/lfw_accuracy"
GIVEN = ("data.root=x", "encoder.weights=/e.safetensors", "head.weights=/h.safetensors")


def swept(store, weight, seed, accuracy, *overrides, recipe=RECIPE, std=0.4):
    measured = {ACCURACY: accuracy, f"{ACCURACY}_std": std}
    weights = () if weight is None else (f"loss.weight={weight}",)
    add(store, "face", recipe, seed, measured, *GIVEN, *weights, *overrides)


def test_the_bound_is_drawn_without_a_run_or_a_store(tmp_path):
    report = make_report(ReportConfig(paper="normface", figure=5, output_dir=str(tmp_path / "none")))
    found = {(row["num_classes"], row["squared_norm"]): row["bound"] for row in report.rows}
    assert found[10_575, 0.0] == pytest.approx(math.log(10_575))
    assert found[10_575, 1.0] == pytest.approx(8.2663, abs=5e-5)  # NormFace, section 3.3
    assert max(bound for (_, norm), bound in found.items() if norm >= 20) < 1e-3
    (axes,) = report.figure.axes
    assert [line.get_label() for line in axes.lines] == [f"n = {count:,}" for count in (10, 100, 1000, 10_575, 100_000)]
    assert axes.lines[3].get_ydata()[4] == found[10_575, 1.0]


def test_accuracies_by_the_weight_of_the_second_loss(store):
    for weight, accuracies in ((0.001, (98.0, 98.4)), (0.1, (99.0, 99.2))):
        for seed, accuracy in enumerate(accuracies):
            swept(store, weight, seed, accuracy)
    for seed in (0, 1):
        swept(store, None, seed, 97.0 + seed, recipe="casia_normface_wen")
    report = store.report(paper="normface", figure=8)
    assert [(row["arm"], row["weight"], row["num_seeds"], row["std_over"]) for row in report.rows] == [
        ("normface + c_contrastive", 0.001, 2, "seeds"),
        ("normface + c_contrastive", 0.1, 2, "seeds"),
        ("normface", None, 2, "seeds"),
    ]
    assert [row["mean"] for row in report.rows] == pytest.approx([98.2, 99.1, 97.5])
    expected = [statistics.stdev(pair) for pair in ((98.0, 98.4), (99.0, 99.2), (97.0, 98.0))]
    assert [row["std"] for row in report.rows] == pytest.approx(expected)
    assert "normface + c_contrastive (2 weights), normface (no second loss)" in report.text
    (axes,) = report.figure.axes
    assert axes.get_ylabel() == "accuracy ± std over seeds (%)" and axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.001", "0.1"]


def test_runs_that_differ_otherwise_are_other_arms_and_single_runs_have_the_deviation_of_their_folds(store):
    for weight, accuracy in ((0, 97.0), (0.01, 98.0), (1, 96.0)):
        swept(store, weight, 0, accuracy)
        swept(store, weight, 0, accuracy - 5, "epochs=1", std=0.7)
    swept(store, None, 0, 96.0, "loss=normface", "epochs=2")
    report = store.report(paper="normface", figure=8)
    arms = {row["arm"] for row in report.rows}
    twice = {f"normface + c_contrastive, epochs {epochs}" for epochs in ("1.0", "5.22")}
    assert arms == {*twice, "normface, epochs 2.0"}  # what else differs of one recipe is said, too
    assert {(row["mean"], row["std"], row["std_over"]) for row in report.rows if row["arm"].endswith("1.0")} == {
        (accuracy, 0.7, "folds") for accuracy in (92.0, 93.0, 91.0)
    }
    assert report.figure.axes[0].get_xscale() == "symlog"


def test_bars_are_of_one_kind_also_where_only_some_weights_have_several_seeds(store):
    for weight, seed, accuracy, std in ((0.1, 0, 98.0, 0.4), (0.1, 1, 99.0, 0.6), (0.01, 0, 97.0, 0.3)):
        swept(store, weight, seed, accuracy, std=std)
    rows = store.report(paper="normface", figure=8).rows
    assert [(row["weight"], row["mean"], row["num_seeds"], row["std_over"]) for row in rows] == [
        (0.01, 97.0, 1, "folds"),
        (0.1, 98.5, 2, "folds"),
    ]
    assert [row["std"] for row in rows] == pytest.approx([0.3, 0.5])


def test_equal_losses_of_two_recipes_are_told_apart_by_their_other_settings(store):
    for weight in (0.1, 0.01):
        swept(store, weight, 0, 98.0)
    swept(store, None, 0, 96.0, "epochs=2", recipe="casia_normface_wen")
    swept(store, None, 0, 95.0, "loss=normface", "epochs=3")
    rows = [row for row in store.report(paper="normface", figure=8).rows if row["weight"] is None]
    assert {row["arm"]: row["mean"] for row in rows} == {"normface, epochs 2.0": 96.0, "normface, epochs 3.0": 95.0}


def test_a_figure_without_its_runs_is_one_line(store):
    with pytest.raises(ConfigError, match="recipes: found casia_.*, of which no run of face recognition has finished"):
        store.report(paper="normface", figure=8)
    swept(store, 0.1, 0, 99.0)
    with pytest.raises(ConfigError, match="figure: none of the runs of .* differ only in loss.weight; needed: two wei"):
        store.report(paper="normface", figure=8)
    with pytest.raises(ConfigError, match="figure: found 6; of 'NormFace.*, allowed: 5, 8"):
        store.report(paper="normface", figure=6)
