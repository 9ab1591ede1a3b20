"""The study of configs/study/sec_gpu.yaml in a campaign: each arm is searched with one budget, then run over seeds.

The parts are ordered by importance: the baseline and SEC on ResNet-18, then the other arms, then ResNet-50.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.campaign.recipes import load_trials
from benchmarks.campaign.running import Part
from benchmarks.campaign.scale import Scale
from benchmarks.campaign.sheet import Plan, Sheet
from benchmarks.campaign.training import train, train_and_probe
from ssl_sec.errors import Stopped

# What a search maximises, as in configs/study.
SEARCHED = "val/knn_top1"
SEARCH_EPOCHS = 20
SEARCH_SEED = 100
# For the goal of 90 % by kNN: as long as others' runs of 1 h 39 min on an A100.
LONG, LONG_EPOCHS = "long-resnet18", 500


def list_study_parts(scale: Scale) -> Iterator[Part]:
    """Returns the parts of the study, in order."""
    for encoder in scale.studied:
        for arms in scale.arms:
            for trial in range(scale.trials):
                for arm in arms:
                    yield _search_part(scale, f"{encoder}-{arm}", trial)
            for seed in scale.study_seeds:
                for arm in arms:
                    yield _run_part(scale, f"{encoder}-{arm}", seed)
            if encoder == "resnet18" and arms == scale.arms[0]:
                yield Part(name=LONG, limit_s=3600, measure=lambda sheet, arms=arms: _train_long(sheet, scale, arms))


def _search_part(scale: Scale, arm: str, trial: int) -> Part:
    def measure(sheet: Sheet) -> None:
        changes = {**load_trials()[arm][trial], "epochs": SEARCH_EPOCHS, "monitor.every_epochs": SEARCH_EPOCHS}
        train(sheet, scale, f"study-{arm}", SEARCH_SEED, changes)

    return Part(name=search_name(arm, trial), limit_s=900, measure=measure)


def _run_part(scale: Scale, arm: str, seed: int) -> Part:
    def measure(sheet: Sheet) -> None:
        train_and_probe(sheet, scale, f"study-{arm}", seed, find_best(sheet.plan, arm, scale.trials)[1])

    return Part(name=f"study-{arm}-s{seed}", limit_s=3600, measure=measure)


def _train_long(sheet: Sheet, scale: Scale, arms: tuple[str, ...]) -> None:
    """Trains the arm whose search found the best result, for many epochs with its best values."""
    each = {arm: find_best(sheet.plan, f"resnet18-{arm}", scale.trials) for arm in arms}
    arm = max(each, key=lambda name: each[name][0])
    train_and_probe(sheet, scale, f"study-resnet18-{arm}", 0, {**each[arm][1], "epochs": LONG_EPOCHS})


class NoTrialError(RuntimeError):
    """All trials of an arm's search failed."""


def find_best(plan: Plan, arm: str, num_trials: int) -> tuple[float, dict[str, Any]]:
    """Finds the best trial of an arm's search.

    Args:
        plan: the campaign's plan.
        arm: name of encoder and arm.
        num_trials: number of trials of the search.

    Returns:
        Accuracy of kNN on held-out training images, in percent, and dotted key -> value of the searched keys.

    Raises:
        Stopped: a trial has not run yet.
        NoTrialError: all trials failed.
    """
    found: list[tuple[float, dict[str, Any]]] = []
    for trial in range(num_trials):
        sheet = Sheet(plan, search_name(arm, trial)).read()
        if sheet.get("state") not in ("done", "failed"):
            raise Stopped(f"{search_name(arm, trial)} has not run yet")
        if sheet["state"] == "done":
            found.append((sheet[SEARCHED], load_trials()[arm][trial]))
    if not found:
        raise NoTrialError(f"all trials of {arm} failed")
    return max(found, key=lambda one: one[0])


def search_name(arm: str, trial: int) -> str:
    """The name of a trial's sheet."""
    return f"search-{arm}-{trial}"
