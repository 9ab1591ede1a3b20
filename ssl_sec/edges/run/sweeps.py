"""A sweep in MLflow: one run whose children are the runs of its arms, with their table as figures, text and picture."""

import contextlib
import logging
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from mlflow.exceptions import MlflowException

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.run.running import RunLock, open_run
from ssl_sec.edges.tracking.provenance import code_files, keep_code
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.errors import Stopped, UserError, first_line
from ssl_sec.figures.drawing import BLUE, VERMILION, add_grid

logger = logging.getLogger("ssl_sec")

# What arms are compared by, as far as their runs have it.
FIGURES = {
    "probe/top1": "probe top-1 %",
    "probe/top5": "probe top-5 %",
    "probe/knn_top1": "kNN top-1 %",
    "val/knn_top1": "kNN top-1 % on held-out training images",
    "retrieval/recall_at_1": "Recall@1 %",
    "retrieval/nmi": "NMI %",
    "val/recall_at_1": "Recall@1 % on held-out classes",
    "val/verification_accuracy": "verification % on held-out people",
}
_PANELS = 3

# Arm -> the last figures of each of its runs.
Results = Mapping[str, Sequence[Mapping[str, float]]]


class Sweep:
    """The run that a sweep's runs belong to; without a store there is none, and the sweep runs all the same.

    Args:
        run: in MLflow.
        lock: by which a later job sees whether this process still runs it.
    """

    def __init__(self, run: TrackedRun | None, lock: RunLock | None = None) -> None:
        self._run = run
        self._lock = lock

    @classmethod
    def start(cls, identity: RunIdentity, values: Mapping[str, Any], output_dir: str) -> "Sweep":
        """Makes the run; if this process ends without a word, the next job of the output folder closes it.

        Args:
            identity: of the run.
            values: its parameters.
            output_dir: of the sweep's runs.
        """
        with tempfile.TemporaryDirectory() as kept:
            identity = replace(identity, tags={**keep_code(Path(kept)), **identity.tags})
            try:
                run = TrackedRun.start(identity, values)
            except (UserError, MlflowException, OSError) as error:
                logger.warning("%s; the runs of the sweep have no parent", first_line(error))
                return cls(None)
            lock: RunLock | None = None
            with contextlib.suppress(UserError):  # no run can be written there then, which the first one says
                lock = open_run(Path(output_dir).expanduser(), identity.uri, run.run_id)
            try:
                for path in code_files(Path(kept)):
                    run.log_file(path)
            except (MlflowException, OSError) as error:
                logger.warning("MLflow: %s", first_line(error))
        return cls(run, lock)

    @property
    def run_id(self) -> str | None:
        """Of the run in MLflow."""
        return None if self._run is None else self._run.run_id

    @contextmanager
    def ended_after(self, results: Results, table: Callable[[], str]) -> Iterator[None]:
        """Ends the sweep as what is done within ends.

        Args:
            results: filled on the way.
            table: of them, in text.
        """
        status, reason = "FAILED", None
        try:
            yield
            status = "FINISHED"
        except (Stopped, KeyboardInterrupt):
            status = "KILLED"
            raise
        except Exception as error:
            reason = first_line(error)
            raise
        finally:
            self.end(status, reason, results, table())

    def end(self, status: str, reason: str | None, results: Results, table: str) -> None:
        """Leaves the table and ends the run; what MLflow does not take is logged."""
        run = self._run
        if run is None:
            return
        try:
            figures = dict(_mean_and_std(results))
            if figures:
                run([{"step": 0, "metrics": figures}])
            if table:
                run.client.log_text(run.run_id, table + "\n", "sweep.txt")
                run.client.log_text(run.run_id, as_csv(results), "sweep.csv")
                run.begin_note(as_markdown(results))
            if (figure := arms_figure(results)) is not None:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "arms.png"
                    figure.savefig(path, dpi=110)
                    run.log_file(path, "plots")
        except Exception as error:
            logger.warning("MLflow: %s", first_line(error))
        left = None
        try:
            run.end(status, reason)
        except Exception as error:
            logger.warning("MLflow: %s", first_line(error))
            left = {"status": status, "reason": reason}
        if self._lock is not None:
            self._lock.release(left)


def as_csv(results: Results) -> str:
    """A line for each run: its arm and its figures."""
    told = _told(results)
    lines = [",".join(["arm", *told])]
    for arm, runs in results.items():
        lines += [",".join([f'"{arm}"', *(str(run.get(name, "")) for name in told)]) for run in runs]
    return "\n".join(lines) + "\n"


def as_markdown(results: Results) -> str:
    """A line for each arm: means, and standard deviations over its runs."""
    told = _told(results)
    rows = [["arm", "runs", *(FIGURES[name] for name in told)], ["---"] * (2 + len(told))]
    for arm, runs in results.items():
        rows.append([arm, str(len(runs)), *(mean_and_std([run[name] for run in runs if name in run]) for name in told)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def arms_figure(results: Results) -> Figure | None:
    """Each run as a point, each arm's mean with its standard deviation; None where no run has a figure."""
    told = _told(results)[:_PANELS]
    if not told:
        return None
    figure = Figure(figsize=(2 + 4 * len(told), 1.5 + 0.45 * len(results)), layout="constrained")
    figure.suptitle("each run, and the mean ± standard deviation of each arm", fontsize=9)
    for place, name in enumerate(told):
        axes = figure.add_subplot(1, len(told), place + 1)
        add_grid(axes)
        for row, runs in enumerate(results.values()):
            values = [run[name] for run in runs if name in run]
            if not values:
                continue
            axes.plot(values, [row] * len(values), "o", color=BLUE, alpha=0.5, markersize=6)
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            axes.errorbar(statistics.fmean(values), row, xerr=spread, fmt="D", color=VERMILION, capsize=4, markersize=5)
        axes.set_yticks(range(len(results)), list(results) if place == 0 else [""] * len(results))
        axes.set_ylim(len(results) - 0.5, -0.5)
        axes.set_xlabel(FIGURES[name])
    return figure


def _mean_and_std(results: Results) -> Iterator[tuple[str, float]]:
    """The figures of the arms, which the charts page shows as one group, the arms of a figure beside each other."""
    for arm, runs in results.items():
        for name in _told(results):
            values = [run[name] for run in runs if name in run]
            shown = re.sub(r"[^A-Za-z0-9_. -]+", "_", arm)
            if values:
                yield f"sweep/{name.replace('/', '_')}_mean {shown}", statistics.fmean(values)
            if len(values) > 1:
                yield f"sweep/{name.replace('/', '_')}_std {shown}", statistics.stdev(values)


def _told(results: Results) -> list[str]:
    return [name for name in FIGURES if any(name in run for runs in results.values() for run in runs)]


def mean_and_std(values: Sequence[float]) -> str:
    """For example 80.00 ± 1.50; empty without values."""
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"
