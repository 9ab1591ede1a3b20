"""What workers ask the driver for, where runs are in object storage; with a fake actor."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from fsspec.implementations.memory import MemoryFileSystem

from ssl_sec.edges.run.on_ray import channel
from ssl_sec.edges.run.on_ray.channel import WorkerFolder
from ssl_sec.edges.storage import bucket
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.checkpoints import WAITING
from ssl_sec.edges.storage.holder import holder_of
from ssl_sec.edges.storage.places import local_folder
from ssl_sec.errors import StorageError
from ssl_sec.training import checkpoint
from ssl_sec.training.checkpoint import defect_of, save_checkpoint, save_part
from ssl_sec.training.class_sharding import HeldRows


class FakeDriver:
    """Answers every question for a checkpoint request with yes."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.was_asked = threading.Event()
        self.has_ended = False
        self.messages: list[tuple[str, str]] = []
        self.failures: dict[int, Exception] = {}  # step of a record -> the error with which its call ends
        self.call = SimpleNamespace(remote=self._call)
        self.store = SimpleNamespace(remote=lambda: None)

    def _call(self, method: str, *arguments: Any) -> Any:
        if method == "append_record":
            return self.failures.get(arguments[0]["step"])
        if method == "log_message":
            self.messages.append(arguments)
            return True
        if self.has_ended:
            raise SystemExit  # ends the thread that asks
        if method == "is_stop_requested" and method in self.asked:
            self.was_asked.set()  # for the second time: all questions of the first round have been asked
        self.asked.add(method)
        return method == "take_save_request"


def answer_at_once(monkeypatch) -> None:
    """Makes the result of a call to the driver the object itself; an exception is raised where it is fetched."""

    def get(answer):
        for each in answer if isinstance(answer, list) else [answer]:
            if isinstance(each, Exception):
                raise each
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: (calls, []))


def test_worker_0_alone_takes_a_save_request(monkeypatch, tmp_path):
    """Other workers would take the request from the driver and ignore it."""
    monkeypatch.setenv("SSL_SEC_STAGING", str(tmp_path))
    monkeypatch.setattr(channel, "_ASK_EVERY_S", 0.01)
    answer_at_once(monkeypatch)
    asked = []
    for rank in (0, 1):
        driver = FakeDriver()
        folder = WorkerFolder("memory://bucket/runs/recipe/run", rank, driver)
        assert driver.was_asked.wait(30)
        asked.append("take_save_request" in driver.asked)
        assert folder.take_save_request() == (rank == 0)
        driver.has_ended = True
        (thread,) = [each for each in threading.enumerate() if each.name == "ask-driver"]
        thread.join()
    assert asked == [True, False]


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Starts workers of a run; each call returns the driver's messages, and the steps that are uploaded."""
    monkeypatch.setenv("SSL_SEC_STAGING", str(tmp_path))
    answer_at_once(monkeypatch)
    monkeypatch.setattr(channel, "_ASK_EVERY_S", 0.01)
    drivers = []

    def start(url: str, *ranks: int) -> tuple[list[tuple[str, str]], list[str]]:
        drivers.append(driver := FakeDriver())
        for rank in ranks:
            WorkerFolder(url, rank, driver)
        files = Bucket(url).files("checkpoints")
        return driver.messages, sorted(name.split("/")[1] for name in files if name.endswith("manifest.json"))

    yield start
    for driver in drivers:
        driver.has_ended = True
    for thread in [each for each in threading.enumerate() if each.name == "ask-driver"]:
        thread.join()


def waiting_checkpoint(url: str, rank: int, holder: str, parts: bool = False) -> Path:
    """A checkpoint that a worker has not uploaded before its death."""
    output_dir, recipe, name = url.rsplit("/", 2)
    folder = local_folder(output_dir, "workers", str(rank)) / recipe / name
    waiting = folder / "checkpoints" / WAITING
    waiting.mkdir(parents=True)
    (folder / ".holder").write_text(holder)
    names = [save_part(waiting, 7, {"templates": HeldRows(torch.zeros(1, 2), 0)}).name] if parts else []
    return save_checkpoint(waiting, 7, {"weights": torch.ones(2)}, keep_last=1, parts=names)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_restarted_workers_upload_the_checkpoint_that_waited(started, ranks):
    url = f"memory://restarted-{ranks[0]}/runs/recipe/run"
    Bucket(url).write(".holder", b"the driver")
    path = waiting_checkpoint(url, 0, "the driver")
    messages, uploaded = started(url, *ranks)
    assert uploaded == ["step-000000007"]
    ((level, message),) = messages
    assert level == "INFO"
    assert message == f"uploading step-000000007, which could not be uploaded before, from {path}"
    assert not path.exists()


def test_a_worker_waits_for_storage_that_is_away_and_says_so_once(started, monkeypatch):
    url = "memory://away/runs/recipe/run"
    Bucket(url).write(".holder", b"the driver")
    monkeypatch.setattr(bucket, "ANSWER_S", 0.0)
    monkeypatch.setattr(bucket, "_LONGEST_PAUSE_S", 0.01)
    failures, read = [ConnectionError("connection refused")] * 5, MemoryFileSystem.cat_file

    def away(self, *arguments, **options):
        if failures:
            raise failures.pop()
        return read(self, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", away)
    messages, _ = started(url, 1)
    reason = f"output_dir: {url}/.holder cannot be read: connection refused"
    assert messages == [("WARNING", f"worker 1: {reason}; it is retried for up to 600 s")]
    assert failures == []


def test_a_waiting_checkpoint_of_an_earlier_driver_is_not_uploaded(started):
    url = "memory://earlier/runs/recipe/run"
    Bucket(url).write(".holder", b"the driver")
    waiting_checkpoint(url, 0, "an earlier driver")
    assert started(url, 0, 1) == ([], [])


def test_a_waiting_checkpoint_is_kept_if_it_is_not_known_which_driver_it_is_of(started):
    url = "memory://unknown/runs/recipe/run"
    Bucket(url).write(".holder", b"the driver")
    path = waiting_checkpoint(url, 0, "")
    messages, uploaded = started(url, 0, 1)
    assert uploaded == [] and not path.exists()
    ((level, message),) = messages
    assert level == "WARNING" and message.startswith("step-000000007 is not used: it was not uploaded, and it is not ")
    assert defect_of(Path(message.rpartition(" ")[2])) is None


def test_a_worker_keeps_the_word_of_its_driver_in_its_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SSL_SEC_STAGING", str(tmp_path))
    answer_at_once(monkeypatch)
    url, driver = "memory://word/runs/recipe/run", FakeDriver()
    driver.has_ended = True
    Bucket(url).write(".holder", b"the driver")
    folder = WorkerFolder(url, 0, driver)
    (folder.path / ".holder").unlink()
    folder.append_record({"step": 0})
    assert holder_of(folder.path) == "the driver"


def test_a_waiting_checkpoint_with_all_classes_of_its_only_worker_is_uploaded(started):
    url = "memory://all-classes/runs/recipe/run"
    Bucket(url).write(".holder", b"the driver")
    waiting_checkpoint(url, 0, "the driver", parts=True)
    messages, uploaded = started(url, 0)
    assert uploaded == ["step-000000007"]
    assert [level for level, _ in messages] == ["INFO"]


def test_a_waiting_checkpoint_without_the_parts_of_others_is_named(started, monkeypatch):
    monkeypatch.setattr(checkpoint, "world_size", lambda: 2)
    url = "memory://parts/runs/recipe/run"
    Bucket(url).write(".holder", b"the driver")
    waiting_checkpoint(url, 0, "the driver", parts=True)
    messages, uploaded = started(url, 0, 1)
    assert uploaded == []
    reason = "its upload was interrupted, and the parts of the other workers are missing"
    assert messages == [("WARNING", f"step-000000007 is not used: {reason}")]


def test_a_record_that_the_driver_could_not_write_is_noticed_though_later_calls_succeed(monkeypatch, tmp_path):
    monkeypatch.setenv("SSL_SEC_STAGING", str(tmp_path))
    monkeypatch.setattr(channel, "_ASK_EVERY_S", 0.01)
    answer_at_once(monkeypatch)
    ended: list[Any] = []
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: ([c for c in calls if c in ended], calls))
    driver = FakeDriver()
    folder = WorkerFolder("memory://records/runs/recipe/run", 0, driver)
    try:
        driver.failures[1] = StorageError("metrics.jsonl cannot be written: No space left on device")
        folder.append_record({"step": 0})
        folder.append_record({"step": 1})
        folder.append_record({"step": 2})
        ended.append(driver.failures[1])
        for step in (3, 4):
            with pytest.raises(StorageError, match="^metrics.jsonl cannot be written"):
                folder.append_record({"step": step})
    finally:
        driver.has_ended = True
        for thread in [each for each in threading.enumerate() if each.name == "ask-driver"]:
            thread.join()
