"""What workers ask the driver for, where runs are in object storage; with a fake actor."""

import threading
from types import SimpleNamespace

import ray

from ssl_sec.edges.run.on_ray import channel
from ssl_sec.edges.run.on_ray.channel import WorkerFolder


class FakeDriver:
    """Answers every question for a checkpoint request with yes."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.was_asked = threading.Event()
        self.has_ended = False
        self.call = SimpleNamespace(remote=self._call)

    def _call(self, method: str) -> bool:
        if self.has_ended:
            raise SystemExit  # ends the thread that asks
        if method == "is_stop_requested" and method in self.asked:
            self.was_asked.set()  # for the second time: all questions of the first round have been asked
        self.asked.add(method)
        return method == "take_save_request"


def test_worker_0_alone_takes_a_save_request(monkeypatch, tmp_path):
    """Other workers would take the request from the driver and ignore it."""
    monkeypatch.setenv("SSL_SEC_STAGING", str(tmp_path))
    monkeypatch.setattr(channel, "_ASK_EVERY_S", 0.01)
    monkeypatch.setattr(ray, "get", lambda answer: answer)
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
