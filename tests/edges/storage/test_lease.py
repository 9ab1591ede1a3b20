import json
import os
import threading
import time

import pytest

from ssl_sec.edges.storage import lease as module
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.lease import Lease
from ssl_sec.errors import ConfigError, StorageError


@pytest.fixture(autouse=True)
def takes_no_time(monkeypatch):
    monkeypatch.setattr(module, "_SETTLES_S", 0.0)


def held_by(bucket: Bucket, **changed) -> None:
    about = {"token": "other", "host": "elsewhere", "pid": 7, "since": "noon", "expires": 4e9}
    bucket.write(".lease", json.dumps({**about, **changed}).encode())


def test_a_run_has_one_lease_at_a_time(bucket: Bucket):
    lease = Lease(bucket, lambda: None)
    with pytest.raises(ConfigError, match=rf"run_name: {bucket.url} is in use: process {os.getpid()} on .* runs it"):
        Lease(bucket, lambda: None)
    lease.release()
    assert bucket.files() == {}
    Lease(bucket, lambda: None).release()


@pytest.mark.parametrize("changed", [{"expires": 0.0}, {"machine": module.this_machine(), "pid": 2**22 + 1}])
def test_a_lease_that_expired_or_of_a_dead_local_process_is_taken_over(bucket: Bucket, changed):
    held_by(bucket, **changed)
    lease = Lease(bucket, lambda: None)
    assert json.loads(bucket.read(".lease") or b"")["pid"] == os.getpid()
    lease.release()


def test_process_ids_of_another_container_are_ignored(bucket: Bucket):
    """The other host may have the same name."""
    held_by(bucket, host=module.socket.gethostname(), machine="boot 4026531836", pid=2**22 + 1)
    with pytest.raises(ConfigError, match="is in use"):
        Lease(bucket, lambda: None)


def test_the_lease_of_a_live_process_of_another_user_is_kept(bucket: Bucket, monkeypatch):
    def refuse(pid, number):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(module.os, "kill", refuse)
    held_by(bucket, machine=module.this_machine())
    with pytest.raises(ConfigError, match="is in use"):
        Lease(bucket, lambda: None)


def test_storage_without_conditional_writes_keeps_the_lease_of_a_live_process(bucket: Bucket, monkeypatch):
    def create(self, name, content):
        self.write(name, content)
        return True

    monkeypatch.setattr(Bucket, "create", create)
    lease = Lease(bucket, lambda: None)
    with pytest.raises(ConfigError, match="is in use"):
        Lease(bucket, lambda: None)
    lease.release()
    assert bucket.files() == {}


def test_a_lease_that_is_not_renewed_is_waited_for(bucket: Bucket, monkeypatch, caplog):
    clock = time.time()
    monkeypatch.setattr(module.time, "time", lambda: clock)

    def sleep(seconds):
        nonlocal clock
        clock += seconds

    monkeypatch.setattr(module.time, "sleep", sleep)
    held_by(bucket, expires=clock + 60)
    with caplog.at_level("INFO"):
        Lease(bucket, lambda: None, waits=True).release()
    assert "is in use by process 7 on elsewhere; if that was killed, the run resumes in at most 60 s" in caplog.text

    def renewed(seconds):
        sleep(seconds)
        held_by(bucket, expires=clock + 300)

    monkeypatch.setattr(module.time, "sleep", renewed)
    held_by(bucket, expires=clock + 60)
    with pytest.raises(ConfigError, match="is in use"):
        Lease(bucket, lambda: None, waits=True)


def test_a_lease_of_a_machine_whose_clock_is_ahead_is_waited_for_as_long_as_a_lease_lasts(bucket: Bucket, monkeypatch):
    waited = 0.0

    def sleep(seconds):
        nonlocal waited
        waited += seconds
        assert waited < 2 * module._LASTS_S

    monkeypatch.setattr(module.time, "monotonic", lambda: waited)
    monkeypatch.setattr(module.time, "sleep", sleep)
    held_by(bucket, expires=4e9)
    Lease(bucket, lambda: None, waits=True).release()
    assert waited == pytest.approx(module._LASTS_S, abs=2 * module._LOOKS_EVERY_S)


def test_a_file_that_is_no_lease_is_taken_over(bucket: Bucket):
    bucket.write(".lease", b"\xff{")
    Lease(bucket, lambda: None).release()


def test_only_one_of_two_takes_over_a_lease(bucket: Bucket, monkeypatch):
    held_by(bucket, expires=0.0)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: held_by(bucket))  # the other one writes last
    with pytest.raises(ConfigError, match="was taken by another process at the same time"):
        Lease(bucket, lambda: None)


def test_a_lease_is_renewed_even_after_an_outage_and_its_loss_is_reported(bucket: Bucket, monkeypatch):
    monkeypatch.setattr(module, "_RENEWED_EVERY_S", 0.01)
    lost, renewed, write, read = threading.Event(), threading.Event(), Bucket.write, Bucket.read
    outage = [StorageError("away")]

    def noticing(self, name, content):
        write(self, name, content)
        renewed.set()

    def away_once(self, name):
        if outage and threading.current_thread().name == "lease":
            raise outage.pop()
        return read(self, name)

    lease = Lease(bucket, lost.set)
    before = json.loads(bucket.read(".lease") or b"")["expires"]
    monkeypatch.setattr(Bucket, "read", away_once)
    while outage and not lost.wait(0.001):
        pass
    monkeypatch.setattr(Bucket, "write", noticing)
    assert renewed.wait(30)
    assert json.loads(bucket.read(".lease") or b"")["expires"] > before
    assert not lost.is_set()
    held_by(bucket)
    while not lost.wait(0.01):  # a renewal that had begun may come after the other's
        if json.loads(bucket.read(".lease") or b"")["token"] != "other":
            held_by(bucket)
    lease.release()
    assert json.loads(bucket.read(".lease") or b"")["token"] == "other"
