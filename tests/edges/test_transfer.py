"""Transfer of one encoder to several data sets, with a real run of digits in MLflow on sqlite."""

import csv
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import yaml
from mlflow.tracking import MlflowClient
from PIL import Image

from ssl_sec.data.config import FolderConfig
from ssl_sec.edges import transfer as module
from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run import running, worker
from ssl_sec.edges.run.driver import run_training
from ssl_sec.errors import ConfigError, DataError, Stopped
from ssl_sec.recipes.registry import PRETRAIN
from tests.data.files import encode, write_parquet
from tests.edges.conftest import QUICK
from tests.jobs import configured, transfer

DRAWS_PICTURES = True

FAST = ("probe.epochs=2", "probe.decay_at=[]", "probe.few_shot=[5,50]", "probe.few_shot_draws=4", "runtime=local")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    given = [*QUICK, "runtime=local", "run_name=whole", f"output_dir={tmp_path_factory.mktemp('runs')}"]
    return run_training(PRETRAIN, configured("pretrain", given))


@pytest.fixture(scope="module")
def shades(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of coloured images of no common size, without test images: dark ones and bright ones."""
    shades = [(120 * (number % 2) + 2 * number, number % 2) for number in range(60)]
    colours = [encode(Image.new("RGB", (12 + shade % 5, 15), (shade, shade, 90))) for shade, _ in shades]
    path = tmp_path_factory.mktemp("shades") / "shades.parquet"
    write_parquet(path, colours, [label for _, label in shades])
    return path


def arguments(finished, *more: str) -> list[str]:
    output = finished.folder.path.parents[1]
    return [f"run={finished.run_id}", *FAST, "tracking.system_metrics=false", f"output_dir={output}", *more]


def test_sets_of_other_sizes_are_measured_in_one_table_and_only_once(finished, shades, monkeypatch):
    sets = f"sets=[digits,{{name: parquet, train: [{shades}]}}]"
    measured, names, probe = [], [], module.run_probe

    def stopped_at_the_second(config, sweep_id):
        if not measured:  # as by another process
            with pytest.raises(ConfigError, match=r"^sets: .*-transfer-\w+ is in use: process .*; allowed: other sets"):
                transfer(arguments(finished, sets, "mean_per_class=[shades]"))
        measured.append(config.data.title)
        names.append(config.run_name)
        if measured == ["digits", "shades"]:
            raise DataError("the second set is not there yet")
        return probe(config, sweep_id)

    monkeypatch.setattr(module, "run_probe", stopped_at_the_second)
    monkeypatch.setattr(running, "_FREE_WITHIN_S", 0.0)
    with pytest.raises(DataError, match="not there yet"):
        transfer(arguments(finished, sets, "mean_per_class=[shades]"))
    interrupted = RunFolder(finished.folder.path.with_name(names[-1]))
    interrupted.start({})
    with running.running(interrupted), pytest.raises(ConfigError, match="-on-shades-.* is in use: process "):
        transfer(arguments(finished, sets, "mean_per_class=[shades]"))
    assert interrupted.holds_run
    table = transfer(arguments(finished, sets, "mean_per_class=[shades]"))
    assert measured == ["digits", "shades", "shades"]

    header, _, digits, colours, *notes = table.strip().splitlines()
    assert header.split("  ")[0] == "set" and header.endswith("test images")
    assert digits.startswith("digits") and digits.endswith("top-1           test split")
    assert digits.count("±") == 2
    assert colours.startswith("shades") and colours.endswith("mean per class  20% held out")
    assert colours.count("±") == 1 and " - " in colours  # 24 images of a class are too few for 50 labels
    assert notes[1] == "±: 95 % interval of the mean over 4 draws of the labels"

    client = MlflowClient(finished.uri)
    (parent,) = client.search_runs([finished.experiment_id], "tags.job = 'transfer'")
    assert parent.info.status == "FINISHED"
    assert f"/#/experiments/{finished.experiment_id}/runs/{parent.info.run_id}?" in table
    children = client.search_runs([finished.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert sorted(run.data.tags["data"] for run in children) == ["digits", "shades"]
    (kept,) = finished.folder.path.parent.glob("transfer-*.csv")
    rows = {row["set"]: row for row in csv.DictReader(kept.open(encoding="utf-8"))}
    by_set = {run.data.tags["data"]: run.data.metrics for run in children}
    assert rows["digits"]["logistic regression %"] == f"{by_set['digits']['probe/logistic_top1']:.2f}"
    assert rows["shades"]["logistic regression %"] == f"{by_set['shades']['probe/logistic_mean_per_class']:.2f}"
    assert by_set["digits"]["probe/logistic_top1"] > 30
    names = {artifact.path for artifact in client.list_artifacts(parent.info.run_id)}
    assert {"transfer.csv", "transfer.md", "transfer.png"} <= names
    # The scores of other sets are not those of the pretraining.
    assert not [name for name in client.get_run(finished.run_id).data.metrics if name.startswith("probe")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", (16, 1, ((0.0, 4095.0),))),
        (", image_size_px: 8, num_channels: 1", (8, 1, ((0.0, 4095.0),))),
        (", image_size_px: 8", (8, 3, ((0.0, 4095.0),))),
        (", value_ranges: [[0, 9]]", (16, 1, ((0.0, 9.0),))),
    ],
)
def test_sets_are_read_as_the_run_was_trained_where_they_do_not_say_otherwise(monkeypatch, given, expected):
    monkeypatch.setattr(module, "weights_digest", lambda path: "")
    data = FolderConfig(root="x", value_ranges=((0.0, 4095.0),))
    trained = SimpleNamespace(run_name="whole", data=data, has_learned=lambda *given: False)
    found: Any = SimpleNamespace(files=Path(), short_name="whole", image_shape=(1, 16, 16), config=trained)
    config = configured("transfer", ["run=whole", "runtime=local", f"sets=[{{name: folder, root: y{given}}}]"])
    (probe,) = module._probes(config, found).values()
    assert (probe.data.image_size_px, probe.data.num_channels, probe.data.value_ranges) == expected


@pytest.mark.slow
def test_after_a_stop_the_same_command_measures_the_other_sets(finished, shades, monkeypatch, capfd):
    given = arguments(finished, f"sets=[digits,{{name: parquet, train: [{shades}]}}]", "probe.epochs=3")
    measured, probe = [], module.run_probe

    def counted(config, sweep_id):
        measured.append(config.data.title)
        return probe(config, sweep_id)

    def signalled(self):
        if measured[-1] == "shades":
            signal.raise_signal(signal.SIGTERM)
        return request(self)

    monkeypatch.setattr(module, "run_probe", counted)
    request = worker.FolderRuntime.request
    with monkeypatch.context() as patch, pytest.raises(Stopped) as stop:
        patch.setattr(worker.FolderRuntime, "request", signalled)
        transfer(given)
    assert str(stop.value) == "stopped; finished sets are kept, and the same command measures the others"
    assert "the state is saved" not in capfd.readouterr().err
    table = transfer(given)
    assert measured == ["digits", "shades", "shades"]
    assert [line.split()[0] for line in table.strip().splitlines()[2:4]] == ["digits", "shades"]


def test_all_sets_are_checked_before_the_first_is_measured(finished, shades, monkeypatch):
    monkeypatch.setattr(module, "run_probe", None)
    before = _transfers(finished)
    parquet = f"name: parquet, train: [{shades}]"
    found_none = "sets[1]: parquet/train: 60 images without labels found"
    needed = "a linear probe needs the class of each image: give labelled images, or sets[1].label_column=<name> if a "
    for keys, error in (
        ("label_column: null", f"{found_none}; {needed}column holds the classes"),
        ("test: [nosuch.parquet]", "sets[1].test: found 'nosuch.parquet': no such file or folder"),
    ):
        with pytest.raises(DataError) as found:
            transfer(arguments(finished, f"sets=[digits,{{{parquet}, {keys}}}]"))
        assert str(found.value) == error
    assert _transfers(finished) == before


def _transfers(finished) -> int:
    return len(MlflowClient(finished.uri).search_runs([finished.experiment_id], "tags.job = 'transfer'"))


@pytest.mark.slow
def test_in_object_storage_a_set_is_measured_once_and_its_table_kept(finished, s3, monkeypatch):
    group = finished.folder.path.parent.name
    given = [f"run={finished.run_id}", *FAST, "tracking.system_metrics=false", "sets=[digits]", "probe.few_shot=[]"]
    given += [f"output_dir={s3}", f"tracking.uri={finished.uri}", "tracking.experiment=bucket"]
    first = transfer(given)
    monkeypatch.setattr(module, "run_probe", None)  # it is not needed again
    assert transfer(given).splitlines()[:4] == first.splitlines()[:4]
    files = fsspec.filesystem("s3").glob(f"{s3}/{group}/transfer-*")
    assert {file.rpartition(".")[2] for file in files} == {"csv", "md", "png"}
    client = MlflowClient(finished.uri)
    (parent,) = client.search_runs([client.get_experiment_by_name("bucket").experiment_id], "tags.job = 'transfer'")
    assert parent.info.status == "FINISHED"


def test_images_that_the_encoder_has_learned_from_are_not_held_out(finished, shades, tmp_path):
    folder = tmp_path / "shades" / "before"
    shutil.copytree(finished.folder.path, folder)
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    data = {"name": "parquet", "train": [str(shades)], "num_channels": 1}
    stored |= {"positives": "classes", "loss": {"name": "supcon"}, "data": data}
    (folder / "config.yaml").write_text(yaml.safe_dump(stored))
    with pytest.raises(ConfigError, match="^sets: found 'shades', must be sets with test images, or those from whose"):
        transfer(
            [f"run={folder}", *FAST, f"output_dir={tmp_path}", f"sets=[digits,{{name: parquet, train: [{shades}]}}]"]
        )
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["sets=[digit]"], "sets[0]: found 'digit'; did you mean 'digits'"),
        (["sets=[]"], "sets: found [], must be one value or more"),
        (["sets=digits"], "sets: found 'digits', must be a list"),
        (["sets=[{name: folder}]"], "sets[0].root: missing"),
        (["sets=[digits,{name: digits, rot: x}]"], "sets[1].rot: unknown key for 'digits'"),
        (["sets=[{name: digits, max_images: 99}]"], "sets[0].max_images: found 99, must be null: all images"),
        (["sets=[digits,digits]"], "sets: found ['digits', 'digits'], must be sets with different titles"),
        (["sets=[digits]", "mean_per_class=[digit]"], "mean_per_class: found 'digit'; did you mean 'digits'"),
        (["sets=[digits]", "probe.test_share=0.4"], "probe.test_share: found 0.4, must be null; test_share=<share>"),
        (["sets=[digits]", "probe.mean_per_class=true"], "probe.mean_per_class: found true, must be false; mean_per_"),
        (["sets=[digits]", "test_share=1"], "test_share: found 1.0, must be in (0, 1)"),
        (["sets=[digits]", "probe.few_shot=[0]"], "probe.few_shot[0]: found 0, must be ≥ 1"),
        (["sets=[digits]", "run=nosuch"], "run: found 'nosuch'"),
    ],
)
def test_a_mistake_is_one_line(finished, capsys, given, message):
    assert run_job("transfer", transfer, arguments(finished, *given)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: {message}"), error
