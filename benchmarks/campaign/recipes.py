"""The values of the campaign's training runs, composed in advance for machines without Hydra.

python -m benchmarks.campaign.recipes              # writes both files; a test compares them with configs/
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.campaign.scale import SMALL_STUDIES

PATH = Path(__file__).parent / "recipes.json"
TRIALS_PATH = Path(__file__).parent / "trials.json"

EXPERIMENTS = {arm: f"cifar10_{arm}_100" for arm in ("ntxent", "sec", "sec_ema", "l2reg")}
ENCODERS = ("resnet50", "resnet18")
# With ResNet-50 alone: overrides of the settings of a public code where the paper states none; also with a warm-up.
_WARMUP = "optimiser.warmup_epochs=10"
OPEN = {
    "ntxent_supcontrast": (),
    "sec_supcontrast": ("constraint=sec",),
    "ntxent_supcontrast_warm": (_WARMUP,),
    "sec_supcontrast_warm": ("constraint=sec", _WARMUP),
}
# With ResNet-18 alone: settings that others tuned for it.
TUNED = {arm: f"cifar10_{arm}" for arm in ("ntxent_tuned", "sec_tuned", "dcl_tuned")}
STUDY = "sec_gpu"
# The studies with small runs need the place of the images; a campaign has its own images.
_IMAGES = ("data.train=[train.parquet]", "data.test=[test.parquet]")
_DIGITS = 4


def compose_recipes() -> dict[str, dict[str, Any]]:
    """Composes the values of each recipe, by name.

    The names consist of encoder and arm, `resnet50-ntxent`, of an arm of the study, `study-resnet18-none`, or of an arm
    of a study with small runs, `when_cpu-learning_rate_0.03-sec`.
    """
    from ssl_sec.edges.composition.compose import compose  # needs Hydra

    chosen = [(encoder, arm, [experiment]) for encoder in ENCODERS for arm, experiment in EXPERIMENTS.items()]
    chosen += [("resnet50", arm, ["cifar10_supcontrast", *overrides]) for arm, overrides in OPEN.items()]
    chosen += [("resnet18", arm, [experiment]) for arm, experiment in TUNED.items()]
    found = {
        f"{encoder}-{arm}": compose(
            "pretrain", [f"experiment={experiment}", *changes, f"encoder={encoder}", "runtime=local"]
        )
        for encoder, arm, (experiment, *changes) in chosen
    }
    for name, arm in _study_arms():
        found[f"study-{name}"] = compose("pretrain", [*arm.overrides, "runtime=local"])
    for study in SMALL_STUDIES:
        for name, arm in list_small_arms(study):
            found[name] = compose("pretrain", [*arm.overrides, "runtime=local"])
    return found


def compose_trials() -> dict[str, list[dict[str, float]]]:
    """Makes the trials of each arm of the study: dotted key -> value, from Halton's sequence in the searched space."""
    from scipy.stats.qmc import Halton

    small = [each for study in SMALL_STUDIES for each in list_small_arms(study)]
    found: dict[str, list[dict[str, float]]] = {}
    for name, arm in [*_study_arms(), *small]:
        search = arm.search
        if search is None:
            continue
        draws = Halton(len(search.space), scramble=False).fast_forward(1).random(search.tune.trials)
        found[name] = [
            {key: _between(one, share) for (key, one), share in zip(search.space.items(), draw, strict=True)}
            for draw in draws
        ]
    return found


@cache
def _study_arms() -> list[tuple[str, Any]]:
    """The arms of the study, with their names in the campaign."""
    from ssl_sec.edges.study.plan import read_study

    return [(f"{arm.point.value}-{arm.arm}", arm) for arm in read_study([f"study={STUDY}"]).arms]


@cache
def list_small_arms(study: str) -> list[tuple[str, Any]]:
    """The arms of a study with small runs at its points, with their names in the campaign."""
    from ssl_sec.edges.study.plan import read_study

    points = SMALL_STUDIES[study].points
    given = [f"points=[{','.join(points)}]"] if points else []
    return [(f"{study}-{arm.name}", arm) for arm in read_study([f"study={study}", *given, *_IMAGES]).arms]


def _between(interval: Any, share: float) -> float:
    """The value at a share of an interval, or of its logarithm."""
    low, high = interval.low, interval.high
    value = low * (high / low) ** share if interval.is_log else low + (high - low) * share
    return float(f"{value:.{_DIGITS}g}")


def load_recipes() -> dict[str, dict[str, Any]]:
    """Loads the values of each recipe from recipes.json."""
    return json.loads(PATH.read_text())


def load_trials() -> dict[str, list[dict[str, float]]]:
    """Loads the trials of each arm of the study from trials.json."""
    return json.loads(TRIALS_PATH.read_text())


def change(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a recipe with other values for dotted keys, such as `constraint.eta`."""
    changed = dict(values)
    for key, value in changes.items():
        group, _, name = key.rpartition(".")
        changed[group or name] = {**changed[group], name: value} if group else value
    return changed


if __name__ == "__main__":
    for path, composed in ((PATH, compose_recipes()), (TRIALS_PATH, compose_trials())):
        path.write_text(json.dumps(composed, indent=1) + "\n")
        print(path)
