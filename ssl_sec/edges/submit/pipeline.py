"""Pipelines of jobs on a cluster: a pretraining and its probe, or a sweep of such chains.

The pipeline is itself a job of the cluster, so it continues without its client. It starts a job for each stage, follows
it, and starts the next one only if it succeeded. A sweep is a run in MLflow with a child run for each of its points.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType

from ssl_sec.edges.overrides import key_and_value, key_of
from ssl_sec.edges.packaging import JOB_ID_VARIABLE
from ssl_sec.edges.run.sweeps import Sweep
from ssl_sec.edges.submit.cluster import Cluster, ConnectionLost, entrypoint, exit_code
from ssl_sec.edges.submit.orders import Command
from ssl_sec.edges.tables import in_table
from ssl_sec.edges.tracking.store import connect_to_store, experiment_names, tracking_uri
from ssl_sec.edges.tracking.tracker import JOB_ID_TAG
from ssl_sec.errors import Stopped, UserError, first_line
from ssl_sec.metrics import chosen_metrics, metric_label
from ssl_sec.recipes.registry import RECIPES, compared_metrics
from ssl_sec.recipes.tracking import TrackingConfig

logger = logging.getLogger("ssl_sec")

# Time between two requests to stop a job, if the cluster does not take the first.
_RETRY_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The jobs of a point of a sweep, one after the other.

    Attributes:
        swept: the keys that differ between points, with their values here.
        stages: the jobs, in order.
    """

    swept: tuple[str, ...]
    stages: tuple[Command, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """The plan of a pipeline.

    Attributes:
        name: name of the sweep's run in MLflow.
        recipe: recipe of the sweep's run.
        output_dir: output folder of all runs.
        tracking: tracking of the sweep's run; an experiment that it names is used for all runs.
        parallel: number of chains that run at the same time.
        points: the points; a single one if it is not a sweep.
    """

    name: str
    recipe: str
    output_dir: str
    tracking: TrackingConfig
    parallel: int
    points: tuple[Chain, ...]

    @property
    def is_sweep(self) -> bool:
        """Whether there are several points, which then have a parent run."""
        return len(self.points) > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainResult:
    """The result of a chain.

    Attributes:
        code: exit code of the stage that failed, or 0.
        state: state of the chain, in words.
        metrics: metrics of all its runs.
    """

    code: int
    state: str
    metrics: Mapping[str, float]


def run_pipeline(plan: PipelinePlan) -> int:
    """Runs all chains, as a job of the cluster.

    Returns:
        The exit code: 0 if all succeeded, 130 if they were stopped, or that of the first chain that failed.
    """
    pipeline = _Pipeline(plan, Cluster(None), os.environ[JOB_ID_VARIABLE])
    signal.signal(signal.SIGTERM, pipeline.on_signal)
    return pipeline.run()


class _Pipeline:
    def __init__(self, plan: PipelinePlan, cluster: Cluster, job_id: str) -> None:
        self._plan = plan
        self._cluster = cluster
        self._job_id = job_id
        self._uri = tracking_uri(plan.tracking, plan.output_dir)
        self._stopping = threading.Event()
        self._running: set[str] = set()
        self._lock = threading.Lock()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stops the active stages, which save, and starts no others."""
        self._stopping.set()
        threading.Thread(target=self._stop_all, daemon=True).start()

    def _stop_all(self) -> None:
        with self._lock:
            running = list(self._running)
        for job_id in running:
            self._start_stopping(job_id)

    def _start_stopping(self, job_id: str) -> None:
        """Requests a stage to stop, in a thread of its own: others do not wait for an answer of the cluster."""
        threading.Thread(target=self._stop, args=(job_id,), daemon=True).start()

    def _stop(self, job_id: str) -> None:
        """Requests a stage to stop, again until the cluster takes the request or the stage is over."""
        while job_id in self._running:
            try:
                self._cluster.request_stop(job_id)
                return
            except ConnectionLost as error:
                logger.warning("%s cannot be stopped yet: %s", job_id, first_line(error))
                time.sleep(_RETRY_S)
            except RuntimeError:  # the cluster does not know the job yet; `_stage` stops it once it does
                return

    def run(self) -> int:
        parent = self._parent() if self._plan.is_sweep else Sweep(None)
        with ThreadPoolExecutor(self._plan.parallel) as executor:
            futures = [
                executor.submit(self._chain, number, point, parent)
                for number, point in enumerate(self._plan.points, start=1)
            ]
            ended = [future.result() for future in futures]
        table = self._table(ended)
        print(table, flush=True)
        code = Stopped.exit_code if self._stopping.is_set() else next((each.code for each in ended if each.code), 0)
        reason = next((each.state for each in ended if each.code not in (0, Stopped.exit_code)), None)
        status = {0: "FINISHED", Stopped.exit_code: "KILLED"}.get(code, "FAILED")
        parent.end(status, reason, self._results(ended), table)
        return code

    def _parent(self) -> Sweep:
        plan = self._plan
        values = {
            "points": len(plan.points),
            "swept": ", ".join(sorted({key_of(s) for p in plan.points for s in p.swept})),
        }
        return Sweep.opened(plan.tracking, plan.output_dir, values, recipe=plan.recipe, job="sweep", name=plan.name)

    def _results(self, ended: list[ChainResult]) -> dict[str, list[Mapping[str, float]]]:
        """The metrics of the points that succeeded; points that differ only in their seed are grouped."""
        results: dict[str, list[Mapping[str, float]]] = {}
        for point, each in zip(self._plan.points, ended, strict=True):
            varied = map(key_and_value, point.swept)
            arm = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in varied if key != "seed")
            if each.code == 0:
                results.setdefault(arm or "all seeds", []).append(each.metrics)
        return results

    def _chain(self, number: int, point: Chain, parent: Sweep) -> ChainResult:
        metrics: dict[str, float] = {}
        recipe = point.stages[0].recipe
        for stage in point.stages:
            if self._stopping.is_set():
                return ChainResult(code=Stopped.exit_code, state="stopped", metrics=metrics)
            job_id = f"{self._job_id}-{number}-{stage.job}"
            overrides = list(stage.overrides)
            is_training = RECIPES[stage.job].is_training
            if is_training and parent.run_id is not None:  # that of a probe is the run that it probes
                overrides.append(f"tracking.parent_run={parent.run_id}")
            label = " ".join([*point.swept, stage.job])
            metadata = {"job_name": stage.name, "recipe": recipe, "job": stage.job, "parent": self._job_id}
            try:
                code = self._stage(job_id, overrides, metadata, label)
            except Exception as error:  # the other points continue
                logger.error("%s: %s", label, error, exc_info=not isinstance(error, UserError))
                code = error.exit_code if isinstance(error, UserError) else 1
                return ChainResult(code=code, state=f"{stage.job} failed: {first_line(error)}", metrics=metrics)
            metrics |= self._metrics_of(job_id)
            if code != 0:
                state = "stopped" if code == Stopped.exit_code else f"{stage.job} failed with exit code {code}"
                return ChainResult(code=code, state=state, metrics=metrics)
        return ChainResult(code=0, state="succeeded", metrics=metrics)

    def _stage(self, job_id: str, overrides: list[str], metadata: dict[str, str], label: str) -> int:
        print(f"{label}: job {job_id}", flush=True)
        with self._lock:
            self._running.add(job_id)
        try:
            line = entrypoint(metadata["job"], overrides, sys.executable)
            self._cluster.submit_beside(line, job_id, metadata, parent=self._job_id)
            if self._stopping.is_set():  # a stop was requested while the job was submitted
                self._start_stopping(job_id)
            details = self._cluster.follow(job_id, _Prefixed(label))
        finally:
            with self._lock:
                self._running.discard(job_id)
        print(f"{label}: {details.status.value.lower()}", flush=True)
        return exit_code(details)

    def _metrics_of(self, job_id: str) -> Mapping[str, float]:
        """The last metrics of a job's runs in MLflow: a pretraining, and its probe if it has probed itself."""
        try:
            client = connect_to_store(self._uri)
            condition = f"tags.`{JOB_ID_TAG}` = {json.dumps(job_id)}"
            found = client.search_runs(list(experiment_names(client)), condition)
        except Exception as error:  # they are only shown
            logger.warning("MLflow: %s", first_line(error))
            return {}
        return {name: value for run in found for name, value in run.data.metrics.items()}

    def _table(self, ended: list[ChainResult]) -> str:
        names = chosen_metrics((*compared_metrics(), "train/loss"), {name for each in ended for name in each.metrics})
        rows = [
            [", ".join(point.swept) or point.stages[0].name, each.state, *map(_shown, map(each.metrics.get, names))]
            for point, each in zip(self._plan.points, ended, strict=True)
        ]
        return in_table(["point", "state", *map(metric_label, names)], *rows)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


class _Prefixed:
    """Prints complete lines, each with a label in front."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._rest = ""

    def __call__(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            print(f"[{self._label}] {line}", flush=True)
