"""Whole fine-tunings on real digits, in this process, with MLflow on sqlite."""

import json
import shutil

import pytest
import torch
import yaml
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.config.export import ExportConfig
from ssl_sec.edges.export.export import run_export
from ssl_sec.edges.folder.encoder import load_encoder
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.names import weights_digest
from ssl_sec.edges.folder.stored_config import stored_values
from ssl_sec.edges.run.driver import run_finetuning, run_probe, run_training
from ssl_sec.edges.run.job_values import values_of
from ssl_sec.errors import ConfigError
from ssl_sec.metrics import metric
from ssl_sec.recipes.finetuning.config import FinetuneConfig
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.settings import from_values
from tests.edges.conftest import QUICK
from tests.fakes import assert_identical
from tests.jobs import finetune

DRAWS_PICTURES = True

SETTINGS = (
    *("runtime=local", "runtime.device=cpu", "labels_share=0.2", "global_batch_size=64", "epochs=3"),
    *("augment.min_scale=0.4", "augment.flip_probability=0", "checkpoint.every_epochs=1"),
    *("tracking.system_metrics=false", "tracking.register_model=false"),
)


def config_of(*overrides: str) -> FinetuneConfig:
    return from_values(FinetuneConfig, values_of("finetune", [*SETTINGS, *overrides]))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory):
    output_dir = tmp_path_factory.mktemp("runs")
    given = [*QUICK, "runtime=local", "run_name=before", f"output_dir={output_dir}"]
    return run_training(PRETRAIN, from_values(PretrainConfig, values_of("pretrain", given)))


@pytest.fixture(scope="module")
def output_dir(pretrained):
    return pretrained.folder.path.parents[1]


@pytest.fixture(scope="module")
def finished(pretrained, output_dir):
    return run_finetuning(config_of("run=before", f"output_dir={output_dir}", "run_name=tuned"))


def test_the_encoder_and_the_data_are_those_of_the_run_however_it_is_named(pretrained, output_dir):
    stored = stored_values(pretrained.folder.config_path)
    for word in ("before", pretrained.run_id[:8], str(pretrained.folder.path)):
        values = values_of("finetune", [f"run={word}", f"output_dir={output_dir}", "encoder.freeze_batch_norm=true"])
        assert values["encoder"] == {**stored["encoder"], "freeze_batch_norm": True}
        assert values["data"] == {**stored["data"], "max_images": None}  # a probe takes all training images, too
        assert values["run"] == (word if "/" in word else pretrained.run_id)
    values = values_of("finetune", ["run=before", f"output_dir={output_dir}", "data=mnist", "data.root=x"])
    assert (values["data"]["name"], values["data"]["root"]) == ("mnist", "x")


def test_files_are_read_at_the_size_that_the_run_was_trained_on_unless_one_is_given(pretrained, tmp_path):
    folder = tmp_path / "runs" / "small"
    shutil.copytree(pretrained.folder.path, folder)
    stored = yaml.safe_load((folder / "config.yaml").read_text())

    def data_of(size: int | None, *typed: str, other: bool = True) -> tuple[int | None, int]:
        stored["data"] = {**compose("pretrain", ["data=folder", "data.root=x"])["data"], "num_channels": 1}
        stored["data"]["image_size_px"] = size
        (folder / "config.yaml").write_text(yaml.safe_dump(stored))
        given = ["data=parquet", "data.train=[a.parquet]"] if other else []
        data = values_of("finetune", [f"run={folder}", *given, *typed])["data"]
        return data["image_size_px"], data["num_channels"]

    assert data_of(8) == data_of(8, "augment.min_scale=0.5") == (8, 1)
    assert data_of(8, "data.image_size_px=16") == (16, 1)
    assert data_of(8, "augment.size_px=64") == (None, 1)  # crops of photos
    assert data_of(None) == (8, 1)  # that all images had
    # The images of the run itself, without a size of their own, are no photos to be cropped either.
    assert data_of(None, other=False) == (8, 1)
    assert data_of(None, "augment.size_px=64", other=False) == (None, 1)


def test_mlflow_has_a_runs_starting_point_and_metrics(pretrained, finished):
    client = MlflowClient(finished.uri)
    run = client.get_run(finished.run_id)
    tags = run.data.tags
    assert (run.info.status, tags["job"], tags["labels"], tags["start"]) == (
        "FINISHED", "finetune", "20 %", pretrained.run_id,
    )  # fmt: skip
    assert tags["encoder.weights.sha256"] == weights_digest(pretrained.folder.encoder_path)
    assert run.data.params["encoder.width"] == "0.125" and run.data.params["data.name"] == "digits"
    assert {"val/top1", "finetune/top1", "finetune/ece", "finetune/epoch"} <= run.data.metrics.keys()
    inputs = {(item.tags[0].value, item.dataset.name) for item in run.inputs.dataset_inputs}
    assert inputs == {("training", "digits/train"), ("evaluation", "digits/test")}
    plots = {file.path for file in client.list_artifacts(finished.run_id, "plots")}
    assert plots == {f"plots/{name}.png" for name in ("curves", "norms", "confusion", "reliability")}
    files = {file.path for file in client.list_artifacts(finished.run_id)}
    assert {"encoder.safetensors", "head.safetensors", "confusion.json", "config.yaml"} <= files
    assert "top-1 on the test set (%): " in str(finished)
    assert [name for name in finished.metrics if metric(name) is None] == []
    assert finished.folder.path.parent.name == "digits_finetuned"


def test_a_fine_tuned_encoder_is_exported_loaded_and_probed(finished, output_dir, tmp_path):
    features = load_encoder(finished.folder.path)(torch.rand(2, 1, 8, 8))
    assert features.shape == (2, 64)
    config = ExportConfig(run="tuned", format="safetensors", output=str(tmp_path / "out"), output_dir=str(output_dir))
    exported = run_export(config)
    assert "trained as the features of a classifier; 64 features" in (exported.folder / "README.md").read_text()
    assert_identical(load_file(exported.folder / "encoder.safetensors"), load_file(finished.folder.encoder_path))
    given = ["run=tuned", f"output_dir={output_dir}", "probe.epochs=5", "tracking.system_metrics=false"]
    probed = run_probe(from_values(ProbeJobConfig, values_of("probe", given)))
    assert probed.folder.path.parent == finished.folder.path.parent
    assert MlflowClient(probed.uri).get_run(probed.run_id).data.tags["mlflow.parentRunId"] == finished.run_id
    again = config_of("run=tuned", f"output_dir={output_dir}", "run_name=further", "epochs=0")
    further = run_finetuning(again)
    assert_identical(load_file(further.folder.encoder_path), load_file(finished.folder.encoder_path))


@pytest.mark.parametrize("given", [[], ["data=digits"]])
def test_images_that_an_encoder_was_fine_tuned_on_are_not_held_out_for_its_probe(finished, output_dir, given):
    learned = "must be null: the encoder has learned from the labels of images of 'digits'$"
    before = set(output_dir.glob("*/*"))
    given = ["run=tuned", f"output_dir={output_dir}", "tracking.system_metrics=false", *given]
    with pytest.raises(ConfigError, match=f"^probe.test_share: found 0.2, {learned}"):
        run_probe(from_values(ProbeJobConfig, values_of("probe", [*given, "probe.test_share=0.2"])))
    with pytest.raises(ConfigError, match=f"^test_share: found 0.2, {learned}"):
        run_finetuning(config_of(*given, "run_name=further", "test_share=0.2"))
    assert set(output_dir.glob("*/*")) == before


def test_a_supervised_run_is_fine_tuned_and_keeps_what_it_has_learned(pretrained, tmp_path):
    """Probes of the encoder then know which images they cannot hold out, whatever the fine-tuning's own are."""
    folder = tmp_path / "digits" / "before"
    shutil.copytree(pretrained.folder.path, folder)
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    stored |= {"positives": "classes", "loss": {"name": "supcon"}}
    stored["data"]["max_images"] = None
    (folder / "config.yaml").write_text(yaml.safe_dump(stored))
    given = [f"run={folder}", f"output_dir={tmp_path}", "run_name=tuned", "epochs=0"]
    with pytest.raises(ConfigError, match="^test_share: found 0.2, must be null: the encoder has learned from"):
        run_finetuning(config_of(*given, "test_share=0.2"))
    tuned = run_finetuning(config_of(*given))
    assert stored_values(tuned.folder.config_path)["start_labels"] == ["digits"]


def test_an_interrupted_run_is_resumed_without_the_run_it_started_from(pretrained, output_dir, tmp_path):
    for name in ("before", "mlflow.db"):
        source = pretrained.folder.path if name == "before" else output_dir / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    whole = run_finetuning(config_of(f"run={tmp_path / 'before'}", f"output_dir={tmp_path}", "run_name=whole"))
    folder, expected = whole.folder, load_file(whole.folder.encoder_path)
    shutil.rmtree(tmp_path / "before")
    # As left by a machine that dies in the last epoch.
    shutil.rmtree(folder.checkpoints_path / folder.checkpoint_names()[-1])
    for left in (folder.path / "outcome", folder.encoder_path, folder.head_path, folder.confusion_path):
        left.unlink()
    (folder.path / "unclosed").touch()
    config = from_values(FinetuneConfig, values_of("finetune", [f"resume={folder.path}"]))
    resumed = run_finetuning(config)
    assert_identical(load_file(resumed.folder.encoder_path), expected)
    assert resumed.metrics["finetune/top1"] == whole.metrics["finetune/top1"]
    identity = json.loads(RunFolder(folder.path).identity_path.read_text())
    assert identity["tags"]["encoder.weights.sha256"] == weights_digest(pretrained.folder.encoder_path)


def test_the_same_network_is_trained_from_random_weights(pretrained, tmp_path):
    given = ["data=digits", "encoder=resnet18", "encoder.width=0.125", f"output_dir={tmp_path}", "epochs=0"]
    finished = run_finetuning(config_of(*given))
    assert finished.folder.name == "digits-resnet18-scratch-20pct-s0"
    start, before = load_file(finished.folder.encoder_path), load_file(pretrained.folder.encoder_path)
    assert start.keys() == before.keys() and not torch.equal(start["conv1.weight"], before["conv1.weight"])
    identity = json.loads(finished.folder.identity_path.read_text())
    assert identity["tags"]["start"] == "random weights" and "encoder.weights.sha256" not in identity["tags"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "data: found null, must be given without run=<id>: data=<name>"),
        (["run=nosuch"], "run: found 'nosuch', but MLflow at "),
        (["run=before", "encoder=resnet50"], "encoder: found 'resnet50', must be left out with run=<id>: "),
        (["run=before", "encoder.weights=x"], "encoder.weights: found 'x', must be left out with run=<id>: "),
        (["run=before", "run_checkpoint=7"], "run_checkpoint: found 7, but run "),
        (["run=before", "encoder.width=0.5"], "run: "),
        (
            ["run=before", "trained_stages=6"],
            "trained_stages: found 6, must be 0 to 5, the stages of the encoder, or all",
        ),
        (["run=before", "global_batch_size=1000"], "global_batch_size: found 1000, must be 1 to "),
        (["run=before", "head=mlp2"], "head: found 'mlp2', which jobs.finetune cannot use; allowed: classifier"),
        (["run=before", "labels=0.1"], "labels: unknown key; "),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(pretrained, output_dir, given, message, capsys):
    before = set(output_dir.glob("*/*/config.yaml"))
    assert run_job("finetune", finetune, [*SETTINGS, f"output_dir={output_dir}", "run_name=wrong", *given]) in (2, 4)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].removeprefix("error: ").startswith(message), errors
    assert (
        set(output_dir.glob("*/*/config.yaml")) == before and not (output_dir / "digits_finetuned" / "wrong").exists()
    )
