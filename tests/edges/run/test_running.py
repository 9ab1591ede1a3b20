"""Locks that end with their processes, and runs closed in MLflow after their processes ended."""

import errno
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run import running as module
from ssl_sec.edges.run.resuming import is_probed
from ssl_sec.edges.run.running import close_abandoned, close_in_its_store, running
from ssl_sec.edges.run.sweeps import Sweep
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.errors import ConfigError, StorageError
from ssl_sec.recipes.tracking import TrackingConfig
from tests.edges.run.test_sweeps import wait_for_closing

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(module, "_FREE_WITHIN_S", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return started(tmp_path, "run")


def started(output_dir: Path, name: str) -> RunFolder:
    folder = RunFolder(output_dir / "recipe" / name)
    folder.start({"epochs": 3})
    return folder


@contextmanager
def holder(folder: RunFolder, with_loader: bool = False) -> Iterator[int]:
    """A process that runs something until it is killed; a process that it forked may outlive it."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with running(folder):
                # The loader itself reports that it lives: it releases the lock only once fork has returned in it.
                if with_loader and os.fork() == 0:
                    signal.alarm(60)
                    os.write(there, f"{os.getpid()}\n".encode())
                elif not with_loader:
                    os.write(there, b"0\n")
                signal.pause()
        finally:
            os._exit(1)
    try:
        loader = int(os.read(here, 16))
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if with_loader:
            os.kill(loader, signal.SIGKILL)
        os.close(here)
        os.close(there)


@contextmanager
def killed(folder: RunFolder) -> Iterator[None]:
    """After a process that ran something was killed."""
    with holder(folder):
        pass
    yield


def test_a_second_process_of_a_run_is_refused_with_the_first_named(folder: RunFolder):
    with holder(folder) as pid:
        where = f"process {pid} on {socket.gethostname()}"
        with pytest.raises(
            ConfigError, match=f"run_name: .*/recipe/run is in use: {where} .* runs it; allowed: another"
        ):
            with running(folder):
                raise AssertionError("two run it")
        with running(RunFolder(folder.path.parent / "other")):
            pass


def test_a_lock_ends_with_its_process_and_is_not_inherited_by_loaders(folder: RunFolder):
    with holder(folder, with_loader=True) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with running(folder):
            pass
    assert not (folder.path.parents[1] / ".running").exists()


def test_a_process_that_was_just_killed_is_waited_for(folder: RunFolder, monkeypatch):
    monkeypatch.setattr(module, "_FREE_WITHIN_S", 60.0)
    waits: list[float] = []
    with holder(folder) as pid:

        def kill(seconds: float) -> None:
            waits.append(seconds)
            os.kill(pid, signal.SIGKILL)

        monkeypatch.setattr(module.time, "sleep", kill)
        with running(folder):
            pass
    assert waits


@pytest.mark.parametrize(("number", "refusal"), [(errno.ENOLCK, None), (errno.EIO, "^output_dir: .*Input/output")])
def test_a_file_system_without_locks_is_used_without_them(folder: RunFolder, monkeypatch, number, refusal):
    """Two processes can run the same run there."""

    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.fcntl, "flock", flock)
    with nullcontext() if refusal is None else pytest.raises(StorageError, match=refusal):
        with running(folder), running(folder):
            assert (folder.path.parents[1] / ".running").is_dir()


@pytest.mark.parametrize("is_left", [False, True])
def test_a_full_disk_leaves_no_lock(folder: RunFolder, monkeypatch, is_left):
    """So that this process can run it later; what a process left that died before is not lost."""
    with killed(folder) if is_left else nullcontext():
        pass
    locks = folder.path.parents[1] / ".running"
    before = [path.read_text() for path in locks.glob("*")]

    def pwrite(descriptor, content, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="No space left on device"):
        patch.setattr(module.os, "pwrite", pwrite)
        with running(folder):
            pass
    assert [path.read_text() for path in locks.glob("*")] == before and len(before) == is_left
    with running(folder) as lock:
        assert (lock.before is None) != is_left


def test_an_end_that_cannot_be_recorded_ends_the_lock(folder: RunFolder, monkeypatch):
    lock = module.RunLock(lock_of(folder), {"folder": str(folder.path)})
    begun = lock_of(folder).read_text()

    def pwrite(descriptor, content, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
        patch.setattr(module.os, "pwrite", pwrite)
        lock.release({"status": "FAILED", "reason": "killed"})
    assert lock_of(folder).read_text() == begun
    with running(folder):
        pass


def test_a_record_can_be_read_at_every_moment(folder: RunFolder, monkeypatch):
    with killed(folder):
        pass
    longer = {**json.loads(lock_of(folder).read_text()), "reason": "r" * 100}
    lock_of(folder).write_text(json.dumps(longer))
    found: list[int] = []
    monkeypatch.setattr(module.os, "ftruncate", lambda *_: found.append(json.loads(lock_of(folder).read_text())["pid"]))
    with running(folder):
        pass
    assert found == [os.getpid()]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="output_dir: .* cannot be written: Not a directory"):
        with running(RunFolder(tmp_path / "file" / "recipe" / "run")):
            pass


class Store:
    """A store with runs of MLflow, each with its folder."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.uri = f"sqlite:///{output_dir}/mlflow.db"
        self.client = MlflowClient(self.uri)

    def identity(self, name: str, job: str) -> RunIdentity:
        return RunIdentity(uri=self.uri, experiment="e", name=name, tags={"job": job, "recipe": "recipe"})

    def sweep(self, name: str) -> Sweep:
        tracking = TrackingConfig(uri=self.uri)
        return Sweep.opened(tracking, str(self.output_dir), {}, recipe="e", job="ablate", name=name)

    def run(self, name: str, uri: str | None = None) -> RunFolder:
        folder = started(self.output_dir, name)
        run = TrackedRun.start(self.identity(name, "pretrain"), {})
        folder.run_id_path.write_text(run.run_id)
        folder.identity_path.write_text(json.dumps({"uri": uri or self.uri}))
        return folder

    def of(self, folder: RunFolder):
        return self.client.get_run(folder.run_id_path.read_text())

    def close_abandoned(self, beside: RunFolder) -> None:
        close_abandoned(beside.path.parents[1], self.client, self.uri).join(60)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    return Store(tmp_path_factory.mktemp("runs"))


def lock_of(folder: RunFolder) -> Path:
    return module._lock_path(folder)


def test_the_next_job_closes_only_runs_whose_process_was_killed(store: Store):
    dead, lives, elsewhere, other_store, ended = (
        store.run(name, uri)
        for name, uri in zip("abcde", [None, None, None, "http://elsewhere:5000", None], strict=True)
    )
    with holder(lives) as pid, running(mine := store.run("mine")):
        for each in (dead, elsewhere, other_store, ended):
            with killed(each):
                pass
        record = json.loads(lock_of(elsewhere).read_text())
        lock_of(elsewhere).write_text(json.dumps({**record, "host": "another-machine"}))
        dead_pid = json.loads(lock_of(dead).read_text())["pid"]
        store.client.set_terminated(ended.run_id_path.read_text(), "FINISHED")
        store.close_abandoned(mine)
        assert store.of(dead).info.status == "FAILED"
        reason = store.of(dead).data.tags["ended"]
        assert f"its process ({dead_pid} on {socket.gethostname()}) ended unexpectedly" in reason
        assert not lock_of(dead).exists()
        for each in (lives, elsewhere, other_store, mine):
            assert store.of(each).info.status == "RUNNING"
            assert lock_of(each).exists()
        assert (store.of(ended).info.status, lock_of(ended).exists()) == ("FINISHED", False)
        assert json.loads(lock_of(lives).read_text())["pid"] == pid


def test_a_probe_whose_process_was_killed_is_closed_when_it_starts_again(store: Store):
    probe = store.run("probe")
    run_id = probe.run_id
    with killed(probe):
        assert not is_probed(probe)
    assert not probe.path.exists()
    store.close_abandoned(store.run("after a probe"))
    run = store.client.get_run(run_id)
    assert run.info.status == "FAILED"
    assert "ended unexpectedly" in run.data.tags["ended"]


def test_a_run_is_closed_after_its_name_was_refused_to_another(store: Store):
    folder = store.run("again")
    with killed(folder), pytest.raises(ConfigError, match="already holds a run"):
        with running(folder):
            folder.start({"epochs": 3})
    store.close_abandoned(store.run("beside"))
    assert store.of(folder).info.status == "FAILED"


def test_a_run_whose_folder_was_resumed_is_not_closed(store: Store):
    folder = store.run("resumed")
    with killed(folder), running(folder):
        store.close_abandoned(store.run("next"))
        assert store.of(folder).info.status == "RUNNING"


def test_during_an_outage_nothing_fails_and_the_run_is_closed_later(store: Store, monkeypatch):
    folder = store.run("later")
    beside = store.run("one more")
    with killed(folder):
        with monkeypatch.context() as patch:
            patch.setattr(MlflowClient, "get_run", lambda *args: 1 / 0)
            store.close_abandoned(beside)
        assert store.of(folder).info.status == "RUNNING"
        assert lock_of(folder).exists()
        store.close_abandoned(beside)
    assert store.of(folder).info.status == "FAILED"


def sweep_of(store: Store, name: str) -> tuple[int, str]:
    """The process and the run of a sweep that is killed."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            sweep = store.sweep(name)
            os.write(there, (sweep.run_id or "none").encode())
            signal.pause()
        finally:
            os._exit(1)
    run_id = os.read(here, 64).decode()
    os.close(here)
    os.close(there)
    return pid, run_id


def killed_sweep(store: Store, name: str) -> tuple[int, str]:
    pid, run_id = sweep_of(store, name)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return pid, run_id


def test_the_next_job_closes_only_sweeps_whose_process_was_killed(store: Store):
    alive, its_run = sweep_of(store, "goes on")
    try:
        dead, run_id = killed_sweep(store, "killed")
        store.close_abandoned(store.run("after a sweep"))
        run = store.client.get_run(run_id)
        reason = f"its process ({dead} on {socket.gethostname()}) ended unexpectedly"
        assert (run.info.status, run.data.tags["ended"]) == ("FAILED", f"failed: {reason}")
        assert reason in run.data.tags["mlflow.note.content"]
        assert store.client.get_run(its_run).info.status == "RUNNING"
    finally:
        os.kill(alive, signal.SIGKILL)
        os.waitpid(alive, 0)
    lock = store.output_dir / ".running" / its_run
    assert close_in_its_store(lock, "killed by SIGKILL") and not lock.exists()
    assert store.client.get_run(its_run).data.tags["ended"] == "failed: killed by SIGKILL"


def test_a_job_without_a_folder_closes_them_too(store: Store):
    _, run_id = killed_sweep(store, "killed before another sweep")
    later = store.sweep("another sweep")
    wait_for_closing()
    assert store.client.get_run(run_id).info.status == "FAILED"
    later.end("FINISHED", None, {}, "")


def test_a_sweep_whose_end_mlflow_missed_is_closed_with_that_end(store: Store, monkeypatch):
    ended = store.sweep("s")
    wait_for_closing()  # else it may close this run too
    with monkeypatch.context() as patch:
        patch.setattr(TrackedRun, "end", lambda *args: 1 / 0)
        ended.end("FINISHED", None, {}, "")
    assert ended.run_id is not None and store.client.get_run(ended.run_id).info.status == "RUNNING"
    store.close_abandoned(store.run("after its end"))
    run = store.client.get_run(ended.run_id)
    assert (run.info.status, run.data.tags["ended"]) == ("FINISHED", "finished")
    assert not (store.output_dir / ".running" / ended.run_id).exists()


def test_a_supervisor_closes_the_run_with_its_reason(store: Store):
    folder = store.run("crashed")
    with killed(folder):
        assert close_in_its_store(lock_of(folder), "killed by SIGSEGV")
    assert (store.of(folder).info.status, store.of(folder).data.tags["ended"]) == (
        "FAILED",
        "failed: killed by SIGSEGV",
    )


def test_a_resumed_run_has_no_end(store: Store):
    folder = store.run("taken up")
    with killed(folder):
        close_in_its_store(lock_of(folder), "killed by SIGKILL")
    TrackedRun.reopen(store.uri, folder.run_id_path.read_text())
    assert (store.of(folder).info.status, "ended" in store.of(folder).data.tags) == ("RUNNING", False)
