"""The trials of a study's searches in a small CSV file, next to that of its cells."""

import csv
import io
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_sec.edges.folder.text import text_of
from ssl_sec.edges.study.cells import lock_of
from ssl_sec.edges.study.digest import digest_of
from ssl_sec.edges.study.plan import ArmAt
from ssl_sec.edges.tables import in_csv
from ssl_sec.edges.tune.trials import Trial
from ssl_sec.errors import ConfigError, writing
from ssl_sec.files import locked, replace_text

# With steps in place of epochs if the length of the trainings is in steps.
_COLUMNS = ("arm", "point", "trial", "metric", "epochs", "space", "config", "overrides")
# Keys that affect the result of a search, besides its metric, its space and its number of trials.
_DECIDING = ("mode", "searcher", "scheduler", "measurements", "grace_epochs", "reduction_factor")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTrial:
    """A trial of a search that has ended.

    Attributes:
        arm: arm whose values were searched.
        point: name of the point.
        trial: number of the trial in its search.
        metric: the metric on held-out training images.
        at: epochs or steps after which it was last measured.
        space: the space that was searched, as it was given.
        digest: digest of the search's other settings; empty in the file of an earlier version.
        overrides: overrides of the trial.
    """

    arm: str
    point: str
    trial: int
    metric: float
    at: int
    space: str
    digest: str
    overrides: tuple[str, ...]

    @property
    def num_planned(self) -> int:
        """Number of trials of its search, including failed ones, which are not kept."""
        return int(self.space.partition(" ")[0])

    @classmethod
    def of(cls, arm: ArmAt, trial: Trial) -> "KeptTrial":
        """The record of a trial of an arm's search."""
        return cls(
            arm=arm.arm,
            point=arm.point.name,
            trial=int(trial.name.rpartition("-")[2]),
            metric=trial.metric,
            at=trial.at,
            space=_space(arm),
            digest=_digest(arm),
            overrides=tuple(trial.overrides),
        )


class KeptSearches:
    """The file of a study's searches.

    Args:
        path: path of the CSV file; the file need not exist.

    Raises:
        ConfigError: if the file exists and is not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._trials = _read(path)

    def __iter__(self) -> Iterator[KeptTrial]:
        return iter(self._trials)

    def best(self, arm: ArmAt) -> tuple[str, ...] | None:
        """The overrides of an arm's best trial; None if it has not been searched.

        Raises:
            ConfigError: if the kept search had another space or other settings.
        """
        trials, search = [one for one in self._trials if (one.arm, one.point) == arm.key], arm.search
        if not trials or search is None:
            return None
        if trials[0].space != _space(arm):
            raise ConfigError(
                f"cells: {self.path} has a search of {arm.name} over {trials[0].space} instead of {_space(arm)}; "
                "allowed: another file of cells, or that search"
            )
        if trials[0].digest not in ("", _digest(arm)):
            raise ConfigError(
                f"cells: {self.path} has a search of {arm.name} by another metric or with other settings "
                f"({trials[0].digest} instead of {_digest(arm)}); allowed: another file of cells, or those settings"
            )
        return max(trials, key=lambda one: search.rank(one.metric, one.at)).overrides

    def add(self, arm: ArmAt, trials: Sequence[KeptTrial]) -> None:
        """Adds the trials of an arm's search, the best first.

        Raises:
            StorageError: if the file cannot be written.
        """
        with writing("cells", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(lock_of(self.path)):  # another process may search another arm
                self._trials = [*(one for one in _read(self.path) if (one.arm, one.point) != arm.key), *trials]
                assert arm.search is not None
                replace_text(self.path, self._as_csv(arm.search.recipe.length))

    def _as_csv(self, unit: str) -> str:
        rows: list[list[Any]] = []
        for one in sorted(self._trials, key=lambda one: (one.point, one.arm)):
            values = [one.arm, one.point, one.trial, f"{one.metric:.6g}", one.at, one.space, one.digest]
            rows.append([*values, shlex.join(one.overrides)])
        return in_csv([unit if column == "epochs" else column for column in _COLUMNS], *rows)


def _space(arm: ArmAt) -> str:
    """The space of a search, and its number of trials."""
    assert arm.search is not None
    dimensions = [f"{key}={' .. '.join(one.ends)}" for key, one in arm.search.space.items()]
    return f"{arm.search.tune.trials} trials of {', '.join(dimensions)}"


def _digest(arm: ArmAt) -> str:
    """The digest of the other settings of a search: its metric, and the settings that its trials share."""
    assert arm.search is not None
    search = arm.search
    tune = {key: getattr(search.tune, key) for key in _DECIDING}
    tune |= {} if search.tune.grace_steps is None else {"grace_steps": search.tune.grace_steps}
    return digest_of(search.config, search.recipe.name, metric=search.metric, seed=search.config.seed, **tune)


def _read(path: Path) -> list[KeptTrial]:
    try:
        return [
            KeptTrial(
                arm=row["arm"],
                point=row["point"],
                trial=int(row["trial"]),
                metric=float(row["metric"]),
                at=int(row["steps"] if "steps" in row else row["epochs"]),
                space=row["space"],
                digest=row.get("config", ""),
                overrides=tuple(shlex.split(row["overrides"])),
            )
            for row in csv.DictReader(io.StringIO(text_of(path)))
        ]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise ConfigError(f"cells: {path} is not a file of searches ({error}): {', '.join(_COLUMNS)}") from error
