"""A whole run of deep metric learning on real digits, in this process, with MLflow on sqlite."""

import numpy as np
import pytest
import torch
from mlflow import pyfunc
from mlflow.tracking import MlflowClient

from ssl_sec.data.fingerprint import fingerprint
from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.config import ReplayConfig
from ssl_sec.edges.export.export import run_export
from ssl_sec.edges.folder.encoder import load_network
from ssl_sec.edges.folder.record import data_of
from ssl_sec.edges.report.figures import make_figure_report
from ssl_sec.edges.run.driver import run_probe, run_replay, run_training
from ssl_sec.edges.tracking.runs import RunArchive
from ssl_sec.errors import ConfigError
from ssl_sec.metrics import metric
from ssl_sec.papers import load
from ssl_sec.recipes.metric_learning.config import MetricLearningConfig
from ssl_sec.recipes.metric_learning.figures import draw
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.recipes.registry import METRIC_LEARNING
from ssl_sec.settings import from_values
from tests.jobs import configured, metric_learning

DRAWS_PICTURES = True

QUICK = (
    "experiment=digits_retrieval",
    "runtime=local",
    "runtime.device=cpu",
    "encoder.width=0.125",
    "steps=12",
    "monitor.every_steps=5",
    "checkpoint.every_steps=10",
    "tracking.system_metrics=false",
)


def config_of(*overrides: str) -> MetricLearningConfig:
    return configured("metric_learning", [*QUICK, *overrides])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """A run with its registered model."""
    return run_training(METRIC_LEARNING, config_of("run_name=it", f"output_dir={tmp_path_factory.mktemp('runs')}"))


@pytest.fixture(scope="module")
def client(finished):
    return MlflowClient(finished.uri)


def test_others_may_read_all_files_of_a_run(finished, tmp_path):
    """As other new files: on a cluster, a colleague evaluates the encoder."""
    (tmp_path / "usual").write_text("")
    files = [path for path in finished.folder.path.parents[1].rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {(tmp_path / "usual").stat().st_mode}
    assert {"encoder.safetensors", "head.safetensors", "state.pt"} <= {path.name for path in files}


def test_the_run_its_figures_and_its_pictures_are_in_mlflow(finished, client):
    run = client.get_run(finished.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["job"] == "metric_learning" and run.data.tags["recipe"] == "digits_retrieval"
    assert run.data.tags["mlflow.source.name"] == "jobs.metric_learning"
    assert run.data.params["sampler.images_per_class"] == "15"
    assert {"val/recall_at_1", "retrieval/recall_at_1", "retrieval/nmi", "retrieval/f1"} <= run.data.metrics.keys()
    points = client.get_metric_history(finished.run_id, "val/recall_at_1")
    assert [point.step for point in points] == [0, 4, 9, 11]
    inputs = {item.tags[0].value: item.dataset for item in run.inputs.dataset_inputs}
    assert inputs.keys() == {"training", "evaluation"} and data_of(run) == inputs["training"]
    assert {data.name for data in inputs.values()} == {"digits/train", "digits/test"}  # classes of one set
    assert inputs["evaluation"].digest == fingerprint(config_of().data.open_by_class("test", None))
    names = {item.path for item in client.list_artifacts(finished.run_id)}
    assert {"config.yaml", "encoder.safetensors", "head.safetensors", "norms.json"} <= names
    assert {"numbers.json", "examples.pt"} <= names
    plots = {item.path.removeprefix("plots/") for item in client.list_artifacts(finished.run_id, "plots")}
    assert plots == {
        *("curves.png", "norms.png", "features.png", "retrieved.png", "cosines.png", "cosine_differences.png"),
        *("divergences.png", "direction_changes.png", "training_norms.png", "feature_maps.png"),
        *("class_covariances.png", "distances.png", "rotation_shifts.png"),
    }


def test_the_classes_of_the_test_images_are_named(finished):
    shown = draw(finished.folder)
    assert [text.get_text() for text in shown["features"].legends[0].get_texts()] == list("6789")
    covariances = [text.get_text() for text in shown["class_covariances"].legends[0].get_texts()]
    assert sorted(text.partition(" (")[0] for text in covariances) == [f"class {digit}" for digit in range(6, 10)]


def test_reports_are_drawn_from_mlflow_alone(finished, client):
    archive = RunArchive(client)
    runs = archive.finished_trainings("digits_retrieval")
    paper = load("sec")
    for figure in paper.figures:
        report = make_figure_report("sec", figure, paper, archive, ["digits_retrieval"])
        assert report.rows and {row["arm"] for row in report.rows} == {"sec_ema"}
    distances = make_figure_report("sft", load("sft").figure("4b"), load("sft"), archive, ["digits_retrieval"])
    assert {row["pairs"] for row in distances.rows} == {"positive", "negative"}
    assert [run.run_id for run in runs] == [finished.run_id]
    # The training images' norms, not those of a batch.
    report = make_figure_report("sec", paper.figure("5a"), paper, archive, None)
    mean = sum(row["share_percent"] / 100 * (row["low"] + row["high"]) / 2 for row in report.rows)
    assert mean == pytest.approx(finished.metrics["retrieval/train_norm_mean"], rel=0.02)


def test_the_registered_model_gives_the_embeddings(finished, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", finished.uri)
    shape = (1, 8, 8)
    network = load_network(METRIC_LEARNING, config_of(), shape, finished.folder.path).whole
    images = np.random.default_rng(0).random((3, *shape), dtype=np.float32)
    with torch.no_grad():
        expected = network(torch.from_numpy(images))
    loaded = pyfunc.load_model(f"runs:/{finished.run_id}/encoder")
    assert expected.shape == (3, 64)
    np.testing.assert_allclose(loaded.predict(images), expected.numpy(), rtol=1e-4, atol=1e-5)


def test_the_registered_model_has_the_metrics_of_the_trained_network(finished, client):
    (model,) = client.search_logged_models([finished.experiment_id], "name = 'encoder'")
    found = {metric.key: metric.value for metric in model.metrics}
    assert found == {key: value for key, value in finished.metrics.items() if key.startswith("retrieval/")}


def test_the_summary_describes_the_papers_metrics(finished):
    assert [name for name in finished.metrics if metric(name) is None] == []
    text = str(finished)
    for words in ("Recall@1 on the test classes (%)", "NMI on the test classes (%)", "pairwise F1", "held-out"):
        assert words in text


def test_a_replay_adds_nothing_to_a_complete_run(finished, client):
    before = client.get_run(finished.run_id).data.metrics
    assert run_replay(ReplayConfig(folder=str(finished.folder.path))).run_id == finished.run_id
    assert client.get_run(finished.run_id).data.metrics == before
    assert len(client.get_metric_history(finished.run_id, "val/recall_at_1")) == 4


def test_a_probe_of_its_encoder_says_that_it_is_no_pretraining(finished):
    values = compose(
        "probe", [f"run={finished.run_id}", "runtime=local", f"output_dir={finished.folder.path.parents[1]}"]
    )
    with pytest.raises(
        ConfigError, match=r"^run: found .*jobs.metric_learning; allowed: a run of jobs.pretrain or jobs.finetune$"
    ):
        run_probe(from_values(ProbeJobConfig, values))


def test_its_export_gives_embeddings_elsewhere(finished, tmp_path):
    output_dir, output = finished.folder.path.parents[1], tmp_path / "out"
    given = [f"run={finished.run_id}", "format=safetensors", f"output_dir={output_dir}", f"output={output}"]
    exported = run_export(configured("export", given))
    assert {path.name for path in output.iterdir()} == {"README.md", "encoder.safetensors", "head.safetensors"}
    assert exported.exportable.dim == 64
    card = (output / "README.md").read_text()
    assert "An embedding of images by deep metric learning, in 64 dimensions" in card
    assert "embeddings = head(encoder(images))" in card
    assert f"(`retrieval/recall_at_1`) | {finished.metrics['retrieval/recall_at_1']:.4g} |" in card
    assert "linear probe" not in card


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["global_batch_size=61"], 2, "sampler.images_per_class = 15 with global_batch_size = 61"),
        (["data.num_train_classes=null"], 2, "data.num_train_classes"),
        (["data=cub", "data.root=nowhere"], 3, "nowhere"),
        (["experiment=digits"], 2, "experiment: found 'digits', which is run by jobs.pretrain"),
        (["encoder.freeze_batch_norm=true"], 2, "encoder.freeze_batch_norm"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(tmp_path, capfd, overrides, code, message):
    given = [*QUICK, f"output_dir={tmp_path}", "run_name=bad", *overrides]
    if overrides[0].startswith("experiment"):
        given = overrides
    assert run_job("metric_learning", metric_learning, given) == code
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert not (tmp_path / "digits_retrieval").exists()
