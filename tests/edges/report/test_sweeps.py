"""SFT's figures that compare runs by one setting."""

import io
import itertools

import pytest

from ssl_sec.edges.report.report import SWEEP
from ssl_sec.edges.report.sweeps import make_sweep_report
from ssl_sec.edges.tracking.runs import ArchivedRun, RunArchive
from ssl_sec.errors import ConfigError
from ssl_sec.papers import load

DRAWS_PICTURES = True

BASELINE, SFT = "cars196_ranked_list_sft_baseline", "cars196_ranked_list_sft"
NONE = {"transform.name": "none"}


def rotated(weight="0.2"):
    return {"transform.name": "sft", "transform.weight": weight, "transform.energy": "0.95"}


class Archive(RunArchive):
    """Finished runs by recipe, without a store; later ones are newer."""

    def __init__(self):
        self.runs = []

    def add(self, recipe, recall, seed=0, job="metric_learning", **changes):
        params = {"recipe": recipe, "seed": str(seed), "global_batch_size": "60", "encoder.name": "bn_inception"}
        params |= {key.replace("__", "."): value for key, value in changes.items()}
        number = len(self.runs)
        metrics = {"retrieval/recall_at_1": recall, "retrieval/rotation_shift_mean": recall / 100}
        ids = {"run_id": str(number), "name": str(number), "recipe": recipe, "job": job, "status": "FINISHED"}
        rest = {"experiment_id": "1", "pretraining_run_id": None, "params": params, "metrics": metrics, "weights": {}}
        self.runs.append(ArchivedRun(started_ms=number, **ids, **rest))

    def finished(self, recipe):
        return [run for run in reversed(self.runs) if run.recipe == recipe]


@pytest.fixture
def archive():
    found = Archive()
    for batch, baseline, sft in (("30", 70.0, 78.0), ("60", 74.0, 80.0), ("240", 77.0, 82.0)):
        found.add(BASELINE, baseline, global_batch_size=batch, **NONE)
        found.add(SFT, sft, global_batch_size=batch, **rotated())
    for weight, recall in (("0.5", 81.0), ("2.0", 60.0)):
        found.add(SFT, recall, **rotated(weight))
    return found


def shown(report):
    return {(row["arm"], row["at"]): row["value"] for row in report.rows}


def test_batch_sizes_and_weights_are_drawn_from_the_papers_recipes(archive):
    archive.add(SFT, 84.0, seed=1, **rotated())
    archive.add(SFT, 90.0, seed=1, **rotated())  # the newest of a seed counts
    report = make_sweep_report(archive, "5", None)
    batches = {60.0: (80.0 + 90.0) / 2, 30.0: 78.0, 240.0: 82.0}
    weights = {0.2: 85.0, 0.5: 81.0, 2.0: 60.0}
    assert shown(report) == {
        **{("without transform", batch): value for batch, value in ((30, 70), (60, 74), (240, 77))},
        **{("SFT, λ = 0.2", batch): value for batch, value in batches.items()},
        **{("SFT, batch size 60", weight): value for weight, value in weights.items()},
    }
    (both,) = [row for row in report.rows if row["num_seeds"] == 2 and row["at"] == 60]
    assert both["std"] == pytest.approx(50**0.5)
    by_batch, by_weight = report.figure.axes
    assert by_batch.get_xlabel() == "batch size (images)"
    levels = {line.get_label(): line.get_ydata()[0] for line in by_weight.get_lines() if len(line.get_ydata()) == 2}
    assert levels == {"without transform, batch size 60": 74.0}  # the batch size of the weights
    assert [row["at"] for row in report.rows] == [30, 60, 240, 30, 60, 240, 0.2, 0.5, 2]
    report.figure.savefig(written := io.BytesIO())
    assert written.getvalue().startswith(b"\x89PNG")


def test_runs_with_other_settings_than_the_newest_are_left_out_and_counted(archive):
    archive.runs.insert(0, archive.runs[0])
    archive.runs[0].params["steps"] = "5"  # shared with the run that it is a copy of
    archive.add(SFT, 1.0, job="face", **rotated("9"))
    report = make_sweep_report(archive, "5", None)
    assert "left out: 2 with other settings than the newest run" in report.text
    assert ("without transform", 30.0) not in shown(report)
    assert 1.0 not in shown(report).values()


def test_runs_with_generators_that_have_no_weight_are_left_out(archive):
    for batch in ("30", "60"):
        archive.add(SFT, 50.0, global_batch_size=batch, **{"transform.name": "hdml", "transform.alpha": "90.0"})
    report = make_sweep_report(archive, "5", None)
    assert {value for value in shown(report).values()} == {70, 74, 77, 78, 80, 82, 81, 60}


def test_other_settings_of_a_transform_separate_arms(archive):
    for weight in ("0.2", "0.5"):
        archive.add(SFT, 50.0, **{**rotated(weight), "transform.centres": "random"})
    arms = {arm for arm, _ in shown(make_sweep_report(archive, "5", None))}
    assert {"SFT, batch size 60", "SFT, centres random, batch size 60"} <= arms


def test_encoders_are_compared_by_the_shift_of_the_variation():
    archive = Archive()
    for name, mean in (("resnet18", 40.0), ("resnet50", 25.0)):
        archive.add("mine", mean, **NONE, encoder__name=name, encoder__width="1.0")
    archive.add("mine", 30.0, **NONE, encoder__name="resnet50", encoder__width="0.5")
    report = make_sweep_report(archive, "6b", ("mine",))
    assert {place: value for (_, place), value in shown(report).items()} == {
        "resnet18": 0.4,
        "resnet50": 0.25,
        "resnet50 x0.5": 0.3,
    }
    (axes,) = report.figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["resnet18", "resnet50 x0.5", "resnet50"]


def test_encoders_of_one_name_with_other_settings_have_places_of_their_own():
    archive = Archive()
    for mean, weights, stem in ((40.0, "None", "cifar"), (25.0, "None", "imagenet"), (60.0, "sha256 ab", "imagenet")):
        given = {"encoder__weights": weights, "encoder__stem": stem}
        archive.add("mine", mean, **NONE, encoder__name="resnet50", encoder__width="1.0", **given)
    archive.add("mine", 30.0, **NONE, encoder__name="googlenet")
    report = make_sweep_report(archive, "6b", ("mine",))
    assert {place: value for (_, place), value in shown(report).items()} == {
        "resnet50, stem cifar, weights None": 0.4,
        "resnet50, stem imagenet, weights None": 0.25,
        "resnet50, stem imagenet, weights sha256 ab": 0.6,
        "googlenet": 0.3,
    }
    (axes,) = report.figure.axes
    report.figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_values_of_one_setting_alone_are_a_figure_of_one_panel():
    weights, batches = Archive(), Archive()
    for weight, batch in (("0.2", "30"), ("0.5", "60")):
        weights.add(SFT, 80.0, **rotated(weight))
        batches.add(SFT, 80.0, **rotated(), global_batch_size=batch)
    for archive, label in ((weights, "weight λ of the generated rows"), (batches, "batch size (images)")):
        (axes,) = make_sweep_report(archive, "5", None).figure.axes
        assert axes.get_xlabel() == label


def test_equal_runs_of_two_recipes_are_one_point(archive):
    archive.add("mine", 90.0, seed=1, **rotated("0.5"))
    report = make_sweep_report(archive, "5", (SFT, "mine"))
    assert [(row["value"], row["num_seeds"]) for row in report.rows if row["at"] == 0.5] == [(85.5, 2)]


@pytest.mark.parametrize(("number", "needed"), [("5", "one batch size and one λ"), ("6b", "one encoder")])
def test_nothing_to_compare_is_one_line(number, needed):
    archive = Archive()
    with pytest.raises(ConfigError, match="^recipes: no finished run of mine has retrieval/"):
        make_sweep_report(archive, number, ("mine",))
    archive.add("mine", 50.0, **NONE)
    with pytest.raises(ConfigError, match=f"^figure: found {needed} in the 1 run of mine that can be compared; "):
        make_sweep_report(archive, number, ("mine",))


def test_the_papers_sweep_figures_are_known():
    paper = load("sft")
    assert [paper.figure(number).shows for number in ("5", "6b")] == [(SWEEP,)] * 2
    with pytest.raises(ConfigError, match="figure: found 7; of 'Spherical.*, allowed: 4a, 4b, 5, 6b"):
        paper.figure("7")
