"""Jobs that wait for one another, on the cluster: pretraining, then a probe; a sweep of such chains.

The pipeline is itself a job of the cluster, so that it goes on when whoever sent it has left. It starts a job for
each stage, follows it, and starts the next one only if that succeeded. A sweep is one MLflow run whose children are
the runs of its points.
"""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType

from mlflow.exceptions import MlflowException

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.names import own_tags
from ssl_sec.edges.packaging import JOB_ID_VARIABLE
from ssl_sec.edges.run.sweeps import Sweep
from ssl_sec.edges.submit.cluster import Cluster, entrypoint, exit_code
from ssl_sec.edges.submit.orders import Stage
from ssl_sec.edges.tables import in_table
from ssl_sec.edges.tracking.store import connected, tracking_uri
from ssl_sec.edges.tracking.tracker import JOB_ID_TAG
from ssl_sec.errors import Stopped, first_line
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.recipes.tracking import TrackingConfig

logger = logging.getLogger("ssl_sec")

_TOLD = ("probe/top1", "probe/top5", "probe/knn_top1", "val/knn_top1", "train/loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A chain of jobs.

    Attributes:
        name: what sets it apart from the others.
        swept: the keys that differ between the points, and their values here.
        stages: one after the other.
    """

    name: str
    swept: tuple[str, ...]
    stages: tuple[Stage, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a pipeline does.

    Attributes:
        name: of the sweep's run in MLflow.
        recipe: of its runs.
        output_dir: where run folders are made.
        tracking: of the sweep's run; its experiment is that of all runs.
        parallel: chains that run at once.
        points: one for a mere chain.
    """

    name: str
    recipe: str
    output_dir: str
    tracking: TrackingConfig
    parallel: int
    points: tuple[Point, ...]

    @property
    def is_sweep(self) -> bool:
        """Whether there are several points, so that a run of their own keeps them together."""
        return len(self.points) > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a chain ended.

    Attributes:
        code: the exit code of the stage that failed, or 0.
        state: in words.
        metrics: of all its runs.
    """

    code: int
    state: str
    metrics: Mapping[str, float]


def run_pipeline(plan: Plan) -> int:
    """Runs all chains, as a job of the cluster.

    Returns:
        The exit code: 0 if all succeeded, 130 if they were stopped, or that of the first one that failed.
    """
    pipeline = _Pipeline(plan, Cluster(None), os.environ[JOB_ID_VARIABLE])
    signal.signal(signal.SIGTERM, pipeline.on_signal)
    return pipeline.run()


class _Pipeline:
    def __init__(self, plan: Plan, cluster: Cluster, job_id: str) -> None:
        self._plan = plan
        self._cluster = cluster
        self._job_id = job_id
        self._uri = tracking_uri(plan.tracking, plan.output_dir)
        self._stopping = threading.Event()
        self._running: set[str] = set()
        self._lock = threading.Lock()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stops the stages, which save, and starts no others."""
        self._stopping.set()
        threading.Thread(target=self._stop_all, daemon=True).start()

    def _stop_all(self) -> None:
        with self._lock:
            running = list(self._running)
        for job_id in running:
            self._cluster.ask_to_stop(job_id)

    def run(self) -> int:
        parent = self._parent() if self._plan.is_sweep else Sweep(None)
        with ThreadPoolExecutor(self._plan.parallel) as executor:
            futures = [
                executor.submit(self._chain, number, point, parent)
                for number, point in enumerate(self._plan.points, start=1)
            ]
            ended = [future.result() for future in futures]
        table = self._table(ended)
        if self._plan.is_sweep:
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
            "swept": ", ".join(sorted({s.partition("=")[0] for p in plan.points for s in p.swept})),
        }
        identity = RunIdentity(
            uri=self._uri,
            experiment=plan.tracking.experiment or plan.recipe,
            name=plan.name,
            tags={**own_tags(plan.tracking), "recipe": plan.recipe, "job": "sweep"},
        )
        return Sweep.start(identity, values, plan.output_dir)

    def _results(self, ended: list[Ended]) -> dict[str, list[Mapping[str, float]]]:
        """The figures of the points that succeeded, those that differ by their seed alone together."""
        results: dict[str, list[Mapping[str, float]]] = {}
        for point, each in zip(self._plan.points, ended, strict=True):
            varied = [swept.partition("=") for swept in point.swept if not swept.startswith("seed=")]
            arm = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, _, value in varied)
            if each.code == 0:
                results.setdefault(arm or "all seeds", []).append(each.metrics)
        return results

    def _chain(self, number: int, point: Point, parent: Sweep) -> Ended:
        metrics: dict[str, float] = {}
        run_id: str | None = None
        for stage in point.stages:
            if self._stopping.is_set():
                return Ended(code=Stopped.exit_code, state="stopped", metrics=metrics)
            job_id = f"{self._job_id}-{number}-{stage.job}"
            overrides = list(stage.overrides)
            if not RECIPES[stage.job].is_training:
                if run_id is None:
                    return Ended(code=4, state="MLflow has no run to probe", metrics=metrics)
                overrides.append(f"run={run_id}")
            elif parent.run_id is not None:
                overrides.append(f"tracking.parent_run={parent.run_id}")
            name = point.name if RECIPES[stage.job].is_training else f"{point.name}-{stage.job}"
            code = self._stage(job_id, stage.job, tuple(overrides), name, " ".join([*point.swept, stage.job]))
            run_id, found = self._run_of(job_id)
            metrics |= found
            if code != 0:
                state = "stopped" if code == Stopped.exit_code else f"{stage.job} failed with exit code {code}"
                return Ended(code=code, state=state, metrics=metrics)
        return Ended(code=0, state="succeeded", metrics=metrics)

    def _stage(self, job_id: str, job: str, overrides: tuple[str, ...], name: str, label: str) -> int:
        metadata = {"job_name": name, "recipe": self._plan.recipe, "job": job, "parent": self._job_id}
        print(f"{label}: job {job_id}", flush=True)
        with self._lock:
            self._running.add(job_id)
        try:
            line = entrypoint(job, overrides, sys.executable)
            self._cluster.submit_beside(line, job_id, metadata, parent=self._job_id)
            if self._stopping.is_set():  # it came while the job was sent
                self._cluster.ask_to_stop(job_id)
            details = self._cluster.follow(job_id, _Prefixed(label))
        finally:
            with self._lock:
                self._running.discard(job_id)
        print(f"{label}: {details.status.value.lower()}", flush=True)
        return exit_code(details)

    def _run_of(self, job_id: str) -> tuple[str | None, Mapping[str, float]]:
        """The id and the last metrics of the MLflow run of a job."""
        try:
            client = connected(self._uri)
            experiment = client.get_experiment_by_name(self._plan.tracking.experiment or self._plan.recipe)
            if experiment is None:
                return None, {}
            found = client.search_runs([experiment.experiment_id], f"tags.`{JOB_ID_TAG}` = {json.dumps(job_id)}")
        except MlflowException as error:
            logger.warning("MLflow: %s", first_line(error))
            return None, {}
        return (found[0].info.run_id, found[0].data.metrics) if found else (None, {})

    def _table(self, ended: list[Ended]) -> str:
        told = [name for name in _TOLD if any(name in each.metrics for each in ended)]
        rows = [
            [", ".join(point.swept) or point.name, each.state, *(_shown(each.metrics.get(name)) for name in told)]
            for point, each in zip(self._plan.points, ended, strict=True)
        ]
        return in_table(rows, ["point", "state", *told])


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


class _Prefixed:
    """Prints whole lines with a label before each."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._rest = ""

    def __call__(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            print(f"[{self._label}] {line}", flush=True)
