"""Reads the arms of an ablation: a study of one point, whose arms are given on the command line."""

import re
from collections.abc import Sequence

from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.composition.options import options
from ssl_sec.edges.config import AblateConfig
from ssl_sec.edges.study.plan import Cell, Point
from ssl_sec.errors import ConfigError, nearest
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.settings import from_values

_RANDOM = "random"
_PROBED = "probe.enabled"
# Keys that cannot differ between arms.
_RESERVED = {
    "seed": "seeds=[...]",
    "run_name": "recipe=<name>",
    "arms": "one list",
    "seeds": "one list",
    _PROBED: "it for all arms",
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
        overrides: overrides of the pretraining, and `arms=[...]` and `seeds=[...]`.

    Raises:
        ConfigError: if the arms or the recipe are wrong.
    """
    values = compose("ablate", overrides)
    config = from_values(AblateConfig, {key: values[key] for key in ("arms", "seeds")})
    for override in overrides:
        key, _, value = override.partition("=")
        if key in _OF_THE_SWEEP and (key, value.lower()) != ("resume", "false"):
            raise ConfigError(f"{key}: an ablation sets it; allowed: {_OF_THE_SWEEP[key]}")
    shared = [override for override in overrides if override.partition("=")[0] not in ("arms", "seeds")]
    from_values(PretrainConfig, compose("pretrain", shared))  # mistakes outside the arms are reported first
    return [_cell(shared, arm, seed) for seed in config.seeds for arm in config.arms]


def _cell(shared: Sequence[str], arm: str, seed: int) -> Cell:
    changes = [change for part in re.split(r"\+(?!\d)", arm) for change in _changes(arm, part)]  # 1e+5 is a number
    is_given = any(override.partition("=")[0] == _PROBED for override in shared)
    probed = [] if is_given else [f"{_PROBED}=true"]
    given = (*shared, *changes, f"seed={seed}", "run_name=null", *probed)
    try:
        config = from_values(PretrainConfig, compose("pretrain", given))
        return Cell(arm=arm, point=Point(), seed=seed, overrides=given, config=config)
    except ConfigError as error:
        raise ConfigError(f"arms: {arm}: {error}") from None


def _changes(arm: str, part: str) -> list[str]:
    """The overrides that a part of an arm stands for.

    Raises:
        ConfigError: if it is not a valid part.
    """
    key, is_override, _ = part.partition("=")
    if key in _RESERVED:
        raise ConfigError(f"arms: found {arm!r}; {key} cannot be part of an arm: give {_RESERVED[key]}")
    if is_override:
        return [part]
    allowed = {_RANDOM, *options("constraint")}
    if part not in allowed:
        raise ConfigError(
            f"arms: found {part!r}; {nearest(part, allowed)}, or an override of any group or key, such as loss=triplet"
        )
    return ["constraint=none", "epochs=0"] if part == _RANDOM else [f"constraint={part}"]
