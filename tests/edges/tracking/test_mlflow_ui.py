"""What a user sees: the pages of a run in `mlflow ui`, in headless Chromium."""

import shutil
import subprocess

import pytest
from PIL import Image

from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.tracking.pages import scores_page
from ssl_sec.recipes.registry import FACE, PRETRAIN
from tests.edges.conftest import QUICK, QUICK_FACE
from tests.edges.servers import mlflow_server
from tests.jobs import configured

DRAWS_PICTURES = True

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    overrides = (*QUICK, "runtime=local", f"output_dir={folder}", "run_name=seen", "log_every_steps=1")
    return run_training(PRETRAIN, configured("pretrain", overrides))


@pytest.fixture(scope="module")
def face_run(run, digit_pairs):
    """A run of faces in the same store."""
    folder = run.folder.path.parents[1]
    overrides = (*QUICK_FACE, "runtime=local", f"output_dir={folder}", "run_name=faces", digit_pairs)
    return run_training(FACE, configured("face", overrides))


@pytest.fixture(scope="module")
def ui(run, tmp_path_factory):
    """The address of `mlflow ui`, started as the summary of a run says."""
    log = tmp_path_factory.mktemp("ui") / "log"
    with mlflow_server("ui", "--backend-store-uri", run.uri, "--workers", "1", log=log) as address:
        yield address


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("", ["seen", "Finished", "constraint.name", "val/knn_top1", "digits"]),
        ("/model-metrics", ["train", "(14)", "val", "(6)", "Add chart"]),
        ("/artifacts", ["plots", "config.yaml", "encoder.safetensors"]),
    ],
)
def test_the_pages_of_a_run_show_its_settings_and_results(ui, run, tmp_path, page, shown):
    assert_shown(f"{ui}/#/experiments/{run.experiment_id}/runs/{run.run_id}{page}", shown, tmp_path)


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("", ["faces", "Finished", "jobs.face", "face/digits_accuracy", "train/verification_accuracy"]),
        ("/artifacts/plots/hardest_digits.png", ["plots", "hardest_digits.png", "head.safetensors"]),
    ],
)
def test_the_pages_of_a_face_run_show_its_test_sets(ui, face_run, tmp_path, page, shown):
    assert_shown(f"{ui}/#/experiments/{face_run.experiment_id}/runs/{face_run.run_id}{page}", shown, tmp_path)


def test_the_view_of_an_experiments_scores_lists_its_trainings(ui, run, tmp_path):
    shown = ["Model registry", "Scores", "seen", "val/knn_top1", "constraint", "seed"]
    assert_shown(f"{ui}{scores_page(run.experiment_id)}", shown, tmp_path)


def assert_shown(address, shown, tmp_path):
    """The page is drawn, and has these texts."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--window-size=1400,1600", "--virtual-time-budget=60000", "--timeout=120000"]
    picture = tmp_path / "page.png"
    dom = subprocess.run(
        [chromium, *options, "--dump-dom", address], capture_output=True, text=True, timeout=180
    ).stdout
    assert [text for text in shown if text not in dom] == []
    subprocess.run(
        [chromium, *options, f"--screenshot={picture}", address], check=True, capture_output=True, timeout=180
    )
    with Image.open(picture) as image:
        assert image.size == (1400, 1600)
        assert len(image.convert("RGB").getcolors(2**24)) > 50  # not an empty page
