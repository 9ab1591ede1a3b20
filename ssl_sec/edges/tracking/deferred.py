"""A run in MLflow that is created once the store answers; training does not wait for it."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.tracking.following import Record
from ssl_sec.edges.tracking.provenance import code_files
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.errors import first_line

logger = logging.getLogger(__name__)

# Time between two samples of a machine, as in MLflow.
_MACHINE_INTERVAL_S = 10.0


class _Monitor(SystemMetricsMonitor):
    """Logs the utilisation of this machine; the first value covers a second, as psutil's first of a thread is 0."""

    def monitor(self) -> None:
        psutil.cpu_percent()
        self._shutdown_event.wait(1.0)
        super().monitor()


class DeferredRun:
    """A run in MLflow that is created, or reopened, once the store can be reached; a sink of metrics.

    Args:
        identity: identity of the run.
        values: parameters of the run.
        folder: folder of the run, to which its id is written.
        system_metrics: whether the utilisation of machines is logged.

    Attributes:
        run: the run; None until it is connected.
        on_run: called once with the run.
        on_records: called with the run whenever it has taken metrics.
    """

    def __init__(
        self, identity: RunIdentity, values: Mapping[str, Any], folder: RunFolder, system_metrics: bool = False
    ) -> None:
        self._identity = identity
        self._values = values
        self._folder = folder
        self._system_metrics = system_metrics
        self._monitor: SystemMetricsMonitor | None = None
        self._cluster: str | None = None
        self._connected = threading.Event()
        self._created: str | None = None  # the id of the run, if this process has created it
        self.run: TrackedRun | None = None
        self.on_run: Callable[[TrackedRun], object] = lambda run: None
        self.on_records: Callable[[TrackedRun], object] = lambda run: None

    @property
    def machine_interval_s(self) -> float | None:
        """Time between two samples of the utilisation of machines; None if it is not logged."""
        return (MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() or _MACHINE_INTERVAL_S) if self._system_metrics else None

    def log_machines(self, metrics: Mapping[str, float]) -> None:
        """Logs the utilisation of other machines, once the run is connected."""
        if self.run is not None and self.machine_interval_s is not None:
            self.run.log_machines(metrics, self.machine_interval_s)

    def describe_cluster(self, cluster: str) -> None:
        """Adds the cluster that the run is on to its description, with the next metrics."""
        self._cluster = cluster

    def connect(self) -> TrackedRun:
        """Creates or reopens the run.

        Raises:
            StorageError: if the store cannot be used.
        """
        if self.run is None:
            reopened = self._reopen()
            self.run = reopened or TrackedRun.start(self._identity, self._values, self._keep_id)
            try:
                if reopened is not None and self._created is None:
                    reopened.log_resume(self._identity.tags)
                for path in code_files(self._folder.path):
                    self.run.log_file(path)
            except Exception as error:  # metrics are more important
                logger.warning("MLflow: %s", first_line(error))
            self._connected.set()
            self.on_run(self.run)
        return self.run

    def _keep_id(self, run_id: str) -> None:
        self._created = run_id
        with contextlib.suppress(OSError):  # the folder was removed, or its disk is full, which ends the run
            self._folder.run_id_path.write_text(run_id)

    def _reopen(self) -> TrackedRun | None:
        run_id, uri = self._created or self._folder.run_id, self._identity.uri
        if run_id is None:
            return None
        run = TrackedRun.reopen(uri, run_id)
        if run is None:
            logger.warning("MLflow at %s has no run %s; a new one is created", uri, run_id)
        else:
            run.log_changes(self._values)
        return run

    def ping(self) -> None:
        """Waits for the run, then asks the store for it; raises an error if the store cannot be used."""
        self._connected.wait()
        assert self.run is not None
        self.run.client.get_run(self.run.run_id)

    def __call__(self, records: Sequence[Record]) -> None:
        """Logs the metrics of new steps."""
        run = self.connect()
        if self._system_metrics and self._monitor is None:
            uri = self._identity.uri
            self._monitor = _Monitor(run.run_id, resume_logging=True, tracking_uri=uri)
            self._monitor.start()
        run(records)
        if self._cluster is not None:
            run.describe_cluster(self._cluster)
            self._cluster = None
        if records:
            self.on_records(run)

    def close(self) -> None:
        """Stops logging the machine's utilisation."""
        if self._monitor is not None:
            self._monitor.finish()
