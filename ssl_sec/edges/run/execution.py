"""Executes a run, from its launch to its end in MLflow."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ssl_sec.edges.folder.commands import resume_command
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.masking import masked
from ssl_sec.edges.run.running import close_abandoned
from ssl_sec.edges.run.spec import RunSpec
from ssl_sec.edges.run.summary import Finished, ui_instructions
from ssl_sec.edges.run.uploading import Upload
from ssl_sec.edges.run.worker import Worker, work
from ssl_sec.edges.tracking.deferred import DeferredRun
from ssl_sec.edges.tracking.following import Follower, Progress
from ssl_sec.edges.tracking.store import store_errors
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.errors import Stopped, StorageError, UserError, first_line
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.settings import to_values
from ssl_sec.training.config import LocalConfig

logger = logging.getLogger("ssl_sec")

# How long a run waits at its end until abandoned runs are closed.
_CLOSE_WITHIN_S = 5.0


class Execution:
    """The execution of a run.

    Args:
        spec: specification of the run; its folder exists.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._folder = spec.folder
        values, follows_machine = to_values(spec.config), spec.config.tracking.system_metrics
        self._tracking = DeferredRun(spec.identity, values, spec.folder, follows_machine)
        self._upload = Upload(spec, self._tracking)

    def run(self) -> Finished:
        """Launches the workers and waits for them; then uploads the results and ends the run in MLflow.

        Raises:
            UserError: for mistakes of the user.
            Stopped: if a stop was requested; the state of a training is saved, unless a second Ctrl-C interrupted it.
        """
        folder, uri, tracking = self._folder, self._spec.identity.uri, self._tracking
        folder.write_identity(self._spec.identity)
        closing: list[threading.Thread] = []

        def begin(tracked: TrackedRun) -> None:
            for line in ui_instructions(self._finished()).splitlines():
                logger.info(line.strip())
            closing.append(close_abandoned(folder.path.parents[1], tracked.client, uri))

        tracking.on_run, tracking.on_records = begin, self._upload.upload_start
        logger.info("folder: %s", folder.location)
        logger.info("connecting to MLflow at %s", masked(uri))
        status, reason = "FAILED", None
        try:
            with _removal_reported(folder):
                self._work()
                self._upload.upload_results(tracking.run)
            status = "FINISHED"
        except KeyboardInterrupt:
            status, reason = "KILLED", "interrupted without saving"
            raise Stopped(f"{reason}; {self._after_a_stop()}") from None
        except Stopped:
            has_saved = not self._is_probe and folder.outcome() == "stopped"
            status, reason = "KILLED", f"on request, {'after' if has_saved else 'without'} saving"
            raise
        except Exception as error:
            found = error if isinstance(error, UserError) else folder.error() or error
            reason = first_line(found)
            raise found from None
        finally:
            if tracking.run is not None:
                self._upload.end(tracking.run, status, reason)
            if status == "FAILED":
                folder.discard_unstarted()
            if folder.holds_run:
                if (missing := self._upload.missing) is not None:
                    logger.warning("%s", missing)
            elif tracking.run is not None:
                self._upload.forget_folder(tracking.run)
            for thread in closing:
                thread.join(_CLOSE_WITHIN_S)
        folder.close()
        return self._finished()

    def _work(self) -> None:
        """Launches the workers and follows them to their end.

        Raises:
            UserError: the error of a worker.
            Stopped: if a stop was requested.
        """
        spec, folder = self._spec, self._folder
        progress = Progress(
            spec.config.length,
            folder.name,
            spec.recipe.unit,
            shown=folder.messages(),
            start_step=folder.newest_step() or 0,
            parts=spec.config.parts,
        )
        to_mlflow = Follower(
            folder.metrics_path,
            self._tracking,
            on_error=self._warn_of_outage,
            on_loss=self._upload.record_loss,
            patience=self._upload.patience,
            connects_first=not spec.was_finished,
            only_new=spec.was_finished,
        )
        with Follower(folder.metrics_path, progress, only_new=True), to_mlflow:
            if isinstance(spec.config.runtime, LocalConfig):
                worker = Worker(rank=0, world_size=1, device=spec.config.runtime.resolve_device())
                work(spec.recipe.name, to_values(spec.config), folder, worker)
            else:
                from ssl_sec.edges.run.on_ray.runtime import run_with_ray  # imports Ray

                run_with_ray(spec, self._tracking)
        error = folder.error()
        if error is not None:
            raise error
        if folder.status == "KILLED":
            raise Stopped(f"stopped; {self._after_a_stop()}")

    def _warn_of_outage(self, error: Exception) -> None:
        path = f"{self._folder.location}/{self._folder.metrics_path.name}"
        logger.warning("MLflow: %s; it is retried, and the metrics are in %s", first_line(error), path)

    @property
    def _is_probe(self) -> bool:
        return isinstance(self._spec.config, ProbeJobConfig)

    def _after_a_stop(self) -> str:
        """What is kept; what starts a probe again depends on the job that it belongs to."""
        if self._is_probe:
            return "a probe has no checkpoints, so nothing of it is kept"
        return f"resume it with: {resume_command(self._spec.recipe.name, self._folder)}"

    def replay(self) -> Finished:
        """Uploads what MLflow is missing from a run that has ended.

        Raises:
            StorageError: if the store cannot be used, or does not take everything; or a file of the run is missing.
        """
        folder, patience = self._folder, self._upload.patience
        with store_errors(self._spec.identity.uri):
            tracked = patience.call(self._tracking.connect)
            patience.call(lambda: tracked(folder.records()))
            is_whole = patience.call(lambda: self._upload.is_whole(tracked))
            if folder.status != "FINISHED":
                patience.call(lambda: self._upload.upload_start(tracked))
        status, reason = "FAILED", "its results could not be uploaded"
        try:
            if folder.status == "FINISHED" and not is_whole:
                self._upload.upload_results(tracked)
            error = folder.error()
            status, reason = folder.status, None if error is None else first_line(error)
        except FileNotFoundError as error:
            raise StorageError(f"{error.filename} is missing") from error
        finally:
            self._upload.end(tracked, status, reason, tracked.earlier_end_ms)
        if folder.status == "FINISHED":
            folder.close()
        if (missing := self._upload.missing) is not None:
            raise StorageError(missing)
        return self._finished()

    def _finished(self) -> Finished:
        tracked = self._tracking.run
        return Finished(
            folder=self._folder,
            uri=self._spec.identity.uri,
            run_id=tracked.run_id if tracked else None,
            experiment_id=tracked.experiment_id if tracked else None,
            metrics=self._folder.last_metrics(),
        )


@contextmanager
def _removal_reported(folder: RunFolder) -> Iterator[None]:
    """Reports any error after the removal of the run's folder as that removal."""
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        if folder.holds_run:
            raise
        raise folder.removal() from error
