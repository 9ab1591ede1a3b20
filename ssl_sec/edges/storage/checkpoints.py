"""Checkpoints in object storage, each whole or absent: its files first, then the manifest with their sizes and hashes.

A checkpoint is written on the machine of its worker and uploaded in the background, at most one at a time: if
checkpoints come faster than they can be uploaded, those in between are not uploaded. If tensors are sharded, worker 0
asks the others for their parts of the uploaded ones.
"""

import contextlib
import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_sec.edges.storage.bucket import Bucket, RefusedError
from ssl_sec.errors import StorageError, first_line
from ssl_sec.files import locked
from ssl_sec.training.checkpoint import MANIFEST, best_of, checkpoint_name, defect_of, file_sha256, score_of

logger = logging.getLogger("ssl_sec")

# In a folder of checkpoints: files that are still to be uploaded.
WAITING = ".uploads"

# How long worker 0 waits for the parts of other workers, and the time between two checks for them.
_PARTS_WITHIN_S = 900.0
_LOOK_EVERY_S = 0.5
# Time between two checks of another worker for a request of worker 0.
_ASKED_EVERY_S = 2.0
# How long a run waits at its end for storage that cannot be reached.
_END_WITHIN_S = 600.0
_PAUSE_S = 5.0


def whole_checkpoints(files: Iterable[str]) -> list[str]:
    """Names of the checkpoints that have a manifest, oldest first."""
    return sorted(name.partition("/")[0] for name in files if name.endswith(f"/{MANIFEST}"))


def download_checkpoint(bucket: Bucket, name: str, folder: Path) -> str | None:
    """Downloads a checkpoint unless the folder has it already.

    Args:
        bucket: the folder of the run's checkpoints.
        name: name of the checkpoint.
        folder: folder on this machine, shared by its workers.

    Returns:
        The reason why the checkpoint is not whole; None if it is.

    Raises:
        StorageError: if it cannot be read, or written here.
    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".download"):
            manifest = bucket.read(f"{name}/{MANIFEST}")
            if manifest is None:
                return "no manifest"
            kept = path / MANIFEST
            if kept.is_file() and kept.read_bytes() == manifest and defect_of(path) is None:
                return None
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            for file in _listed(manifest):
                with contextlib.suppress(FileNotFoundError):  # found to be missing below
                    bucket.download(f"{name}/{file}", path / file)
            kept.write_bytes(manifest)
            return defect_of(path)
    except OSError as error:
        raise StorageError(f"checkpoint {name}: cannot be written to {folder}: {error}") from error


def upload_left(bucket: Bucket, folder: Path, log: Callable[[int, str], object] = logger.log) -> None:
    """Uploads the checkpoints that an earlier process of the run could not upload, if they are newer than those stored.

    Args:
        bucket: the folder of the run's checkpoints.
        folder: folder of the run's checkpoints on this machine.
        log: takes the level and the text of messages.

    Raises:
        StorageError: if they cannot be uploaded.
    """
    newest = max(whole_checkpoints(bucket.files()), default="")
    for path in sorted((folder / WAITING).glob("step-*")):
        if path.name <= newest or defect_of(path) is not None:
            continue
        manifest = (path / MANIFEST).read_bytes()
        files = _listed(manifest)
        if len(files) > 1 and json.loads(manifest).get("workers") != 1:  # of sharded tensors
            missing = "the parts of the other workers are missing"
            log(logging.WARNING, f"{path.name} is not used: its upload was interrupted, and {missing}")
            continue
        log(logging.INFO, f"uploading {path.name}, which could not be uploaded before, from {path}")
        for name in (*files, MANIFEST):
            bucket.upload(path / name, f"{path.name}/{name}")


def _listed(manifest: bytes) -> list[str]:
    """The files that a manifest lists; none if it cannot be read."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return [str(name) for name in json.loads(manifest)["files"]]
    return []


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """The workers whose parts make up a checkpoint.

    Attributes:
        rank: rank of this worker.
        world_size: number of workers.
        start: an id that all workers of this start of the run share, and those of other starts do not.
    """

    rank: int
    world_size: int
    start: str


class CheckpointUpload:
    """Uploads a worker's files of checkpoints.

    Worker 0 has the state, writes the manifests and removes old checkpoints; if tensors are sharded, each of the others
    has a part.

    Args:
        bucket: the folder of the run's checkpoints.
        workers: the workers of the run.
        keep_last: number of the newest checkpoints that are kept, besides the best.
        on_uploaded: called before the manifest is written, so that the records before the checkpoint are stored first.
    """

    def __init__(
        self, bucket: Bucket, workers: Workers, keep_last: int, on_uploaded: Callable[[], object] = lambda: None
    ) -> None:
        self._bucket = bucket
        self._workers = workers
        self._keep_last = keep_last
        self._on_uploaded = on_uploaded
        self._waiting: list[Path] = []
        self._stored: dict[str, list[str]] = {}  # the last checkpoint that worker 0 has uploaded -> its files
        self._changed = threading.Condition()
        self._failure: StorageError | None = None
        self._closed_at: float | None = None
        self._thread = threading.Thread(target=self._follow, name="upload-checkpoints", daemon=True)
        self._thread.start()

    def offer(self, checkpoint: Path) -> None:
        """Queues the upload of a whole checkpoint in its present state.

        Raises:
            StorageError: if an earlier upload was refused.
        """
        self._add(checkpoint.parent / WAITING / checkpoint.name, checkpoint.iterdir())

    def offer_part(self, step: int, part: Path) -> None:
        """Queues the upload of this worker's part of the checkpoint after `step` steps; the file is moved.

        Raises:
            StorageError: if an earlier upload was refused.
        """
        self._add(part.parent.parent / WAITING / checkpoint_name(step), [part])
        part.unlink()

    def _add(self, waiting: Path, files: Iterable[Path]) -> None:
        self.check()
        with self._changed:
            if waiting in self._waiting:  # saved again, and the state after a step is always the same
                return
            shutil.rmtree(waiting, ignore_errors=True)
            waiting.mkdir(parents=True)
            for file in files:
                _link(file, waiting / file.name)
            self._waiting.append(waiting)
            # The first may be in the middle of its upload. Worker 0 decides, and asks the others for their parts.
            skipped = self._waiting[1:-1] if self._workers.rank == 0 else []
            best = best_of({path.name: score_of((path / MANIFEST).read_bytes()) for path in skipped})
            for path in skipped:
                if path.name != best:
                    self._waiting.remove(path)
                    shutil.rmtree(path, ignore_errors=True)
            self._changed.notify()

    def check(self) -> None:
        """Raises the StorageError of a refused upload."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Waits until everything is uploaded.

        Raises:
            StorageError: if an upload was refused, or the storage stays unreachable.
        """
        with self._changed:
            self._closed_at = time.monotonic()
            self._changed.notify()
        self._thread.join()
        self.check()

    def _follow(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed_at is not None)
                if not self._waiting:
                    return
                path = self._waiting[0]
            try:
                if self._workers.rank > 0:
                    path = self._asked_for()
                self._upload(path)
            except Exception as error:
                is_late = self._closed_at is not None and time.monotonic() > self._closed_at + _END_WITHIN_S
                if isinstance(error, StorageError) and not isinstance(error, RefusedError) and not is_late:
                    time.sleep(_PAUSE_S)
                    continue
                # The run must not continue without checkpoints.
                what = "it" if self._is_whole(path) else f"the part of worker {self._workers.rank}"
                where = f"{what} is in {path} on {socket.gethostname()}"
                self._failure = StorageError(f"{path.name} cannot be uploaded: {first_line(error)}; {where}")
                return
            with self._changed:
                self._waiting.remove(path)
            shutil.rmtree(path, ignore_errors=True)

    def _is_whole(self, path: Path) -> bool:
        """Whether a waiting checkpoint has no parts of other workers."""
        with contextlib.suppress(OSError):
            is_alone = self._workers.world_size == 1
            return is_alone or self._workers.rank == 0 and len(_listed((path / MANIFEST).read_bytes())) == 1
        return True

    def _asked_for(self) -> Path:
        """The checkpoint that worker 0 asks for; parts of earlier ones, which it has skipped, are removed."""
        while True:
            with self._changed:
                waiting, closed_at = list(self._waiting), self._closed_at
            asked = [path for path in waiting if self._bucket.read(self._question(path.name)) is not None]
            if asked:
                break
            if closed_at is not None and time.monotonic() > closed_at + _PARTS_WITHIN_S:
                raise RefusedError(f"{self._bucket.url}: worker 0 has not asked for it")
            time.sleep(_ASKED_EVERY_S)
        with self._changed:
            for skipped in waiting[: waiting.index(asked[-1])]:
                self._waiting.remove(skipped)
                shutil.rmtree(skipped, ignore_errors=True)
        return asked[-1]

    def _upload(self, path: Path) -> None:
        if self._workers.rank > 0:
            (part,) = path.iterdir()
            self._bucket.upload(part, f"{path.name}/{part.name}")
            about = {"bytes": part.stat().st_size, "sha256": file_sha256(part)}
            note = self._note(path.name, self._workers.rank)
            self._bucket.write(note, json.dumps({"name": part.name, "file": about}).encode())
            return
        if path.name not in self._stored:  # otherwise only the removal failed: the others no longer have their parts
            self._stored = {path.name: self._upload_whole(path)}
        self._remove_others(path.name, self._stored[path.name])

    def _upload_whole(self, path: Path) -> list[str]:
        """Uploads a checkpoint, the other workers their parts of it, and then its manifest; returns its files."""
        manifest = json.loads((path / MANIFEST).read_text())
        files: dict[str, Any] = manifest["files"]
        if len(files) > 1:  # this worker has a part beside the state, so the others have parts, too
            self._bucket.write(self._question(path.name), b"")
        for name in sorted(files):
            self._bucket.upload(path / name, f"{path.name}/{name}")
        if len(files) > 1:
            for rank in range(1, self._workers.world_size):
                note = self._wait_for(self._note(path.name, rank), rank)
                files[note["name"]] = note["file"]
        self._on_uploaded()
        self._bucket.write(f"{path.name}/{MANIFEST}", json.dumps(manifest).encode())
        return [*files, MANIFEST]

    def _question(self, checkpoint: str) -> str:
        """The file by which worker 0 requests the parts of the others."""
        return f"{checkpoint}/.asked-{self._workers.start}"

    def _note(self, checkpoint: str, rank: int) -> str:
        """The file that shows that a worker's part is whole."""
        return f"{checkpoint}/.part-{self._workers.start}-{rank}"

    def _wait_for(self, note: str, rank: int) -> dict[str, Any]:
        deadline = time.monotonic() + _PARTS_WITHIN_S
        while (content := self._bucket.read(note)) is None:
            if time.monotonic() > deadline:
                raise RefusedError(f"{self._bucket.url}/{note}: worker {rank} has not uploaded its part")
            time.sleep(_LOOK_EVERY_S)
        return json.loads(content)

    def _remove_others(self, newest: str, files: Iterable[str]) -> None:
        """Removes all but the newest checkpoints and the best, and the remains of interrupted uploads."""
        stored = self._bucket.files()
        whole = [name for name in whole_checkpoints(stored) if name <= newest]
        scores = {name: score_of(self._bucket.read(f"{name}/{MANIFEST}") or b"") for name in whole}
        kept = {*whole[-self._keep_last :], best_of(scores)}
        # Newer ones are still being uploaded by other workers.
        old = [name for name in stored if (checkpoint := name.partition("/")[0]) <= newest and checkpoint not in kept]
        # A checkpoint without its manifest is absent, so the manifest is removed first.
        self._bucket.remove(sorted(old, key=lambda name: not name.endswith(MANIFEST)))
        own = {f"{newest}/{name}" for name in files}
        self._bucket.remove([name for name in stored if name.startswith(f"{newest}/") and name not in own])


def _link(file: Path, link: Path) -> None:
    try:
        link.hardlink_to(file)
    except OSError:  # not every file system supports links
        shutil.copyfile(file, link)
