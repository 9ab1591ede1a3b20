"""Trainings that are stopped during the evaluation after their last step, in this process."""

import pytest
from mlflow.tracking import MlflowClient

from ssl_sec.edges.run import worker
from ssl_sec.edges.run.driver import run_training
from ssl_sec.errors import Stopped
from ssl_sec.evaluation import clustering
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.training.step import Request
from tests.edges.conftest import QUICK_FACE
from tests.jobs import configured

RETRIEVAL = (
    "experiment=digits_retrieval",
    "encoder.width=0.125",
    "steps=4",
    "evaluation.kmeans_starts=3",
    "tracking.register_model=false",
    "tracking.system_metrics=false",
)
FINETUNING = (
    *("data=digits", "run=null", "encoder=resnet18", "encoder.width=0.125", "encoder.stem=cifar"),
    *("labels_share=0.2", "global_batch_size=64", "epochs=2", "augment.flip_probability=0"),
    *("tracking.register_model=false", "tracking.system_metrics=false"),
)


@pytest.fixture
def stop_when(monkeypatch):
    """Requests a stop of a run once the state after its last step is saved and a function returns True."""

    def request_when(num_steps: int, is_time) -> None:
        def save(self, step, state):
            saved.append(step)
            return save_as_before(self, step, state)

        def request(self):
            return Request.STOP if num_steps in saved and is_time() else Request.NONE

        saved, save_as_before = [], worker.FolderRuntime.save
        monkeypatch.setattr(worker.FolderRuntime, "save", save)
        monkeypatch.setattr(worker.FolderRuntime, "request", request)

    return request_when


@pytest.mark.parametrize(
    ("job", "given", "steps", "measured"),
    [
        ("metric_learning", RETRIEVAL, 4, "retrieval/nmi"),
        pytest.param("face", QUICK_FACE, 8, "face/digits_accuracy", marks=pytest.mark.slow),
        ("finetune", FINETUNING, 8, "finetune/top1"),
    ],
)
def test_a_stop_ends_the_evaluation_and_a_resume_measures(
    job, given, steps, measured, digit_pairs, tmp_path, stop_when, monkeypatch
):
    test_sets = [digit_pairs] if job == "face" else []
    given = [*given, *test_sets, "runtime=local", "runtime.device=cpu", "run_name=it", f"output_dir={tmp_path}"]
    stop_when(steps, lambda: True)
    with pytest.raises(Stopped, match=r"^stopped; resume it with: .*/it$"):
        run_training(RECIPES[job], configured(job, given))
    monkeypatch.undo()
    resumed = run_training(RECIPES[job], configured(job, [*given, "resume=true"]))
    assert 0 <= resumed.metrics[measured] <= 100
    assert MlflowClient(resumed.uri).get_run(resumed.run_id).info.status == "FINISHED"


def test_a_stop_ends_k_means(tmp_path, stop_when, monkeypatch):
    config = configured("metric_learning", [*RETRIEVAL, "runtime=local", f"output_dir={tmp_path}"])
    passes = []
    assign = clustering._assigned
    monkeypatch.setattr(clustering, "_assigned", lambda *given: passes.append(None) or assign(*given))
    stop_when(4, lambda: len(passes) == 1)
    with pytest.raises(Stopped):
        run_training(RECIPES["metric_learning"], config)
    assert len(passes) == 1
