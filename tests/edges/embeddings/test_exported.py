"""Embeddings by the folder of an export, without its run."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from mlflow.tracking import MlflowClient
from PIL import Image
from safetensors.torch import load_file, save_file

from ssl_sec import extract_features, load_embedder, load_encoder, open_digits
from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.embeddings.embed import run_embed
from ssl_sec.edges.export.export import run_export
from ssl_sec.edges.run.driver import run_finetuning, run_training
from ssl_sec.edges.run.job_values import values_of
from ssl_sec.edges.run.summary import Finished
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.embeddings.reading import read_set, require_alike
from ssl_sec.errors import ConfigError
from ssl_sec.exporting.record import read_record
from ssl_sec.recipes.finetuning.config import FinetuneConfig
from ssl_sec.recipes.registry import FACE, PRETRAIN
from ssl_sec.settings import from_values
from tests.edges.conftest import QUICK, QUICK_FACE
from tests.jobs import configured, embed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """A scaled ResNet, the same with a classifier, a model of timm, and a network of faces with its head."""
    place = ["runtime=local", f"output_dir={tmp_path_factory.mktemp('runs')}"]
    scaled = [*QUICK, *place, "encoder.mean=[0.3]", "encoder.std=[0.2]", "epochs=0", "run_name=scaled"]
    scaled.append("tracking.register_model=true")
    unscaled = [each for each in QUICK if not each.startswith("encoder.")]
    vit = [*unscaled, *place, "encoder=timm", "encoder.model=test_vit", "epochs=0", "run_name=vit"]
    faces = [*QUICK_FACE, *place, "epochs=0", "run_name=faces"]
    pretrained = {
        name: run_training(PRETRAIN, configured("pretrain", given))
        for name, given in (("scaled", scaled), ("vit", vit))
    }
    classifier = ["experiment=digits_finetune", f"run={pretrained['scaled'].folder.path}", *place, "epochs=1"]
    few = ["run_name=classifier", "global_batch_size=32", "tracking.register_model=false"]
    tuned = run_finetuning(from_values(FinetuneConfig, values_of("finetune", [*classifier, *few])))
    return {
        **pretrained,
        "classifier": tuned,
        "faces": run_training(FACE, configured("face", faces)),
    }


def embeddings(word: str | Path, output: Path, *more: str) -> np.ndarray:
    place = [f"output={output}", f"output_dir={output.parent / 'runs'}"]
    given = [f"run={word}", *place, "runtime=local", "split=test", *(more or ["data=digits"])]
    run_embed(configured("embed", given))
    return np.stack(pq.read_table(output)["embedding"].to_numpy(zero_copy_only=False))


def export(finished: Finished, name: str, output: Path) -> Path:
    given = [f"run={finished.folder.path}", f"format={name}", f"output={output}"]
    return run_export(configured("export", given)).folder


@pytest.mark.parametrize(
    ("network", "form"),
    [
        ("scaled", "safetensors"),
        pytest.param("scaled", "torchscript", marks=pytest.mark.slow),
        pytest.param("vit", "timm", marks=pytest.mark.slow),
        ("faces", "torchscript"),
    ],
)
def test_an_export_embeds_as_its_run(runs, network, form, tmp_path: Path):
    finished = runs[network]
    folder = export(finished, form, tmp_path / "export")
    expected, found = embeddings(finished.folder.path, tmp_path / "run"), embeddings(folder, tmp_path / "other")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    written = [tmp_path / name / "test-00000-of-00001.parquet" for name in ("run", "other")]
    require_alike([file for path in written for file in read_set([(str(path), partial(path.open, "rb"))]).files])
    (record,) = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db").search_runs(["1"])
    assert (record.data.tags["recipe"], record.data.tags["job"]) == ("export", "embed")
    assert "mlflow.parentRunId" not in record.data.tags
    (file,) = (tmp_path / "other").iterdir()
    assert json.loads(pq.read_schema(file).metadata[b"ssl_sec"])["run"] == finished.run_id


@pytest.mark.parametrize("network", [pytest.param("scaled", marks=pytest.mark.slow), "classifier"])
def test_images_of_other_sizes_get_the_size_of_the_training_images(runs, network, tmp_path: Path, caplog):
    """Digits have one size without a key for it; fine-tuning's crop, of 224 pixels, does not suit them."""
    caplog.set_level("INFO", "ssl_sec")
    data = photos(tmp_path / "photos")
    finished = runs[network]
    folder = export(finished, "safetensors", tmp_path / "export")
    expected = embeddings(folder, tmp_path / "other", *data)
    words = [str(finished.folder.path), finished.run_id, *(["models:/digits-encoder/1"] if network == "scaled" else [])]
    for place, word in enumerate(words):  # of the last two, only MLflow is asked
        found = embeddings(word, tmp_path / f"run{place}", *data, f"tracking.uri={finished.uri}")
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert caplog.text.count("images of 1 x 8 x 8") == 1 + len(words)


def test_an_export_that_was_checked_with_other_images_has_the_size_of_the_training_images(runs, tmp_path: Path):
    data = photos(tmp_path / "photos")
    given = [f"run={runs['scaled'].folder.path}", "format=safetensors", f"output={tmp_path / 'export'}", *data[:-1]]
    run_export(configured("export", given))
    _, record = read_record(tmp_path / "export")
    assert record.image_shape == (1, 8, 8)
    colours = [each for each in data if "channels" not in each]  # read as the run's images
    run_export(configured("export", [*given[:2], f"output={tmp_path / 'grey'}", *colours[:-1]]))
    with pytest.raises(ConfigError, match="data: found images of 1 x 12 x 12, must be of 1 x 8 x 8, as the run was"):
        run_export(configured("export", [*given, "overwrite=true", "data.image_size_px=12"]))
    assert read_record(tmp_path / "export")[1] == record


@pytest.fixture(scope="module")
def cropped(runs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A classifier of photos, of whose central 8 of 12 pixels it was trained."""
    folder = tmp_path_factory.mktemp("cropped")
    for kind in ("train/cat", "train/dog", "test/cat", "test/dog"):
        photos(folder / kind)
    given = [f"run={runs['scaled'].folder.path}", "data=folder", f"data.root={folder}", "data.num_channels=1"]
    crop = ["augment.short_side_px=12", "augment.size_px=8", "epochs=0", "global_batch_size=2"]
    more = ["runtime=local", f"output_dir={folder / 'runs'}", "tracking.register_model=false", "held_out_share=0.5"]
    return run_finetuning(from_values(FinetuneConfig, values_of("finetune", [*given, *crop, *more])))


def test_an_export_has_the_crop_of_the_run_whatever_it_was_checked_with(runs, cropped, tmp_path: Path):
    data = photos(tmp_path / "photos")
    given = [f"run={cropped.folder.path}", "format=safetensors", f"output={tmp_path / 'export'}"]
    run_export(configured("export", [*given, *data[:-1], "data.image_size_px=8"]))
    expected = embeddings(cropped.folder.path, tmp_path / "run", *data)
    found = embeddings(tmp_path / "export", tmp_path / "other", *data)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_embeddings_of_images_that_are_cut_otherwise_are_refused(cropped, tmp_path: Path):
    data = photos(tmp_path / "photos")
    embeddings(cropped.folder.path, tmp_path / "output", *data)
    with pytest.raises(ConfigError, match="other embeddings of the train split, with crop {.*} instead of {'size_px'"):
        embeddings(cropped.folder.path, tmp_path / "output", *data, "data.image_size_px=8", "data.resident_limit_mib=0")


def test_torchscript_takes_images_of_the_recorded_size_alone(runs, tmp_path: Path):
    """Others could get other features than by the run, which rebuilds its network for them or refuses them."""
    folder, data = export(runs["scaled"], "torchscript", tmp_path / "export"), photos(tmp_path / "photos")
    with pytest.raises(ConfigError, match="data: found images of 1 x 12 x 12, which .* for images of 1 x 8 x 8$"):
        embeddings(folder, tmp_path / "output", *data, "data.image_size_px=12")
    assert len(embeddings(folder, tmp_path / "output", *data)) == 2


def test_a_given_size_is_that_of_the_images(runs, tmp_path: Path, caplog):
    caplog.set_level("INFO", "ssl_sec")
    embeddings(runs["scaled"].folder.path, tmp_path / "run", *photos(tmp_path / "photos"), "data.image_size_px=12")
    assert caplog.text.count("images of 1 x 12 x 12") == 1


def photos(folder: Path) -> list[str]:
    """Overrides that read grey images of two sizes."""
    folder.mkdir(parents=True)
    for number, shape in enumerate([(20, 24), (30, 16)]):
        pixels = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return ["data=folder", f"data.root={folder}", "data.num_channels=1", "split=train"]


def test_the_address_of_an_export_on_the_hub_is_refused_in_one_line(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_job("embed", embed, ["run=hf://me/digits-encoder", "output=out", "data=digits"]) == 2
    assert "error: run: found 'hf://me/digits-encoder'; allowed: a folder, or the URL" in capsys.readouterr().err


def test_a_file_of_this_version_does_not_say_where_its_images_are(runs, tmp_path: Path):
    folder = export(runs["scaled"], "safetensors", tmp_path / "export")
    with pytest.raises(ConfigError, match="data: missing, as the export .*export does not say where"):
        embeddings(folder, tmp_path / "output", "batch_size=8")
    with pytest.raises(ConfigError, match="checkpoint: found 'best', must be 'last' with an export"):
        embeddings(folder, tmp_path / "output", "checkpoint=best")
    weights = load_file(folder / "encoder.safetensors")
    save_file(weights, folder / "encoder.safetensors")  # as an earlier version wrote it
    with pytest.raises(ConfigError, match="encoder.safetensors does not say how to build its network"):
        embeddings(folder, tmp_path / "output")


@pytest.mark.parametrize("form", ["safetensors", "torchscript"])
def test_images_of_other_channels_are_refused(runs, form, tmp_path: Path):
    from PIL import Image

    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "0.png")
    folder = export(runs["scaled"], form, tmp_path / "export")
    with pytest.raises(ConfigError, match="^data: found images of 3 x 8 x 8, .* data.num_channels=1$"):
        embeddings(folder, tmp_path / "output", "data=folder", f"data.root={tmp_path / 'photos'}", "split=train")
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("empty/", 2, "run: {root}/empty holds neither a run nor an export; allowed: the folder of either, a run's id"),
        ("none/here", 2, "run: {root}/none/here holds neither a run nor an export"),
        ("onnx/", 2, "run: {root}/onnx holds an export whose encoder.onnx does not say how to build its network"),
        ("program/", 2, "run: {root}/program holds an export whose encoder.pt2 does not say how to build its network"),
        ("broken/", 4, "run: {root}/broken/encoder.safetensors cannot be read: "),
        ("config/", 4, "run: {root}/config/config.json cannot be read: "),
        ("script/", 4, "run: {root}/script/encoder.pt cannot be read: "),
    ],
)
def test_a_folder_without_a_network_is_one_line(name, code, message, tmp_path: Path, capsys):
    (tmp_path / "empty").mkdir()
    files = {
        "onnx": "encoder.onnx",
        "program": "encoder.pt2",
        "broken": "encoder.safetensors",
        "script": "encoder.pt",
        "config": "model.safetensors",
    }
    for folder, file in files.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_bytes(b"no network")
        (tmp_path / folder / "README.md").write_text("an export")
    given = [f"run={tmp_path}/{name}", f"output={tmp_path / 'output'}", f"output_dir={tmp_path}", "runtime=local"]
    assert run_job("embed", embed, given) == code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: {message.format(root=tmp_path)}"), error


@pytest.mark.parametrize(
    ("network", "form"),
    [("scaled", "safetensors"), ("vit", "timm"), pytest.param("faces", "hub", marks=pytest.mark.slow)],
)
def test_the_encoder_of_an_export_is_loaded_as_that_of_its_run(runs, network, form, tmp_path: Path):
    folder = export(runs[network], form, tmp_path / "export")
    before = sorted(folder.iterdir())
    expected, found = load_encoder(runs[network].folder.path), load_encoder(str(folder))
    images = torch.rand(4, *runs[network].folder.data().image_shape)
    with torch.no_grad():
        assert torch.equal(found(images), expected(images))
    assert sorted(folder.iterdir()) == before and not found.training


@pytest.mark.parametrize(
    ("network", "form"), [("scaled", "hub"), ("vit", "timm"), pytest.param("faces", "hub", marks=pytest.mark.slow)]
)
def test_the_embedder_of_a_run_and_of_its_export_computes_what_the_job_embeds(runs, network, form, tmp_path: Path):
    folder = export(runs[network], form, tmp_path / "export")
    expected = embeddings(runs[network].folder.path, tmp_path / "embeddings")
    for place in (runs[network].folder.path, folder):
        embedder = load_embedder(place)
        assert not any(module.training for module in embedder.modules())
        found, _ = extract_features(embedder, open_digits("test"))
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_folder_without_the_name_of_its_job_has_an_encoder_alone(runs, tmp_path: Path):
    copied = shutil.copytree(runs["faces"].folder.path, tmp_path / "faces")
    (copied / "mlflow.json").unlink()
    assert load_encoder(copied)(torch.rand(2, *runs["faces"].folder.data().image_shape)).shape[0] == 2
    with pytest.raises(ConfigError, match=r"^run: found .*/faces, whose mlflow.json does not name the job"):
        load_embedder(copied)


def test_an_export_in_object_storage_is_loaded_and_embeds(runs, s3, tmp_path: Path):
    folder = export(runs["scaled"], "safetensors", tmp_path / "export")
    for path in folder.iterdir():
        Bucket(f"{s3}/exports/digits").upload(path, path.name)
    expected = load_encoder(runs["scaled"].folder.path).backbone.state_dict()
    found = load_encoder(f"{s3}/exports/digits").backbone.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    embeddings(f"{s3}/exports/digits", tmp_path / "other")
    with pytest.raises(ConfigError, match=f"run: {s3}/exports/none holds neither a run nor an export"):
        embeddings(f"{s3}/exports/none", tmp_path / "none")


def test_a_folder_whose_network_cannot_be_rebuilt_is_refused(runs, tmp_path: Path):
    folder = export(runs["scaled"], "torchscript", tmp_path / "export")
    with pytest.raises(ConfigError, match="an export without its network's parts; allowed: one with format=safetens"):
        load_encoder(folder)
    with pytest.raises(ConfigError, match="holds no trained encoder; allowed: the folder of a run or export"):
        load_encoder(tmp_path)


def test_exports_that_differ_only_in_the_scale_of_images_are_distinguished(runs, tmp_path: Path):
    """Their weights are equal: hub's format has the scale in its config.json."""
    folder = export(runs["scaled"], "hub", tmp_path / "export")
    embeddings(folder, tmp_path / "output")
    config = folder / "config.json"
    values = json.loads(config.read_text())
    values["ssl_sec"]["encoder"]["mean"] = [0.5]
    config.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="holds other embeddings of the test split, with weights"):
        embeddings(folder, tmp_path / "output")
