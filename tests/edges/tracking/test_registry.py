"""Registered models as the networks of jobs: their addresses, their weights, and what is refused."""

from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file
from torch import nn

from ssl_sec.edges.config.export import ExportConfig
from ssl_sec.edges.export.export import run_export
from ssl_sec.edges.folder.encoder import load_network
from ssl_sec.edges.folder.stored_config import stored_values
from ssl_sec.edges.run.driver import run_finetuning, run_probe, run_training
from ssl_sec.edges.run.job_values import values_of
from ssl_sec.edges.run.summary import Finished
from ssl_sec.edges.tracking.networks import found_network
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.finetuning.config import FinetuneConfig
from ssl_sec.recipes.registry import FACE, PRETRAIN, trainings
from ssl_sec.recipes.tracking import TrackingConfig
from ssl_sec.settings import from_values
from tests.edges.conftest import QUICK, QUICK_FACE
from tests.jobs import configured


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A pretraining with three registered versions: its last weights, others, and its kept checkpoint."""
    output_dir = tmp_path_factory.mktemp("runs")
    given = [*QUICK, "runtime=local", "tracking.register_model=true", "run_name=whole", f"output_dir={output_dir}"]
    finished = run_training(PRETRAIN, config := configured("pretrain", given))
    assert finished.run_id is not None and finished.experiment_id is not None
    client = MlflowClient(finished.uri)
    network = load_network(PRETRAIN, config, (1, 8, 8), finished.folder.path)
    with torch.no_grad():
        network.encoder.backbone.get_parameter("conv1.weight").mul_(2)
    tracked = TrackedRun(client, finished.run_id, finished.experiment_id)
    tracked.log_network(network.whole, (1, 8, 8), network.dim, "digits-encoder")
    (kept,) = client.search_logged_models([finished.experiment_id], "name LIKE 'checkpoint-%'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", finished.uri)
        client.create_model_version("digits-encoder", f"models:/{kept.model_id}", model_id=kept.model_id)
    return finished


def weights(finished: Finished, word: str, name: str = "encoder.safetensors", **options) -> dict[str, torch.Tensor]:
    output_dir = finished.folder.path.parents[1]
    with found_network(
        word, options.get("checkpoint", "last"), TrackingConfig(), str(output_dir), trainings()
    ) as found:
        assert found.run_id == finished.run_id
        return load_file(found.files / name)


@pytest.mark.parametrize(("address", "times"), [("@best", 1), ("/1", 1), ("/2", 2), ("/3", 1), ("/latest", 1)], ids=str)
def test_an_address_means_the_weights_of_its_version(finished, address, times):
    own, found = load_file(finished.folder.encoder_path), weights(finished, f"models:/digits-encoder{address}")
    own["conv1.weight"] = times * own["conv1.weight"]
    torch.testing.assert_close(found, own, rtol=0, atol=0)


def test_a_fine_tuning_starts_from_the_weights_of_the_version_and_says_which(finished, tmp_path):
    given = [f"output_dir={tmp_path}", f"tracking.uri={finished.uri}", "runtime=local", "epochs=0"]
    given += ["tracking.register_model=false", "tracking.system_metrics=false", "run_name=tuned"]
    values = values_of("finetune", ["run=models:/digits-encoder/2", "global_batch_size=64", *given])
    tuned = run_finetuning(from_values(FinetuneConfig, values))
    start, expected = load_file(tuned.folder.initial_path), load_file(finished.folder.encoder_path)
    expected["conv1.weight"] = 2 * expected["conv1.weight"]
    torch.testing.assert_close(start, expected, rtol=0, atol=0)
    assert stored_values(tuned.folder.config_path)["run"] == "models:/digits-encoder/2"


def test_a_fine_tuning_records_the_number_of_the_version_that_an_alias_names(finished):
    number = MlflowClient(finished.uri).get_model_version_by_alias("digits-encoder", "best").version
    given = ["run=models:/digits-encoder@best", f"tracking.uri={finished.uri}", "runtime=local"]
    assert values_of("finetune", given)["run"] == f"models:/digits-encoder/{number}"


def test_a_fine_tuning_of_a_version_takes_no_checkpoint_of_its_run(finished, tmp_path):
    given = ["run=models:/digits-encoder/2", f"tracking.uri={finished.uri}", f"output_dir={tmp_path}", "runtime=local"]
    values = values_of("finetune", [*given, "run_checkpoint=10", "global_batch_size=64"])
    with pytest.raises(ConfigError, match="^run_checkpoint: found 10, must be 'last' with run=models:/digits-e"):
        run_finetuning(from_values(FinetuneConfig, values))


def test_mlflow_loads_it_on_the_cpu_of_a_machine_with_a_gpu(finished, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", finished.uri)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    images = np.zeros((3, 1, 8, 8), np.float32)
    assert mlflow.pyfunc.load_model("models:/digits-encoder/2").predict(images).shape == (3, 64)


def test_a_program_keeps_its_active_experiment_and_run_while_a_network_is_registered(finished, monkeypatch):
    tracked = TrackedRun(client := MlflowClient(finished.uri), finished.run_id, finished.experiment_id)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", finished.uri)
    monkeypatch.setattr("mlflow.tracking.fluent._active_experiment_id", client.create_experiment("of the program"))
    with mlflow.start_run() as own:
        tracked.log_network(nn.Flatten(), (1, 8, 8), 64, "flat")
        assert mlflow.active_run() is own
    (version,) = client.search_model_versions("name = 'flat'")
    assert version.run_id == finished.run_id
    model = client.get_logged_model(version.source.removeprefix("models:/"))
    assert (model.experiment_id, model.source_run_id) == (finished.experiment_id, finished.run_id)
    run = client.get_run(finished.run_id).data
    assert model.params == run.params
    about = {key: run.tags[key] for key in ("mlflow.user", "mlflow.source.name", "mlflow.source.git.commit")}
    assert model.tags.items() >= about.items()


@pytest.mark.slow
def test_the_head_belongs_to_the_version(tmp_path: Path, digit_pairs):
    given = [*QUICK_FACE, "epochs=0", "runtime=local", "tracking.register_model=true", f"output_dir={tmp_path}"]
    faces = run_training(FACE, configured("face", [*given, digit_pairs]))
    client = MlflowClient(faces.uri)
    (model,) = client.search_registered_models()
    for name, path in (("encoder", faces.folder.encoder_path), ("head", faces.folder.head_path)):
        found = weights(faces, f"models:/{model.name}/1", f"{name}.safetensors")
        torch.testing.assert_close(found, load_file(path), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("models:/digits-encoder", "run: found 'models:/digits-encoder', must be models:/<name>@<alias>, "),
        ("models:/digits-encoder@", "must be models:/<name>@<alias>"),
        ("models:/digit-encoder/1", "has no such model; did you mean 'digits-encoder'?"),
        ("models:/digits-encoder@champion", "digits-encoder has no such version; allowed: @best, /latest, /1, /2, /3"),
        ("models:/digits-encoder/4", "digits-encoder has no such version; allowed: @best, /latest, /1, /2, /3"),
        ("models:/by-hand/1", "found 'models:/by-hand/1', of which MLflow does not know the run"),
        ("models:/pickled/1", "found 'models:/pickled/1', which holds no network of jobs.pretrain"),
        ("nosuch/folder", "nosuch/folder holds no run; allowed: a run's folder, its id"),
    ],
)
def test_a_version_without_a_network_is_one_line(finished, word, message, tmp_path_factory):
    client = MlflowClient(finished.uri)
    for name, run_id in (("by-hand", None), ("pickled", finished.run_id)):
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
            client.create_model_version(name, tmp_path_factory.mktemp(name).as_uri(), run_id)
    with pytest.raises(ConfigError) as raised:
        weights(finished, word)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_version_names_its_weights_and_no_checkpoint_chooses_others(finished):
    with pytest.raises(
        ConfigError, match="checkpoint: found 'best', must be 'last' with run=models:/digits-encoder@be"
    ):
        weights(finished, "models:/digits-encoder@best", checkpoint="best")


@pytest.mark.parametrize(("number", "is_evaluated"), [(1, True), (2, False)])
def test_the_card_of_a_version_has_the_runs_metrics_if_the_weights_are_its_last(
    finished, tmp_path: Path, number, is_evaluated
):
    address, output_dir = f"models:/digits-encoder/{number}", finished.folder.path.parents[1]
    export = run_export(
        ExportConfig(run=address, output_dir=str(output_dir), output=str(tmp_path / "made"), format="safetensors")
    )
    card = (export.folder / "README.md").read_text()
    assert ("(`val/knn_top1`)" in card) == is_evaluated
    assert ("Not evaluated." in card) == (f"| checkpoint | {address} |" in card) == (not is_evaluated)


def test_a_probe_of_a_version_is_one_of_its_run_if_the_weights_are(finished):
    output_dir = finished.folder.path.parents[1]
    fast = ["probe.epochs=2", "probe.decay_at=[]", "probe.learning_rates=[0.1]", "runtime=local"]

    def probe(address: str) -> Finished:
        given = [f"run='models:/digits-encoder{address}'", *fast, f"output_dir={output_dir}", "run_name=probed"]
        given.append("tracking.system_metrics=false")
        return run_probe(configured("probe", given))

    with pytest.raises(ConfigError, match="run: found 'models:/digits-encoder/2', whose weights are not the last ones"):
        probe("/2")
    probed = MlflowClient(finished.uri).get_run(str(probe("@best").run_id))
    assert probed.data.tags["mlflow.parentRunId"] == finished.run_id
    assert probed.data.params["run"] == finished.run_id
