"""A run on real digits, its encoder taken elsewhere."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from mlflow.entities import DatasetInput, Metric, Param, Run, RunData, RunInfo, RunInputs, RunTag
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from ssl_sec.data.config import FolderConfig
from ssl_sec.data.crops import CentreSquare
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.export.export import _record, run_export
from ssl_sec.edges.export.folder import ExportFolder
from ssl_sec.edges.export.model_card import model_card
from ssl_sec.edges.folder.descriptions import DataDescription
from ssl_sec.edges.folder.encoder import load_network
from ssl_sec.edges.folder.record import data_set
from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.tracking.networks import found_network
from ssl_sec.errors import ConfigError, StorageError
from ssl_sec.exporting import formats
from ssl_sec.exporting.mirrored import combining
from ssl_sec.exporting.reading import reading
from ssl_sec.metrics import metric
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.registry import FACE, PRETRAIN, trainings
from ssl_sec.settings import from_values
from tests.data.files import encode, noise, write_folder
from tests.edges.conftest import QUICK, QUICK_FACE
from tests.jobs import configured, export


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """A run with a scaled encoder, its probe and its registered model."""
    output_dir = tmp_path_factory.mktemp("runs")
    overrides = [*QUICK, "runtime=local", "probe.enabled=true", "tracking.register_model=true", "run_name=whole"]
    scaled = ["encoder.mean=[0.3]", "encoder.std=[0.2]", f"output_dir={output_dir}"]
    return run_training(PRETRAIN, configured("pretrain", [*overrides, *scaled]))


def export_config(finished, name, *overrides):
    output_dir = finished.folder.path.parent.parent
    return configured("export", [f"run={finished.run_id}", f"format={name}", f"output_dir={output_dir}", *overrides])


@pytest.fixture(scope="module")
def exported(finished):
    return {name: run_export(export_config(finished, name)) for name in ("safetensors", "torchscript", "onnx")}


def test_an_export_is_a_folder_with_its_file_and_its_card(finished, exported):
    files = {"safetensors": "encoder.safetensors", "torchscript": "encoder.pt", "onnx": "encoder.onnx"}
    for name, file in files.items():
        folder = exported[name].folder
        assert folder.parent == finished.folder.path.parent.parent / "exports"
        assert {path.name for path in folder.iterdir()} == {file, "README.md"}
        assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert {path.name for path in folder.parent.iterdir()} == {one.folder.name for one in exported.values()}


def test_recorded_encoders_take_other_batches_in_a_process_without_this_package(finished, exported, tmp_path: Path):
    code = """
import sys, numpy, torch, onnxruntime
images = numpy.load("images.npy")
session = onnxruntime.InferenceSession(sys.argv[1])
script = torch.jit.load(sys.argv[2])
for count in (1, 3, 7):
    (features,) = session.run(None, {"images": images[:count]})
    numpy.save(f"onnx{count}.npy", features)
    numpy.save(f"torchscript{count}.npy", script(torch.from_numpy(images[:count])).detach().numpy())
assert "ssl_sec" not in sys.modules
"""
    images = open_digits("test").read(torch.arange(7)).images.float() / 255
    np.save(tmp_path / "images.npy", images.numpy())
    paths = [str(exported["onnx"].folder / "encoder.onnx"), str(exported["torchscript"].folder / "encoder.pt")]
    done = subprocess.run([sys.executable, "-c", code, *paths], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = from_values(PretrainConfig, yaml.safe_load(finished.folder.config_path.read_text()))
    encoder = load_network(PRETRAIN, config, (1, 8, 8), finished.folder.path).encoder
    with torch.no_grad():
        features = encoder(images).numpy()
    for count in (1, 3, 7):
        for name in ("onnx", "torchscript"):
            found = np.load(tmp_path / f"{name}{count}.npy")
            np.testing.assert_allclose(found, features[:count], rtol=0, atol=1e-4 * np.abs(features).max())


def test_the_card_has_what_mlflow_knows(finished, exported):
    client = MlflowClient(finished.uri)
    run = client.get_run(finished.run_id)
    for name, one in exported.items():
        card = (one.folder / "README.md").read_text()
        _, metadata, body = card.split("---\n", 2)
        fields = yaml.safe_load(metadata)
        assert fields["library_name"] == ("onnx" if name == "onnx" else "pytorch")
        assert "datasets" not in fields  # the Hub has no such set
        assert fields["metrics"] == ["accuracy"]
        assert name in fields["tags"]
        assert "license" not in fields
        assert f"```python\n{reading(one.exportable, one.form.takes_numpy)}\n```" in body
        assert f"```python\n{one.form.loading(one.exportable)}\n{one.form.use(one.exportable)}\n```" in body
        assert f"(`val/knn_top1`) | {run.data.metrics['val/knn_top1']:.4g} |" in body
        assert f"(`probe/top1`) | {finished.metrics['probe/top1']:.4g} |" in body
        assert "| training on digits | kNN top-1 " in body
        assert re.search(r"\| probe \w{8} on digits: 10 labels per class, 5 epochs, cached features \(\w{8}\) \|", body)
        assert "probe/held_out" not in body and "train/lr" not in body  # neither the search of the probe nor settings
        assert f"| commit | {run.data.tags['mlflow.source.git.commit']} |" in body
        assert "| seed | 0 |" in body
        assert "| encoder.width | 0.125 |" in body
        assert f"{one.check.largest_difference:.3g}" in body
        assert "1437 images" in body
        assert f"torch {torch.__version__.split('+')[0]}" in body
        assert str(finished.folder.path.parent) not in card


def test_the_card_has_the_scaling_if_the_file_lacks_it(exported):
    alone = (exported["safetensors"].folder / "README.md").read_text()
    assert "scale the pixels first, (images - mean) / std with mean [0.3] and std [0.2]" in alone
    assert (
        "it subtracts the mean [0.3] and divides by [0.2] itself" in (exported["onnx"].folder / "README.md").read_text()
    )


def test_a_folder_is_exported_while_its_store_is_unreachable(finished, exported, tmp_path: Path, caplog):
    overrides = [f"run={finished.folder.path}", "format=safetensors"]
    config = configured("export", [*overrides, f"output_dir={tmp_path}"])
    with found_network(config.run, config.checkpoint, config.tracking, config.output_dir, trainings()) as source:
        run, probes = _record(source, config)
        assert caplog.text == "" and probes is not None
        assert (run.info.run_id, len(probes)) == (finished.run_id, 1)
        assert run.data.tags["ssl_sec.version"]  # as MLflow has it, and no folder
    here = exported["safetensors"]
    away = ["tracking.uri=http://127.0.0.1:9", f"output={tmp_path / 'away'}"]
    alone = run_export(configured("export", [*overrides, *away]))
    weights, same = (load_file(one.folder / "encoder.safetensors") for one in (alone, here))
    assert weights.keys() == same.keys() and all(torch.equal(weights[name], same[name]) for name in same)
    (message,) = (record.getMessage() for record in caplog.records if record.name == "ssl_sec")
    assert "MLflow at http://127.0.0.1:9 cannot be used: " in message
    assert message.endswith(f"; the model card has only what is in {finished.folder.path}")
    # What the folder does not know: its probes, and the version that trained it.
    expected, found = (set((one.folder / "README.md").read_text().splitlines()) for one in (here, alone))
    assert found - expected == {"MLflow could not be asked for linear probes.", "| trained with ssl_sec | unknown |"}
    missing = [line for line in expected - found if "| probe " not in line and "trained with" not in line]
    assert missing == []


def test_the_job_prints_its_check_and_how_to_load(exported):
    output = str(exported["onnx"])
    assert f"{exported['onnx'].check.largest_difference:.3g}" in output
    assert 'encoder = onnxruntime.InferenceSession("encoder.onnx")' in output
    assert f"folder: {exported['onnx'].folder}" in output


def test_faces_are_exported_with_their_head_under_the_metrics_of_their_test_sets(finished, digit_pairs, tmp_path: Path):
    output_dir = finished.folder.path.parent.parent
    overrides = [*QUICK_FACE, "epochs=0", "runtime=local", f"output_dir={output_dir}", digit_pairs]
    faces = run_training(FACE, configured("face", overrides))
    output = tmp_path / "faces"
    exported = run_export(export_config(faces, "torchscript", f"output={output}"))
    assert exported.exportable.dim == 16
    card = (output / "README.md").read_text()
    assert "An embedding of aligned faces in 16 dimensions" in card
    assert "embeddings = encoder(images)" in card
    assert [name for name in faces.metrics if metric(name) is None] == []
    assert f"digits accuracy (%) (`face/digits_accuracy`) | {faces.metrics['face/digits_accuracy']:.4g} |" in card
    # These scores are not of the image alone.
    assert "| evaluation.flips | sum_of_directions |" in card and "principal components" not in card
    assert f"```python\n{combining(exported.form, exported.exportable, 'sum_of_directions')}\n```" in card
    run, alone = MlflowClient(faces.uri).get_run(faces.run_id), Param("evaluation.flips", "none")
    given = [Param(key, value) for key, value in run.data.params.items() if not key.startswith("evaluation.")]
    measured = RunData([Metric("face/digits_accuracy", 50.0, 0, 0)], [*given, alone, Param("evaluation.pca", "4")])
    measured.tags.update(run.data.tags)
    card = model_card(Run(run.info, measured), [], exported.form, exported.exportable, exported.check)
    assert "mirror image" not in card and "were reduced to 4 principal components" in card
    with pytest.raises(ConfigError, match="format: found 'timm', .*; allowed .*: pt2, onnx, torchscript, hub$"):
        run_export(export_config(faces, "timm", f"output={tmp_path / 'timm'}"))


def test_the_only_version_is_the_best(finished):
    assert MlflowClient(finished.uri).get_model_version_by_alias("digits-encoder", "best").run_id == finished.run_id


def test_an_existing_output_stays_unless_it_may_be_replaced(finished, exported, tmp_path: Path):
    output = tmp_path / "taken"
    output.mkdir()
    (output / "README.md").write_text("an older export")
    with pytest.raises(ConfigError, match="output: .*taken already exists; allowed: a new folder, or overwrite=true"):
        run_export(export_config(finished, "safetensors", f"output={output}"))
    (output / "letter.txt").write_text("not ours")
    with pytest.raises(ConfigError, match="overwrite: .*taken is not an export, it holds 'letter.txt'"):
        run_export(export_config(finished, "safetensors", f"output={output}", "overwrite=true"))
    (output / "letter.txt").unlink()
    run_export(export_config(finished, "safetensors", f"output={output}", "overwrite=true"))
    assert {path.name for path in output.iterdir()} == {"encoder.safetensors", "README.md"}
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_an_export_that_is_interrupted_while_it_takes_its_place_keeps_the_old_one(monkeypatch, tmp_path: Path):
    output = tmp_path / "export"
    output.mkdir()
    (output / "README.md").write_text("an older export")
    rename = Path.rename

    def interrupted(path: Path, target: Path):
        if path.name.endswith(".tmp"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), ExportFolder(output).filled(overwrite=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert (output / "README.md").read_text() == "an older export"


def test_exports_of_one_process_id_to_one_folder_leave_each_other_alone(tmp_path: Path):
    output = tmp_path / "encoder"  # as of two containers, in each of which the job is process 1
    with pytest.raises(ConfigError, match="encoder already exists"), ExportFolder(output).filled(False) as first:
        (first / "encoder.pt").touch()
        with ExportFolder(output).filled(False) as second:
            (second / "README.md").touch()
        assert (first / "encoder.pt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["encoder"]
    assert [path.name for path in output.iterdir()] == ["README.md"]


def test_an_export_that_fails_its_check_keeps_the_old_output(finished, monkeypatch, tmp_path: Path):
    save = formats.save_weights

    def other(backbone, path, metadata=None):
        with torch.no_grad():
            backbone.conv1.weight += 1
        save(backbone, path, metadata)
        with torch.no_grad():
            backbone.conv1.weight -= 1

    monkeypatch.setattr(formats, "save_weights", other)
    with pytest.raises(ConfigError, match="safetensors was written, but differs from the trained network by"):
        run_export(export_config(finished, "safetensors", f"output={tmp_path / 'some' / 'folders' / 'new'}"))
    assert list(tmp_path.iterdir()) == []


def test_a_format_that_cannot_hold_the_encoder_is_refused_before_images_are_read(finished, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(PretrainConfig, "open_examples", lambda *given: pytest.fail("images were opened"))
    with pytest.raises(
        ConfigError, match="timm can build no ResNet-18, CIFAR stem .*allowed.*: safetensors, pt2, onnx, torchscript"
    ):
        run_export(export_config(finished, "timm", f"output={tmp_path / 'new'}"))
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_output_is_a_storage_error(finished, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="output: .*new cannot be written: Not a directory"):
        run_export(export_config(finished, "torchscript", f"output={tmp_path / 'file' / 'new'}"))


def test_the_card_of_a_run_without_metrics_says_not_evaluated(finished, exported):
    client = MlflowClient(finished.uri)
    bare = client.get_run(client.create_run("0", run_name="a | b", tags={"job": "pretrain"}).info.run_id)
    one = exported["safetensors"]
    card = model_card(bare, [], one.form, one.exportable, one.check)
    assert "Not evaluated." in card and "GPU" not in card
    tied = replace(one.check, is_tied_to_cpu=True)
    assert "may fail on a GPU" in model_card(bare, [], one.form, one.exportable, tied)
    assert "metrics:" not in card
    assert "| run name | a \\| b |" in card
    assert "| commit | unknown |" in card
    run = client.get_run(finished.run_id)
    assert "not evaluated by a linear probe" in model_card(run, [], one.form, one.exportable, one.check)


def test_the_card_of_an_encoder_says_whether_it_has_learned_from_labels(finished, exported):
    one, run = exported["safetensors"], MlflowClient(finished.uri).get_run(finished.run_id)
    cards = [model_card(run, [], one.form, one.exportable, one.check, has_learned_labels=has) for has in (False, True)]
    assert ["pretrained without labels by" in card for card in cards] == [True, False]
    assert "pretrained with labels by" in cards[1]
    assert ["- self-supervised-learning" in card for card in cards] == [True, False]
    assert "| positives | views |" in cards[0]


def test_the_results_name_data_and_protocol_and_the_newest_of_equal_probes(finished, exported):
    one, run = exported["safetensors"], MlflowClient(finished.uri).get_run(finished.run_id)
    all_labels = "all labels, 100 epochs, cached features (0b4c4af9)"
    few_labels = "1 labels per class, 100 epochs, cached features (11111111)"
    probes = [
        probe_of("newest00", "labelled", all_labels, 97.0),
        probe_of("another0", "labelled", few_labels, 60.0),
        probe_of("other000", "photos", all_labels, 80.0),
        probe_of("older000", "labelled", all_labels, 91.0),
    ]
    card = model_card(run, probes, one.form, one.exportable, one.check)
    rows = [line.split(" | ")[::2] for line in card.splitlines() if line.startswith("| probe ")]
    assert rows == [
        [f"| probe newest00 on labelled: {all_labels}", "97 |"],
        [f"| probe another0 on labelled: {few_labels}", "60 |"],
        [f"| probe other000 on photos: {all_labels}", "80 |"],
    ]


def test_the_card_has_the_names_of_data_and_weights_and_no_path_of_this_machine(finished, exported, tmp_path: Path):
    one, run = exported["safetensors"], MlflowClient(finished.uri).get_run(finished.run_id)
    root = tmp_path / "my data, of 2024; all" / "photos"
    for kind in ("cat", "dog"):
        write_folder(root, {f"train/{kind}/{number}.png": encode(noise(8, 8)) for number in range(2)})
    images = FolderConfig(root=str(root), image_size_px=8).open("train", CentreSquare(size_px=8))
    data = data_set(DataDescription.of(images), "photos/train")
    assert str(tmp_path) in data.source
    given = [Param("encoder.weights", f"{tmp_path}/resnet.pth"), Param("encoder.name", "resnet18")]
    alone = Run(
        run.info,
        RunData(metrics=[], params=given, tags=[RunTag("job", "pretrain")]),
        RunInputs([DatasetInput(data, [])]),
    )
    card = model_card(alone, [], one.form, one.exportable, one.check)
    assert str(tmp_path) not in card and "my data" not in card and "; all" not in card
    assert "- photos/train: train split, 4 images, 0 bad images, 2 classes\n" in card
    assert "| encoder.weights | resnet.pth |" in card


def probe_of(run_id: str, data: str, protocol: str, top1: float) -> Run:
    """A probe as MLflow has it."""
    info = RunInfo(run_id, "0", "", "FINISHED", 0, None, "active")
    tags = [RunTag("data", data), RunTag("probe.protocol", f"{data}, {protocol}")]
    return Run(info, RunData(metrics=[Metric("probe/top1", top1, 0, 0)], tags=tags))


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (
            ["run=abc", "format=torchscript"],
            2,
            "run: found 'abc', but MLflow at .* has no run whose id or name starts with it",
        ),
        (["run={run}", "format=torchscrip"], 2, "format: found 'torchscrip'; did you mean 'torchscript'"),
        (["run={run}"], 2, "format: missing"),
        (["run={run}", "format=onnx", "outptu=x"], 2, "outptu: unknown key; did you mean 'output'"),
        (
            ["run={run}", "format=onnx", "tracking.uri=sqlite:////proc/none/mlflow.db"],
            4,
            "tracking.uri: found .*, which does not exist",
        ),
        (
            ["run={run}", "format=onnx", "data=cifar10", "data.root=/none"],
            3,
            "cifar10.*; the check .*; allowed: data=<set>",
        ),
    ],
)
def test_a_mistake_is_one_line_and_its_exit_code(overrides, code, message, finished, capsys, tmp_path: Path):
    output_dir = finished.folder.path.parent.parent
    given = [override.format(run=finished.run_id) for override in overrides]
    assert run_job("export", export, [*given, f"output_dir={output_dir}", f"output={tmp_path / 'new'}"]) == code
    output = capsys.readouterr().err.strip()
    assert output.startswith("error: ")
    assert "\n" not in output
    assert re.search(message, output), output
    assert list(tmp_path.iterdir()) == []
