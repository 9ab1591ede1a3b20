"""The metrics of a study's runs in a small CSV file, from which the study can be continued on any machine."""

import csv
import io
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_sec.edges.folder.text import text_of
from ssl_sec.edges.study.plan import Cell
from ssl_sec.edges.tables import in_csv
from ssl_sec.errors import ConfigError, nearest, writing
from ssl_sec.files import locked, replace_text
from ssl_sec.metrics import chosen_metrics
from ssl_sec.recipes.registry import compared_metrics

# Metrics at a run's end that are kept beside those by which arms are compared.
_LAST = ("train/loss", "train/metric_loss", "val/alignment", "val/uniformity")
# Metrics whose mean over the reports of a run is kept, since at its end the learning rate is 0. The first report, with
# random weights, is left out.
MEANS = (
    "train/norm_mean",
    "train/norm_std",
    "train/turn_mean",
    "train/gradient_norm_mean",
    "train/step_angle_mean",
    "train/step_angle_std",
)
_FIRST_COLUMNS = ("arm", "point", "seed", "config", "minutes", "run_id")
# Significant digits of the kept metrics.
DIGITS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptCell:
    """A run that has ended.

    Attributes:
        arm: arm of the run.
        point: name of its point; empty for the recipe as it is.
        seed: seed of the run.
        digest: digest of its configuration.
        minutes: duration of the run, including its probe; NaN if it is not known, as for a run that was stopped and
            continued.
        run_id: id of the run in MLflow; empty if it is not known.
        metrics: metric -> value; of `mean/<metric>` the mean over the run's reports after the first.
    """

    arm: str
    point: str
    seed: int
    digest: str
    minutes: float
    run_id: str
    metrics: Mapping[str, float]

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of the cell: arm, point and seed."""
        return self.arm, self.point, self.seed


def metrics_of(
    records: Sequence[Mapping[str, Any]], probe: Mapping[str, float], metric: str | None = None
) -> dict[str, float]:
    """The metrics of a run that are kept.

    Args:
        records: reports of the run, oldest first, with their `metrics`.
        probe: the metrics of its probe.
        metric: a metric that is kept beside the usual ones.

    Raises:
        ConfigError: if there is no such metric.
    """
    metrics = [record["metrics"] for record in records]
    last = {name: value for one in metrics for name, value in one.items()}
    if metric is not None and metric not in {**last, **probe}:
        raise ConfigError(f"metric: found {metric!r}, which is not measured; {nearest(metric, {**last, **probe})}")
    found = {name: last[name] for name in chosen_metrics((*compared_metrics(), *_LAST), last)}
    for name in MEANS:
        values = [one[name] for one in metrics if name in one]
        if values:
            found[f"mean/{name}"] = statistics.fmean(values[1:] or values)
    found |= {name: probe[name] for name in chosen_metrics(compared_metrics(), probe)}
    return found if metric is None else {**found, metric: {**last, **probe}[metric]}


class KeptCells:
    """The file of a study's cells.

    Args:
        path: path of the CSV file; the file need not exist.

    Raises:
        ConfigError: if the file exists and is not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cells = {cell.key: cell for cell in _read(path)}

    def __iter__(self) -> Iterator[KeptCell]:
        return iter(self._cells.values())

    def of(self, cells: Iterable[Cell]) -> list[KeptCell]:
        """The kept metrics of these cells, in order; cells that have not ended are left out."""
        return [kept for cell in cells if (kept := self._cells.get(cell.key)) is not None]

    def find(self, cell: Cell) -> KeptCell | None:
        """The kept metrics of a cell; None if it has not ended.

        Raises:
            ConfigError: if a run with another configuration is kept.
        """
        kept = self._cells.get(cell.key)
        if kept is not None and kept.digest != cell.digest:
            at = f" at {kept.point}" if kept.point else ""
            raise ConfigError(
                f"cells: {self.path} has {kept.arm}{at}, seed {kept.seed}, with another configuration ({kept.digest} "
                f"instead of {cell.digest}); allowed: another file, or that configuration"
            )
        return kept

    def add(self, cell: KeptCell) -> None:
        """Adds a cell to the file, which is replaced as a whole; other threads and processes may add theirs at once.

        Raises:
            ConfigError: if the file is no longer such a file.
            StorageError: if it cannot be written.
        """
        with writing("cells", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(lock_of(self.path)):  # for other threads, too, as each opens the lock anew
                self._cells |= {each.key: each for each in [*_read(self.path), cell]}
                replace_text(self.path, as_csv(self._cells.values()))


def lock_of(path: Path) -> Path:
    """The lock of a file that several threads and processes add to."""
    return path.with_name(f".{path.name}.lock")


def as_csv(cells: Iterable[KeptCell]) -> str:
    """The text of the file."""
    cells = sorted(cells, key=lambda cell: (cell.point, cell.arm, cell.seed))
    names = sorted({name for cell in cells for name in cell.metrics})
    rows: list[list[Any]] = []
    for cell in cells:
        values = [f"{cell.metrics[name]:.{DIGITS}g}" if name in cell.metrics else "" for name in names]
        rows.append([cell.arm, cell.point, cell.seed, cell.digest, f"{cell.minutes:.2f}", cell.run_id, *values])
    return in_csv([*_FIRST_COLUMNS, *names], *rows)


def _read(path: Path) -> list[KeptCell]:
    try:
        return [_from_row(row) for row in csv.DictReader(io.StringIO(text_of(path)))]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        expected = ", ".join(_FIRST_COLUMNS)
        raise ConfigError(f"cells: {path} is not a file of cells ({error}); it has the columns {expected}") from error


def _from_row(row: Mapping[str, str]) -> KeptCell:
    return KeptCell(
        arm=row["arm"],
        point=row["point"],
        seed=int(row["seed"]),
        digest=row["config"],
        minutes=float(row["minutes"]),
        run_id=row["run_id"],
        metrics={name: float(value) for name, value in row.items() if name not in _FIRST_COLUMNS and value},
    )
