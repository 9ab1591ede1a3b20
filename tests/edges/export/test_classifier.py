"""A fine-tuned network is exported with its classifier."""

import json
import re

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from ssl_sec.data.standard_sets import open_digits
from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.export.export import run_export
from ssl_sec.edges.folder.encoder import load_embedder, load_encoder
from ssl_sec.edges.run.driver import run_finetuning, run_training
from ssl_sec.errors import ConfigError
from ssl_sec.exporting import FILE_NAMES, FORMATS
from ssl_sec.exporting.reading import reading
from ssl_sec.networks.config import ResNetConfig
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.settings import from_values
from tests.edges.conftest import QUICK
from tests.jobs import configured, embed, export

LOCAL = ("runtime=local", "tracking.system_metrics=false", "tracking.register_model=false")
TUNED = ("data=digits", "data.max_images=300", "encoder.width=0.125", "global_batch_size=64", "epochs=2")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A fine-tuning of digits from random weights, whose run is in MLflow, too."""
    output_dir = tmp_path_factory.mktemp("runs")
    given = [*LOCAL, *TUNED, "run_name=tuned", "optimiser.learning_rate=0.05", f"output_dir={output_dir}"]
    return run_finetuning(configured("finetune", given))


def output_dir(tuned):
    return tuned.folder.path.parents[1]


def exported(tuned, form, output, *overrides, run=None):
    given = [f"run={run or tuned.folder.path}", f"format={form}", f"output={output}", "classifier=true"]
    return run_export(configured("export", [*given, f"output_dir={output_dir(tuned)}", *overrides]))


def logits_of(tuned, images):
    head = load_file(tuned.folder.head_path)
    with torch.no_grad():
        return load_encoder(tuned.folder.path)(images) @ head["fc.weight"].T + head["fc.bias"]


@pytest.mark.parametrize(
    "form", ["safetensors", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pt2", "onnx")), "hub"]
)
def test_the_export_computes_logits_and_names_the_classes(tuned, tmp_path, monkeypatch, form):
    done = exported(tuned, form, tmp_path / "out")  # compares the logits with those of the trained network
    assert done.exportable.output == "logits" and "logits up to" in str(done)
    assert json.loads((done.folder / "classes.json").read_text()) == [str(digit) for digit in range(10)]
    assert {path.name for path in done.folder.iterdir()} <= FILE_NAMES
    _, metadata, body = (done.folder / "README.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(metadata)
    assert fields["pipeline_tag"] == "image-classification" and fields["tags"] == ["image-classification", form]
    assert "A classifier of images into 10 classes" in body and "Output: float32 [batch, 10]" in body
    assert f"```python\n{reading(done.exportable, done.form.takes_numpy)}\n```" in body
    images = open_digits("test").read(torch.arange(40)).images.float() / 255
    monkeypatch.chdir(done.folder)
    namespace = {"images": images.numpy() if done.form.takes_numpy else images}
    exec(f"{done.form.loading(done.exportable)}\n{done.form.use(done.exportable)}", namespace)
    found = torch.as_tensor(namespace["logits"])
    torch.testing.assert_close(found.detach(), logits_of(tuned, images), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", ["safetensors", "hub"])
def test_the_export_is_loaded_and_embeds_images_as_logits(tuned, tmp_path, form):
    folder = exported(tuned, form, tmp_path / "out").folder
    images = open_digits("test").read(torch.arange(5)).images.float() / 255
    with torch.no_grad():
        torch.testing.assert_close(load_embedder(folder)(images), logits_of(tuned, images), rtol=1e-4, atol=1e-4)
        assert load_encoder(folder)(images).shape == (5, 64)
    given = [f"run={folder}", f"output={tmp_path / 'logits'}", "data=digits", "split=test", "runtime=local"]
    assert run_job("embed", embed, [*given, f"output_dir={tmp_path / 'runs'}"]) == 0
    rows = pq.read_table(tmp_path / "logits").to_pydict()
    expected = logits_of(tuned, open_digits("test").images.float() / 255)
    torch.testing.assert_close(torch.tensor(rows["embedding"]), expected, rtol=1e-3, atol=1e-3)


def test_a_run_in_mlflow_needs_no_folder(tuned, tmp_path):
    kept = tuned.folder.path.rename(tmp_path / "away")
    try:
        folder = exported(tuned, "safetensors", tmp_path / "out", run=tuned.run_id).folder
    finally:
        kept.rename(tuned.folder.path)
    assert load_file(folder / "head.safetensors").keys() == {"fc.weight", "fc.bias"}
    with safe_open(folder / "encoder.safetensors", "pt") as file:
        assert json.loads(file.metadata()["ssl_sec"])["head"]["dim"] == 10


def test_without_the_key_the_encoder_is_exported_alone(tuned, tmp_path):
    folder = exported(tuned, "safetensors", tmp_path / "out", "classifier=false").folder
    assert {path.name for path in folder.iterdir()} == {"encoder.safetensors", "README.md"}


def test_a_kept_checkpoint_is_exported_without_its_classifier(tuned, tmp_path, capsys):
    given = [f"run={tuned.folder.path}", "classifier=true", "format=onnx", "checkpoint=best"]
    assert run_job("export", export, [*given, f"output={tmp_path / 'out'}"]) == 2
    assert capsys.readouterr().err == "error: checkpoint: found 'best', must be 'last' with classifier=true\n"


def test_timms_folder_holds_no_classifier():
    resnet = from_values(ResNetConfig, {"name": "resnet50", "stem": "imagenet"}).architecture(3, 224)
    FORMATS["timm"].require_fit(resnet, has_head=False)
    with pytest.raises(
        ConfigError, match="format: found 'timm', .* a head; allowed for this network: safetensors, pt2"
    ):
        FORMATS["timm"].require_fit(resnet, has_head=True)


def test_a_run_without_a_classifier_is_refused(tmp_path, capsys):
    given = [*QUICK, "epochs=0", "runtime=local", f"output_dir={tmp_path / 'runs'}", "run_name=encoder"]
    pretrained = run_training(PRETRAIN, configured("pretrain", given))
    asked = [f"run={pretrained.folder.path}", "format=safetensors", "classifier=true", f"output={tmp_path / 'out'}"]
    capsys.readouterr()
    assert run_job("export", export, asked) == 2
    refusal = "error: classifier: found true, must be false with a run of jobs.pretrain, which keeps none\n"
    assert capsys.readouterr().err == refusal


def test_a_run_whose_files_are_gone_is_refused(tuned, tmp_path, capsys):
    names = tuned.folder.confusion_path
    kept = names.rename(tmp_path / "away")
    try:
        asked = [f"run={tuned.folder.path}", "format=safetensors", "classifier=true", f"output={tmp_path / 'out'}"]
        assert run_job("export", export, asked) == 2
    finally:
        kept.rename(names)
    message = (
        "error: classifier: found true, but run .* has no head.safetensors or no confusion.json that can be read: "
    )
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert re.match(message, line), line
