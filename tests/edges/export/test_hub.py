"""An export for the Hugging Face Hub, as a folder and pushed to a Hub on loopback."""

import json
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.embeddings.embed import run_embed
from ssl_sec.edges.export.export import Exported, run_export
from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.run.summary import Finished
from ssl_sec.errors import ConfigError, StorageError
from ssl_sec.recipes.registry import FACE, PRETRAIN
from tests.edges.conftest import QUICK, QUICK_FACE
from tests.edges.export.fake_hub import TOKEN, fake_hub
from tests.jobs import configured
from tests.jobs import export as export_job


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """A probed ResNet, and a network of faces, with its head, that no other library has."""
    place = ["runtime=local", f"output_dir={tmp_path_factory.mktemp('runs')}"]
    resnet = [*QUICK, *place, "probe.enabled=true", "encoder.mean=[0.3]", "encoder.std=[0.2]", "run_name=whole"]
    faces = [*QUICK_FACE, *place, "epochs=0", "run_name=faces"]
    return {
        "resnet": run_training(PRETRAIN, configured("pretrain", resnet)),
        "faces": run_training(FACE, configured("face", faces)),
    }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    with fake_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def export(finished: Finished, output: object, *more: str) -> Exported:
    given = [f"run={finished.folder.path}", "format=hub", f"output={output}", *more]
    return run_export(configured("export", given))


def metadata(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("resnet", {"model.safetensors", "config.json"}),
        pytest.param("faces", {"model.safetensors", "config.json", "encoder.pt2"}, marks=pytest.mark.slow),
    ],
)
def test_the_folder_is_complete_and_embeds_as_its_run(runs, name, files, tmp_path: Path):
    finished = runs[name]
    exported = export(finished, tmp_path / "hub")
    assert {path.name for path in (tmp_path / "hub").iterdir()} == {*files, "README.md"}
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert (config["dim"], config["image_shape"]) == (exported.exportable.dim, [1, 8, 8])
    assert (config["mean"], config["std"]) == (exported.exportable.mean, exported.exportable.std)
    found = []
    for word in (tmp_path / "hub", finished.folder.path):
        output = tmp_path / f"by-{word.name}"
        given = [f"run={word}", f"output={output}", f"output_dir={tmp_path}", "runtime=local", "data=digits"]
        run_embed(configured("embed", given))
        found.append(np.stack(pq.read_table(output)["embedding"].to_numpy(zero_copy_only=False)))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_the_card_has_the_scores_of_the_run_and_a_license_only_if_it_is_given(runs, tmp_path: Path):
    finished = runs["resnet"]
    export(finished, tmp_path / "one")
    export(finished, tmp_path / "other", "license=cc-by-nc-4.0")
    cards = [(tmp_path / name / "README.md").read_text() for name in ("one", "other")]
    assert "license" not in metadata(cards[0])
    card = metadata(cards[1])
    assert (card["license"], card["library_name"]) == ("cc-by-nc-4.0", "pytorch")
    assert "datasets" not in card and card["metrics"] == ["accuracy"]
    assert "hub" in card["tags"]
    assert f"(`probe/top1`) | {finished.metrics['probe/top1']:.4g} |" in cards[0]
    assert "hf download" not in cards[0]


def test_a_push_is_one_commit_and_replaces_only_on_request(runs, hub):
    faces, resnet = runs["faces"], runs["resnet"]
    exported = export(faces, "hf://me/networks", "license=mit")
    assert exported.folder is None and f"repository: {hub.address}/me/networks" in str(exported)
    assert hub.commits == ["me/networks"] and hub.private == {"me/networks": True}
    assert hub.files["me/networks"].keys() >= {"model.safetensors", "config.json", "encoder.pt2", "README.md"}
    card = hub.files["me/networks"]["README.md"].decode()
    assert metadata(card)["license"] == "mit"
    assert "hf download me/networks --local-dir encoder" in card

    with pytest.raises(
        ConfigError, match="output: hf://networks already exists; allowed: a new name, or overwrite=true"
    ):
        export(resnet, "hf://networks")
    assert hub.files["me/networks"]["README.md"].decode() == card
    hub.files["me/networks"]["notes.txt"] = b"by hand"
    export(resnet, "hf://networks", "overwrite=true")
    now = hub.files["me/networks"]
    assert "encoder.pt2" not in now and now["notes.txt"] == b"by hand"
    assert json.loads(now["config.json"])["output"] == "features"


def test_a_push_that_failed_is_repeated_by_the_same_command(runs, hub):
    hub.refusal = "Private repository storage limit reached"
    with pytest.raises(StorageError, match="hf://networks cannot be written: .*storage limit reached"):
        export(runs["resnet"], "hf://networks")
    assert hub.files["me/networks"].keys() == {".gitattributes"}
    hub.refusal = None
    with pytest.raises(ConfigError, match="output: hf://networks already exists"):
        export(runs["resnet"], "hf://networks", "private=false")  # it would be private
    export(runs["resnet"], "hf://networks")
    assert hub.commits == ["me/networks"] and "config.json" in hub.files["me/networks"]


def test_a_push_has_the_files_of_a_folder(runs, hub, tmp_path: Path):
    export(runs["resnet"], "hf://public", "private=false")
    export(runs["resnet"], tmp_path / "folder")
    assert hub.private == {"me/public": False}
    pushed = hub.files["me/public"]
    assert pushed["config.json"] == (tmp_path / "folder" / "config.json").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(pushed["model.safetensors"])
    one, other = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "folder"))
    assert one.keys() == other.keys() and all(bool((one[name] == other[name]).all()) for name in one)


def test_without_a_token_a_folder_is_written_and_the_push_command_shown(
    runs, hub, monkeypatch, caplog, capsys, tmp_path: Path
):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    given = [f"run={runs['resnet'].folder.path}", "format=hub", "output=hf://me/networks", f"output_dir={tmp_path}"]
    assert run_job("export", export_job, given) == 0
    (folder,) = (tmp_path / "exports").iterdir()
    assert {"model.safetensors", "config.json", "README.md"} <= {path.name for path in folder.iterdir()}
    assert "me/networks" in (folder / "README.md").read_text()
    assert f"`hf upload me/networks {folder}`" in caplog.text and f"folder: {folder}" in capsys.readouterr().out
    assert hub.files == {}


@pytest.mark.parametrize(
    ("output", "token", "message"),
    [
        ("hf://other/networks", TOKEN, "You don't have the rights to create a model under this namespace"),
        ("hf://networks", "hf_wrong", "output: hf://networks cannot be written: "),
    ],
)
def test_a_refusal_of_the_hub_is_one_line(runs, hub, monkeypatch, output, token, message):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(StorageError) as raised:
        export(runs["resnet"], output)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert hub.commits == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["format=onnx", "output=hf://me/networks"], "format: found 'onnx', must be 'hub' with output=hf://"),
        (["format=hub", "output=hf://a/b/c"], "output: found 'hf://a/b/c', must be hf://<owner>/<name>"),
        (["format=hub", "output=hf://"], "output: found 'hf://', must be hf://<owner>/<name>"),
        (["format=hub", "output=s3://bucket/x"], "output: found 's3://bucket/x', a URL"),
        (["format=hub", "license='MIT license'"], "license: found 'MIT license', must be the Hub's name of a license"),
    ],
)
def test_an_invalid_repository_or_license_is_refused(given, message):
    with pytest.raises(ConfigError) as raised:
        configured("export", ["run=any", *given])
    assert message in str(raised.value)
