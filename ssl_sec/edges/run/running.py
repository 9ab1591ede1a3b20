"""Which process runs what in an output folder: each run has one, and a run whose process is gone is closed in MLflow.

A process that runs something holds a lock in `<output_dir>/.running`, on a file that names the process. The lock ends
with the process, however it dies; a file that nobody locks any more is a run that its process could not end.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
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
from ssl_sec.edges.folder.stored_config import with_credentials
from ssl_sec.edges.masking import masked
from ssl_sec.edges.run.supervision import tell_supervisor
from ssl_sec.edges.tracking.store import connected, is_unknown
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.errors import ConfigError, StorageError

logger = logging.getLogger(__name__)

_FOLDER = ".running"
# A process that was killed a moment ago may still hold its lock.
_FREE_WITHIN_S = 5.0
# File systems without locks say so; runs are then not kept apart.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

# Processes that are forked from this one, as loaders are, may outlive it and must not hold its locks.
_held: set[int] = set()


def _let_go() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def running(folder: RunFolder) -> Iterator[None]:
    """Keeps a run to this process until the block ends.

    Raises:
        ConfigError: if another process has it.
        StorageError: if the output folder cannot be written.
    """
    lock = RunLock(_lock_path(folder), {"folder": str(folder.path)})
    try:
        yield
    except BaseException:
        # A run that was refused, because the folder holds another one, has not ended that one.
        lock.release(lock.before)
        raise
    lock.release()


class RunLock:
    """A run that this process alone has; if the process cannot end it in MLflow, a later job does.

    Args:
        path: of the file that is locked.
        run: how a later job finds it in MLflow: its folder, or the store's address and the run's id.

    Attributes:
        before: what an earlier process left in the file.

    Raises:
        ConfigError: if another process has it.
        StorageError: if the file cannot be written.
    """

    def __init__(self, path: Path, run: Mapping[str, str]) -> None:
        self._path = path
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._record = {**run, "host": socket.gethostname(), "pid": os.getpid(), "since": since}
        try:
            self._descriptor = _waited_for(path, run.get("folder") or run["run_id"])
            _held.add(self._descriptor)
            self.before = _record_of(self._descriptor)
            _write_record(self._descriptor, self._record)
        except OSError as error:
            raise StorageError(f"output_dir: {path.parents[1]} cannot be written: {error.strerror}") from error
        tell_supervisor(path)

    def release(self, left: Mapping[str, Any] | None = None) -> None:
        """Gives the run back.

        Args:
            left: how a later job ends the run in MLflow, beside what is known of it; None if there is nothing to end.
        """
        if left is None:
            self._path.unlink(missing_ok=True)
        else:
            _write_record(self._descriptor, {**self._record, **left})
        _held.discard(self._descriptor)
        os.close(self._descriptor)
        with contextlib.suppress(OSError):  # others run
            self._path.parent.rmdir()


def open_run(output_dir: Path, uri: str, run_id: str) -> RunLock:
    """A run in MLflow without a folder, as a sweep has.

    Args:
        output_dir: whose later jobs look after it.
        uri: of its store.
        run_id: in MLflow.

    Raises:
        StorageError: if the output folder cannot be written.
    """
    return RunLock(output_dir.resolve() / _FOLDER / run_id, {"uri": masked(uri), "run_id": run_id})


def close_abandoned(folder: RunFolder, client: MlflowClient, uri: str) -> threading.Thread:
    """Closes runs in MLflow whose processes on this machine are gone, beside the run that has begun.

    Args:
        folder: of the run that has begun; others of its output folder are looked at.
        client: of the store.
        uri: of the store; runs of other stores are left to others.

    Returns:
        The thread that does so; it ends with the process.
    """
    thread = threading.Thread(
        target=_close_all, args=(_lock_path(folder).parent, client, masked(uri)), name="close-abandoned", daemon=True
    )
    thread.start()
    return thread


def _close_all(locks: Path, client: MlflowClient, uri: str) -> None:
    for path in sorted(locks.glob("*")):
        try:
            record = json.loads(path.read_text())
            if record["host"] == socket.gethostname() and _stored_at(record) in (uri, None):
                close(path, client, f"its process ({record['pid']} on {record['host']}) ended without a word")
        except Exception:  # the next job tries again
            logger.debug("%s", path, exc_info=True)


def close(lock: Path, client: MlflowClient, reason: str) -> bool:
    """Ends a run in MLflow if its process is gone: as FAILED, unless the process left word of another end.

    Args:
        lock: the file that the process had locked.
        client: of the run's store.
        reason: why it ended, as far as the process left no word.

    Returns:
        Whether the run was open.

    Raises:
        MlflowException: if the store cannot be used; another try is possible.
    """
    descriptor = _locked(lock, os.O_RDWR)
    if descriptor is None:
        return False
    try:
        record = _record_of(descriptor)
        was_open = record is not None and _end(record, client, reason)
        lock.unlink()
        return was_open
    finally:
        os.close(descriptor)


def close_in_its_store(lock: Path, reason: str) -> bool:
    """Ends a run in whichever store it has; see `close`.

    Raises:
        ConfigError: if the store asks for credentials that this process does not have.
        MlflowException: if the store cannot be used.
    """
    uri = _stored_at(json.loads(lock.read_text()))
    return uri is not None and close(lock, connected(with_credentials(uri, "tracking.uri")), reason)


def _end(record: Mapping[str, Any], client: MlflowClient, reason: str) -> bool:
    run_id = record["run_id"] if "run_id" in record else RunFolder(Path(record["folder"])).run_id
    if run_id is None:
        return False
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if is_unknown(error):
            return False
        raise
    if run.info.status != "RUNNING":
        return False
    status, reason = (record["status"], record["reason"]) if "status" in record else ("FAILED", reason)
    TrackedRun(client, run_id, run.info.experiment_id).end(status, reason)
    logger.info(
        "run %s is %s in MLflow now: %s", record.get("folder", run.info.run_name), status, reason or "told late"
    )
    return True


def _stored_at(record: Mapping[str, Any]) -> str | None:
    """The address of a run's store, without credentials; None if it has none."""
    return record["uri"] if "uri" in record else RunFolder(Path(record["folder"])).identity.uri or None


def _lock_path(folder: RunFolder) -> Path:
    # Names may be as long as those of files, and output folders may have several paths.
    name = hashlib.sha256(os.fsencode(Path(folder.path.parent.name, folder.path.name))).hexdigest()[:24]
    return folder.path.parent.parent / _FOLDER / name


def _waited_for(path: Path, what: str) -> int:
    deadline = time.monotonic() + _FREE_WITHIN_S
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = _locked(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            descriptor = os.open(path, os.O_RDWR)
        if descriptor is not None:
            return descriptor
        if time.monotonic() > deadline:
            raise ConfigError(
                f"run_name: {what} is in use: {_holder(path)} runs it; allowed: another run_name, or to wait "
                "for its end"
            )
        time.sleep(0.1)


def _locked(path: Path, flags: int) -> int | None:
    """The file, open and locked, or None if another process has it or it has just been removed."""
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
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


def _holder(path: Path) -> str:
    try:
        record = json.loads(path.read_text())
        return f"process {record['pid']} on {record['host']} (since {record['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
