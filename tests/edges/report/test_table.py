"""Tables: which runs count, and what their settings change."""

import re
import statistics
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from ssl_sec.edges.config import ReportConfig
from ssl_sec.edges.report.measurements import _compose_settings
from ssl_sec.edges.report.report import make_report
from ssl_sec.edges.tracking import runs as report_runs
from ssl_sec.errors import ConfigError


def line_of(text, label, kind):
    """Returns the cells of a method's line in the printed table."""
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if f"{label}  " in line and "  paper  " in line)
    for line in lines[start : start + 3]:
        if f" {kind}  " in line:
            return [cell.strip() for cell in line.split(f" {kind}  ")[1].split("  ") if cell.strip()]
    return None


def test_the_mean_and_deviation_over_seeds_equal_those_by_hand(store):
    for seed, top1 in ((0, 86.0), (1, 87.0), (2, 89.0)):
        store.result("cifar10_sec_100", seed, top1)
    text = store.text(table=5)
    # 86, 87, 89: mean 87.333, squared deviations 1.778 + 0.111 + 2.778 = 4.667, over n - 1 = 2: 1.5275².
    assert line_of(text, "NT-Xent + SEC", "ours") == ["87.33 ± 1.53 (3)", "not run", "not run", "not run"]
    assert line_of(text, "NT-Xent + SEC", "difference") == ["+0.46"]
    assert line_of(text, "NT-Xent", "ours") == ["not run"] * 4
    assert line_of(text, "NT-Xent", "difference") is None
    cell = store.cells()["cifar10_sec_100", "probe/top1"]
    assert cell["ours_std"] == pytest.approx((4.666666 / 2) ** 0.5)
    assert (cell["paper_value"], cell["num_seeds"], cell["seeds"]) == (86.87, 3, "0 1 2")
    assert cell["difference"] == pytest.approx(262 / 3 - 86.87)
    assert "changed" not in text


def test_the_points_of_a_sweep_count_as_runs(store):
    sweep = store._run("cifar10_sec_100", "sweep", {"points": 2}, {}, "FINISHED", "sweep", {})
    for seed, top1 in ((0, 86.0), (1, 88.0)):
        trained = store.pretrained("cifar10_sec_100", seed)
        store.client.set_tag(trained, "mlflow.parentRunId", sweep)
        store.probed(trained, top1)
    text = store.text(table=5)
    assert line_of(text, "NT-Xent + SEC", "ours")[0] == "87.00 ± 1.41 (2)"
    assert "changed" not in text


def test_a_transfer_to_other_data_is_no_result_of_the_recipe(store):
    trained = store.pretrained("cifar10_sec_100", 0, epochs=10)
    store.probed(trained, 70.0)
    transfer = store._run("cifar10_sec_100", "transfer", {"sets": "[digits]"}, {}, "FINISHED", "transfer", {})
    for name, top1 in (("digits", 98.0), ("cifar10", 71.0)):
        probed = store.probed(trained, top1, data__name=name)
        store.client.set_tag(probed, "mlflow.parentRunId", transfer)
    cell = store.cells()["cifar10_sec_100", "probe/top1"]
    assert (cell["ours"], cell["seeds"]) == (71.0, "0")


def test_a_run_that_was_trained_further_is_not_one_of_its_recipe(store):
    store.result("cifar10_sec_100", 0, 80.0)
    longer = store.pretrained("cifar10_sec_100", 1)
    store.client.set_tag(longer, "resumed.epochs", "200")
    store.probed(longer, 90.0)
    assert store.cells()["cifar10_sec_100", "probe/top1"]["ours"] == 80.0


def test_a_single_seed_has_no_deviation(store):
    store.result("cifar100_l2reg_200", 4, 66.0)
    assert "66.00 (1)" in store.text(table=5)
    assert store.cells()["cifar100_l2reg_200", "probe/top1"]["ours_std"] is None


def test_the_last_value_counts_not_the_best(store):
    store.result("cifar10_sec_100", 0, 10.0, 95.0, 80.0)
    assert store.cells()["cifar10_sec_100", "probe/top1"]["ours"] == 80.0


def test_the_newest_run_of_a_seed_counts_once(store):
    first = store.pretrained("cifar10_sec_100", 0)
    store.probed(first, 50.0)
    second = store.pretrained("cifar10_sec_100", 0)
    store.probed(second, 80.0)
    newest = store.probed(second, 81.0)
    store.probed(first, 60.0)  # an older encoder, probed again
    cell = store.cells()["cifar10_sec_100", "probe/top1"]
    assert (cell["ours"], cell["num_seeds"], cell["run_ids"]) == (81.0, 1, newest)


@pytest.mark.parametrize("status", ["FAILED", "KILLED", "RUNNING"])
def test_only_finished_runs_count(store, status):
    store.result("cifar10_sec_100", 0, 86.0)
    store.probed(store.pretrained("cifar10_sec_100", 1), 10.0, status=status)
    store.probed(store.pretrained("cifar10_sec_100", 2, status=status), 20.0)
    cell = store.cells()["cifar10_sec_100", "probe/top1"]
    assert (cell["ours"], cell["seeds"]) == (86.0, "0")
    assert "left out: 1 without a finished pretraining in the store" in store.text(table=5)


def test_a_probes_metric_that_was_copied_to_its_pretraining_counts_once(store):
    """Seed 1's probe was deleted, so its settings are unknown."""
    store.pretrained("cifar10_sec_100", 1, {"probe/top1": (99.0,)})
    store.probed(store.pretrained("cifar10_sec_100", 0, {"probe/top1": (86.0,)}), 86.0)
    cell = store.cells()["cifar10_sec_100", "probe/top1"]
    assert (cell["ours"], cell["seeds"]) == (86.0, "0")


def test_runs_of_other_recipes_do_not_count(store):
    store.result("cifar10_sec_200", 0, 90.0)
    store.result("digits", 0, 80.0)
    ours = {recipe: cell["ours"] for (recipe, metric), cell in store.cells().items() if metric == "probe/top1"}
    assert {recipe for recipe, value in ours.items() if value} == {"cifar10_sec_200"}


@pytest.mark.parametrize(
    "changes",
    [
        {"runtime__name": "local", "runtime__precision": "bfloat16", "runtime__num_workers": 8},
        {"data__root": "/elsewhere", "data__download": True},
        {"output_dir": "/elsewhere", "run_name": "mine", "resume": True, "log_every_steps": 1},
        {"tracking__experiment": "all", "checkpoint__keep_last": 9, "monitor__every_epochs": 1},
        {
            "probe__enabled": True,
            "probe__epochs": 5,
        },  # the pretraining's settings of a probe; those of the probe itself count
    ],
)
def test_runtime_settings_are_not_changes(store, changes):
    store.result("cifar10_sec_100", 0, 86.0, **changes)
    text = store.text(table=5)
    assert "86.00 (1)" in text
    assert "changed" not in text


def test_a_reduced_run_is_marked_with_its_changes(store):
    store.result("cifar10_sec_100", 0, 50.0, epochs=12, encoder__width=0.25)
    text = store.text(table=5)
    assert line_of(text, "NT-Xent + SEC", "ours")[0] == "50.00 (1) [1]"
    assert line_of(text, "NT-Xent + SEC", "difference") == ["-36.87 [1]"]
    assert "[1] changed: encoder.width 0.25 (recipe: 1.0), epochs 12 (recipe: 100)" in text
    assert "encoder.width 0.25" in store.cells()["cifar10_sec_100", "probe/top1"]["changed"]
    assert "[1] changed: encoder.width" in store.report(table=5).markdown


def test_a_changed_probe_is_marked(store):
    store.probed(store.pretrained("cifar10_sec_100", 0), 50.0, probe__epochs=5, probe__learning_rates=[0.1])
    text = store.text(table=5)
    assert max(map(len, text.splitlines())) <= 120  # also the longest note
    rates = "[0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 5.0, 10.0]"
    changed = f"[1] changed: probe.epochs 5 (recipe: 100), probe.learning_rates [0.1] (recipe: {rates})"
    assert changed in " ".join(text.split())


def test_a_probe_on_other_data_is_marked(store):
    parent = store.pretrained("cifar10_sec_100", 0)
    own = {f"data__{key}": value for key, value in {"name": "cifar100", "root": "data", "max_images": None}.items()}
    run = store.probed(parent, 50.0, **own)
    assert store.client.get_run(run).data.params["data"] == "None"
    assert "data.name cifar100 (recipe: cifar10)" in store.text(table=5)


def test_exact_runs_are_not_mixed_with_changed_ones(store):
    store.result("cifar10_sec_100", 0, 86.0)
    store.result("cifar10_sec_100", 1, 50.0, epochs=12)
    store.result("cifar10_sec_100", 0, 40.0, epochs=12)  # newer than the exact one of its seed
    cell = store.cells()["cifar10_sec_100", "probe/top1"]
    assert (cell["ours"], cell["seeds"], cell["changed"]) == (86.0, "0", "")


def test_runs_that_changed_different_things_are_not_mixed(store):
    store.result("cifar10_sec_100", 0, 50.0, epochs=12)
    store.result("cifar10_sec_100", 0, 60.0, epochs=20)
    store.result("cifar10_sec_100", 1, 62.0, epochs=20)
    cell = store.cells()["cifar10_sec_100", "probe/top1"]
    assert cell["ours"] == 61.0
    assert cell["changed"] == "epochs 20 (recipe: 100)"


def test_an_arm_of_an_ablation_is_not_its_recipe(store):
    """jobs.ablate tags all arms with the recipe's name."""
    store.result("cifar10_sec_100", 0, 86.0)
    store.result("cifar10_sec_100", 1, 36.0, epochs=0, constraint__name="none")
    assert store.cells()["cifar10_sec_100", "probe/top1"]["seeds"] == "0"


def test_all_pages_are_read(store, monkeypatch):
    monkeypatch.setattr(report_runs, "_RUNS_A_PAGE", 2)
    for seed in range(5):
        store.result("cifar10_sec_100", seed, 80.0 + seed)
    cell = store.cells()["cifar10_sec_100", "probe/top1"]
    assert (cell["ours"], cell["seeds"]) == (82.0, "0 1 2 3 4")
    assert cell["ours_std"] == pytest.approx(statistics.stdev(range(5)))


def test_runs_are_searched_by_tag_and_status(store, monkeypatch):
    filters = []
    search = MlflowClient.search_runs

    def recording_search(self, experiment_ids, filter_string="", *arguments, **options):
        filters.append(filter_string)
        return search(self, experiment_ids, filter_string, *arguments, **options)

    monkeypatch.setattr(MlflowClient, "search_runs", recording_search)
    store.report(table=5)
    assert len(filters) == 12
    assert all("attributes.status = 'FINISHED'" in filter_string for filter_string in filters)
    assert sum("tags.recipe = 'cifar10_sec_100'" in filter_string for filter_string in filters) == 1


def test_the_runs_can_be_limited_to_one_experiment(store):
    store.result("cifar10_sec_100", 0, 86.0)
    store.result("cifar10_sec_200", 0, 90.0)
    cells = store.cells(experiment="cifar10_sec_200")
    assert [cells[f"cifar10_sec_{epochs}", "probe/top1"]["ours"] for epochs in (100, 200)] == [None, 90.0]
    with pytest.raises(ConfigError, match="tracking.experiment: found 'cifar'"):
        store.report(table=5, experiment="cifar")


def test_a_recipe_without_an_experiment_is_marked(store, monkeypatch):
    _compose_settings.cache_clear()
    monkeypatch.setattr("ssl_sec.edges.report.measurements.job_of", lambda recipe: None)  # as if it had been removed
    store._experiments["casia_softmax"] = store.client.create_experiment("casia")
    params = {"recipe": "casia_softmax", "seed": 0}
    values = {"face/lfw_accuracy": [52.0]}
    store._run("casia_softmax", "face", params, values, "FINISHED", "a", {})
    text = store.text(table=4)
    _compose_settings.cache_clear()
    assert "52.00 (1) [1]" in text
    assert "[1] changed: there is no experiment of this name to compare the settings with" in text


def test_a_wide_table_is_split_by_data_set(store):
    text = store.text(table=3)
    headers = [line for line in text.splitlines() if "NMI" in line or "In-Shop R@1" in line]
    assert len(headers) == 4
    assert line_of(text, "Triplet + SEC", "paper") == ["64.24", "30.83", "60.82", "71.61", "81.40", "88.86"]
    assert max(map(len, text.splitlines())) < 140


def test_a_table_of_long_headings_is_split_between_its_groups(store):
    widths = [len(line) for line in store.text(table=11).splitlines() if line.startswith("---")]
    assert len(widths) == 2 and max(widths) < 150


def test_a_table_of_settings_needs_no_store(tmp_path: Path):
    text = make_report(ReportConfig(table=7, output_dir=str(tmp_path / "none"))).text
    assert "0.0001" in text
    assert "not run" not in text
    assert "ours" not in text


def test_a_deviation_of_the_papers_is_shown(store):
    text = store.text(paper="normface", table=2)
    assert "99.16 ± 0.025" in text


def test_a_table_says_how_to_run_what_it_lacks(store):
    for data in ("cifar10", "cifar100"):
        store.probed(store.pretrained(f"{data}_ntxent_100", 0), 86.0)
        store.probed(store.pretrained(f"{data}_ntxent_100", 1), 86.0, metric="probe/top5")
    store.probed(store.pretrained("cifar10_sec_100", 0), 86.0)
    store.probed(store.pretrained("cifar10_sec_100", 1), 86.0, metric="probe/top5")
    line = re.sub(r"\s+", " ", re.search(r"^not run: .*(\n  .*)*", store.text(table=5), re.M)[0])
    assert line.startswith("not run: python -m jobs.pretrain experiment=<name> probe.enabled=true, where <name> is ")
    names = line.partition(" where <name> is ")[2].partition(";")[0]
    assert names.startswith("{cifar10,cifar100}_l2reg_100, cifar100_sec_100, {cifar10,cifar100}_ntxent_200, ")
    assert line.endswith("; what else it needs: configs/table/sec_5.yaml")
    assert "experiment=&lt;name> probe" in store.report(table=5).markdown
    assert "jobs.face experiment=<name> data.root=<value>, where <name> is casia_softmax," in store.text(table=4)
    for number in (1, 6, 7):  # no recipe has these
        assert "not run" not in store.text(table=number)
