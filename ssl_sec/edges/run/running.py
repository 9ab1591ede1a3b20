"""Locks of active runs: each run has one process, and a run whose process has died is closed in MLflow.

A process holds a lock for each of its runs, on a file in `<output_dir>/.running` that names the process. The lock ends
with the process, however it dies; so a file without a lock is a run that its process could not end.
"""

import atexit
import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored import StoredFolder
from ssl_sec.edges.folder.stored_config import with_credentials
from ssl_sec.edges.masking import masked
from ssl_sec.edges.run.supervision import register_lock
from ssl_sec.edges.tracking.store import connect_to_store, find_run
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.errors import ConfigError, UserError, writing
from ssl_sec.files import replace_text

logger = logging.getLogger(__name__)

_FOLDER = ".running"
# A process that has just been killed may still hold its lock.
_FREE_WITHIN_S = 5.0
# The errors of file systems without locks; there, two processes can run the same run.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

# Forked processes, such as data loaders, may outlive this one and must not hold its locks.
_held: set[int] = set()


def _release_all() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_release_all)


@contextmanager
def running(folder: RunFolder, key: str = "run_name", other: str = "another run_name") -> Iterator["RunLock"]:
    """Locks a run for this process until the block ends; yields the lock.

    Args:
        folder: folder of the run; it need not exist, as for a job that has none.
        key: key that the refusal of another process names.
        other: what it allows.

    Raises:
        ConfigError: if another process has locked it.
        StorageError: if the output folder cannot be written.
    """
    lock = RunLock(_lock_path(folder), {"folder": str(folder.path)}, key, other)
    remove_at_exit(folder)
    try:
        yield lock
    except BaseException:
        # A run that was refused because the folder holds another run leaves the record of that other run.
        lock.release(lock.before)
        raise
    lock.release()


def remove_staged(folder: RunFolder) -> None:
    """Removes the staging folder of a run in object storage, so that the folders of runs do not fill the disk.

    It stays if it may have files that are not stored, if a process has locked the run, or if a later job closes the run
    in MLflow, for which it reads the folder.
    """
    if not isinstance(folder, StoredFolder) or folder.has_left or not folder.path.exists():
        return
    path = _lock_path(folder)
    with contextlib.suppress(OSError):  # there is such a lock, or there are no locks at all
        path.parent.mkdir(exist_ok=True)
        if (descriptor := _try_lock(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)) is None:
            return
        try:
            if not folder.has_left:  # by a process that has just ended
                shutil.rmtree(folder.path, ignore_errors=True)
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)
        path.parent.rmdir()  # unless other runs are active


def remove_at_exit(folder: RunFolder) -> None:
    """Lets `remove_staged` follow at the end of this process, which still reads the folder, as for a probe."""
    if isinstance(folder, StoredFolder):
        atexit.register(remove_staged, folder)


class RunLock:
    """The lock of a run; if this process cannot end the run in MLflow, a later job does.

    Args:
        path: path of the file to lock.
        run: location of the run for a later job: its folder, or the address of the store and the run's id.
        key: key that the refusal names.
        other: what it allows.
        folder_key: key of the folder, for a file that cannot be written.

    Attributes:
        before: the record that an earlier process left in the file.

    Raises:
        ConfigError: if another process has locked it.
        StorageError: if the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        run: Mapping[str, str],
        key: str = "run_name",
        other: str = "another run_name",
        folder_key: str = "output_dir",
    ) -> None:
        self._path = path
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._record = {**run, "host": socket.gethostname(), "pid": os.getpid(), "since": since}
        with writing(folder_key, path.parents[1]):
            self._descriptor = _wait_for(path, key, run.get("folder") or run["run_id"], other)
            _held.add(self._descriptor)
            self.before = _record_of(self._descriptor)
            try:
                _write_record(self._descriptor, self._record)
            except OSError:
                self._unlock(removes=self.before is None)
                raise
        register_lock(path)

    def release(self, left: Mapping[str, Any] | None = None) -> None:
        """Releases the lock.

        Args:
            left: the status and the reason with which a later job ends the run in MLflow; None if it has ended.
        """
        try:
            if left is not None:
                _write_record(self._descriptor, {**self._record, **left})
        finally:
            self._unlock(removes=left is None)

    def _unlock(self, *, removes: bool) -> None:
        if removes:
            self._path.unlink(missing_ok=True)
        _held.discard(self._descriptor)
        os.close(self._descriptor)
        with contextlib.suppress(OSError):  # other runs are active
            self._path.parent.rmdir()

    def leave_run(self, folder: RunFolder) -> None:
        """Lets `close_abandoned` end the run of a folder that is removed, if an earlier process could not end it."""
        if self.before is not None and (run_id := folder.run_id) is not None:
            record = {**self.before, "uri": folder.identity.uri, "run_id": run_id}
            replace_text(self._path.with_name(run_id), json.dumps(record))

    def abandon(self, reason: str) -> None:
        """Ends the run as FAILED and releases the lock; if the store cannot be used, a later job ends it."""
        self.release({"status": "FAILED", "reason": reason})
        with contextlib.suppress(UserError, MlflowException, OSError):
            close_in_its_store(self._path, reason)


def lock_sweep(output_dir: Path, uri: str, run_id: str) -> RunLock:
    """Locks a run in MLflow that has no folder, such as that of a sweep.

    Args:
        output_dir: output folder; a later job there closes the run if this process dies.
        uri: address of its store.
        run_id: id of the run in MLflow.

    Raises:
        StorageError: if the output folder cannot be written.
    """
    return RunLock(output_dir.resolve() / _FOLDER / run_id, {"uri": masked(uri), "run_id": run_id})


def close_abandoned(output_dir: Path, client: MlflowClient, uri: str) -> threading.Thread:
    """Closes the runs in MLflow whose processes on this machine have died.

    Args:
        output_dir: output folder of the runs, on this machine.
        client: client of the store.
        uri: address of the store; runs in other stores are ignored.

    Returns:
        The thread that does this; it ends with the process.
    """
    thread = threading.Thread(
        target=_close_all, args=(output_dir / _FOLDER, client, masked(uri)), name="close-abandoned", daemon=True
    )
    thread.start()
    return thread


def _close_all(locks: Path, client: MlflowClient, uri: str) -> None:
    for path in sorted(locks.glob("*")):
        try:
            record = json.loads(path.read_text())
            if record["host"] == socket.gethostname() and _stored_at(record) in (uri, None):
                close(path, client, f"its process ({record['pid']} on {record['host']}) ended unexpectedly")
        except Exception:  # the next job tries again
            logger.debug("%s", path, exc_info=True)


def close(lock: Path, client: MlflowClient, reason: str) -> bool:
    """Ends a run in MLflow if its process has died: as FAILED, unless the process left another status.

    Args:
        lock: the file that the process had locked.
        client: client of the run's store.
        reason: reason for the end, if the process left none.

    Returns:
        Whether the run was still RUNNING.

    Raises:
        MlflowException: if the store cannot be used; the next job tries again.
    """
    descriptor = _try_lock(lock, os.O_RDWR)
    if descriptor is None:
        return False
    try:
        record = _record_of(descriptor)
        was_running = record is not None and _end(record, client, reason)
        lock.unlink()
        return was_running
    finally:
        os.close(descriptor)


def close_in_its_store(lock: Path, reason: str) -> bool:
    """Ends a run in its own store; see `close`.

    Raises:
        ConfigError: if the store needs credentials that this process does not have.
        MlflowException: if the store cannot be used.
    """
    uri = _stored_at(json.loads(lock.read_text()))
    return uri is not None and close(lock, connect_to_store(with_credentials(uri, "tracking.uri")), reason)


def _end(record: Mapping[str, Any], client: MlflowClient, reason: str) -> bool:
    run_id = record["run_id"] if "run_id" in record else RunFolder(Path(record["folder"])).run_id
    if run_id is None:
        return False
    run = find_run(client, run_id)
    if run is None or run.info.status != "RUNNING":
        return False
    status, reason = (record["status"], record["reason"]) if "status" in record else ("FAILED", reason)
    TrackedRun(client, run_id, run.info.experiment_id).end(status, reason)
    logger.info(
        "run %s is now %s in MLflow: %s", record.get("folder", run.info.run_name), status, reason or "reported late"
    )
    return True


def _stored_at(record: Mapping[str, Any]) -> str | None:
    """The address of a run's store, without credentials; None if it is not known."""
    return record["uri"] if "uri" in record else RunFolder(Path(record["folder"])).identity.uri or None


def _lock_path(folder: RunFolder) -> Path:
    # A hash, since the name may be as long as a file name, and the output folder may have several paths.
    name = hashlib.sha256(os.fsencode(Path(folder.path.parent.name, folder.path.name))).hexdigest()[:24]
    return folder.path.parent.parent / _FOLDER / name


def _wait_for(path: Path, key: str, what: str, other: str) -> int:
    deadline = time.monotonic() + _FREE_WITHIN_S
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = _try_lock(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            descriptor = os.open(path, os.O_RDWR)
        if descriptor is not None:
            return descriptor
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{key}: {what} is in use: {_holder(path)} runs it; allowed: {other}, or waiting for its end"
            )
        time.sleep(0.1)


def _try_lock(path: Path, flags: int) -> int | None:
    """Opens and locks a file; None if another process has locked it, or it has just been removed."""
    try:
        descriptor = os.open(path, flags, 0o666)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _record_of(descriptor: int) -> Mapping[str, Any] | None:
    try:
        return json.loads(os.pread(descriptor, 1 << 16, 0))
    except ValueError:
        return None


def _write_record(descriptor: int, record: Mapping[str, Any]) -> None:
    content = json.dumps(record).encode()
    # One write covers a longer record with spaces, so that the file can be read whenever this process dies.
    os.pwrite(descriptor, content.ljust(os.fstat(descriptor).st_size), 0)
    os.ftruncate(descriptor, len(content))


def _holder(path: Path) -> str:
    try:
        record = json.loads(path.read_text())
        return f"process {record['pid']} on {record['host']} (since {record['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
