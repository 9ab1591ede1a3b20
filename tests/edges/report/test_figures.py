"""Figures of the runs of small stores."""

import pytest

from ssl_sec.errors import ConfigError
from tests.edges.report.conftest import curves


def histogram(low, high, counts):
    width = (high - low) / len(counts)
    return {"step": 9, "edges": [low + width * place for place in range(len(counts) + 1)], "counts": counts}


def test_the_distributions_of_norms(store):
    store.pretrained("digits", 0, histogram=histogram(0.0, 4.0, [1, 2, 3, 2]))
    store.pretrained("digits", 1, histogram=histogram(0.0, 4.0, [3, 2, 1, 2]))
    store.pretrained("digits", 0, histogram=histogram(1.0, 2.0, [4, 4]), constraint__name="none", constraint__eta=0)
    report = store.report(figure=1)
    assert "no constraint (1 seed), sec (2 seeds)" in report.text
    rows = report.rows
    for arm in ("no constraint", "sec"):
        assert sum(row["share_percent"] for row in rows if row["arm"] == arm) == pytest.approx(100)
    below_2 = [row["share_percent"] for row in rows if row["arm"] == "sec" and row["high"] <= 2.0001]
    assert sum(below_2) == pytest.approx((3 / 8 + 5 / 8) / 2 * 100)


def test_curves_over_steps_with_their_deviation(store):
    for seed, level in ((0, 50.0), (1, 54.0)):
        store.pretrained("digits", seed, curves(level))
    store.pretrained("digits", 0, curves(40.0), constraint__name="none")
    store.pretrained("digits", 0, {"val/knn_top1": [30.0]}, constraint__name="none", epochs=0)  # the arm "random"
    store.pretrained("digits", 2, curves(0.0), status="FAILED")
    rows = store.report(figure=6).rows
    sec = [row for row in rows if row["arm"] == "sec" and row["metric"] == "val/knn_top1"]
    assert [(row["mean"], row["std"]) for row in sec] == [
        (52.0, pytest.approx(8**0.5)),
        (56.0, pytest.approx(8**0.5)),
    ]
    variances = [row["mean"] for row in rows if row["arm"] == "sec" and row["metric"] == "train/norm_variance"]
    assert variances == pytest.approx([0.25, 0.04, 0.01])
    assert {row["arm"] for row in rows} == {"sec", "no constraint"}


def test_a_figure_shows_the_newest_experiment_or_the_given_recipes(store):
    store.pretrained("cifar10_ntxent_100", 0, curves(50.0))
    store.pretrained("cifar10_sec_100", 0, curves(50.0))
    store.pretrained("digits", 0, curves(50.0))
    assert {row["arm"] for row in store.report(figure=4).rows} == {"sec"}
    chosen = store.report(figure=4, recipes=("cifar10_sec_100", "cifar10_ntxent_100"))
    assert {row["arm"] for row in chosen.rows} == {"cifar10_ntxent_100", "cifar10_sec_100"}
    with pytest.raises(
        ConfigError, match="recipes: found 'digit', for which no pretraining has finished; did you mean"
    ):
        store.report(figure=4, recipes=("digit",))


def test_a_figure_without_its_data_is_one_line(store):
    with pytest.raises(ConfigError, match="recipes: no pretraining has finished"):
        store.report(figure=4)
    store.pretrained("digits", 0, {"val/knn_top1": [30.0]})
    with pytest.raises(ConfigError, match="none of the 1 run has histograms"):
        store.report(figure="5a")
    with pytest.raises(ConfigError, match="none of the 1 run has two points of val/knn_top1"):
        store.report(figure=4)
