"""Runs a study: the searches of its arms, then arms times points times seeds, and compares the results."""

import hashlib
import json
import logging
import math
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.names import new_name
from ssl_sec.edges.folder.stored import open_folder
from ssl_sec.edges.folder.text import text_of
from ssl_sec.edges.pictures import save_picture
from ssl_sec.edges.run.running import remove_staged, running
from ssl_sec.edges.run.sweeps import Sweep
from ssl_sec.edges.storage.places import is_remote, local_folder
from ssl_sec.edges.study.cells import KeptCell, KeptCells, metrics_of
from ssl_sec.edges.study.comparison import Comparison, curves_of, deciding_metric
from ssl_sec.edges.study.plan import CELL_TAGS, ArmAt, Cell, Point, Study, num_comparisons
from ssl_sec.edges.study.processes import Processes, Task
from ssl_sec.edges.study.searches import KeptSearches, KeptTrial
from ssl_sec.edges.study.uploaded import JOB, download_metrics, searches_path
from ssl_sec.edges.tables import in_markdown, in_table
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.edges.tune.claims import OtherSearchError
from ssl_sec.edges.tune.trial import last_line, reason_of
from ssl_sec.errors import ConfigError, Stopped, UserError, counted, writing
from ssl_sec.figures.study import curves_figure
from ssl_sec.files import replace_text
from ssl_sec.metrics import metric_label
from ssl_sec.recipes.registry import RECIPES

logger = logging.getLogger("ssl_sec")

# Metrics that show how the training of arms differs, as curves over the steps.
_CURVES = (
    "train/norm_mean",
    "train/norm_std",
    "train/gradient_norm_mean",
    "train/step_angle_mean",
    "train/metric_loss",
)

_STOPPED = "stopped; the same command continues the study"


def run_study(study: Study) -> str:
    """Runs the runs of a study that have not ended yet; returns the table of all results.

    Raises:
        ConfigError: if the file of cells holds other runs, or another process runs the study.
        UserError: if runs failed, after all others have run.
        Stopped: if the job was interrupted; the same command continues.
    """
    job = _Job(study)
    if study.config.run:
        with job.locked(), job.tracked():
            for points in job.stages():
                job.search(points[0])
                job.run(points)
            job.require_success()
    return job.summary()


class _Job:
    """A study while it runs."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._recipe = RECIPES[study.job]
        # The parts that the study itself needs are the same in all runs.
        self._config = study.arms[0].config
        self._folder = local_folder(self._config.output_dir) / self._config.recipe_name
        self._logs = self._folder / "logs"
        path = self._cells_path()
        if not (study.config.run or path.exists()):
            download_metrics(self._config, path)
        self._kept = KeptCells(path)
        self._searches = KeptSearches(searches_path(path))
        self._sweep = Sweep(None)
        self._failures: list[str] = []
        self._found: dict[tuple[str, str], tuple[str, ...]] = {}
        self._made: list[Cell] = []
        self._written: list[Path] = []
        self._lock = threading.Lock()
        for cell in self._cells():
            self._kept.find(cell)  # checked before anything runs

    def _cells_path(self) -> Path:
        """The file of cells.

        Raises:
            ConfigError: if its folder does not exist.
        """
        if self._study.config.cells is not None:
            return Path(self._study.config.cells).expanduser()
        if is_remote(self._config.output_dir):
            raise ConfigError("cells: found null, must be a file where output_dir is object storage")
        return self._folder / "cells.csv"

    def _cells(self) -> list[Cell]:
        """The runs of the arms whose values are known."""
        arms = [arm for arm in self._study.arms if arm.search is not None]
        found = {arm.key: best for arm in arms if (best := self._searches.best(arm)) is not None}
        if found != self._found or not self._made:
            self._found, self._made = found, self._study.cells(found)
        return self._made

    def locked(self) -> AbstractContextManager[object]:
        """Refuses another process that does the same, but not one that runs other arms, seeds or points."""
        parts = [str(self._kept.path.resolve()), sorted(arm.key for arm in self._study.arms), sorted(self._study.seeds)]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
        return running(RunFolder(self._folder / f"study-{digest}"), "study", "other arms, seeds or points")

    def tracked(self) -> AbstractContextManager[None]:
        """Records the block as a run in MLflow, the parent of all others."""
        tracking = self._config.tracking
        own_tags = {key: tag for key, tag in (tracking.tags or {}).items() if key not in CELL_TAGS}
        file = self._study.file
        values = {"arms": file.arms, "seeds": list(self._study.seeds), "over": file.over, "shared": list(file.shared)}
        config, known = replace(self._config, tracking=replace(tracking, tags=own_tags)), "study.mlflow_run_id"
        name = new_name(f"{self._study.name}-study")
        self._sweep = Sweep.of_trainings(config, values, self._folder / known, job=JOB, name=name)
        self._sweep.adopt([kept.run_id for kept in self._kept.of(self._cells())])
        self._sweep.log_where()
        return self._sweep.ended_with(self._upload)

    def stages(self) -> list[list[Point]]:
        """The points, in groups whose runs follow one search: each begins with a point that has arms to search."""
        groups: list[list[Point]] = []
        for point in self._study.points:
            if groups and not self._unsearched(point):
                groups[-1].append(point)
            else:
                groups.append([point])
        return groups

    def _unsearched(self, point: Point) -> list[ArmAt]:
        """The arms with sweeps that have not been searched yet at a point."""
        arms = self._study.arms_at(point)
        return [arm for arm in arms if arm.search is not None and self._searches.best(arm) is None]

    def search(self, point: Point) -> None:
        """Searches the arms with sweeps that have not been searched yet at a point."""
        left = self._unsearched(point)
        if not left:
            return
        import ray

        from ssl_sec.edges.tune.job import run_search  # imports Ray

        was_connected = ray.is_initialized()
        for arm in left:
            assert arm.search is not None
            logger.info("searching %s", arm.name)
            tracking = replace(arm.search.config.tracking, parent_run=self._sweep.run_id)
            config = replace(arm.search.config, tracking=tracking)
            try:
                trials, _, _ = run_search(replace(arm.search, config=config))
            except Stopped as error:
                raise Stopped(_STOPPED) from error
            except OtherSearchError as error:
                made = self._folder / f"{config.run_name}*"
                raise ConfigError(
                    f"study: an unfinished search of {arm.name} had {error.difference}; allowed: the earlier settings, "
                    f"another recipe=<name>, or to delete {made}"
                ) from error
            self._searches.add(arm, [KeptTrial.of(arm, trial) for trial in trials])
        if not was_connected:
            ray.shutdown()  # the runs need the whole machine

    def run(self, points: Sequence[Point]) -> None:
        """Runs the cells of some points that have not ended yet.

        Raises:
            Stopped: if a signal stopped them.
        """
        cells = [cell for cell in self._cells() if cell.point in points]
        left = {cell.name: cell for cell in cells if self._kept.find(cell) is None}
        done = len(cells) - len(left)
        if done:
            logger.info("%d of %d runs are done", done, len(cells))
        parent = [] if self._sweep.run_id is None else [f"tracking.parent_run={self._sweep.run_id}"]
        tasks = [
            Task(name=cell.name, arguments=[cell.job, *cell.overrides, *parent], log=self._log(cell.name))
            for cell in left.values()
        ]
        continued = {name for name in left if self._has_begun(name)}
        begins = {name: len(text_of(self._log(name))) for name in left}
        num_ended, whole = done, list[float]()

        def end(name: str, code: int, minutes: float) -> None:
            nonlocal num_ended
            with self._lock:
                if code != 0:
                    why = reason_of(code, self._log(name), begins[name])
                    self._failures.append(f"{name}: {why}")
                    logger.warning("%s failed: %s", name, why)
                    return
                kept = self._keep(left[name], math.nan if name in continued else minutes)
                self._sweep.record(self._record)
                num_ended += 1
                if name not in continued:
                    whole.append(60 * minutes)
                waiting = len(cells) - num_ended
                rest = mean(whole) * waiting / self._study.config.concurrent if whole and waiting else None
                metric = self._metric([kept])
                shown = f"{metric_label(metric)} {kept.metrics[metric]:.4g}" if metric in kept.metrics else "ended"
                logger.info(
                    "%s (%d of %d): %s, in %.1f min%s",
                    *(name, num_ended, len(cells), shown, minutes),
                    "" if rest is None else f"; about {_in_words(rest)} left",
                )

        def report(running: Sequence[str]) -> None:
            for name in running:
                last = last_line(self._log(name), begins[name]) or "starting"
                logger.info("%s", last if last.startswith(name) else f"{name}: {last.removeprefix('INFO: ')}")

        if left:
            at_a_time = min(len(left), self._study.config.concurrent)
            logger.info(
                "running %s, %d at a time; the output is in %s", counted(len(left), "run"), at_a_time, self._logs
            )
        processes = Processes(self._study.config.concurrent)
        processes.run(tasks, end, report)
        if processes.was_stopped:
            raise Stopped(_STOPPED)

    def require_success(self) -> None:
        """Raises a UserError if runs failed."""
        if self._failures:
            raise UserError(
                f"{counted(len(self._failures), 'run')} failed; the last: {self._failures[-1]}; the output is in "
                f"{self._logs}; the same command runs them again"
            )

    def _has_begun(self, name: str) -> bool:
        folder = open_folder(self._folder / name)
        folder.refresh()
        return folder.holds_run

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.txt"

    def _keep(self, cell: Cell, minutes: float) -> KeptCell:
        folders = [open_folder(self._folder / name) for name in (cell.name, f"{cell.name}-probe")]
        for folder in folders:
            folder.refresh()  # in object storage, the process of the run has removed its folder here
        kept = KeptCell(
            arm=cell.arm,
            point=cell.point.name,
            seed=cell.seed,
            digest=cell.digest,
            minutes=minutes,
            run_id=folders[0].run_id or "",
            metrics=metrics_of(folders[0].records(), folders[1].last_metrics(), self._study.file.metric),
        )
        self._kept.add(kept)
        for folder in folders:
            remove_staged(folder)
        return kept

    def _comparison(self) -> Comparison:
        kept = self._kept.of(self._cells())
        family = num_comparisons(self._study.file)
        return Comparison.of(kept, self._metric(kept), self._study.baseline, family)

    def _metric(self, kept: Sequence[KeptCell]) -> str:
        """The metric that the arms are compared by."""
        return self._study.file.metric or deciding_metric(self._recipe, kept)

    def _upload(self, run: TrackedRun) -> None:
        for path in (self._kept.path, self._searches.path):
            if path.exists():
                run.log_file(path)
        comparison = self._record(run)
        if not comparison.rows:
            return
        for path in self._write(comparison):
            run.log_file(path, "plots" if path.suffix == ".png" else None)

    def _record(self, run: TrackedRun) -> Comparison:
        """Uploads the metrics of the runs that have ended, and their table."""
        comparison = self._comparison()
        if comparison.rows:
            run([{"step": sum(len(row.metrics) for row in comparison.rows), "metrics": comparison.metrics()}])
            run.describe_results(in_markdown(*comparison.table()))
        return comparison

    def _write(self, comparison: Comparison) -> list[Path]:
        """Writes the table and the plots next to the file of cells, once; returns their paths."""
        if self._written:
            return self._written
        folder = self._kept.path.parent
        stem = self._kept.path.stem
        written = [folder / f"{stem}.md"]
        with writing("cells", folder):
            replace_text(written[0], in_markdown(*comparison.table()) + "\n")
            figures = comparison.figures()
            if (curves := self._curves()) is not None:
                figures["curves"] = curves
            for name, figure in figures.items():
                written.append(folder / f"{stem}-{name}.png")
                save_picture(written[-1], figure)
        self._written = written
        return written

    def _curves(self) -> Figure | None:
        """The curves of the runs whose folders are on this machine."""
        arms: dict[str, dict[str, list[list[tuple[float, float]]]]] = {}
        usual, compared = (*_CURVES, *self._recipe.curves), self._study.file.metric
        names = usual if compared is None else tuple(dict.fromkeys((compared, *usual)))
        for cell in self._cells():
            path = self._folder / cell.name
            if is_remote(self._config.output_dir) or not path.is_dir():
                continue
            label = " ".join(part for part in (cell.point.value, cell.arm) if part)
            for metric, curve in curves_of(open_folder(path).records(), names).items():
                if metric in usual or len(curve) > 1:  # the compared metric may be measured only at the end
                    arms.setdefault(label, {}).setdefault(metric, []).append(curve)
        return curves_figure(arms, f"{self._study.name}: means over the runs of an arm")

    def summary(self) -> str:
        """The table of the results, and the places of its files."""
        comparison = self._comparison()
        if not comparison.rows:
            return "no run has ended yet"
        written = [f"wrote {path}" for path in [self._kept.path, *self._write(comparison)]]
        return "\n".join(["", in_table(*comparison.table()), "", *written, *self._sweep.where])


def _in_words(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
