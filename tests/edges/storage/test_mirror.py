import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ssl_sec.edges.storage import mirror as module
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.holder import holder_of
from ssl_sec.edges.storage.mirror import Mirror, download_run, upload_run, versions
from ssl_sec.errors import StorageError

NEVER_S = 1000.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run" / "plots").mkdir(parents=True)
    return tmp_path / "run"


def test_changed_files_are_uploaded_and_deleted_ones_removed(bucket: Bucket, folder: Path):
    mirror = Mirror(folder, bucket, NEVER_S)
    (folder / "metrics.jsonl").write_text("1\n")
    (folder / "error.json").write_text("{}")
    mirror.flush()
    assert bucket.files() == {"metrics.jsonl": 2, "error.json": 2}
    (folder / "metrics.jsonl").write_text("1\n2\n")
    (folder / "error.json").unlink()
    mirror.close()
    assert bucket.files() == {"metrics.jsonl": 4}


def test_a_file_that_a_cleaner_of_temporary_files_takes_is_restored(bucket: Bucket, folder: Path):
    mirror = Mirror(folder, bucket, NEVER_S)
    for name in ("config.yaml", "plots/norms.png"):
        (folder / name).write_text(name)
    mirror.flush()
    (folder / "config.yaml").unlink()
    (folder / "plots" / "norms.png").unlink()
    (folder / "plots").rmdir()
    mirror.flush()
    mirror.close()
    assert sorted(bucket.files()) == ["config.yaml", "plots/norms.png"]
    for name in ("config.yaml", "plots/norms.png"):
        assert (folder / name).read_text() == name


def test_the_holders_word_is_kept_new_and_written_again_if_a_cleaner_takes_it(bucket: Bucket, folder: Path):
    mirror = Mirror(folder, bucket, NEVER_S, holder="word")
    mirror.flush()
    os.utime(folder / ".holder", (0, 0))
    mirror.flush()
    assert (folder / ".holder").stat().st_mtime > 0
    (folder / ".holder").unlink()
    mirror.flush()
    assert holder_of(folder) == "word" and bucket.files() == {}
    mirror.close()


def test_only_changed_files_are_uploaded(bucket: Bucket, folder: Path, monkeypatch):
    (folder / "a").touch()
    mirror, uploaded = Mirror(folder, bucket, NEVER_S), []
    (folder / "b").touch()
    monkeypatch.setattr(Bucket, "upload", lambda self, path, name: uploaded.append(name))
    mirror.flush()
    mirror.close()
    assert uploaded == ["b"]  # `a` was there before, as after a download


def test_the_mark_of_a_complete_run_is_uploaded_last(bucket: Bucket, folder: Path, monkeypatch):
    (folder / "unclosed").touch()
    mirror, done = Mirror(folder, bucket, NEVER_S), []
    monkeypatch.setattr(Bucket, "upload", lambda self, path, name: done.append(name))
    monkeypatch.setattr(Bucket, "remove", lambda self, names: done.extend(names))
    for name in ("outcome", "zebra", "encoder.safetensors"):
        (folder / name).touch()
    (folder / "unclosed").unlink()
    mirror.close()
    assert done == ["encoder.safetensors", "zebra", "outcome", "unclosed"]


def test_files_of_the_machine_are_not_uploaded(folder: Path):
    for name in ("checkpoints/step-1/state.pt", "ray/x", "stop", "save", "launch", "crash-0.txt", ".temporary", "kept"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert versions(folder).keys() == {"kept"}


def test_a_removed_folder_removes_nothing_in_storage(bucket: Bucket, folder: Path):
    (folder / "metrics.jsonl").touch()
    mirror = Mirror(folder, bucket, NEVER_S)
    bucket.write("metrics.jsonl", b"")
    (folder / "metrics.jsonl").unlink()
    (folder / "plots").rmdir()
    folder.rmdir()
    mirror.close()
    assert bucket.files() == {"metrics.jsonl": 0}


def test_an_upload_that_fails_is_tried_again(bucket: Bucket, folder: Path, monkeypatch):
    mirror, upload = Mirror(folder, bucket, NEVER_S), Bucket.upload
    (folder / "a").write_text("a")

    def fail(self, path, name):
        raise StorageError("away")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="away"):
        patch.setattr(Bucket, "upload", fail)
        mirror.flush()
    assert Bucket.upload is upload
    mirror.close()
    assert bucket.files() == {"a": 1}


def test_a_mirror_uploads_in_the_background(bucket: Bucket, folder: Path, monkeypatch):
    import threading

    uploaded, upload = threading.Event(), Bucket.upload

    def noticing(self, path, name):
        upload(self, path, name)
        uploaded.set()

    monkeypatch.setattr(Bucket, "upload", noticing)
    mirror = Mirror(folder, bucket, interval_s=0.01)
    (folder / "a").write_text("a")
    assert uploaded.wait(30)
    mirror.abandon()
    (folder / "b").touch()
    mirror.close()
    assert bucket.files() == {"a": 1}  # nothing after it was abandoned


def test_uploads_take_a_tenth_of_the_time_at_most(bucket: Bucket, folder: Path, monkeypatch):
    mirror, seconds, waits, flushes = Mirror(folder, bucket, interval_s=None), 0.0, [], iter([0.1, 3.0, 0.2])
    mirror._interval_s = 5.0

    def flush():
        nonlocal seconds
        seconds += next(flushes)

    def wait(wait_s):
        waits.append(wait_s)
        return len(waits) > 3

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: seconds))
    monkeypatch.setattr(mirror, "flush", flush)
    monkeypatch.setattr(mirror._ended, "wait", wait)
    mirror._follow()
    assert waits == pytest.approx([5.0, 5.0, 30.0, 5.0])


def test_a_download_makes_the_folder_like_that_in_storage(bucket: Bucket, folder: Path):
    (folder / "plots" / "stale.png").touch()
    (folder / "stop").touch()
    for name in ("config.yaml", "plots/norms.png", "checkpoints/step-000000001/state.pt", ".lease"):
        bucket.write(name, name.encode())
    download_run(bucket, folder)
    assert versions(folder).keys() == {"config.yaml", "plots/norms.png"}
    assert (folder / "plots" / "norms.png").read_text() == "plots/norms.png"
    assert (folder / "stop").exists() and not (folder / "checkpoints").exists()


def test_files_that_are_missing_after_a_crash_stay_in_storage_unless_a_run_removes_them(bucket: Bucket, folder: Path):
    for name in ("config.yaml", "plots/norms.png", "error.json", "outcome"):
        bucket.write(name, b"")
    (folder / "metrics.jsonl").write_text("1\n")
    upload_run(folder, bucket)
    assert sorted(bucket.files()) == ["config.yaml", "metrics.jsonl", "plots/norms.png"]
