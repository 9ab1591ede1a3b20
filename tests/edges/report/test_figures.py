"""Figures of the runs of small stores."""

import dataclasses

import pytest
import torch

from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.directions import cosine_distributions, distance_distributions, pair_cosines
from tests.edges.report.conftest import curves
from tests.figures.test_training import draw


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


def test_norms_on_several_data_sets_have_a_panel_each(store):
    for name, high in (("digits", 4.0), ("cifar10_ntxent_100", 9.0), ("cifar10_sec_100", 2.0)):
        store.pretrained(name, 0, histogram=histogram(0.0, high, [1, 2, 3, 2]))
    report = store.report(figure=1, recipes=("digits", "cifar10_ntxent_100", "cifar10_sec_100"))
    panels = {axes.get_title(): len(axes.get_legend().get_texts()) for axes in report.figure.axes}
    assert panels == {"digits": 1, "cifar10": 2}
    assert {(row["data"], row["arm"]) for row in report.rows} == {
        ("digits", "digits"),
        ("cifar10", "cifar10_ntxent_100"),
        ("cifar10", "cifar10_sec_100"),
    }


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


def test_a_curve_counts_the_seeds_that_have_it_and_needs_common_steps(store):
    recall = {"val/recall_at_1": [1.0, 2.0, 3.0]}
    for seed, test in ((0, {"test/recall_at_1": [5.0, 6.0]}), (1, {}), (2, {})):
        store.trained("metric_learning", "digits_retrieval", seed, {**recall, **test})
    report = store.report(figure=4)
    assert {row["metric"] for row in report.rows} == {"test/recall_at_1"}
    assert "no constraint (1 seed)" in report.text


def test_a_figure_shows_the_newest_experiment_or_the_given_recipes(store, caplog):
    caplog.set_level("INFO", logger="ssl_sec")
    store.pretrained("cifar10_ntxent_100", 0, curves(50.0))
    store.pretrained("cifar10_sec_100", 0, curves(50.0))
    store.pretrained("digits", 0, curves(50.0))
    assert {row["arm"] for row in store.report(figure=4).rows} == {"sec"}
    assert "drawing the newest experiment, digits (jobs.pretrain); recipes=[<names>] draws others" in caplog.messages
    caplog.clear()
    chosen = store.report(figure=4, recipes=("cifar10_sec_100", "cifar10_ntxent_100"))
    assert {row["arm"] for row in chosen.rows} == {"cifar10_ntxent_100", "cifar10_sec_100"}
    assert not caplog.messages
    with pytest.raises(ConfigError, match="recipes: found 'digit', for which no training has finished; did you mean"):
        store.report(figure=4, recipes=("digit",))
    store.trained("metric_learning", "digits_retrieval", 0, {"val/recall_at_1": [1.0, 2.0]})
    assert {row["metric"] for row in store.report(figure=4).rows} == {"val/recall_at_1"}
    with pytest.raises(
        ConfigError, match=r"^recipes: found runs of jobs\.metric_learning and jobs\.pretrain; allowed: recipes of one"
    ):
        store.report(figure=4, recipes=("digits", "digits_retrieval"))


def test_arms_of_one_recipe_show_their_learning_rates(store):
    for rate in ("1e-05", "2e-05"):
        for constraint in ("none", "sec"):
            given = {"constraint__name": constraint, "constraint__eta": constraint, "optimiser__learning_rate": rate}
            store.trained("metric_learning", "cars", 0, {"test/recall_at_1": [1.0, 2.0]}, **given)
    rows = store.report(figure=4).rows
    assert {row["arm"] for row in rows} == {
        f"{constraint}, optimiser.learning_rate {rate}"
        for constraint in ("no constraint", "sec")
        for rate in ("1e-05", "2e-05")
    }


def test_two_constraints_show_their_learning_rates(store):
    store.trained("metric_learning", "cars", 0, {"test/recall_at_1": [1.0, 2.0]}, optimiser__learning_rate="1e-05")
    given = {"constraint__name": "sec", "optimiser__learning_rate": "2e-05"}
    store.trained("metric_learning", "cars", 0, {"test/recall_at_1": [1.0, 2.0]}, **given)
    assert {row["arm"] for row in store.report(figure=4).rows} == {
        "no constraint, optimiser.learning_rate 1e-05",
        "sec, optimiser.learning_rate 2e-05",
    }


def test_keys_that_only_some_losses_have_are_shown_where_they_tell_more_than_the_loss(store):
    of_losses = (
        {"name": "triplet", "margin": "1.0"},
        {"name": "adaface", "margin": "0.4", "rho": "0.01", "scale": "64.0"},
        {"name": "magface", "least_norm": "10.0", "scale": "32.0"},
        {"name": "magface", "least_norm": "20.0", "scale": "32.0"},
        {"name": "combined", "first.name": "adaface", "first.rho": "0.1", "second.name": "center"},
        {"name": "combined", "first.name": "center", "second.name": "adaface", "second.rho": "0.1"},
    )
    for keys in of_losses:
        given = {f"loss.{key}".replace(".", "__"): value for key, value in keys.items()}
        store.trained("metric_learning", "cars", 0, {"test/recall_at_1": [1.0, 2.0]}, **given)
    assert {row["arm"].removeprefix("no constraint, ") for row in store.report(figure=4).rows} == {
        "loss.margin 1.0, loss.name triplet",
        "loss.margin 0.4, loss.name adaface, loss.scale 64.0",
        "loss.least_norm 10.0, loss.name magface, loss.scale 32.0",
        "loss.least_norm 20.0, loss.name magface, loss.scale 32.0",
        "loss.first.name adaface, loss.name combined, loss.second.name center",
        "loss.first.name center, loss.name combined, loss.second.name adaface",
    }


def test_each_loss_has_a_panel_of_the_curve_that_most_arms_have(store):
    both = {"test/recall_at_1": [1.0, 2.0], "val/recall_at_1": [5.0, 6.0]}
    for name, metrics in (("triplet", both), ("triplet_sec", both), ("ms", {"val/recall_at_1": [3.0, 4.0]})):
        store.trained("metric_learning", name, 0, metrics, loss__name=name.partition("_")[0])
    report = store.report(figure=4, recipes=("triplet", "triplet_sec", "ms"))
    assert {row["metric"] for row in report.rows} == {"val/recall_at_1"}
    assert {axes.get_title(): len(axes.lines) for axes in report.figure.axes} == {"triplet": 2, "ms": 1}
    assert {axes.get_ylabel() for axes in report.figure.axes} == {"held-out Recall@1 %"}
    (alone,) = store.report(figure=4, recipes=("triplet",)).figure.axes
    assert (alone.get_title(), alone.get_ylabel()) == ("", "test Recall@1 %")


def test_the_numbers_of_metric_learning_are_drawn_from_the_store_alone(store):
    labels = torch.arange(40) % 4
    for constraint, spread in (("none", 1.0), ("sec", 0.3)):
        for seed in range(2):
            embeddings = labels[:, None] + spread * draw(40, 4, seed=seed)
            norms = histogram(0.0, 1 + spread, [1, 1])
            found = {"cosines": cosine_distributions, "distances": distance_distributions}
            measured = {
                name: dataclasses.asdict(measure(embeddings, labels, seed=0)) for name, measure in found.items()
            }
            numbers = {**measured, "training_norms": norms}
            store.trained("metric_learning", "cars", seed, numbers=numbers, constraint__name=constraint)
    report = store.report(figure="5b")
    assert report.text.endswith("cosines of pairs of test images; no constraint (2 seeds), sec (2 seeds)")
    assert {row["arm"]: row["num_seeds"] for row in report.rows} == {"no constraint": 2, "sec": 2}
    shares = [row["share_percent"] for row in report.rows if row["arm"] == "sec" and row["pairs"] == "positive"]
    assert sum(shares) == pytest.approx(100)
    assert [axes.get_title() for axes in report.figure.axes] == ["no constraint (2 seeds)", "sec (2 seeds)"]
    (axes,) = store.report(figure="5d").figure.axes
    named = [text.get_text().partition(":")[0] for text in axes.get_legend().get_texts()]
    assert named == ["no constraint (2 seeds)", "sec (2 seeds)"]
    assert "norms of the training images" in store.report(figure="5a").text  # and not those of the last batch
    assert "distances of pairs of test images" in store.report(figure="4b", paper="sft").text
    with pytest.raises(ConfigError, match=r"^figure: none of the 4 runs has changes of direction .* \(numbers\.json\)"):
        store.report(figure=7)


def test_images_of_one_run_of_each_arm_are_drawn(store):
    for seed in (1, 0):
        run_id = store.trained("metric_learning", "cars", seed)
        examples = {
            "queries": torch.full((2, 1, 4, 4), 9, dtype=torch.uint8),
            "neighbours": torch.zeros(2, 3, 1, 4, 4, dtype=torch.uint8),
            "correct": torch.tensor([[True, False, True], [False, False, True]]) ^ bool(seed),
        }
        torch.save(examples, store.folder / "examples.pt")
        store.client.log_artifact(run_id, str(store.folder / "examples.pt"))
    report = store.report(figure=9)
    assert report.text.endswith("images retrieved for test images; no constraint (seed 0)")
    assert [row["correct"] for row in report.rows] == [True, False, True, False, False, True]
    with pytest.raises(ConfigError, match=r"has the strongest channels of the last feature maps \(examples\.pt\)"):
        store.report(figure=8)


def test_the_cosines_of_faces_are_those_of_their_test_sets(store):
    pairs = dataclasses.asdict(pair_cosines(torch.tensor([0.5, 0.9]), torch.tensor([-0.5, 0.1])))
    store.trained("face", "lfw", 0, numbers={"cosines": {"lfw": pairs, "cfp": pairs}})
    store.trained("face", "lfw", 0, numbers={"cosines": {"lfw": pairs}}, constraint__name="sec")
    report = store.report(figure="5c")
    assert report.text.endswith("cosines of the test sets' pairs; no constraint (1 seed), sec (1 seed)")
    assert report.figure.get_suptitle().endswith("cosines of the test sets' pairs, lfw")
    assert len(report.figure.axes) == 2
    store.trained("face", "other", 0, numbers={"cosines": {"cfp": pairs}})
    with pytest.raises(DataError, match="have no test set of pairs in common"):
        store.report(figure="5c", recipes=("lfw", "other"))
    with pytest.raises(
        ConfigError,
        match=r"^figure: found 7, which is not drawn from runs of jobs\.face; allowed with them: 1, 4, 5a, 5b, 5c, 6$",
    ):
        store.report(figure=7)


def test_a_figure_without_its_data_is_one_line(store):
    with pytest.raises(ConfigError, match="recipes: no training has finished"):
        store.report(figure=4)
    store.pretrained("digits", 0, {"val/knn_top1": [30.0]})
    with pytest.raises(ConfigError, match=r"none of the 1 run has norms of the embeddings, .* \(norms\.json\)"):
        store.report(figure="5a")
    with pytest.raises(ConfigError, match="none of the 1 run has two points of val/knn_top1"):
        store.report(figure=4)
    with pytest.raises(ConfigError, match=r"^figure: found 9, .* jobs\.pretrain; allowed with them: 1, 4, 5a, 6$"):
        store.report(figure=9)
