"""A whole run on real digits with its probe and its model, in this process, with MLflow on sqlite."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from ssl_sec.data.fingerprint import fingerprint
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.edges.config import ReplayConfig
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run import uploading, worker
from ssl_sec.edges.run.driver import run_probe, run_replay, run_training
from ssl_sec.edges.run.job_values import values_of
from ssl_sec.edges.tracking.networks import found_network, located_run
from ssl_sec.edges.tracking.runs import tracked_beside
from ssl_sec.errors import ConfigError, Stopped, UserError
from ssl_sec.metrics import metric
from ssl_sec.networks import resnet
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.recipes.tracking import TrackingConfig
from ssl_sec.settings import from_values
from ssl_sec.training.step import Request
from tests.data.test_fingerprint import write_image
from tests.edges.run.driver.conftest import pretrain_config
from tests.jobs import configured

DRAWS_PICTURES = True

# With a user's images: one epoch of five steps of a narrow encoder.
SMALL = [
    "encoder.width=0.125",
    "epochs=1",
    "global_batch_size=8",
    "monitor.neighbours=2",
    "tracking.system_metrics=false",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """A run with its probe and its registered model."""
    output_dir = tmp_path_factory.mktemp("runs")
    overrides = ["experiment=digits", "encoder.width=0.125", "epochs=2", "probe.epochs=5", "probe.decay_at=[0.6]"]
    overrides += ["probe.enabled=true", "run_name=whole", f"output_dir={output_dir}", "tracking.system_metrics=false"]
    overrides += ["tracking.tags={team: vision}"]
    return run_training(PRETRAIN, pretrain_config(overrides))


@pytest.fixture(scope="module")
def client(finished):
    return MlflowClient(finished.uri)


def test_mlflow_has_the_runs_settings_and_results(finished, client):
    run = client.get_run(finished.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["constraint.eta"] == "0.25"
    assert run.data.params["encoder.name"] == "resnet18"
    assert run.data.tags["mlflow.source.name"] == "jobs.pretrain"
    data = run.inputs.dataset_inputs[0].dataset
    assert (data.name, data.digest) == ("digits/train", fingerprint(open_digits("train")))
    what = {"job": "pretrain", "recipe": "digits", "data": "digits", "encoder": "resnet18x0.125", "loss": "ntxent"}
    assert (
        run.data.tags.items()
        >= {**what, "constraint": "sec", "seed": "0", "team": "vision", "ended": "finished"}.items()
    )
    assert run.data.tags["mlflow.note.content"].startswith("- ended: finished\n- command: `")
    assert client.get_experiment(run.info.experiment_id).name == "digits"


def test_system_metrics_are_logged_while_a_run_trains(quick, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    folder, client = RunFolder(tmp_path / "runs/digits/it"), MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")

    def figures(run_id: str):
        return client.get_metric_history(run_id, "system/cpu_utilization_percentage")

    report = worker.FolderRuntime.report

    def waiting(self, step, metrics, norms=None):  # so that the run lasts until some figures are there
        report(self, step, metrics, norms)
        deadline = time.monotonic() + 120
        while step == 5 and not (folder.run_id_path.is_file() and len(figures(folder.run_id_path.read_text())) > 1):
            assert time.monotonic() < deadline
            time.sleep(0.2)

    monkeypatch.setattr(worker.FolderRuntime, "report", waiting)
    changes = ["run_name=it", "log_every_steps=1", "tracking.system_metrics=true"]
    run = run_training(PRETRAIN, pretrain_config([*quick, *changes]))
    points = figures(run.run_id)
    assert [point.step for point in points] == list(range(len(points))) and len(points) > 1
    assert all(0 <= point.value <= 100 for point in points) and points[0].value > 0
    assert not any(name.startswith("system/") for name in run.metrics)
    assert client.get_run(run.run_id).info.status == "FINISHED"


def waits_for_the_views(monkeypatch, tmp_path: Path, seen: list[bytes]):
    """Holds a run named `it` at its fifth step until its page has the picture of the views."""
    folder, client = RunFolder(tmp_path / "runs/digits/it"), MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    report = worker.FolderRuntime.report

    def waiting(self, step, metrics, norms=None):
        report(self, step, metrics, norms)
        deadline = time.monotonic() + 120
        while step == 5 and not seen:
            assert time.monotonic() < deadline
            time.sleep(0.2)
            if folder.run_id_path.is_file() and client.list_artifacts(folder.run_id_path.read_text(), "plots"):
                path = client.download_artifacts(folder.run_id_path.read_text(), "plots/views.png", str(tmp_path))
                seen.append(Path(path).read_bytes())

    monkeypatch.setattr(worker.FolderRuntime, "report", waiting)


def test_the_views_are_on_the_page_of_a_run_while_it_trains(quick, tmp_path: Path, monkeypatch):
    seen: list[bytes] = []
    waits_for_the_views(monkeypatch, tmp_path, seen)
    finished = run_training(PRETRAIN, pretrain_config([*quick, "run_name=it", "log_every_steps=1"]))
    assert seen[0].startswith(b"\x89PNG")
    assert seen[0] == (finished.folder.path / "plots" / "views.png").read_bytes()


@pytest.mark.slow
def test_views_that_cannot_be_drawn_do_not_lose_metrics(quick, tmp_path: Path, monkeypatch, caplog):
    def refused(folder: Path, figures: object):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(uploading, "save_figures", refused)
        patch.setattr(uploading.Upload, "upload_results", lambda self, tracked: None)
        finished = run_training(PRETRAIN, pretrain_config([*quick, "run_name=it", "log_every_steps=1"]))
    assert caplog.messages.count("MLflow: no space left") == 1
    history = MlflowClient(finished.uri).get_metric_history(finished.run_id, "train/loss")
    assert [point.step for point in history] == list(range(10))
    # Sent later, they are there even if the run has not finished.
    finished.folder.write_outcome("stopped")
    run_replay(ReplayConfig(folder=str(finished.folder.path)))
    (plot,) = MlflowClient(finished.uri).list_artifacts(finished.run_id, "plots")
    assert plot.path == "plots/views.png"


def test_every_metric_is_in_mlflow_once(finished, client):
    expected = {}
    for record in finished.folder.records():
        for key, value in record["metrics"].items():
            expected.setdefault(key, []).append((record["step"], value))
    assert {"train/loss", "train/metric_loss", "train/constraint", "train/eta", "train/lr"} < expected.keys()
    assert {"train/norm_mean", "train/norm_std", "train/images_per_s", "val/knn_top1", "val/rankme"} < expected.keys()
    for key, points in expected.items():
        history = [(point.step, point.value) for point in client.get_metric_history(finished.run_id, key)]
        assert len(history) == len(points), key
        assert dict(history) == pytest.approx(dict(points)), key


def test_the_artifacts_are_there(finished, client, tmp_path: Path):
    names = {item.path for item in client.list_artifacts(finished.run_id)}
    assert {"config.yaml", "encoder.safetensors", "norms.json", "plots", "packages.txt"} <= names
    plots = {item.path for item in client.list_artifacts(finished.run_id, "plots")}
    assert plots == {f"plots/{name}.png" for name in ("curves", "norms", "features", "views", "neighbours")}
    path = client.download_artifacts(finished.run_id, "config.yaml", str(tmp_path))
    assert yaml.safe_load(Path(path).read_text())["epochs"] == 2


def test_the_encoder_has_torchvisions_key_names(finished):
    tensors = load_file(finished.folder.encoder_path)
    backbone, _ = resnet(18, "cifar", 0.125, num_channels=1)
    assert tensors.keys() == backbone.state_dict().keys()
    assert "layer1.0.conv1.weight" in tensors


def test_the_registered_model_gives_the_encoders_features(finished, client, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", finished.uri)
    model = mlflow.pyfunc.load_model("models:/digits-encoder/1")
    assert model.metadata.signature.inputs.inputs[0].shape == (-1, 1, 8, 8)
    images = np.random.default_rng(0).random((5, 1, 8, 8), dtype=np.float32)
    backbone, num_features = resnet(18, "cifar", 0.125, num_channels=1)
    backbone.load_state_dict(load_file(finished.folder.encoder_path))
    with torch.no_grad():
        expected = backbone.eval()(torch.from_numpy(images)).numpy()
    features = model.predict(images)
    assert features.shape == (5, num_features)
    np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-5)


def test_the_stores_address_is_not_left_in_the_environment(finished):
    assert "MLFLOW_TRACKING_URI" not in os.environ


def test_the_probe_is_a_child_run_with_its_confusion(finished, client):
    runs = client.search_runs([finished.experiment_id], f"tags.`mlflow.parentRunId` = '{finished.run_id}'")
    assert len(runs) == 1
    probe = runs[0]
    assert probe.info.status == "FINISHED"
    assert probe.data.metrics["probe/top1"] == finished.metrics["probe/top1"]
    assert 20 < probe.data.metrics["probe/top1"] <= probe.data.metrics["probe/top5"] <= 100
    names = {item.path for item in client.list_artifacts(probe.info.run_id)}
    assert "confusion.json" in names
    confusion = json.loads((finished.folder.path.parent / "whole-probe" / "confusion.json").read_text())
    assert np.sum(confusion["confusion"]) == 360
    right = np.trace(np.array(confusion["confusion"])) / 360
    assert 100 * right == pytest.approx(finished.metrics["probe/top1"])


def test_the_pretraining_run_has_the_probes_metrics_and_protocol(finished, client):
    run = client.get_run(finished.run_id)
    (probe,) = client.search_runs(
        [finished.experiment_id], "tags.job = 'probe' and attributes.run_name = 'whole-probe'"
    )
    for name in ("top1", "top5", "knn_top1", "learning_rate"):
        assert run.data.metrics[f"probe/{name}"] == probe.data.metrics[f"probe/{name}"]
    protocol = run.data.tags["probe.protocol"]
    assert protocol.startswith("digits, 10 labels per class, 5 epochs, cached features (")
    assert protocol == probe.data.tags["probe.protocol"]
    assert probe.data.tags.items() >= {"constraint": "sec", "seed": "0", "team": "vision"}.items()


def test_the_registered_version_is_best_at_once_with_the_reason(finished, client):
    assert str(client.get_registered_model("digits-encoder").aliases["best"]) == "1"
    version = client.get_model_version("digits-encoder", "1")
    assert version.tags["score.name"] == "probe/top1"  # the probe had ended when it was looked for
    assert float(version.tags["score"]) == finished.metrics["probe/top1"]
    assert version.tags["data.digest"] in version.description and finished.run_id in version.description


def test_a_separate_probe_finds_the_run_by_its_id(finished, client, tmp_path: Path):
    overrides = [
        f"run={finished.run_id}",
        "runtime=local",
        "probe=few_labels",
        "probe.epochs=5",
        "probe.decay_at=[0.6]",
    ]
    elsewhere = [f"output_dir={tmp_path}", f"tracking.uri={finished.uri}", "run_name=elsewhere"]
    probed = run_probe(configured("probe", [*overrides, *elsewhere]))
    assert probed.metrics["probe/top1"] == finished.metrics["probe/top1"]
    assert probed.folder.path == tmp_path / "digits" / "elsewhere"
    before = client.get_run(finished.run_id).data
    assert not any(name.startswith("probe_") for name in before.metrics)  # it is the run's own protocol

    config = configured("probe", [*overrides, "probe.epochs=6", *elsewhere[:2]])
    other = run_probe(config)
    assert other.folder.path == tmp_path / "digits" / "whole-probe"
    after = client.get_run(finished.run_id).data
    assert after.metrics["probe/top1"] == before.metrics["probe/top1"]
    (name,) = (name for name in after.metrics if name.startswith("probe_") and name.endswith("/top1"))
    assert after.metrics[name] == other.metrics["probe/top1"]
    assert "6 epochs" in after.tags[f"{name.removesuffix('/top1')}.protocol"]
    assert after.tags["probe.protocol"] == before.tags["probe.protocol"]


def test_the_summary_has_the_addresses_of_the_results(finished):
    assert [name for name in finished.metrics if metric(name) is None] == []  # the probe's, too
    text = str(finished)
    assert f"MLflow run: {finished.run_id}" in text
    assert f"ui --backend-store-uri {finished.uri}" in text
    assert f"/#/experiments/{finished.experiment_id}/runs/{finished.run_id}?workflowType=machine_learning" in text
    assert f"top-1 on the test set (%): {finished.metrics['probe/top1']:.4g}" in text


def test_a_probe_of_an_unknown_run_is_one_line(finished):
    config = configured("probe", ["run=whoel", "runtime=local", f"tracking.uri={finished.uri}"])
    with pytest.raises(
        ConfigError,
        match="run: found 'whoel', but MLflow at .* has no run whose id or name starts with it; did you mean 'whole'",
    ):
        run_probe(config)


def test_a_folder_is_probed_without_its_store_and_the_probe_sent_later(finished, tmp_path, caplog, monkeypatch):
    moved = RunFolder(tmp_path / "whole")
    shutil.copytree(finished.folder.path, moved.path)
    (tmp_path / "file").write_text("")
    away = f"sqlite:///{tmp_path}/file/mlflow.db"
    identity = json.loads(moved.identity_path.read_text())
    moved.identity_path.write_text(
        json.dumps({**identity, "uri": finished.uri.replace("sqlite:////", "sqlite:////none/")})
    )
    overrides = [f"run={moved.path}", "runtime=local", f"output_dir={tmp_path / 'runs'}", f"tracking.uri={away}"]
    config = from_values(ProbeJobConfig, values_of("probe", overrides))
    assert (config.probe.epochs, config.probe.decay_at) == (5, (0.6,))
    probed = run_probe(config)
    assert probed.metrics["probe/top1"] == finished.metrics["probe/top1"]
    assert probed.run_id is None and probed.folder.path == tmp_path / "runs/digits/whole-probe"
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == 2 and "cannot be used" in messages[0] and f"folder={probed.folder.path}" in messages[1]

    (tmp_path / "file").unlink()
    replayed = run_replay(ReplayConfig(folder=str(probed.folder.path)))
    run = MlflowClient(away).get_run(replayed.run_id)
    assert run.info.status == "FINISHED" and "mlflow.parentRunId" not in run.data.tags  # it is not in this store


def test_a_folder_of_another_job_is_not_probed_and_one_without_weights_is_looked_up(finished, tmp_path):
    def located(folder: Path):
        return located_run(str(folder), "last", TrackingConfig(), str(tmp_path), ("pretrain",))

    with pytest.raises(ConfigError, match="'.*/whole-probe', a run of jobs.probe; allowed: a run of jobs.pret"):
        located(finished.folder.path.with_name("whole-probe"))
    word = (finished.folder.path.with_name("whole-probe") / "mlflow_run_id").read_text()[:12]
    with pytest.raises(ConfigError, match=f"^run: found '{word}', a run of jobs.probe; allowed: a run of jobs"):
        found_network(word, "last", TrackingConfig(uri=finished.uri), str(tmp_path), ("pretrain",)).__enter__()
    shutil.copytree(finished.folder.path, tmp_path / "whole")
    assert located(tmp_path / "whole").path == tmp_path / "whole"
    (tmp_path / "whole" / "encoder.safetensors").unlink()
    assert located(tmp_path / "whole")[1].run_id == finished.run_id


def test_jobs_of_a_folder_are_tracked_in_its_store_if_it_is_available(finished, tmp_path, caplog):
    tracking = TrackingConfig()
    beside, run_id = tracked_beside(finished.folder, tracking, str(tmp_path))
    assert (beside.uri, run_id) == (finished.uri, finished.run_id)
    other = TrackingConfig(uri=finished.uri.replace("/mlflow.db", "/./mlflow.db"))  # another name of the same store
    assert tracked_beside(finished.folder, other, str(tmp_path)) == (other, finished.run_id)
    moved = RunFolder(tmp_path / "whole")
    shutil.copytree(finished.folder.path, moved.path)
    identity = json.loads(moved.identity_path.read_text())
    moved.identity_path.write_text(json.dumps({**identity, "uri": f"sqlite:///{tmp_path}/gone/mlflow.db"}))
    assert tracked_beside(moved, tracking, str(tmp_path / "runs")) == (tracking, None)
    assert "gone/mlflow.db, the store of " in caplog.text and not (tmp_path / "gone").exists()


def test_a_run_name_in_use_is_refused(finished):
    output_dir = finished.folder.path.parent.parent
    config = pretrain_config(["experiment=digits", "run_name=whole", f"output_dir={output_dir}"])
    with pytest.raises(ConfigError, match="already holds a run"):
        run_training(PRETRAIN, config)


@pytest.mark.parametrize("name", ["whole-probe", "mine"])
def test_a_probe_stops_on_request(name, finished, tmp_path, monkeypatch, capfd):
    def signalled(self):
        signal.raise_signal(signal.SIGTERM)
        return Request.STOP

    monkeypatch.setattr(worker.FolderRuntime, "request", signalled)
    overrides = [f"run={finished.run_id}", "runtime=local", f"tracking.uri={finished.uri}", f"output_dir={tmp_path}"]
    named = [] if name == "whole-probe" else [f"run_name={name}"]
    with pytest.raises(Stopped) as stop:
        run_probe(configured("probe", [*overrides, *named]))
    nothing = "a probe has no checkpoints, so nothing of it is kept"
    assert str(stop.value) == f"stopped; {nothing}; the same command starts it again"
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("stopping: ")]
    assert line == f"stopping: {nothing} (Ctrl-C again to stop at once)"
    killed = MlflowClient(finished.uri).get_run((tmp_path / "digits" / name / "mlflow_run_id").read_text())
    assert (killed.info.status, killed.data.tags["ended"]) == ("KILLED", "stopped: on request, without saving")


def test_a_probe_that_failed_before_it_measured_leaves_its_name_free(finished, tmp_path: Path):
    overrides = [f"run={finished.folder.path}", "runtime=local", f"output_dir={tmp_path}", "run_name=mine"]
    config = configured("probe", [*overrides, "probe.labels_per_class=1000"])
    with pytest.raises(UserError, match="^probe.labels_per_class: found 1000, must be 1 to [0-9]+, the images"):
        run_probe(config)
    assert not (tmp_path / "digits").exists()


def test_without_a_recipe_the_data_set_names_experiment_folder_and_model(tmp_path: Path):
    for label in "ab":
        for number in range(20):
            write_image(tmp_path / "my flowers" / "train" / label / f"{number}.png", number)
    shutil.copytree(tmp_path / "my flowers" / "train", tmp_path / "my flowers" / "test")
    overrides = ["data=folder", f"data.root={tmp_path / 'my flowers'}", f"output_dir={tmp_path / 'runs'}", *SMALL]
    finished = run_training(PRETRAIN, pretrain_config(overrides))
    assert finished.folder.path == tmp_path / "runs" / "my-flowers" / "my_flowers-resnet18-none-s0"
    client = MlflowClient(finished.uri)
    run = client.get_run(finished.run_id)
    assert client.get_experiment(finished.experiment_id).name == "my-flowers"
    assert run.data.params["recipe"] == run.data.tags["recipe"] == "my-flowers"
    assert [model.name for model in client.search_registered_models()] == ["my-flowers-encoder"]


def test_mlflow_has_the_numbers_of_duplicate_and_unreadable_images(tmp_path: Path):
    for number in range(16):
        write_image(tmp_path / "flowers" / f"{number:02d}.png", number % 10)
    (tmp_path / "flowers" / "99.png").write_bytes(b"no image")
    where = ["data=folder", f"data.root={tmp_path / 'flowers'}", f"output_dir={tmp_path / 'runs'}"]
    skipping = ["data.on_bad_image=skip", "epochs=0", "tracking.register_model=false"]
    finished = run_training(PRETRAIN, pretrain_config([*where, *SMALL, *skipping]))
    run = (client := MlflowClient(finished.uri)).get_run(finished.run_id)
    assert [run.data.tags[f"data.{what}"] for what in ("duplicates", "unreadable")] == ["6 of 17", "1 of 17"]
    assert "check.json" in [each.path for each in client.list_artifacts(finished.run_id)]
    profile = json.loads(run.inputs.dataset_inputs[0].dataset.profile)
    assert profile == {"images": 16, "bad_images": 1, "classes": 0, "checked": 17, "duplicates": 6, "unreadable": 1}
    data = finished.folder.data()
    assert (data.num_images, data.num_checked, data.num_duplicates, data.num_unreadable) == (16, 17, 6, 1)
    # A folder of a version without the check.
    finished.folder.check_path.unlink()
    assert finished.folder.data().num_checked == 0
