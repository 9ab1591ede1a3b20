"""Reads the arms of an ablation: a study of one point, whose arms are given on the command line."""

import re
from collections.abc import Sequence
from dataclasses import fields

from ssl_sec.edges.composition.compose import compose, on_training, options_of, training_of
from ssl_sec.edges.config import AblateConfig
from ssl_sec.edges.overrides import UNREGISTERED, key_and_value, key_of
from ssl_sec.edges.run.job_values import values_of
from ssl_sec.edges.study.plan import PROBED, Cell, Point
from ssl_sec.errors import ConfigError, nearest
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.settings import from_values

_OWN = tuple(field.name for field in fields(AblateConfig))
_RANDOM = "random"
# Keys that cannot differ between arms.
_RESERVED = {
    "seed": "seeds=[...]",
    "run_name": "recipe=<name>",
    "arms": "one list",
    "seeds": "one list",
    PROBED: "it for all arms",
}
# Keys that the sweep sets -> what is given instead.
_OF_THE_SWEEP = {
    "seed": "seeds=[<seed>,...]",
    "run_name": "recipe=<name>: runs are named after recipe, arm and seed",
    "resume": "the same command, which continues the ablation",
}


def read_arms(overrides: Sequence[str]) -> list[Cell]:
    """The runs of an ablation: each arm with each seed, seed by seed.

    Args:
        overrides: overrides of the training, and `arms=[...]`, `seeds=[...]` and `job=...`.

    Raises:
        ConfigError: if the arms or the recipe are wrong.
    """
    job = training_of(overrides)
    values = compose(on_training("ablate", job), overrides)
    config = from_values(AblateConfig, {key: values[key] for key in _OWN})
    for override in overrides:
        key, value = key_and_value(override)
        if key in _OF_THE_SWEEP and (key, value.lower()) != ("resume", "false"):
            raise ConfigError(f"{key}: an ablation sets it; allowed: {_OF_THE_SWEEP[key]}")
    shared = [override for override in overrides if key_of(override) not in _OWN]
    from_values(RECIPES[job].training, values_of(job, shared))  # mistakes outside the arms are reported first
    return [_cell(job, shared, arm, seed) for seed in config.seeds for arm in config.arms]


def _cell(job: str, shared: Sequence[str], arm: str, seed: int) -> Cell:
    changes = [change for part in re.split(r"\+(?!\d)", arm) for change in _changes(job, arm, part)]  # 1e+5: a number
    is_given = PROBED in map(key_of, shared)
    probed = [f"{PROBED}=true"] if RECIPES[job].probes_itself and not is_given else []
    given = (UNREGISTERED, *shared, *changes, f"seed={seed}", "run_name=null", *probed)
    try:
        config = from_values(RECIPES[job].training, values_of(job, given))
        return Cell(job=job, arm=arm, point=Point(), seed=seed, overrides=given, config=config)
    except ConfigError as error:
        raise ConfigError(f"arms: {arm}: {error}") from None


def _changes(job: str, arm: str, part: str) -> list[str]:
    """The overrides that a part of an arm stands for.

    Raises:
        ConfigError: if it is not a valid part.
    """
    key, is_override, _ = part.partition("=")
    if key in _RESERVED:
        raise ConfigError(f"arms: found {arm!r}; {key} cannot be part of an arm: give {_RESERVED[key]}")
    if is_override:
        return [part]
    constraints = options_of(job).get("constraint", {})
    allowed = {_RANDOM, *constraints}
    if part not in allowed:
        raise ConfigError(
            f"arms: found {part!r}; {nearest(part, allowed)}, or an override of any group or key, such as loss=triplet"
        )
    if part != _RANDOM:
        return [f"constraint={part}"]
    return [*(["constraint=none"] if constraints else []), f"{RECIPES[job].length}=0"]
