"""The study of a campaign: its trials, and which of them its runs take."""

import pytest

from benchmarks.campaign import parts, recipes, study, training
from benchmarks.campaign.sheet import Plan, Sheet
from ssl_sec.errors import Stopped


@pytest.fixture
def plan(tmp_path):
    return Plan(output=str(tmp_path / "campaign"), checkpoints=str(tmp_path / "runs"))


def test_every_trial_is_in_its_search_space_and_arms_have_equally_many():
    trials = recipes.load_trials()
    assert {(name.startswith("resnet"), len(each)) for name, each in trials.items()} == {(True, 6), (False, 8)}
    rates = [trial["optimiser.learning_rate"] for trial in trials["resnet50-sec"]]
    assert min(rates) >= 0.03 and max(rates) <= 0.5 and len(set(rates)) == 6
    assert max(trial["optimiser.learning_rate"] for trial in trials["resnet18-cut_init"]) <= 0.3
    assert all(0.25 <= trial["grad_scale"] <= 1.5 for trial in trials["resnet18-gradscale"])


def test_an_arm_of_the_study_runs_with_the_best_trial_of_its_search(plan):
    def write(trial, state="done", **figures):
        Sheet(plan, f"search-resnet18-sec-{trial}").write(state, **figures)

    write(0, **{"val/knn_top1": 60.0})
    with pytest.raises(Stopped, match="search-resnet18-sec-1 has not run yet"):
        study.find_best(plan, "resnet18-sec", 3)
    write(1, **{"val/knn_top1": 70.0})
    write(2, "failed")
    trials = recipes.load_trials()["resnet18-sec"]
    assert study.find_best(plan, "resnet18-sec", 3) == (70.0, trials[1])
    values = training.make_run_values(plan, parts.FULL, "study-resnet18-sec", 1, trials[1])
    assert values["constraint"]["eta"] == trials[1]["constraint.eta"] and values["constraint"]["name"] == "sec"
    assert (values["epochs"], values["global_batch_size"], values["seed"]) == (100, 512, 1)
    write(0, "failed")
    write(1, "failed")
    with pytest.raises(RuntimeError, match="all trials of resnet18-sec failed"):
        study.find_best(plan, "resnet18-sec", 3)
