"""The work of a worker on any runtime; it writes metrics and checkpoints to the run's folder."""

import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ssl_sec.collectives import gather_objects
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.cpu import keep_freed_memory, schedule_as_batch
from ssl_sec.errors import Stopped, StorageError, UserError, out_of_memory, out_of_space
from ssl_sec.gpus import require_usable
from ssl_sec.recipes.registry import RECIPES, SCORES
from ssl_sec.settings import from_values
from ssl_sec.training.checkpoint import CheckpointWriter, save_part, without_held_rows
from ssl_sec.training.divergence import SMALLER_STEPS
from ssl_sec.training.norms import NormHistogram
from ssl_sec.training.step import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """This process, one of the workers of a run.

    Attributes:
        rank: rank of the worker.
        world_size: number of workers.
        device: device of the worker.
        node: name of the machine, in a cluster with the id of its node.
        is_preempted: returns whether machines of the run are about to be preempted; called at reported steps.
    """

    rank: int
    world_size: int
    device: torch.device
    node: str = field(default_factory=socket.gethostname)
    is_preempted: Callable[[], bool] = lambda: False


class FolderRuntime:
    """The Runtime of training: rank 0 writes metrics and checkpoints to the run's folder.

    Args:
        worker: this worker.
        folder: the run's folder.
        keep_last: number of checkpoints to keep, besides the one with the best score.
    """

    def __init__(self, worker: Worker, folder: RunFolder, keep_last: int = 1) -> None:
        self.rank = worker.rank
        self.world_size = worker.world_size
        self.device = worker.device
        self._folder = folder
        self._is_preempted = worker.is_preempted
        self._has_warned = False
        self._upload = folder.upload_checkpoints(worker.rank, worker.world_size, keep_last)
        on_written = (lambda checkpoint: None) if self._upload is None else self._upload.offer
        self._writer = CheckpointWriter(folder.checkpoints_path, keep_last, on_written)
        self._score: float | None = None  # in the last report; an earlier score is that of another state

    def report(self, step: int, metrics: Mapping[str, float], norms: NormHistogram | None = None) -> None:
        """Adds a record to the run's metrics."""
        if self.rank == 0:
            histogram = {} if norms is None else {"norms": asdict(norms)}
            self._folder.append_record({"step": step, "metrics": dict(metrics), **histogram})
            self._score = next((metrics[name] for name in SCORES if name in metrics), None)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint: this worker's own part at once, the rest in the background."""
        state, held = without_held_rows(state)
        parts: list[str] = []
        if held:
            part = save_part(self._folder.checkpoints_path, step, held)
            if self._upload is not None and self.rank > 0:
                self._upload.offer_part(step, part)
            written = gather_objects(part.name)
            parts = written if self._upload is None else [part.name]  # the others' are uploaded from their machines
        if self.rank == 0:
            self._writer.save(step, state, self._score, parts)

    def close(self) -> None:
        """Waits until everything is written, and uploaded."""
        self._writer.close()
        if self._upload is not None:
            self._upload.close()

    def request(self) -> Request:
        """The driver's request; while machines are about to be preempted, a save each time.

        Raises:
            StorageError: if a checkpoint could not be written or uploaded: training must not continue without them.
        """
        self._writer.check()
        if self._upload is not None:
            self._upload.check()
        if self.rank > 0:
            return Request.NONE
        is_preempted = self._is_preempted()
        if self._folder.is_stop_requested():
            return Request.STOP
        if is_preempted and not self._has_warned:
            logger.warning("a machine of this run is about to be preempted; every reported step is saved from now on")
            self._has_warned = True
        is_requested = self._folder.take_save_request()
        return Request.SAVE if is_requested or is_preempted else Request.NONE


def work(job: str, values: Mapping[str, Any], folder: RunFolder, worker: Worker) -> None:
    """Runs a recipe on this worker; worker 0 writes to the run's folder how it ended."""
    if folder.error() is not None:
        return  # a restart cannot help; the driver reports the error
    if worker.rank == 0 and (changed := folder.changed_versions()):
        logger.warning("the curve may change, since versions have changed since the run began: %s", "; ".join(changed))
    folder.log_worker(worker.rank, worker.world_size, worker.node)
    if worker.device.type == "cpu":
        keep_freed_memory()
        if worker.world_size > 1:
            schedule_as_batch()
    else:
        torch.backends.cudnn.benchmark = True  # all batches have one size
    try:
        require_usable(worker.device)
        recipe = RECIPES[job]
        config = from_values(recipe.config, values)
        with closing(FolderRuntime(worker, folder, config.kept_checkpoints)) as runtime:
            recipe.run(config, runtime, folder)
    except Stopped:
        _write_outcome(folder, worker, "stopped")
    except UserError as error:
        with contextlib.suppress(StorageError):  # the folder was removed, or the disk is full
            folder.write_error(error)
        raise  # other workers may wait for this one: the cluster must end them
    except FloatingPointError as error:
        # The objective is the same on all workers, so all of them get here.
        folder.write_error(UserError(f"training diverged: {error}; {_last_checkpoint(folder)}; {SMALLER_STEPS}"))
    except Exception as error:
        folder.log_failure(worker.rank, error)
        needs_more = out_of_memory(error) or out_of_space(error)
        if needs_more is None:
            raise
        with contextlib.suppress(StorageError):  # the disk is full
            folder.write_error(needs_more)
        raise needs_more from error
    else:
        _write_outcome(folder, worker, "finished")


def _write_outcome(folder: RunFolder, worker: Worker, outcome: str) -> None:
    """Worker 0 has the most to save, and its results are on disk by now; the others may end long before it."""
    if worker.rank == 0:
        folder.write_outcome(outcome)


def _last_checkpoint(folder: RunFolder) -> str:
    names = folder.checkpoint_names()
    return (
        f"the last good checkpoint is {folder.location}/checkpoints/{names[-1]}" if names else "no checkpoint was saved"
    )
