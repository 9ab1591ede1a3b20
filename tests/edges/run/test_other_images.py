"""Probes and fine-tunings of an encoder of digits, grey and 8 x 8, on coloured photos of several sizes."""

from pathlib import Path

import numpy as np
import pytest
from mlflow.tracking import MlflowClient
from PIL import Image

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.run.job_values import values_of
from ssl_sec.edges.run.summary import Finished
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.settings import from_values
from tests.edges.conftest import QUICK
from tests.jobs import finetune, probe

JOBS = {"probe": probe, "finetune": finetune}
FAST = {
    "probe": ("probe.epochs=2", "probe.decay_at=[]", "probe.learning_rates=[0.1]"),
    "finetune": ("epochs=1", "global_batch_size=16", "tracking.register_model=false"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    given = [*QUICK, "epochs=1", "runtime=local", "run_name=mine", f"output_dir={tmp_path_factory.mktemp('runs')}"]
    return run_training(PRETRAIN, from_values(PretrainConfig, values_of("pretrain", given)))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, numbers = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for place in ("train/dark", "train/light", "test/dark", "test/light"):
        (folder / place).mkdir(parents=True)
        for number in range(30):
            pixels = numbers.integers(0, 128, (12 + number % 5, 20, 3)) + 100 * place.endswith("light")
            Image.fromarray(pixels.astype(np.uint8)).save(folder / place / f"{number}.png")
    return folder


def arguments(finished, job: str, *more: str) -> list[str]:
    place = [f"output_dir={finished.folder.path.parents[1]}", "runtime=local", "tracking.system_metrics=false"]
    return ["run=mine", *place, *FAST[job], *more]


@pytest.mark.parametrize("job", JOBS)
def test_files_are_read_as_the_encoder_was_trained_however_the_run_is_named(finished, photos, job):
    for more in ([], [f"run={finished.folder.path}"], *([["probe=paper"]] if job == "probe" else [])):
        data = values_of(job, arguments(finished, job, "data=folder", f"data.root={photos}", *more))["data"]
        assert (data["image_size_px"], data["num_channels"], data["root"]) == (8, 1, str(photos))


@pytest.mark.parametrize("job", JOBS)
def test_coloured_photos_are_measured_without_further_options(finished, photos, job):
    given = arguments(finished, job, "data=folder", f"data.root={photos}", "run_name=photos", "recipe=photos")
    assert run_job(job, JOBS[job], [each for each in given if job == "finetune" or each != "recipe=photos"]) == 0
    folder = RunFolder(finished.folder.path.parents[1] / ("photos" if job == "finetune" else "digits") / "photos")
    assert folder.data().image_shape == (1, 8, 8)


def test_a_probe_converts_images_that_its_own_keys_name(finished, photos):
    def probed(*more: str) -> tuple[int | None, int]:
        data = values_of("probe", arguments(finished, "probe", "data=folder", f"data.root={photos}", *more))["data"]
        return data["image_size_px"], data["num_channels"]

    assert probed("data.num_channels=3", "probe.num_channels=1") == (8, 3)
    assert probed("data.image_size_px=32", "probe.image_size_px=8") == (32, 1)
    assert probed("probe.image_size_px=16") == (16, 1)
    given = arguments(finished, "probe", "data=cifar10", "probe.num_channels=1")
    assert values_of("probe", given)["data"]["name"] == "cifar10"


@pytest.mark.parametrize(
    ("job", "given", "told"),
    [
        (
            "probe",
            ["data=folder", "data.num_channels=3"],
            "data.num_channels: found 3, must be 1, as the encoder was trained; probe.num_channels=1 converts",
        ),
        (
            "probe",
            ["data=folder", "data.image_size_px=16"],
            "data.image_size_px: found 16, must be 8, as the encoder was trained; probe.image_size_px=16 takes it at",
        ),
        (
            "probe",
            ["data=cifar10"],
            "data.name: found 'cifar10', with channels = 3, must be with 1, as the encoder was trained; probe.num_",
        ),
        (
            "probe",
            ["data=folder", "data.max_images=99"],
            "data.max_images: found 99, must be null: all images; probe.labels_per_class=<n> trains on fewer",
        ),
        (
            "probe",
            ["data=folder", "probe.num_channels=3"],
            "probe.num_channels: found 3, must be 1, as the encoder was trained",
        ),
        (
            "finetune",
            ["data=folder", "data.num_channels=3"],
            "data.num_channels: found 3, must be 1, as the encoder was trained",
        ),
        (
            "finetune",
            ["data=cifar10"],
            "data.name: found 'cifar10', with channels = 3, must be with 1, as the encoder was trained",
        ),
    ],
)
def test_images_that_do_not_fit_the_encoder_are_one_line(finished, photos, job, given, told, capsys):
    place = [f"data.root={photos}", "run_name=wrong"]
    assert run_job(job, JOBS[job], arguments(finished, job, *given, *place)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: {told}"), error
    assert not list(finished.folder.path.parents[1].glob("*/wrong"))
    client = MlflowClient(finished.uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    assert not client.search_runs(experiments, "attributes.run_name = 'wrong'")


@pytest.mark.parametrize("job", JOBS)
def test_missing_test_images_are_found_before_the_run_begins(finished, photos, job, capsys):
    given = ["data=parquet", f"data.train=[{photos}]", f"data.test=[{photos}/no.parquet]", "run_name=missing"]
    assert run_job(job, JOBS[job], arguments(finished, job, *given, "data.image_size_px=8", "data.num_channels=1")) == 3
    assert "error: data.test: found '" in capsys.readouterr().err
    client = MlflowClient(finished.uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    assert not client.search_runs(experiments, "attributes.run_name = 'missing'")


@pytest.mark.parametrize(
    ("data", "images"), [("null", "training images"), ("{name: folder, root: cats}", "images of cats")]
)
def test_the_summary_names_the_set_whose_labels_rank_the_encoder(tmp_path, data, images):
    folder = RunFolder(tmp_path)
    folder.config_path.write_text(f"monitor: {{data: {data}}}")
    metrics = {"val/knn_top1": 50.0, "val/rankme": 3.0}
    said = str(Finished(metrics=metrics, folder=folder, run_id=None, uri="http://a", experiment_id=None))
    assert said.startswith(f"kNN top-1 on held-out {images} (%): 50\nRankMe: 3\n")
