import io
import json
from dataclasses import replace

import torch
from mlflow.tracking import MlflowClient

from ssl_sec.data.standard_sets import open_digits
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.run.summary import Finished
from ssl_sec.recipes.face.figures import draw
from ssl_sec.recipes.registry import FACE
from tests.edges.conftest import QUICK_FACE
from tests.jobs import configured

DRAWS_PICTURES = True

METRICS = {
    "train/loss": 1.5,
    "face/cfp_fp_accuracy": 99.123,
    "face/cfp_fp_accuracy_std": 0.31,
    "face/cfp_fp_eer": 0.9,
    "face/cfp_fp_tar_at_far_1e-3": 97.0,
    "face/cfp_fp_norm_mean": 20.0,
    "face/cfp_fp_accuracy_euclidean_normalised": 98.5,
    "face/cfp_fp_accuracy_euclidean_normalised_std": 0.25,
    "face/blufr_tar_at_far_1e-3": 94.2,
    "face/blufr_tar_at_far_1e-3_mean": 94.5,
    "face/blufr_tar_at_far_1e-3_std": 0.3,
    "face/blufr_dir_at_far_1e-2": 70.0,
    "face/megaface_1e6_rank1": 91.02,
    "face/ytf_accuracy_max": 90.0,
    "face/ytf_accuracy_max_std": 1.0,
    "face/ytf_accuracy_hik": 95.0,
}


def test_the_summary_describes_the_metrics_of_test_sets(tmp_path):
    finished = Finished(metrics=METRICS, folder=RunFolder(tmp_path), run_id=None, uri="http://a", experiment_id=None)
    assert str(finished).split("\nfolder: ")[0].splitlines() == [
        "total loss: 1.5",
        "blufr TAR at FAR = 1e-3 (%): 94.2 (94.5 - 0.3)",
        "blufr DIR at rank 1 and FAR = 1e-2 (%): 70",
        "cfp_fp accuracy (%): 99.12 ± 0.31",
        "cfp_fp accuracy by the Euclidean distance of directions (%): 98.5 ± 0.25",
        "cfp_fp EER (%): 0.9",
        "cfp_fp TAR at FAR = 1e-3 (%): 97",
        "megaface rank-1 among 1e6 distractors (%): 91.02",
        "ytf accuracy by the greatest cosine of two videos' frames (%): 90 ± 1",
        "ytf accuracy by HIK-SVM (%): 95",
    ]


def test_the_summary_has_the_accuracies_with_few_labels(tmp_path):
    metrics = {"probe/few_shot_20": 71.26, "probe/few_shot_20_interval": 0.312, "probe/few_shot_5": 60.0}
    finished = Finished(metrics=metrics, folder=RunFolder(tmp_path), run_id=None, uri="http://a", experiment_id=None)
    assert str(finished).split("\nfolder: ")[0].splitlines() == [
        "top-1 on the test set with 5 labels per class (%): 60",
        "top-1 on the test set with 20 labels per class (%): 71.26 ± 0.31 (95 % interval)",
    ]


def test_pictures_of_the_kept_results_of_test_sets(tmp_path):
    folder = RunFolder(tmp_path)
    record = {"step": 0, "metrics": {"train/loss": 1.0, "face/lfw_accuracy": 50.0}}
    folder.metrics_path.write_text(json.dumps(record) + "\n")
    assert [*draw(folder)] == ["curves"]
    kept = {"scores": torch.tensor([0.1, 0.2, 0.7]), "same": torch.tensor([False, False, True]), "norms": torch.ones(5)}
    torch.save({**kept, "norms": torch.full((5,), torch.nan)}, folder.test_set_path("ijbc"))
    pixels = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    pairs = {f"{kind}_{side}": pixels for kind in ("different", "same") for side in ("first", "second")}
    shown = {**pairs, "different_scores": torch.tensor([0.2]), "same_scores": torch.tensor([0.7])}
    discards = {"quality": torch.ones(4), "refused": torch.arange(4) < 2, "far": torch.tensor(0.1)}
    torch.save({**kept, **shown, **discards}, folder.test_set_path("lfw"))
    histograms = {f"{kind}_histograms": torch.full((2, 10), 0.1) for kind in ("different", "same")}
    torch.save({**kept, **histograms}, folder.test_set_path("ytf"))
    torch.save({"embeddings": torch.rand(6, 2), "labels": torch.arange(6) % 2}, folder.features_path)
    folder.describe_data(replace(open_digits("test"), class_names=("a", "b")))
    figures = draw(folder)
    names = ["curves", "plane", "roc", "scores", "discards", "test_set_norms", "hardest_lfw", "histograms_ytf"]
    assert [*figures] == names
    for figure in figures.values():
        figure.savefig(written := io.BytesIO())
        assert written.getvalue().startswith(b"\x89PNG")


def test_results_of_test_sets_of_version_0_1_are_found(tmp_path):
    folder, kept = RunFolder(tmp_path), tmp_path / "benchmarks" / "lfw.pt"
    kept.parent.mkdir()
    kept.touch()
    assert folder.test_set_paths() == [kept]
    assert folder.test_set_path("lfw").parent != kept.parent


def test_the_test_sets_are_inputs_of_the_run_in_mlflow(digit_pairs, tmp_path):
    given = [*QUICK_FACE, "epochs=0", "runtime=local", f"output_dir={tmp_path}", digit_pairs]
    faces = run_training(FACE, configured("face", given))
    run = MlflowClient(faces.uri).get_run(faces.run_id)
    inputs = {item.dataset.name: item.tags[0].value for item in run.inputs.dataset_inputs}
    assert inputs == {"digits/train": "training", "digits/pairs": "evaluation"}
