"""Reports from small stores with hand-written runs, and from one real run."""

import csv
import json
import shutil
import statistics
from functools import cache
from pathlib import Path

import pytest
from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.config import ReportConfig
from ssl_sec.edges.report.report import make_report, run_report
from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.tracking import runs as report_runs
from ssl_sec.edges.tracking.store import connect_to_store
from ssl_sec.errors import ConfigError, StorageError
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.recipes.tracking import TrackingConfig
from ssl_sec.settings import flattened, from_values, to_values


class Store:
    """A store of made-up runs; later ones are newer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = f"sqlite:///{folder}/mlflow.db"
        self.client = MlflowClient(self.uri)
        self._clock = 1_000
        self._experiments: dict[str, str] = {}

    def pretrained(self, recipe, seed, metrics=None, *, status="FINISHED", name=None, histogram=None, **changes):
        params = {**flattened(values_of(recipe)), "seed": seed, **dotted(changes)}
        run_id = self._run(recipe, "pretrain", params, metrics or {}, status, name or f"seed{seed}", {})
        if histogram is not None:
            path = self.folder / "norms.json"
            path.write_text(json.dumps([histogram]))
            self.client.log_artifact(run_id, str(path))
        return run_id

    def probed(self, parent, *top1, metric="probe/top1", status="FINISHED", **changes):
        recipe = self.client.get_run(parent).data.tags["recipe"]
        config = from_values(
            ProbeJobConfig, {"run": parent, **{key: values_of(recipe)[key] for key in ("probe", "runtime")}}
        )
        params = {**flattened(to_values(config)), **dotted(changes)}
        return self._run(recipe, "probe", params, {metric: top1}, status, "probe", {"mlflow.parentRunId": parent})

    def result(self, recipe, seed, *top1, **changes):
        """Adds a pretraining and its probe."""
        return self.probed(self.pretrained(recipe, seed, **changes), *top1)

    def _run(self, recipe, job, params, metrics, status, name, tags):
        if recipe not in self._experiments:
            location = (self.folder / "artifacts").as_uri()
            self._experiments[recipe] = self.client.create_experiment(recipe, artifact_location=location)
        self._clock += 1
        tags = {"recipe": recipe, "job": job, **tags}
        run = self.client.create_run(self._experiments[recipe], self._clock, tags, name)
        logged = [Param(key, str(value)) for key, value in params.items()]
        points = [
            Metric(key, value, self._clock, step)
            for key, values in metrics.items()
            for step, value in enumerate(values)
        ]
        self.client.log_batch(run.info.run_id, metrics=points, params=logged[:90])
        self.client.log_batch(run.info.run_id, params=logged[90:])
        self.client.set_terminated(run.info.run_id, status)
        return run.info.run_id

    def report(self, experiment=None, **keys):
        """Makes a report without writing it."""
        return make_report(ReportConfig(**keys, tracking=TrackingConfig(uri=self.uri, experiment=experiment)))

    def text(self, **keys):
        return self.report(**keys).text

    def write(self, *arguments):
        return run_report([*arguments, f"output={self.folder / 'report'}", f"tracking.uri={self.uri}"])

    def cells(self, **keys):
        """(recipe, metric) -> the row of Table 5."""
        return {(row["recipe"], row["metric"]): row for row in self.report(table=5, **keys).rows}


@cache
def values_of(recipe):
    return to_values(from_values(PretrainConfig, compose("pretrain", [f"experiment={recipe}"])))


def dotted(changes):
    return {key.replace("__", "."): value for key, value in changes.items()}


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A store without runs; its tables take longest to create."""
    folder = tmp_path_factory.mktemp("empty")
    connect_to_store(f"sqlite:///{folder}/mlflow.db")
    return folder / "mlflow.db"


@pytest.fixture
def store(empty, tmp_path: Path) -> Store:
    shutil.copy(empty, tmp_path / "mlflow.db")
    return Store(tmp_path)


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
def test_settings_of_where_and_how_a_run_ran_are_not_changes(store, changes):
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
    assert (
        "[1] changed: probe.epochs 5 (recipe: 100), probe.learning_rates [0.1] (recipe: [1.0, 2.0, 5.0, 10.0])" in text
    )


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


def test_a_recipe_without_an_experiment_is_marked(store):
    store._experiments["casia_softmax"] = store.client.create_experiment("casia")
    params = {"recipe": "casia_softmax", "seed": 0}
    values = {"face/lfw_accuracy": [52.0]}
    store._run("casia_softmax", "face", params, values, "FINISHED", "a", {})
    text = store.text(table=4)
    assert "52.00 (1) [1]" in text
    assert "[1] changed: there is no experiment of this name to compare the settings with" in text


def test_the_files_of_a_table(store):
    store.result("cifar10_sec_100", 0, 86.0)
    text = store.write("table=12")
    folder = store.folder / "report"
    paths = [folder / f"sec-table-12.{ending}" for ending in ("md", "csv", "png")]
    assert text.splitlines()[-3:] == list(map(str, paths))
    markdown = paths[0].read_text()
    assert "| 100 epochs | NT-Xent | paper | 84.76 | 99.36 | 58.43 | 85.26 |" in markdown
    assert "|  |  | ours | 86.00 (1) | not run | not run | not run |" in markdown
    with paths[1].open() as file:
        assert len(list(csv.DictReader(file))) == 8 * 4
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_a_wide_table_is_split_by_data_set(store):
    text = store.text(table=3)
    headers = [line for line in text.splitlines() if "NMI" in line or "In-Shop R@1" in line]
    assert len(headers) == 4
    assert line_of(text, "Triplet + SEC", "paper") == ["64.24", "30.83", "60.82", "71.61", "81.40", "88.86"]
    assert max(map(len, text.splitlines())) < 140


def test_a_table_of_settings_needs_no_store(tmp_path: Path):
    text = make_report(ReportConfig(table=7, output_dir=str(tmp_path / "none"))).text
    assert "0.0001" in text
    assert "not run" not in text
    assert "ours" not in text


def test_a_deviation_of_the_papers_is_shown(store):
    text = store.text(paper="normface", table=2)
    assert "99.16 ± 0.025" in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["table=13"], 2, "table: found 13, but"),
        (["paper=sef", "table=1"], 2, "paper: found 'sef'; did you mean"),
        (["figure=2"], 2, "allowed: paper=sec figure=1, paper=sec figure=4, paper=sec figure=5a, paper=sec figure=6"),
        (["paper=sft", "figure=4"], 2, "figure: found paper=sft figure=4; allowed: paper=sec figure=1"),
        ([], 2, "one of them: table=5, figure=6 or compare <run> <run>"),
        (["table=1", "figure=1"], 2, "one of them"),
        (["tabel=1"], 2, "tabel: unknown key; did you mean 'table'"),
        (["compare", "a"], 2, "compare: found ['a'], must be two runs"),
        (["table=5"], 4, "which does not exist"),
        (["table=5", "tracking.uri=sqlite:///{folder}/text"], 4, "is not an SQLite database"),
        (["table=1", "output=/proc/none"], 4, "output: /proc/none cannot be written"),
    ],
)
def test_a_mistake_is_one_line(arguments, code, message, tmp_path: Path, capsys):
    (tmp_path / "text").write_text("no database")
    given = [argument.format(folder=tmp_path) for argument in arguments]
    defaults = [f"output={tmp_path / 'report'}"] if not any("output=" in argument for argument in given) else []
    assert run_job("report", run_report, [*given, *defaults, f"output_dir={tmp_path / 'none'}"]) == code
    printed = capsys.readouterr().err.strip()
    assert message in printed
    assert printed.startswith("error: ")
    assert "\n" not in printed
    assert not (tmp_path / "none").exists()


def test_help_and_keys(capsys):
    assert run_job("report", run_report, ["--help"]) == 0
    printed = capsys.readouterr().out
    assert "compare <run> <run>" in printed
    assert "paper" in printed
    config = from_values(ReportConfig, compose("report", ["table=5"]))
    assert config.table == 5
    assert from_values(ReportConfig, to_values(config)) == config


# Figures


def histogram(low, high, counts):
    width = (high - low) / len(counts)
    return {"step": 9, "edges": [low + width * place for place in range(len(counts) + 1)], "counts": counts}


def curves(level):
    return {
        "val/knn_top1": [level, level + 4.0],
        "train/norm_mean": [1.0, 2.0, 3.0],
        "train/norm_std": [0.5, 0.2, 0.1],
    }


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


# Comparisons of two runs


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


def test_a_store_that_fails_during_a_report_is_an_error(store, monkeypatch):
    def failing(*arguments, **options):
        raise OSError("no route")

    monkeypatch.setattr(MlflowClient, "search_runs", failing)
    with pytest.raises(StorageError, match="cannot be used: no route"):
        store.report(table=5)


def test_a_real_run_is_read(quick, tmp_path: Path):
    """The reports read what the driver logs."""
    given = [*quick, "runtime=local", "run_name=whole", "probe.enabled=true", "monitor.every_epochs=1"]
    finished = run_training(PRETRAIN, from_values(PretrainConfig, compose("pretrain", given)))
    keys = {"output_dir": str(tmp_path / "runs"), "tracking": TrackingConfig()}
    for figure in (1, 4, 6):
        report = make_report(ReportConfig(figure=figure, **keys))
        assert "sec (1 seed)" in report.text
        assert report.rows
    assert len(json.loads(finished.folder.norms_path.read_text())) == 3
    text = make_report(ReportConfig(compare=("whole-probe", "whole"), **keys)).text
    assert f"{finished.metrics['probe/top1']:.4g}" in text
    assert "settings that differ:" in text
