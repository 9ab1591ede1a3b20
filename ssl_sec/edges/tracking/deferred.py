"""A run in MLflow that is made as soon as the store answers, while training has long begun."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.tracking.following import Record
from ssl_sec.edges.tracking.provenance import code_files
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.errors import first_line

logger = logging.getLogger(__name__)


class DeferredRun:
    """A run in MLflow that is made, or taken up, as soon as the store can be reached; a sink of figures.

    Args:
        identity: of the run.
        values: its parameters.
        folder: of the run, where its id is kept.
        system_metrics: whether the use of this machine is followed while figures come.

    Attributes:
        run: once it is there.
        on_run: called once with it.
    """

    def __init__(
        self, identity: RunIdentity, values: Mapping[str, Any], folder: RunFolder, system_metrics: bool = False
    ) -> None:
        self._identity = identity
        self._values = values
        self._folder = folder
        self._system_metrics = system_metrics
        self._monitor: SystemMetricsMonitor | None = None
        self._connected = threading.Event()
        self.run: TrackedRun | None = None
        self.on_run: Callable[[TrackedRun], object] = lambda run: None

    def connect(self) -> TrackedRun:
        """The run.

        Raises:
            StorageError: if the store cannot be used.
        """
        if self.run is None:
            reopened = self._reopened()
            self.run = reopened or TrackedRun.start(self._identity, self._values)
            if reopened is None:
                with contextlib.suppress(FileNotFoundError):  # the run's folder was removed, which ends the run
                    self._folder.run_id_path.write_text(self.run.run_id)
            try:
                if reopened is not None:
                    reopened.note_resume(self._identity.tags)
                for path in code_files(self._folder.path):
                    self.run.log_file(path)
            except Exception as error:  # the figures are worth more
                logger.warning("MLflow: %s", first_line(error))
            self._connected.set()
            self.on_run(self.run)
        return self.run

    def _reopened(self) -> TrackedRun | None:
        run_id, uri = self._folder.run_id, self._identity.uri
        if run_id is None:
            return None
        run = TrackedRun.reopen(uri, run_id)
        if run is None:
            logger.warning("MLflow at %s has no run %s; a new one is made", uri, run_id)
        else:
            run.note_changes(self._values)
        return run

    def ask(self) -> None:
        """Asks the store for the run, as soon as there is one; raises if the store cannot be used."""
        self._connected.wait()
        assert self.run is not None
        self.run.client.get_run(self.run.run_id)

    def __call__(self, records: Sequence[Record]) -> None:
        """Logs the figures of new steps."""
        run = self.connect()
        if self._system_metrics and self._monitor is None:
            uri = self._identity.uri
            self._monitor = SystemMetricsMonitor(run.run_id, resume_logging=True, tracking_uri=uri)
            self._monitor.start()
        run(records)

    def close(self) -> None:
        """Ends what follows the machine; no figure is held back."""
        if self._monitor is not None:
            self._monitor.finish()
