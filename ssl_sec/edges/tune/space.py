"""The space of a search: keys whose values are Hydra's sweeps, and the configuration that they change."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.config.tune import TuneConfig
from ssl_sec.edges.overrides import parsed, understood
from ssl_sec.errors import ConfigError, nearest
from ssl_sec.recipes.pretraining.config import LOWER_IS_BETTER, MONITORED, PretrainConfig
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.settings import from_values

_SWEEPS = "choice(a,b), interval(0.1,1), tag(log,interval(0.001,1)), int(interval(1,8)) or range(1,8)"
# A text value that begins with one of these is an incomplete sweep.
_SWEEP_NAMES = ("choice(", "interval(", "tag(", "int(", "range(")
# Keys that differ in each trial, or by which trials are compared.
_RESERVED = ("epochs", "output_dir", "probe.enabled", "recipe", "resume", "run_name")
# Trials choose settings, so they are not probed: that would use the test images.
_NOT_PROBED = "probe.enabled=false"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """A key with a choice of values, in Hydra's grammar."""

    values: tuple[str, ...]

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
        shared: the overrides of every trial, as given.
        space: key -> its values.
        config: configuration of the first trial, with the first value of each key.
    """

    tune: TuneConfig
    shared: tuple[str, ...]
    space: Space
    config: PretrainConfig

    @property
    def metric(self) -> str:
        """The metric by which trials are compared."""
        assert PRETRAIN.score is not None
        return self.tune.metric or PRETRAIN.score

    @property
    def unprobed(self) -> tuple[str, ...]:
        """The overrides of every trial, without a probe."""
        return (*self.shared, _NOT_PROBED)

    def rank(self, metric: float, epoch: int) -> tuple[bool, int, float]:
        """The rank of a trial by its last measurement; a better one is larger.

        Trials that were trained longer come first, since the scheduler has stopped the others for being behind at the
        same epoch, and some metrics worsen with training; a metric that is not a number is the worst at any epoch.

        Args:
            metric: the last measurement.
            epoch: epoch of that measurement.
        """
        if math.isnan(metric):
            return False, epoch, 0.0
        return True, epoch, metric if self.tune.mode == "max" else -metric


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
        overrides: overrides of the pretraining, some of which are sweeps, and of the search.

    Raises:
        ConfigError: if a key or a value is wrong, or nothing is searched.
    """
    overrides = [understood(override) for override in overrides]
    each = {text: parsed(text) for text in overrides}
    own = {field.name for field in fields(TuneConfig)}
    swept = {one.key_or_group: _dimension(one) for one in each.values() if one.is_sweep_override()}
    for key in swept:
        if key in _RESERVED or key in own or key.partition(".")[0] in ("tracking", "runtime"):
            raise ConfigError(f"{key}: found several values, must be one: it is the same in all trials")
    fixed = [text for text, one in each.items() if not one.is_sweep_override()]
    typed = {one.key_or_group for one in each.values()}
    fixed += [] if "runtime" in typed else ["runtime=local"]
    values = compose("tune", fixed)
    tune = from_values(TuneConfig, {key: values[key] for key in own})
    if values["runtime"]["name"] != "local":
        raise ConfigError(
            f"runtime: found {values['runtime']['name']!r}, must be 'local': a trial is one process, and Ray gives it "
            "its share of the cluster (cpus_per_trial, gpus_per_trial)"
        )
    if tune.metric is not None and tune.metric not in MONITORED:
        raise ConfigError(
            f"metric: found {tune.metric!r}, not measured by the monitor; {nearest(tune.metric, MONITORED)}"
        )
    if tune.mode is None:
        tune = replace(tune, mode="min" if tune.metric in LOWER_IS_BETTER else "max")
    for one in each.values() if not swept else ():
        if isinstance(value := one.value(), str) and value.startswith(_SWEEP_NAMES):
            raise ConfigError(f"{one.key_or_group}: found {value!r}; allowed: {_SWEEPS}")
    if not swept:
        raise ConfigError(
            "found no key to search, must be one or more, as 'optimiser.learning_rate=tag(log,interval(0.03,3))'; "
            f"searched values are {_SWEEPS}"
        )
    shared = [text for text in fixed if text.partition("=")[0] not in own]
    every = max(1, values["epochs"] // tune.measurements)
    shared += [] if "monitor.every_epochs" in typed else [f"monitor.every_epochs={every}"]
    first = {key: dimension.ends[0] for key, dimension in swept.items()}
    configs = [_config(shared, first)]
    for key, dimension in swept.items():
        configs += [_config(shared, {**first, key: end}) for end in dimension.ends[1:]]
    return Search(tune=tune, shared=tuple(shared), space=swept, config=configs[0])


def _config(shared: Sequence[str], values: Mapping[str, str]) -> PretrainConfig:
    chosen = [f"{key}={value}" for key, value in values.items()]
    return from_values(PretrainConfig, compose("pretrain", [*shared, _NOT_PROBED, *chosen]))


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
