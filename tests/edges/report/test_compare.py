"""Comparisons of two runs."""

import pytest

from ssl_sec.errors import ConfigError
from tests.edges.report.conftest import curves

DRAWS_PICTURES = True


def test_two_runs_are_compared(store):
    first = store.pretrained("digits", 0, curves(50.0), name="plain")
    second = store.pretrained("digits", 0, curves(53.5), name="wide", encoder__width=1.0)
    text = store.write("compare", first, second[:12])
    assert next(line for line in text.splitlines() if line.startswith("encoder.width")).split()[1:] == ["0.25", "1.0"]
    assert "optimiser.learning_rate" not in text
    row = next(line for line in text.splitlines() if line.startswith("val/knn_top1"))
    assert row.split() == ["val/knn_top1", "54", "57.5", "+3.5"]
    assert text.splitlines()[-1].endswith(f"compare-{first[:8]}-{second[:8]}.png")
    everything = store.report(compare=("plain", "wide"), all=True)
    assert "optimiser.learning_rate" in everything.text
    rows = {row["key"]: row for row in everything.rows}
    assert (rows["encoder.width"]["equal"], rows["epochs"]["equal"]) == (False, True)


def test_a_metric_or_setting_that_one_run_lacks_has_no_difference(store):
    first = store.pretrained("digits", 0, {"train/loss": (4.0, 2.5), "probe/top1": (80.0,)}, name="plain")
    second = store.pretrained("digits", 0, {"train/loss": (4.0, 2.0), "val/rankme": (9.0,)}, name="wide")
    store.client.log_param(second, "monitor.batches", 5)
    report = store.report(compare=(first, second))
    lines = report.text.splitlines()
    assert [line.split() for line in lines[lines.index("last values:") + 3 :]] == [
        ["probe/top1", "80", "-"],
        ["train/loss", "2.5", "2", "-0.5"],
        ["val/rankme", "-", "9"],
    ]
    assert ["monitor.batches", "-", "5"] in [line.split() for line in lines]
    rows = {row["key"]: (row["first"], row["second"], row["equal"]) for row in report.rows}
    assert (rows["probe/top1"], rows["monitor.batches"]) == ((80.0, None, False), (None, "5", False))
    assert [axes.get_ylabel() for axes in report.figure.axes] == ["total loss"]  # the others have one point


def test_the_picture_shows_the_loss_and_the_scores_first_and_no_machine(store):
    others = {
        "train/loss": (2.0, 1.0),
        "train/eta": (1.0, 0.5),
        "system/cpu_utilization_percentage": (20.0, 30.0),
        "train/epoch": (1, 2),
    }
    runs = [store.pretrained("digits", seed, {**others, "other": (1, 2), **curves(50.0)}) for seed in (0, 1)]
    labels = [axes.get_ylabel() for axes in store.report(compare=tuple(runs)).figure.axes]
    assert labels[:2] == ["total loss", "held-out kNN top-1 %"]
    assert labels[2] == "constraint's weight η" and labels[-1] == "other" and len(labels) == 6


def test_a_run_is_found_by_its_name_or_its_beginning(store):
    store.pretrained("digits", 0, curves(50.0), name="none-seed0-1")
    probe = store.pretrained("digits", 0, curves(50.0), name="none-seed0-1-probe")
    store.pretrained("digits", 1, curves(50.0), name="noneXseed1")
    assert "none-seed0-1 and none-seed0-1-probe" in store.text(compare=("none-seed0-1", probe))
    with pytest.raises(ConfigError, match="compare: found 'none', which matches 3 runs: "):
        store.report(compare=("none", probe))
    with pytest.raises(ConfigError, match="which matches 2 runs"):  # _ is no wildcard
        store.report(compare=("none-seed0", probe))
    with pytest.raises(ConfigError, match="compare: found 'noneYseed', but MLflow at .* has no run"):
        store.report(compare=(probe, "noneYseed"))
    with pytest.raises(ConfigError, match="both kinds of quotation marks"):
        store.report(compare=(probe, "'\""))


def test_runs_of_one_name_are_distinguished_by_their_ids(store):
    ids = [store.pretrained("digits", seed, curves(50.0), name="same") for seed in (0, 1)]
    assert f"same {ids[0][:8]} and same {ids[1][:8]}" in store.text(compare=tuple(ids))
    with pytest.raises(ConfigError, match="'same', which matches 2 runs"):
        store.report(compare=("same", ids[0]))


def test_a_run_equals_itself(store):
    run = store.pretrained("digits", 0, curves(50.0))
    assert all(row["equal"] for row in store.report(compare=(run, run)).rows)
