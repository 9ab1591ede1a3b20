"""The folder of a run that is kept in object storage: a staging folder on this machine."""

import contextlib
import logging
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ssl_sec.collectives import gather_objects
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.checkpoints import (
    WAITING,
    CheckpointUpload,
    Workers,
    download_checkpoint,
    upload_left,
    whole_checkpoints,
)
from ssl_sec.edges.storage.holder import HOLDER, holder_of, write_holder
from ssl_sec.edges.storage.lease import Lease
from ssl_sec.edges.storage.mirror import UPLOADS_EVERY_S, Mirror, download_run, upload_run
from ssl_sec.edges.storage.places import local_folder, split_url, url_of
from ssl_sec.errors import StorageError, writing
from ssl_sec.training.checkpoint import MANIFEST, defect_of
from ssl_sec.training.resuming import Found

logger = logging.getLogger("ssl_sec")


def open_folder(path: Path) -> RunFolder:
    """The folder of a run on this machine, or the staging folder of a run in object storage."""
    url = url_of(path)
    return RunFolder(path) if url is None else StoredFolder(path, Bucket(url))


class StoredFolder(RunFolder):
    """The staging folder of a run in object storage.

    Args:
        path: path on this machine.
        bucket: the run's folder in object storage.
        restored: folder for downloaded checkpoints; None for that which the run's workers on this machine share.
    """

    def __init__(self, path: Path, bucket: Bucket, restored: Path | None = None) -> None:
        super().__init__(path)
        self._bucket = bucket
        self._output_dir, recipe, name = split_url(bucket.url)
        self._recipe_and_name = f"{recipe}/{name}"
        self._restored_path = restored or local_folder(self._output_dir, "restored") / self._recipe_and_name
        self._checkpoints = bucket.folder("checkpoints")
        self._mirror: Mirror | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return open_folder, (self.path,)  # other processes have uploads of their own

    @property
    def location(self) -> str:
        """Where users find the run."""
        return self._bucket.url

    def _names(self) -> set[str]:
        return {name.partition("/")[0] for name in self._bucket.files()}

    @contextmanager
    def held(self, *, waits: bool = False, key: str = "run_name", other: str = "another run_name") -> Iterator[None]:
        """Takes the lease of the run, downloads it, and uploads what changes until the block ends.

        Args:
            waits: whether to wait for a lease that a killed process seems to have left.
            key: key that the refusal names while another process has the lease.
            other: what it allows.

        Raises:
            ConfigError: if another process has the lease.
            StorageError: if the storage cannot be used.
        """
        with self._leased(waits=waits, key=key, other=other):
            try:
                self._upload_left()
                holder = uuid.uuid4().hex
                self.take_over(holder)
                self._bucket.clean()
                with self._mirrored(holder):
                    yield
            finally:
                self.tidy()
                if self.is_complete:
                    shutil.rmtree(self._kept_path, ignore_errors=True)

    @contextmanager
    def _leased(self, **options: Any) -> Iterator[None]:
        lease = Lease(self._bucket, self._stop, **options)
        try:
            yield
        finally:
            lease.release()

    @contextmanager
    def _mirrored(self, holder: str) -> Iterator[None]:
        """Uploads what changes until the block ends."""
        self._bucket.write(HOLDER, holder.encode())
        self._mirror = self.mirror(holder=holder)
        try:
            yield
        except BaseException:
            with _reported():  # what ended the run matters more
                self._mirror.close()
                if not any(map(self._waiting_in, (self.path, *self._worker_folders(holder)))):
                    (self.path / HOLDER).unlink(missing_ok=True)  # nothing is left to upload
            raise
        else:
            self._mirror.close()
            (self.path / HOLDER).unlink(missing_ok=True)
        finally:
            self._mirror = None
            if not self.holds_run:
                with _reported():
                    self._bucket.remove([HOLDER])

    def _stored_holder(self) -> str:
        """The holder of the run, as stored; empty if there is none."""
        return (self._bucket.read(HOLDER) or b"").decode()

    def _upload_left(self) -> None:
        """Uploads what an earlier process could not, so that all workers resume from the newest checkpoint."""
        own, newest = holder_of(self.path), self._stored_holder()
        if not (own and newest):
            for folder in (self.path, *self._worker_folders(own or newest)):
                self._keep_waiting(folder)
        elif own != newest:
            for path in self._waiting_in(self.path):
                logger.warning("%s is not used: it was not uploaded, and another process has held the run since", path)
        else:
            upload_run(self.path, self._bucket)
            for folder in (self.path, *self._worker_folders(own)):
                upload_left(self._checkpoints, folder / self.checkpoints_path.name)

    def _waiting_in(self, folder: Path) -> list[Path]:
        """The checkpoints in a folder of this machine that wait for their upload."""
        return sorted((folder / self.checkpoints_path.name / WAITING).glob("step-*"))

    def _keep_waiting(self, folder: Path) -> None:
        """Moves checkpoints newer than those stored out of a folder that is reused, since they may be the run's newest.

        Whether another process has held the run since is not known where a holder is missing.
        """
        if not (waiting := self._waiting_in(folder)):
            return
        newest = max(self.checkpoint_names(), default="")
        for path in waiting:
            if path.name <= newest or defect_of(path) is not None:
                continue
            kept = self._kept_path / path.name
            with writing("output_dir", kept.parent):
                shutil.rmtree(kept, ignore_errors=True)
                kept.parent.mkdir(parents=True, exist_ok=True)
                path.rename(kept)
            reason = "it was not uploaded, and it is not known whether another process has held the run since"
            self._log(logging.WARNING, f"{path.name} is not used: {reason}; it is kept in {kept}")

    @property
    def has_left(self) -> bool:
        """Whether something here may not be stored: a process holds the run, was killed, or could not upload it."""
        return (self.path / HOLDER).exists() or bool(self._waiting_in(self.path))

    @property
    def _kept_path(self) -> Path:
        """The folder with checkpoints that were neither used nor uploaded."""
        return local_folder(self._output_dir) / "kept" / self._recipe_and_name

    def _log(self, level: int, message: str) -> None:
        logger.log(level, "%s", message)

    def _worker_folders(self, holder: str) -> list[Path]:
        """The staging folders of workers on this machine, of this holder."""
        folders = local_folder(self._output_dir, "workers").glob(f"*/{self._recipe_and_name}")
        return [folder for folder in sorted(folders) if holder and holder_of(folder) == holder]

    def take_over(self, holder: str) -> None:
        """Makes the folder that of a new process: like that in the storage, and without earlier checkpoints.

        Args:
            holder: the process that holds the run, see `ssl_sec.edges.storage.holder`.

        Raises:
            StorageError: if the storage cannot be used, or the folder cannot be written.
        """
        download_run(self._bucket, self.path)
        with writing("output_dir", self.path):
            shutil.rmtree(self.checkpoints_path, ignore_errors=True)
            self.path.mkdir(parents=True, exist_ok=True)
            write_holder(self.path, holder)

    def mirror(self, interval_s: float | None = UPLOADS_EVERY_S, holder: str | None = None) -> Mirror:
        """Uploads what changes; see `Mirror`."""
        return Mirror(self.path, self._bucket, interval_s, holder)

    def refresh(self) -> None:
        """Takes over what other machines have written.

        Raises:
            StorageError: if the storage cannot be used.
        """
        own = holder_of(self.path)
        if not own or own != self._stored_holder():
            download_run(self._bucket, self.path)

    def remove(self) -> None:
        """Removes the run, here and in object storage.

        Raises:
            ConfigError: if another process has the lease.
            StorageError: if the storage cannot be used.
        """
        with self._leased() if self._mirror is None else nullcontext():
            super().remove()
            shutil.rmtree(self._kept_path, ignore_errors=True)
            self._bucket.remove([name for name in self._bucket.files() if not name.startswith(".lease")])

    def tidy(self) -> None:
        """Removes the checkpoints on this machine, unless some could not be uploaded."""
        shutil.rmtree(self._restored_path, ignore_errors=True)
        if not any(self.checkpoints_path.glob(f"{WAITING}/*")):
            shutil.rmtree(self.checkpoints_path, ignore_errors=True)

    def flush(self) -> None:
        """Uploads what has changed, so that other machines see it.

        Raises:
            StorageError: if that fails.
        """
        if self._mirror is not None:
            self._mirror.flush()

    def find_checkpoint(self) -> Found:
        """The newest whole checkpoint, downloaded to this machine; the same on all workers.

        Raises:
            StorageError: if the storage cannot be used, or a worker cannot download what another one has downloaded.
        """
        # All workers must resume from one checkpoint, while an upload may just be ending. A worker has uploaded what
        # was left on its machine before it looks, so the newest counts.
        names = max(gather_objects(whole_checkpoints(self._checkpoints.files())), key=lambda found: found[-1:])
        skipped: list[str] = []
        for name in reversed(names):
            reason = self._download_on_all(name)
            if reason is None:
                return Found(path=self._restored_path / name, skipped=tuple(skipped))
            skipped.append(f"{name}: {reason}")
        return Found(path=None, skipped=tuple(skipped))

    def _download_on_all(self, name: str) -> str | None:
        """Why a checkpoint is whole for no worker; None if all have downloaded it."""
        reasons: list[str | None] = []
        for _ in range(2):  # what another worker has downloaded whole was damaged on its way to this one
            reasons = gather_objects(download_checkpoint(self._checkpoints, name, self._restored_path))
            if len({reason is None for reason in reasons}) == 1:
                return reasons[0]
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
        raise StorageError(f"checkpoint {name}: {reason} on worker {rank}, but whole on another one")

    def checkpoint_names(self) -> list[str]:
        """The names of the checkpoints in object storage, oldest first."""
        return whole_checkpoints(self._checkpoints.files())

    def read_manifest(self, name: str) -> bytes | None:
        """The manifest of a checkpoint; None if it has none."""
        return self._checkpoints.read(f"{name}/{MANIFEST}")

    def fetch_checkpoint(self, name: str) -> Path:
        """The folder of a whole checkpoint, downloaded to this machine.

        Raises:
            StorageError: if it is not whole, or the storage cannot be used.
        """
        path = self._restored_path / name
        if (reason := download_checkpoint(self._checkpoints, name, self._restored_path)) is not None:
            raise StorageError(f"checkpoint {path}: {reason}")
        return path

    def upload_checkpoints(self, rank: int, world_size: int, keep_last: int) -> CheckpointUpload | None:
        """Starts the upload of what this worker writes of checkpoints; all workers call it."""
        workers = Workers(rank=rank, world_size=world_size, start=gather_objects(uuid.uuid4().hex)[0])
        # First the metrics of the steps before it: a resume would drop later ones, and could not restore missing ones.
        bucket = self._bucket.folder("checkpoints")  # of the usual patience: the upload repeats what fails
        return CheckpointUpload(bucket, workers, keep_last, self.flush)

    def _stop(self) -> None:
        """Stops the run, which another process has taken over."""
        if self._mirror is not None:
            self._mirror.abandon()
        with contextlib.suppress(OSError):
            self.stop_path.touch()


@contextmanager
def _reported() -> Iterator[None]:
    """Logs an error of the storage, and continues."""
    try:
        yield
    except StorageError as error:
        logger.error("%s", error)
