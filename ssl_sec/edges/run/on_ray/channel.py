"""The link between the workers of a cluster and their driver if they share no folder.

A worker has its own staging folder. It sends what it writes there to an actor on the driver's machine, which writes it
to the driver's folder; requests to stop or save are sent back the same way.
"""

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ssl_sec.collectives import gather_objects
from ssl_sec.data.image_set import ImageSet
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored import StoredFolder, open_folder
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.checkpoints import upload_left
from ssl_sec.edges.storage.holder import holder_of, write_holder
from ssl_sec.edges.storage.mirror import Version, versions
from ssl_sec.edges.storage.places import local_folder, split_url
from ssl_sec.errors import UserError
from ssl_sec.files import locked

# Time between two requests to the driver whether to stop or save.
_ASK_EVERY_S = 0.5
# Size of the pieces in which files are sent.
_CHUNK_BYTES = 32 << 20


class DriverFolder:
    """The driver's folder of a run, as an actor that workers call."""

    def __init__(self, path: str) -> None:
        self._folder = open_folder(Path(path))
        assert isinstance(self._folder, StoredFolder)
        # The driver has its own mirror, in another process.
        self._mirror = self._folder.mirror(interval_s=None)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the folder."""
        return getattr(self._folder, method)(*arguments)

    def store(self) -> None:
        """Uploads what has changed."""
        self._mirror.flush()

    def write(self, name: str, content: bytes, start: int, is_last: bool) -> None:
        """Writes a piece of a file, which appears whole after the last one.

        Args:
            name: relative to the folder.
            content: content of the piece.
            start: position in the file where it begins.
            is_last: whether it is the last piece.
        """
        path = self._folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.incoming")
        with temporary.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.write(content)
        if is_last:
            temporary.replace(path)


def serve_folder(folder: RunFolder) -> Any:
    """Starts the actor for a folder of this machine; it ends with the driver."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(DriverFolder)
    return actor.options(scheduling_strategy=here).remote(str(folder.path))


class WorkerFolder(StoredFolder):
    """The staging folder of a worker, whose files and records go to the driver.

    Args:
        url: address of the run.
        rank: rank of the worker.
        server: the actor of `serve_folder`.
    """

    def __init__(self, url: str, rank: int, server: Any) -> None:
        output_dir, recipe, name = split_url(url)
        super().__init__(local_folder(output_dir, "workers", str(rank)) / recipe / name, Bucket(url))
        self._rank = rank
        self._server = server
        self._calls: list[Any] = []  # those whose end has not been seen
        self._failure: Exception | None = None  # the first error of a call, raised by all later ones
        self._sending = threading.Lock()
        self._stop_requested, self._save_requested = False, threading.Event()
        # A worker that starts again while the storage cannot be reached waits for it, as uploads do.
        self._bucket, self._checkpoints = (each.patient(self._warn) for each in (self._bucket, self._checkpoints))
        self._holder = self._stored_holder()
        self._upload_waiting()
        if not (self._holder and holder_of(self.path)):
            self._keep_waiting(self.path)
        self.take_over(self._holder)
        self._sent: dict[str, Version] = versions(self.path)
        threading.Thread(target=self._ask, name="ask-driver", daemon=True).start()

    def _upload_waiting(self) -> None:
        """Uploads the checkpoints that waited for their upload when the workers before these ended.

        A worker of another rank may have been on this machine, so the first worker here does it for all.
        """
        output_dir, recipe, name = split_url(self._bucket.url)
        with locked(local_folder(output_dir, "workers") / f".{recipe}-{name}"):
            for folder in self._worker_folders(self._holder):
                checkpoints = folder / self.checkpoints_path.name
                if self._waiting_in(folder):
                    self.flush()  # the metrics before them
                    upload_left(self._checkpoints, checkpoints, self._log)
                    shutil.rmtree(checkpoints)

    def _log(self, level: int, message: str) -> None:
        self._call("log_message", logging.getLevelName(level), message)

    def _warn(self, level: int, message: str) -> None:
        self._log(level, f"worker {self._rank}: {message}")

    def mark_training(self) -> None:
        """Tells the driver that all workers have their folders; until then, a stop does not wait for them."""
        gather_objects(None)
        if self._rank == 0:
            self._call("mark_training")

    def append_record(self, record: Mapping[str, Any]) -> None:
        """Sends a line of the metrics, after the files that were written before it."""
        self._send_files()
        self._call("append_record", dict(record))

    def forget_records_from(self, step: int) -> None:
        """Drops the metrics of steps that will be taken again; messages stay."""
        self._call("forget_records_from", step)

    def add_worker(self, about: Mapping[str, Any]) -> None:
        """Sends the start of this worker process."""
        self._call("add_worker", about)

    def add_failure(self, about: Mapping[str, Any]) -> None:
        """Sends the error of this process."""
        self._call("add_failure", about)
        self.wait_until_sent()

    def describe_data(self, image_set: ImageSet, *, is_resumed: bool = False) -> None:
        """Sends the description of the data."""
        super().describe_data(image_set, is_resumed=is_resumed)
        self._send_files()

    def write_outcome(self, outcome: str) -> None:
        """Sends how the workers ended, and all files that they have written."""
        super().write_outcome(outcome)
        self._send_files()
        self.wait_until_sent()

    def write_error(self, error: UserError) -> None:
        """Sends a user error, which the driver reports."""
        super().write_error(error)
        self._send_files()
        self.wait_until_sent()

    def error(self) -> UserError | None:
        """The user error that a worker wrote, if any."""
        return self._ask_driver("error")

    def is_stop_requested(self) -> bool:
        """Whether a stop is requested."""
        return self._stop_requested

    def take_save_request(self) -> bool:
        """Whether a checkpoint is requested; the request is then forgotten."""
        if is_requested := self._save_requested.is_set():
            self._save_requested.clear()
        return is_requested

    def tidy(self) -> None:
        """Sends what is left, and removes the folder, unless checkpoints could not be uploaded."""
        self._send_files()
        self.wait_until_sent()
        super().tidy()
        if not self.checkpoints_path.exists():
            shutil.rmtree(self.path, ignore_errors=True)

    def flush(self) -> None:
        """Makes the driver's machine upload what this worker has sent."""
        self.wait_until_sent()
        ray.get(self._server.store.remote())

    def wait_until_sent(self) -> None:
        """Waits until the driver has everything; raises the error of a call that has failed."""
        with self._sending:
            calls, self._calls = self._calls, []
            self._require_success(calls)

    def _ask_driver(self, method: str) -> Any:
        return ray.get(self._server.call.remote(method))

    def _call(self, method: str, *arguments: Any) -> None:
        # Calls of one process arrive in order.
        with self._sending:
            self._send(self._server.call.remote(method, *arguments))

    def _send(self, call: Any) -> None:
        """Keeps a call until it has ended; raises the error of an earlier one that has failed."""
        self._calls.append(call)
        ended, self._calls = ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        self._require_success(ended)

    def _require_success(self, calls: list[Any]) -> None:
        # What a failed call should have written is missing, so no later one may pass for the whole run.
        try:
            ray.get(calls)
        except Exception as error:
            cause = getattr(error, "cause", error)  # of a RayTaskError
            self._failure = self._failure or (cause if isinstance(cause, Exception) else error)
        if self._failure is not None:
            raise self._failure

    def _send_files(self) -> None:
        with self._sending:
            with contextlib.suppress(OSError):  # the next call tries again
                write_holder(self.path, self._holder)
            for name, version in versions(self.path).items():
                if self._sent.get(name) == version:
                    continue
                with contextlib.suppress(FileNotFoundError), (self.path / name).open("rb") as file:
                    start, content = 0, file.read(_CHUNK_BYTES)
                    while True:
                        following = file.read(_CHUNK_BYTES)
                        self._send(self._server.write.remote(name, content, start, not following))
                        if not following:
                            break
                        start, content = start + len(content), following
                    self._sent[name] = version

    def _ask(self) -> None:
        while True:
            with contextlib.suppress(RayError, RuntimeError):  # Ray shuts down during a request
                self._stop_requested = self._ask_driver("is_stop_requested")
                # Worker 0 decides for all; a request that another worker took would be lost.
                if self._rank == 0 and self._ask_driver("take_save_request"):
                    self._save_requested.set()
            time.sleep(_ASK_EVERY_S)
