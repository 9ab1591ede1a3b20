"""Our values for a paper's table: metrics of finished runs, over seeds.

A value is the mean over seeds of the metric's last value in each seed's newest finished run. Runs with the recipe's
settings are never mixed with runs that changed some; the latter are taken only if there are no others, with their
changes. Runs that started from different weights are never mixed; those of the newest run are taken.
"""

import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ssl_sec.edges.composition.compose import compose, composed, job_of
from ssl_sec.edges.tables import deviation
from ssl_sec.edges.tracking.comparing import deciding, is_expected
from ssl_sec.edges.tracking.runs import ArchivedRun, RunArchive, in_order
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.settings import flattened, from_values, to_values

# (key, the recipe's value, the run's value); None if the key is missing.
Change = tuple[str, str | None, str | None]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A metric of our runs over seeds.

    Attributes:
        mean: the mean over seeds.
        deviation: the sample standard deviation; None for a single seed.
        seeds: the seeds that were run.
        run_ids: the runs that have the metric.
        changes: how the runs' settings differ from the recipe's.
    """

    mean: float
    deviation: float | None
    seeds: tuple[str, ...]
    run_ids: tuple[str, ...]
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A run that has the metric, its pretraining, and the changed settings of both."""

    run: ArchivedRun
    pretraining: ArchivedRun
    changes: tuple[Change, ...]

    @property
    def is_on_own_data(self) -> bool:
        """Whether the data set of the result is that of the pretraining."""
        trained_on = self.pretraining.params.get("data.name")
        return self.run.params.get("data.name", trained_on) == trained_on


class Measurements:
    """The results of the runs in an archive.

    Attributes:
        orphans: the ids of probes whose pretraining is not in the archive.
    """

    def __init__(self, archive: RunArchive) -> None:
        self._archive = archive
        self.orphans: set[str] = set()

    def __call__(self, recipe: str, metric: str) -> Measured | None:
        """Returns a metric of a recipe; None if it was not run."""
        candidates = self._find_candidates(recipe, metric)
        exact = [candidate for candidate in candidates if not candidate.changes]
        if not candidates:
            return None
        # Before those of a transfer to another data set.
        chosen = exact or [candidate for candidate in candidates if candidate.is_on_own_data] or candidates
        newest = max(chosen, key=_start_time)
        alike = newest.changes, newest.pretraining.weights
        return _average([other for other in chosen if (other.changes, other.pretraining.weights) == alike], metric)

    def _find_candidates(self, recipe: str, metric: str) -> list[_Candidate]:
        runs = self._archive.finished(recipe)
        by_id = {run.run_id: run for run in runs}
        found: list[_Candidate] = []
        for run in runs:
            is_copy = metric.startswith("probe/") and run.pretraining_run_id is None  # a copy of its probe's metric
            if metric not in run.metrics or is_copy:
                continue
            pretraining = run if run.pretraining_run_id is None else by_id.get(run.pretraining_run_id)
            if pretraining is None:
                self.orphans.add(run.run_id)
                continue
            found.append(
                _Candidate(run=run, pretraining=pretraining, changes=self._find_changes(recipe, run, pretraining))
            )
        return found

    def _find_changes(self, recipe: str, run: ArchivedRun, pretraining: ArchivedRun) -> tuple[Change, ...]:
        expected = _compose_settings(recipe)
        if expected is None:
            return (("experiment", recipe, None),)
        if missing := expected.keys() - pretraining.settings.keys():
            # Keys that the run's version did not have: that version behaved as their defaults.
            expected = {key: value for key, value in expected.items() if key not in missing & _defaults(recipe)}
        changes = _compare(*(remove_probe(settings) for settings in (expected, pretraining.settings)))
        if run is not pretraining:
            # The probe's own settings; data=None means the data set of the pretraining.
            own = {key: value for key, value in run.settings.items() if (key, value) != ("data", "None")}
            keys = {key for key in expected if key.startswith("probe.")} | own.keys()
            changes += _compare({key: expected[key] for key in keys if key in expected}, own)
        return tuple(sorted(changes, key=lambda change: change[0]))


@cache
def _compose_settings(recipe: str) -> Mapping[str, str] | None:
    """Composes the settings of the experiment of this name that decide its result; None if there is none."""
    config = _compose_config(recipe)
    if config is None:
        return None
    return deciding({key: str(value) for key, value in flattened(to_values(config)).items()}, str(job_of(recipe)))


@cache
def _defaults(recipe: str) -> frozenset[str]:
    """The keys of an experiment whose values are those that a configuration without the key would have."""
    config = _compose_config(recipe)
    values = {} if config is None else to_values(config)
    return frozenset(key for key in flattened(values) if _is_default(type(config), values, key))


def _is_default(kind: type, values: Mapping[str, Any], key: str) -> bool:
    without = copy.deepcopy(dict(values))
    *path, last = key.split(".")
    group = without
    for part in path:
        group = group[part]
    del group[last]
    try:
        return to_values(from_values(kind, without)) == values
    except ConfigError:  # a required key
        return False


@cache
def _compose_config(recipe: str) -> Any:
    """Composes the configuration of the experiment of this name; None if there is none."""
    job = job_of(recipe)
    if job is None:
        return None
    experiment = f"experiment={recipe}"
    # Required keys say where something is on a machine; they do not change a result.
    missing = [key for key, value in flattened(composed(job, [experiment])).items() if value == "???"]
    try:
        return from_values(RECIPES[job].config, compose(job, [experiment, *(f"{key}=elsewhere" for key in missing)]))
    except ConfigError:  # it requires other values from the command line
        return None


def _average(candidates: Sequence[_Candidate], metric: str) -> Measured:
    by_seed = {candidate.pretraining.seed: candidate for candidate in sorted(candidates, key=_start_time)}
    chosen = [by_seed[seed] for seed in in_order(by_seed)]
    values = [candidate.run.metrics[metric] for candidate in chosen]
    return Measured(
        mean=statistics.fmean(values),
        deviation=deviation(values),
        seeds=tuple(candidate.pretraining.seed for candidate in chosen),
        run_ids=tuple(candidate.run.run_id for candidate in chosen),
        changes=candidates[0].changes,
    )


def _start_time(candidate: _Candidate) -> tuple[int, int]:
    return candidate.pretraining.started_ms, candidate.run.started_ms


def _compare(expected: Mapping[str, str], found: Mapping[str, str]) -> tuple[Change, ...]:
    keys = sorted(expected.keys() | found.keys())
    return tuple(
        (key, expected.get(key), found.get(key))
        for key in keys
        if not is_expected(key, expected.get(key), found.get(key))
    )


def remove_probe(settings: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings without those of the probe."""
    return {key: value for key, value in settings.items() if not key.startswith("probe.")}
