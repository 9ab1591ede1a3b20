"""The space of a search: keys whose values are Hydra's sweeps, and the configuration that they change."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from ssl_sec.edges.composition.compose import compose, on_training, training_of
from ssl_sec.edges.config.tune import TuneConfig
from ssl_sec.edges.overrides import UNREGISTERED, key_of, parsed, understood
from ssl_sec.errors import ConfigError, nearest
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.pretraining.config import LOWER_IS_BETTER, MONITORED
from ssl_sec.recipes.registry import FINETUNE, PRETRAIN, RECIPES, RecipeRow
from ssl_sec.settings import from_values

_SWEEPS = "choice(a,b), interval(0.1,1), tag(log,interval(0.001,1)), int(interval(1,8)) or range(1,8)"
# A text value that begins with one of these is an incomplete sweep.
_SWEEP_NAMES = ("choice(", "interval(", "tag(", "int(", "range(")
# Keys that differ in each trial, or by which trials are compared.
_RESERVED = ("epochs", "steps", "output_dir", "probe.enabled", "evaluation.enabled", "recipe", "resume", "run_name")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """A key with a choice of values, in Hydra's grammar."""

    values: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(self.values)

    @property
    def ends(self) -> tuple[str, ...]:
        """All values."""
        return self.values


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A key with a number between two others, both included.

    Attributes:
        low: the smallest value.
        high: the largest value.
        is_log: whether the logarithm is distributed uniformly.
        is_integer: whether values are whole numbers.
    """

    low: float
    high: float
    is_log: bool
    is_integer: bool

    def __str__(self) -> str:
        return " to ".join(self.ends) + (" (log)" if self.is_log else "")

    @property
    def ends(self) -> tuple[str, ...]:
        """The least and the greatest value."""
        return (self.text(self.low), self.text(self.high))

    def text(self, value: float) -> str:
        """A value in Hydra's grammar, with six digits."""
        return str(int(value)) if self.is_integer else repr(float(f"{value:.6g}"))


Space = Mapping[str, Choices | Interval]


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """A search.

    Attributes:
        tune: settings of the search; its mode is not None.
        recipe: the training of its trials.
        shared: the overrides of every trial, as given.
        space: key -> its values.
        config: configuration of the first trial, with the first value of each key.
    """

    tune: TuneConfig
    recipe: RecipeRow
    shared: tuple[str, ...]
    space: Space
    config: TrainingConfig

    @property
    def metric(self) -> str:
        """The metric by which trials are compared."""
        assert self.recipe.score is not None
        return self.tune.metric or self.recipe.score

    @property
    def length(self) -> int:
        """The epochs or steps of a trial."""
        return int(getattr(self.config, self.recipe.length))

    @property
    def every(self) -> int:
        """The epochs or steps between two measurements."""
        monitor: Any = getattr(self.config, "monitor")  # noqa: B009  # every training has one of its own kind
        return int(getattr(monitor, f"every_{self.recipe.length}"))

    @property
    def of_trials(self) -> tuple[str, ...]:
        """The overrides of every trial, which looks at no test image."""
        return (UNREGISTERED, *self.shared, _not_tested(self.recipe))

    def rank(self, metric: float, at: int) -> tuple[bool, int, float]:
        """The rank of a trial by its last measurement; a better one is larger.

        Trials that were trained longer come first, since the scheduler has stopped the others for being behind after
        the same epochs, and some metrics worsen with training; a metric that is not a number is the worst at any.

        Args:
            metric: the last measurement.
            at: epochs or steps before that measurement.
        """
        if math.isnan(metric):
            return False, at, 0.0
        return True, at, metric if self.tune.mode == "max" else -metric


def chosen_overrides(space: Space, values: Mapping[str, Any]) -> list[str]:
    """The overrides of a trial: `key=value` for each key of the space."""
    found: list[str] = []
    for key, dimension in space.items():
        value = values[key]
        found.append(f"{key}={dimension.text(value) if isinstance(dimension, Interval) else value}")
    return found


def read_search(overrides: Sequence[str]) -> Search:
    """The search that the overrides describe.

    Args:
        overrides: overrides of the training, some of which are sweeps, and of the search.

    Raises:
        ConfigError: if a key or a value is wrong, or nothing is searched.
    """
    each = {text: parsed(text) for text in map(understood, overrides)}
    own = {field.name for field in fields(TuneConfig)}
    space = {one.key_or_group: _dimension(one) for one in each.values() if one.is_sweep_override()}
    for key in space:
        if key in _RESERVED or key in own or key.partition(".")[0] in ("tracking", "runtime"):
            raise ConfigError(f"{key}: found several values, must be one: it is the same in all trials")
    fixed = [text for text, one in each.items() if not one.is_sweep_override()]
    typed = {one.key_or_group for one in each.values()}
    fixed += [] if "runtime" in typed else ["runtime=local"]
    recipe = RECIPES[training_of(fixed)]
    if recipe is FINETUNE:
        raise ConfigError(f"job: found {recipe.name!r}; allowed: pretrain, metric_learning or face")
    values = compose(on_training("tune", recipe.name), fixed)
    tune = from_values(TuneConfig, {key: values[key] for key in own})
    _require_trials(tune, recipe, values)
    if not space:
        raise _nothing_searched(each.values())
    if tune.mode is None:
        tune = replace(tune, mode="min" if tune.metric in LOWER_IS_BETTER else "max")
    shared = [text for text in fixed if key_of(text) not in own]
    every, key = max(1, int(values[recipe.length] // tune.measurements)), f"monitor.every_{recipe.length}"
    shared += [] if key in typed else [f"{key}={every}"]
    first = {key: dimension.ends[0] for key, dimension in space.items()}
    config = _config(recipe, shared, first)
    for key, dimension in space.items():
        for end in dimension.ends[1:]:
            _config(recipe, shared, {**first, key: end})  # a value that is not allowed is refused before any trial
    return Search(tune=tune, recipe=recipe, shared=tuple(shared), space=space, config=config)


def _nothing_searched(overrides: Iterable[Override]) -> ConfigError:
    """The error about overrides without a sweep; it names the key of an incomplete one."""
    for one in overrides:
        if isinstance(value := one.value(), str) and value.startswith(_SWEEP_NAMES):
            return ConfigError(f"{one.key_or_group}: found {value!r}; allowed: {_SWEEPS}")
    return ConfigError(
        "found no key to search, must be one or more, as 'optimiser.learning_rate=tag(log,interval(0.03,3))'; "
        f"searched values are {_SWEEPS}"
    )


def _require_trials(tune: TuneConfig, recipe: RecipeRow, values: Mapping[str, Any]) -> None:
    """Refuses trials that are not one process, or whose metric is not measured on training images.

    Args:
        tune: settings of the search.
        recipe: the training of its trials.
        values: the composed configuration, of the search and the training.
    """
    if values["runtime"]["name"] != "local":
        raise ConfigError(
            f"runtime: found {values['runtime']['name']!r}, must be 'local': a trial is one process, and Ray gives it "
            "its share of the cluster (cpus_per_trial, gpus_per_trial)"
        )
    _require_measured(tune, recipe)
    if values.get("held_out_share") == 0:
        raise ConfigError(
            f"held_out_share: found 0, must be greater: trials are compared by {recipe.score}, on held-out classes"
        )


def _require_measured(tune: TuneConfig, recipe: RecipeRow) -> None:
    """Refuses a metric that is not measured on training images, and a time that is not in the training's unit."""
    metric = tune.metric
    if metric is not None and metric not in (MONITORED if recipe is PRETRAIN else (recipe.score,)):
        known = MONITORED if recipe is PRETRAIN else [str(recipe.score)]
        raise ConfigError(f"metric: found {metric!r}, not measured by the monitor; {nearest(metric, known)}")
    for unit in ("epochs", "steps"):
        if getattr(tune, f"grace_{unit}") is not None and unit != recipe.length:
            raise ConfigError(
                f"grace_{unit}: the length of jobs.{recipe.name} is in {recipe.length}; give grace_{recipe.length}"
            )


def _not_tested(recipe: RecipeRow) -> str:
    """Trials choose settings, so they must not look at test images."""
    return "probe.enabled=false" if recipe.probes_itself else "evaluation.enabled=false"


def _config(recipe: RecipeRow, shared: Sequence[str], values: Mapping[str, str]) -> TrainingConfig:
    chosen = [f"{key}={value}" for key, value in values.items()]
    return from_values(recipe.training, compose(recipe.name, [*shared, _not_tested(recipe), *chosen]))


def _dimension(override: Override) -> Choices | Interval:
    sweep = override.value()
    if isinstance(sweep, IntervalSweep):
        low, high, is_log = sweep.start, sweep.end, "log" in sweep.tags
        assert low is not None
        assert high is not None
        key, found = override.key_or_group, f"interval({low:g},{high:g})"
        if not low < high:
            raise ConfigError(f"{key}: found {found}, must be of two different numbers, the least first")
        if is_log and low <= 0:
            raise ConfigError(f"{key}: found {found}; both ends of a logarithmic interval must be greater than 0")
        return Interval(low=low, high=high, is_log=is_log, is_integer=isinstance(low, int) and isinstance(high, int))
    if isinstance(sweep, ChoiceSweep | RangeSweep):
        return Choices(values=tuple(override.sweep_string_iterator()))
    raise ConfigError(f"{override.key_or_group}: found {override.input_line}; allowed: {_SWEEPS}")
