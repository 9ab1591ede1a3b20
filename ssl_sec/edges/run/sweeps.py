"""Runs in MLflow without a folder: of a job, or of a sweep, the parent of its runs with their table and plot."""

import contextlib
import logging
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.run.running import RunLock, close_abandoned, lock_sweep
from ssl_sec.edges.run.signals import announce_stop, stop_requests
from ssl_sec.edges.run.summary import ui_command
from ssl_sec.edges.storage.places import local_folder
from ssl_sec.edges.tables import deviation, in_csv, in_markdown, mean_and_std
from ssl_sec.edges.tracking.identity import identity_of
from ssl_sec.edges.tracking.pages import run_page
from ssl_sec.edges.tracking.provenance import code_files, keep_code
from ssl_sec.edges.tracking.store import is_unknown
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.errors import Stopped, UserError, first_line
from ssl_sec.figures.sweeps import arms_figure
from ssl_sec.files import replace_text
from ssl_sec.metrics import chosen_metrics, metric_label
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.registry import compared_metrics
from ssl_sec.recipes.tracking import TrackingConfig

logger = logging.getLogger("ssl_sec")

_PANELS = 3

# Arm -> the last metrics of each of its runs.
Results = Mapping[str, Sequence[Mapping[str, float]]]


class JobRun:
    """The run in MLflow of a job without its own folder; if the store cannot be used, there is no run."""

    # What is missing without the run, for the warning.
    _missing: ClassVar[str] = "the job is not recorded in MLflow"

    def __init__(self, run: TrackedRun | None, lock: RunLock | None = None) -> None:
        self._run = run
        self._lock = lock

    @classmethod
    def opened(
        cls,
        tracking: TrackingConfig,
        output_dir: str,
        values: Mapping[str, Any],
        known: Path | None = None,
        *,
        recipe: str,
        job: str,
        name: str,
        tags: Mapping[str, str] | None = None,
    ) -> Self:
        """Creates the run, or reopens that of an earlier process if the store still has it.

        If this process dies, the next job of the output folder closes the run. The file `known` keeps the id of the run
        for the next process; without it, the run is a new one.
        """
        known_id = (known.read_text().strip() if known is not None and known.is_file() else "") or None
        with tempfile.TemporaryDirectory() as kept:
            code = keep_code(Path(kept))
            identity = identity_of(tracking, output_dir, recipe=recipe, job=job, name=name, code=code, tags=tags or {})
            opened = cls._started(identity, values, known_id, local_folder(output_dir))
            if (run := opened._run) is None:
                return opened
            opened.record(lambda run: [run.log_file(path) for path in code_files(Path(kept))])
        if known is not None:
            try:
                known.parent.mkdir(parents=True, exist_ok=True)
                replace_text(known, run.run_id)
            except OSError as error:
                logger.warning("%s cannot be written: %s", known, error.strerror)
        close_abandoned(local_folder(output_dir), run.client, identity.uri)
        return opened

    @classmethod
    def _started(cls, identity: RunIdentity, values: Mapping[str, Any], known_id: str | None, output_dir: Path) -> Self:
        """The new or reopened run with its lock in the output folder; none if the store cannot be used."""
        lock: RunLock | None = None

        def hold(run_id: str) -> None:
            nonlocal lock
            with contextlib.suppress(UserError):  # the first run reports that the folder cannot be written
                lock = lock_sweep(output_dir, identity.uri, run_id)

        try:
            run = None if known_id is None else TrackedRun.reopen(identity.uri, known_id)
            if run is None:
                run = TrackedRun.start(identity, values, hold)
            else:
                hold(run.run_id)
                run.log_resume(identity.tags)
                run.log_changes(values)
        except (UserError, MlflowException, OSError) as error:
            logger.warning("%s; %s", first_line(error), cls._missing)
            if lock is not None:
                lock.abandon(first_line(error))
            return cls(None)
        return cls(run, lock)

    @property
    def run_id(self) -> str | None:
        """The id of the run in MLflow."""
        return None if self._run is None else self._run.run_id

    @property
    def experiment_id(self) -> str | None:
        """The id of its experiment."""
        return None if self._run is None else self._run.experiment_id

    @property
    def where(self) -> list[str]:
        """Lines with the id of the run, and how to see its page; none if there is no run."""
        if self._run is None:
            return []
        page = run_page(self._run.experiment_id, self._run.run_id)
        return [f"MLflow run: {self._run.run_id}", ui_command(self._run.client.tracking_uri, page)]

    def log_where(self) -> None:
        """Logs the lines of `where`, for jobs that take long."""
        for line in "\n".join(self.where).splitlines():
            logger.info("%s", line.strip())

    def log_files(self, paths: Sequence[Path]) -> None:
        """Uploads files of the job; errors of MLflow are logged."""
        for path in paths:
            self.record(lambda run, path=path: run.log_file(path))

    def record(self, upload: Callable[[TrackedRun], object]) -> None:
        """Uploads intermediate results; errors of MLflow are logged."""
        if self._run is None:
            return
        try:
            upload(self._run)
        except (MlflowException, OSError) as error:
            logger.warning("MLflow: %s", first_line(error))

    @contextmanager
    def ended_with(self, upload: Callable[[TrackedRun], object]) -> Iterator[None]:
        """Ends the run at the end of the block, with the status that the block ends with.

        Args:
            upload: uploads the results before the end, even after an error; its own errors are logged.
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
            self._end(status, reason, upload)

    def _end(self, status: str, reason: str | None, upload: Callable[[TrackedRun], object]) -> None:
        run = self._run
        if run is None:
            return
        left = None
        with stop_requests(partial(announce_stop, "the results are uploaded first")):
            try:
                upload(run)
            except Exception as error:
                logger.warning("MLflow: %s", first_line(error))
            try:
                run.end(status, reason)
            except Exception as error:
                logger.warning("MLflow: %s", first_line(error))
                left = {"status": status, "reason": reason}
            if self._lock is not None:
                self._lock.release(left)


class Sweep(JobRun):
    """The parent run of a sweep; if the store cannot be used there is none, and the sweep runs without it."""

    _missing = "the runs of the sweep have no parent run"

    @classmethod
    def of_trainings(
        cls, config: TrainingConfig, values: Mapping[str, Any], known: Path, *, job: str, name: str
    ) -> Self:
        """The run of a job that trains one recipe on one data set several times; see `opened`."""
        group, tags = config.recipe_name, {"data": config.data.title}
        return cls.opened(
            config.tracking, config.output_dir, values, known, recipe=group, job=job, name=name, tags=tags
        )

    def adopt(self, run_ids: Sequence[str | None]) -> None:
        """Makes runs that have ended children of this sweep; those that ran with another store are left out."""
        if self._run is None:
            return
        elsewhere = 0
        for run_id in filter(None, run_ids):
            try:
                self._run.client.set_tag(run_id, MLFLOW_PARENT_RUN_ID, self._run.run_id)
            except (MlflowException, OSError) as error:
                if isinstance(error, MlflowException) and is_unknown(error):
                    elsewhere += 1
                else:
                    logger.warning("MLflow: %s", first_line(error))
        if elsewhere:
            logger.info("runs that ended earlier and are not in this MLflow: %d", elsewhere)

    @contextmanager
    def ended_after(
        self, results: Results, table: Callable[[], str], described: Callable[[], str] | None = None
    ) -> Iterator[None]:
        """Ends the sweep at the end of the block, with the status that the block ends with.

        Args:
            results: the results, which the block fills.
            table: makes a text from the results.
            described: makes the table in Markdown of the description; None: means and standard deviations.
        """
        with self.ended_with(lambda run: _upload(run, results, table(), described)):
            yield

    def end(self, status: str, reason: str | None, results: Results, table: str) -> None:
        """Uploads the results and ends the run; errors of MLflow are logged."""
        self._end(status, reason, lambda run: _upload(run, results, table))


def _upload(run: TrackedRun, results: Results, table: str, described: Callable[[], str] | None = None) -> None:
    metrics = dict(_sweep_metrics(results))
    if metrics:
        # A sweep that is continued has more runs.
        run([{"step": sum(map(len, results.values())), "metrics": metrics}])
    if table:
        run.client.log_text(run.run_id, table + "\n", "sweep.txt")
        run.client.log_text(run.run_id, as_csv(results), "sweep.csv")
        run.describe_results(as_markdown(results) if described is None else described())
    if names := _known_metrics(results)[:_PANELS]:
        figure = arms_figure(results, names)
        run.client.log_figure(run.run_id, figure, "plots/arms.png", save_kwargs={"dpi": 110})


def as_csv(results: Results) -> str:
    """The results as CSV, with a line for each run."""
    names = _known_metrics(results)
    rows = [[arm, *(run.get(name, "") for name in names)] for arm, runs in results.items() for run in runs]
    return in_csv(["arm", *names], *rows)


def as_markdown(results: Results) -> str:
    """The results as Markdown, with a line for each arm: means and standard deviations over its runs."""
    names = _known_metrics(results)
    rows = [["arm", "runs", *map(metric_label, names)]]
    for arm, runs in results.items():
        rows.append(
            [arm, str(len(runs)), *(mean_and_std([run[name] for run in runs if name in run]) for name in names)]
        )
    return in_markdown(*rows)


def _sweep_metrics(results: Results) -> Iterator[tuple[str, float]]:
    """Means and standard deviations of the arms; MLflow's charts show them as one group, with the arms side by side."""
    for arm, runs in results.items():
        for name in _known_metrics(results):
            values = [run[name] for run in runs if name in run]
            shown = re.sub(r"[^A-Za-z0-9_. -]+", "_", arm)
            if values:
                yield f"sweep/{name.replace('/', '_')}_mean {shown}", statistics.fmean(values)
            if (spread := deviation(values)) is not None:
                yield f"sweep/{name.replace('/', '_')}_std {shown}", spread


def _known_metrics(results: Results) -> list[str]:
    return chosen_metrics(compared_metrics(), {name for runs in results.values() for run in runs for name in run})
