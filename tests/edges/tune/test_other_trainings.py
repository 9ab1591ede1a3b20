"""Searches over keys of metric learning and of faces: trials look at no test image."""

from pathlib import Path

import pytest

from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.config import ReplayConfig
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.driver import run_replay
from ssl_sec.edges.tune.job import _scheduler
from ssl_sec.edges.tune.space import Interval, read_search
from ssl_sec.edges.tune.trials import Trial, rows_of
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.settings import from_values
from tests.edges.conftest import QUICK_FACE
from tests.jobs import run_recipe

RETRIEVAL = ("experiment=digits_retrieval", "encoder.width=0.125", "steps=16", "tracking.system_metrics=false")
FACES = (*QUICK_FACE, "job=face", "held_out_share=0.2")
SWEPT = "optimiser.learning_rate=interval(0.1,1)"


@pytest.mark.parametrize(
    ("given", "job", "metric", "length", "every"),
    [
        (RETRIEVAL, "metric_learning", "val/recall_at_1", 16, 2),
        ((*RETRIEVAL, "monitor.every_steps=5", "metric=val/recall_at_1"), "metric_learning", "val/recall_at_1", 16, 5),
        (FACES, "face", "val/verification_accuracy", 2, 1),
    ],
)
def test_trials_are_of_the_experiments_training_and_are_not_tested(given, job, metric, length, every):
    search = read_search([*given, "evaluation.enabled=true", SWEPT])
    assert (search.recipe, search.metric, search.tune.mode) == (RECIPES[job], metric, "max")
    assert (search.length, search.every) == (length, every)
    assert search.space == {"optimiser.learning_rate": Interval(low=0.1, high=1.0, is_log=False, is_integer=False)}
    trial = from_values(RECIPES[job].config, compose(job, search.of_trials))
    assert not trial.evaluation.enabled


@pytest.mark.parametrize(("given", "grace"), [([], 2), (["grace_steps=7"], 7), (["grace_steps=70"], 16)])
def test_no_trial_is_stopped_in_its_first_steps(given, grace):
    search = read_search([*RETRIEVAL, *given, SWEPT])
    (bracket,) = _scheduler(search)._brackets
    assert min(milestone for milestone, _ in bracket._rungs) == grace
    trial = Trial(name="t", overrides=["optimiser.learning_rate=0.5"], values={}, metric=50.0, at=16)
    assert rows_of([trial], search) == [
        ["trial", "optimiser.learning_rate", "val/recall_at_1", "steps"],
        ["t", "0.5", "50", "16"],
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([*RETRIEVAL, "grace_epochs=2"], "grace_epochs: the length of jobs.metric_learning is in steps; give"),
        (
            ["experiment=digits", "grace_steps=2"],
            "grace_steps: the length of jobs.pretrain is in epochs; give",
        ),
        ([*RETRIEVAL, "metric=test/recall_at_1"], "metric: found 'test/recall_at_1', not measured by the monitor"),
        ([*RETRIEVAL, "held_out_share=0"], "held_out_share: found 0, must be greater: trials are compared by val/re"),
        ([*RETRIEVAL, "job=finetune"], "job: found 'finetune'; allowed: pretrain, metric_learning or face"),
        (["experiment=digits_retrieval", "stepz=2"], "stepz: unknown key; did you mean 'steps'?"),
    ],
)
def test_a_wrong_search_is_refused_in_one_line(given, message):
    with pytest.raises(ConfigError) as caught:
        read_search([*given, SWEPT])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("job", ["metric_learning", "face"])
def test_a_trial_looks_at_no_test_image(job, tmp_path: Path, digit_pairs, caplog):
    given = [*RETRIEVAL, "steps=4"] if job == "metric_learning" else [*FACES, "epochs=1", digit_pairs]
    search = read_search([*given, f"output_dir={tmp_path}", "run_name=it", SWEPT])
    run_recipe(job, search.of_trials)
    folder = RunFolder(tmp_path / search.config.recipe_name / "it")
    metrics = {name for record in folder.records() for name in record["metrics"]}
    assert search.metric in metrics
    assert not [name for name in metrics if name.startswith(("retrieval/", "face/", "test/"))]
    assert not folder.features_path.exists()
    assert {path.name for path in (folder.path / "plots").glob("*.png")} >= {"curves.png", "norms.png"}
    assert (folder.path / "encoder.safetensors").exists() and (folder.path / "head.safetensors").exists()
    # Its upload is complete.
    assert "upload what is missing" not in caplog.text
    run_replay(ReplayConfig(folder=str(folder.path)))
