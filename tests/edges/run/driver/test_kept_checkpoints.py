"""Encoders of kept checkpoints: in MLflow, probed and exported."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from ssl_sec.edges.folder.checkpoints import chosen_step, kept_checkpoints
from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.tracking.checkpoints import download_checkpoint, log_checkpoints
from ssl_sec.edges.tracking.runs import RunArchive
from ssl_sec.embeddings.parts import origin_of
from ssl_sec.errors import ConfigError, StorageError
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.recipes.tracking import TrackingConfig
from ssl_sec.training.checkpoint import load_checkpoint
from tests import jobs
from tests.edges.run.driver.conftest import pretrain_config

SCORED = {4: 60.0, 6: 70.0, 8: None}


@pytest.mark.parametrize(("checkpoint", "step"), [("last", 8), ("best", 6), (4, 4)])
def test_a_checkpoint_is_chosen(checkpoint, step):
    assert chosen_step(checkpoint, SCORED, "the run") == step


@pytest.mark.parametrize(
    ("checkpoint", "kept", "message"),
    [
        (
            5,
            SCORED,
            r"5, but the run keeps only those of the steps 4 \(val/knn_top1 60\), 6 \(best: val/knn_top1 70\), 8$",
        ),
        ("best", {4: None}, "found 'best', but no checkpoint of the run has a score; allowed: 4"),
        ("best", {}, "found 'best', but the run has no checkpoints"),
    ],
)
def test_a_missing_checkpoint_is_refused(checkpoint, kept, message):
    with pytest.raises(ConfigError, match=message):
        chosen_step(checkpoint, kept, "the run", lambda: "val/knn_top1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with checkpoints of two epochs."""
    from tests.edges.conftest import QUICK

    folder = tmp_path_factory.mktemp("kept") / "runs"
    options = ["run_name=it", "checkpoint.every_epochs=1", "probe.enabled=false", f"output_dir={folder}"]
    return run_training(PRETRAIN, pretrain_config([*QUICK, *options]))


PROBE = ("runtime=local", "probe.epochs=2", "probe.decay_at=[]", "tracking.system_metrics=false")


def weights_at(trained, step: int) -> dict[str, torch.Tensor]:
    state = load_checkpoint(trained.folder.checkpoints_path / f"step-{step:09d}", torch.device("cpu"))
    return {name.removeprefix("backbone."): value for name, value in state["encoder"].items()}


def test_mlflow_has_the_metrics_of_each_kept_checkpoint(trained):
    client = MlflowClient(trained.uri)
    models = {model.name: model for model in client.search_logged_models([trained.experiment_id])}
    assert models.keys() == {"checkpoint-5", "checkpoint-10"}
    for step in (5, 10):
        model = models[f"checkpoint-{step}"]
        found = {metric.key: metric.value for metric in model.metrics or []}
        expected = {
            name: value
            for record in trained.folder.records()
            if record["step"] == step - 1
            for name, value in record["metrics"].items()
            if name == "train/loss" or not name.startswith("train/")
        }
        assert "train/loss" in expected and ("val/knn_top1" in expected) == (step == 10)
        assert found == expected and model.status == "READY" and model.source_run_id == trained.run_id
    losses = [point.step for point in client.get_metric_history(trained.run_id, "train/loss")]
    assert len(set(losses)) == len(losses)  # the run has each point once
    jobs.replay([f"folder={trained.folder.path}"])
    assert len(client.search_logged_models([trained.experiment_id])) == 2  # none is there twice


def test_a_checkpoint_whose_upload_was_interrupted_is_not_offered_and_is_uploaded_again(trained, tmp_path, monkeypatch):
    client = MlflowClient(trained.uri)

    def steps() -> list[str]:
        return sorted(model.name for model in client.search_logged_models([trained.experiment_id]))

    for model in client.search_logged_models([trained.experiment_id]):
        client.delete_logged_model(model.model_id)
    upload = MlflowClient.log_model_artifacts

    def interrupted(self, model_id: str, folder: str) -> None:
        if not client.get_logged_model(model_id).name == "checkpoint-5":
            raise MlflowException("the store is gone")
        upload(self, model_id, folder)

    monkeypatch.setattr(MlflowClient, "log_model_artifacts", interrupted)
    where = client, trained.experiment_id, trained.run_id
    with pytest.raises(MlflowException, match="the store is gone"):
        log_checkpoints(*where, PRETRAIN, trained.folder)
    assert steps() == ["checkpoint-10", "checkpoint-5"]
    with pytest.raises(ConfigError, match=r"checkpoint: found 10, but .* keeps only those of the steps 5$"):
        download_checkpoint(*where, 10, tmp_path)
    monkeypatch.setattr(MlflowClient, "log_model_artifacts", upload)
    log_checkpoints(*where, PRETRAIN, trained.folder)
    assert steps() == ["checkpoint-10", "checkpoint-5"]
    download_checkpoint(*where, 10, tmp_path)
    expected, found = weights_at(trained, 10), load_file(tmp_path / "encoder.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    kept = trained.folder.path.parents[1].rglob("*.safetensors")  # in MLflow's folder, too
    assert {path.stat().st_mode for path in kept} == {trained.folder.config_path.stat().st_mode}  # others may read them


@pytest.mark.parametrize("by", ["folder", "id"])
def test_the_encoder_of_a_checkpoint_is_exported(trained, tmp_path, by):
    run = trained.folder.path if by == "folder" else trained.run_id
    where = f"output_dir={trained.folder.path.parents[1]}"
    jobs.export([f"run={run}", where, "checkpoint=5", "format=safetensors", f"output={tmp_path / 'out'}"])
    exported, expected = load_file(tmp_path / "out" / "encoder.safetensors"), weights_at(trained, 5)
    assert all(torch.equal(exported[name], expected[name]) for name in exported)
    assert not torch.equal(exported["conv1.weight"], load_file(trained.folder.encoder_path)["conv1.weight"])
    with pytest.raises(
        ConfigError, match=r"checkpoint: found 7, but .* keeps only those of the steps 5, 10 \(best: val/knn_top1 "
    ):
        jobs.export([f"run={run}", where, "checkpoint=7", "format=safetensors", f"output={tmp_path / 'none'}"])


@pytest.mark.parametrize("by", ["folder", "id"])
def test_a_probe_of_a_checkpoint_is_its_own_and_ranks_no_run(trained, by):
    run, root = trained.folder.path if by == "folder" else trained.run_id, trained.folder.path.parents[1]
    jobs.probe([f"run={run}", f"output_dir={root}", "checkpoint=best", f"run_name=of-{by}", *PROBE])
    client = MlflowClient(trained.uri)
    (probe,) = client.search_runs([trained.experiment_id], f"attributes.run_name = 'of-{by}'")
    assert probe.data.tags["checkpoint"] == "best" and "probe/top1" in probe.data.metrics
    best = chosen_step("best", kept_checkpoints(trained.folder), "")
    probed = load_file(root / "digits" / f"of-{by}" / "encoder.safetensors")
    assert all(torch.equal(probed[name], value) for name, value in weights_at(trained, best).items())
    assert not any(name.startswith("probe") for name in client.get_run(trained.run_id).data.metrics)
    cards = {}
    for checkpoint in ("best", "last"):
        out = root / f"exported-{checkpoint}-{by}"
        jobs.export(
            [f"run={run}", f"output_dir={root}", f"checkpoint={checkpoint}", "format=safetensors", f"output={out}"]
        )
        cards[checkpoint] = (out / "README.md").read_text()
    of_probe, of_training, of_best = (
        f"probe {probe.info.run_id[:8]} on digits",
        "training on digits",
        f"| checkpoint | best (step {best}) |",
    )
    assert of_probe in cards["best"] and of_best in cards["best"] and of_training not in cards["best"]
    assert of_training in cards["last"] and of_probe not in cards["last"] and of_best not in cards["last"]
    archive = RunArchive.open(TrackingConfig(uri=trained.uri), str(root))
    assert [each.name for each in archive.finished("digits")] == ["it"]


@pytest.mark.parametrize("by", ["folder", "id"])
def test_embeddings_of_the_best_checkpoint_say_which_it_was(trained, tmp_path, by, caplog):
    run, root = trained.folder.path if by == "folder" else trained.run_id, trained.folder.path.parents[1]
    best = chosen_step("best", kept_checkpoints(trained.folder), "")
    caplog.set_level("INFO", "ssl_sec")
    caplog.clear()
    jobs.embed([f"run={run}", f"output_dir={root}", "checkpoint=best", "split=test", f"output={tmp_path}"])
    origin = origin_of(pq.read_schema(tmp_path / "test-00000-of-00001.parquet"))
    assert origin is not None and origin["checkpoint"] == f"best (step {best})"
    assert caplog.text.count(f" is that of step {best}") == 1


def test_a_run_that_has_not_ended_is_probed_by_its_checkpoints(trained, tmp_path: Path):
    copy = tmp_path / "runs" / "digits" / "it"
    shutil.copytree(trained.folder.path, copy)
    (copy / "encoder.safetensors").unlink()
    jobs.probe([f"run={copy}", f"output_dir={tmp_path}/runs", "checkpoint=5", "run_name=early", *PROBE])
    assert (tmp_path / "runs" / "digits" / "early" / "confusion.json").is_file()
    (copy / "checkpoints" / "step-000000005" / "state.pt").write_bytes(b"")
    with pytest.raises(StorageError, match="step-000000005: state.pt has 0 bytes"):
        jobs.probe([f"run={copy}", f"output_dir={tmp_path}/runs", "checkpoint=5", "run_name=damaged", *PROBE])
