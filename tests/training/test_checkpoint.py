import builtins
import errno
import json
import os
import resource
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.errors import StorageError
from ssl_sec.training import checkpoint, resuming, visibility
from ssl_sec.training.checkpoint import (
    CheckpointWriter,
    best_of,
    file_sha256,
    load_checkpoint,
    save_checkpoint,
    save_part,
)
from ssl_sec.training.class_sharding import HeldRows
from ssl_sec.training.resuming import Found, agreed_checkpoint
from tests.workers import on_workers

CPU = torch.device("cpu")


def state(value=1.0):
    return {
        "step": 7,
        "encoder": {"weight": torch.full((50,), value), "mu": torch.tensor(value, dtype=torch.float64)},
        "optimiser": {"state": {0: {"momentum": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }


def names(folder):
    return sorted(os.listdir(folder))


def test_a_saved_state_can_be_loaded(tmp_path):
    path = save_checkpoint(tmp_path / "checkpoints", 7, state(), keep_last=2)
    assert path == tmp_path / "checkpoints" / "step-000000007"
    assert names(path) == ["manifest.json", "state.pt"]
    found = agreed_checkpoint(tmp_path / "checkpoints")
    assert (found.path, found.skipped) == (path, ())
    torch.testing.assert_close(load_checkpoint(path, CPU), state(), rtol=0, atol=0)
    assert load_checkpoint(path, torch.device("meta"))["encoder"]["weight"].device.type == "meta"


def test_the_manifest_states_size_and_hash(tmp_path):
    path = save_checkpoint(tmp_path, 7, state(), keep_last=1)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 7
    assert manifest["files"]["state.pt"]["bytes"] == (path / "state.pt").stat().st_size
    assert len(manifest["files"]["state.pt"]["sha256"]) == 64


@pytest.mark.parametrize("folder", ["", "none"])
def test_a_folder_without_checkpoints_has_none(tmp_path, folder):
    found = agreed_checkpoint(tmp_path / folder)
    assert found.path is None and found.skipped == ()


def test_the_newest_is_found_by_its_step(tmp_path):
    for step in (9, 10, 100, 2):
        save_checkpoint(tmp_path, step, state(), keep_last=9)
    assert agreed_checkpoint(tmp_path).path.name == "step-000000100"


@pytest.mark.parametrize("keep_last", [1, 2, 5])
def test_only_the_last_ones_stay(tmp_path, keep_last):
    for step in range(1, 5):
        save_checkpoint(tmp_path, step, state(step), keep_last)
    assert names(tmp_path) == [f"step-{step:09}" for step in range(max(1, 5 - keep_last), 5)]


def truncate(path):
    os.truncate(path / "state.pt", 100)


def flip(path):
    content = bytearray((path / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "state.pt").write_bytes(content)


def rewrite_manifest(text):
    return lambda path: (path / "manifest.json").write_text(text)


def replace_by_a_file(path):
    for name in names(path):
        (path / name).unlink()
    path.rmdir()
    path.write_text("torn")


DAMAGES = [
    (truncate, r"state.pt has 100 bytes instead of \d+"),
    (flip, "state.pt does not match its hash"),
    (lambda path: (path / "state.pt").unlink(), "state.pt is missing"),
    (lambda path: (path / "manifest.json").unlink(), "no manifest"),
    (rewrite_manifest(""), "unreadable manifest"),
    (rewrite_manifest('{"step": 3, "fil'), "unreadable manifest"),
    (rewrite_manifest("[]"), "unreadable manifest"),
    (rewrite_manifest("{}"), "unreadable manifest"),
    (rewrite_manifest('{"files": {}}'), "unreadable manifest"),
    (rewrite_manifest('{"files": [3]}'), "unreadable manifest"),
    (rewrite_manifest('{"files": {"state.pt": {"bytes": 3}}}'), "unreadable manifest"),
    (replace_by_a_file, "unreadable manifest"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_torn_checkpoint_is_skipped_and_named(tmp_path, damage, reason):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, state(step), keep_last=3)
    damage(tmp_path / "step-000000003")
    found = agreed_checkpoint(tmp_path)
    assert found.path == tmp_path / "step-000000002"
    (skipped,) = found.skipped
    pytest.raises(StorageError, load_checkpoint, tmp_path / "step-000000003", CPU).match(f": {reason}$")
    assert skipped.startswith("step-000000003: ")
    assert load_checkpoint(found.path, CPU)["encoder"]["mu"] == 2


def test_if_all_are_torn_they_are_named_newest_first(tmp_path):
    for step in (1, 2):
        flip(save_checkpoint(tmp_path, step, state(), keep_last=3))
    found = agreed_checkpoint(tmp_path)
    assert found.path is None
    assert [reason.split(":")[0] for reason in found.skipped] == ["step-000000002", "step-000000001"]


@given(which=st.sampled_from(["state.pt", "manifest.json"]), place=st.floats(0, 1), bit=st.integers(0, 7))
@settings(max_examples=60)
def test_a_flipped_bit_never_gives_another_state(which, place, bit):
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(Path(folder), 3, state(), keep_last=1)
        content = bytearray((path / which).read_bytes())
        content[int(place * (len(content) - 1))] ^= 1 << bit
        (path / which).write_bytes(content)
        found = agreed_checkpoint(Path(folder))
        if found.path is None:
            assert len(found.skipped) == 1
        else:
            assert which == "manifest.json"
            torch.testing.assert_close(load_checkpoint(path, CPU), state(), rtol=0, atol=0)


def test_a_torn_newer_checkpoint_does_not_displace_a_whole_one(tmp_path):
    for step in (4, 9):
        save_checkpoint(tmp_path, step, state(step), keep_last=2)
    truncate(tmp_path / "step-000000009")
    save_checkpoint(tmp_path, 5, state(5), keep_last=1)
    assert agreed_checkpoint(tmp_path).path == tmp_path / "step-000000005"


def test_a_mounted_bucket_keeps_checkpoints(tmp_path, mounted_bucket):
    for step in (3, 4, 5):
        path = save_checkpoint(tmp_path, step, state(step), keep_last=2)
        assert agreed_checkpoint(tmp_path).path == path and load_checkpoint(path, CPU)["encoder"]["mu"] == step
    assert names(tmp_path) == ["step-000000004", "step-000000005"]


def test_a_torn_checkpoint_of_the_same_step_is_replaced(tmp_path):
    truncate(save_checkpoint(tmp_path, 3, state(1), keep_last=1))
    path = save_checkpoint(tmp_path, 3, state(2), keep_last=1)
    assert load_checkpoint(path, CPU)["encoder"]["mu"] == 2


def test_a_whole_checkpoint_of_the_same_step_is_never_touched(tmp_path):
    path = save_checkpoint(tmp_path, 3, state(1), keep_last=1)
    before = (path / "state.pt").stat()
    assert save_checkpoint(tmp_path, 3, state(1), keep_last=1) == path
    after = (path / "state.pt").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_the_best_stays_beside_the_last_ones(tmp_path):
    scores = {1: 50.0, 2: 80.0, 3: None, 4: 70.0, 5: None, 6: 80.0, 7: None, 8: 60.0}
    kept = []
    for step, score in scores.items():
        save_checkpoint(tmp_path, step, state(step), keep_last=1, score=score)
        kept.append([int(name.removeprefix("step-")) for name in names(tmp_path)])
    assert kept == [[1], [2], [2, 3], [2, 4], [2, 5], [6], [6, 7], [6, 8]]


def test_a_best_checkpoint_with_a_torn_manifest_is_not_kept(tmp_path):
    save_checkpoint(tmp_path, 1, state(1), keep_last=1, score=90.0)
    (tmp_path / "step-000000001" / "manifest.json").write_text("{")
    save_checkpoint(tmp_path, 2, state(2), keep_last=1, score=10.0)
    assert names(tmp_path) == ["step-000000002"]


def test_too_little_space_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, state(1), keep_last=1)
    usage = shutil._ntuple_diskusage(total=1 << 30, used=0, free=3 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    save_checkpoint(tmp_path, 2, state(2), keep_last=2)
    monkeypatch.setattr(torch, "save", lambda *a: pytest.fail("nothing may be written"))
    large = {"weight": torch.ones(1 << 20)}
    with pytest.raises(StorageError, match="it needs 5 MiB, and 3 MiB are free$"):
        save_checkpoint(tmp_path, 3, {"model": large, "optimiser": [torch.ones(3)]}, keep_last=2)
    assert names(tmp_path) == ["step-000000001", "step-000000002"]


def test_training_can_continue_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The state at the call is saved; the call returns before anything is on the disk."""
    may_write, save = threading.Event(), torch.save
    monkeypatch.setattr(torch, "save", lambda *a: (may_write.wait(60), save(*a)))
    writer = CheckpointWriter(tmp_path, keep_last=2)
    live = state(1.0)
    writer.save(1, live, score=5.0)
    live["encoder"]["weight"] += 1
    live["optimiser"]["state"][0]["momentum"] += 1
    assert agreed_checkpoint(tmp_path).path is None
    may_write.set()
    writer.close()
    saved = load_checkpoint(agreed_checkpoint(tmp_path).path, CPU)
    torch.testing.assert_close(saved, state(1.0), rtol=0, atol=0)
    writer.save(2, live)
    writer.save(3, live)
    writer.close()
    assert names(tmp_path) == ["step-000000001", "step-000000002", "step-000000003"]


def test_a_failed_write_is_raised_once_at_the_next_call(tmp_path, monkeypatch):
    writer = CheckpointWriter(tmp_path, keep_last=2)
    monkeypatch.setattr(checkpoint, "save_checkpoint", fail_to_save)
    writer.save(1, state())
    with pytest.raises(StorageError, match="^full$"):
        writer.save(2, state())
    writer.close()
    writer.save(3, state())
    with pytest.raises(StorageError, match="^full$"):
        writer.close()


def fail_to_save(*arguments):
    raise StorageError("full")


def test_leftovers_of_a_killed_process_are_ignored_and_removed(tmp_path):
    save_checkpoint(tmp_path, 1, state(1), keep_last=3)
    for left_over in (".step-000000002.8f14e45f", ".step-000000009.1"):
        (tmp_path / left_over).mkdir()
        (tmp_path / left_over / "state.pt").write_text("half")
    found = agreed_checkpoint(tmp_path)
    assert found.path == tmp_path / "step-000000001" and found.skipped == ()
    save_checkpoint(tmp_path, 2, state(2), keep_last=3)
    assert names(tmp_path) == ["step-000000001", "step-000000002"]
    assert names(tmp_path / "step-000000002") == ["manifest.json", "state.pt"]


def test_a_process_with_the_same_number_in_another_container_is_not_disturbed(tmp_path, monkeypatch):
    theirs = tmp_path / f".step-000000002.{os.getpid()}"
    part = tmp_path / f".parts-000000002-of-1/.rows-000000000000.safetensors.{os.getpid()}"
    for path in (theirs / "theirs.pt", part):
        path.parent.mkdir()
        path.write_text("half")
    held = {'["weight"]': HeldRows(torch.ones(2, 3), 0)}
    assert save_part(tmp_path, 2, held).name == "rows-000000000000.safetensors"
    assert part.read_text() == "half"
    seen = []
    write = torch.save
    monkeypatch.setattr(torch, "save", lambda *given: seen.append(names(theirs)) or write(*given))
    save_checkpoint(tmp_path, 2, state(2), keep_last=1)
    assert seen == [["theirs.pt"]]


def fail(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


def assert_the_old_one_stays(folder, match, num_values=1):
    with pytest.raises(StorageError, match=rf"^checkpoint of step 2: cannot be written to {folder}: .*{match}.*$") as e:
        save_checkpoint(folder, 2, {**state(2), "large": torch.ones(num_values)}, keep_last=1)
    assert "\n" not in str(e.value)
    assert names(folder) == ["step-000000001"]
    assert load_checkpoint(agreed_checkpoint(folder).path, CPU)["encoder"]["mu"] == 1


@pytest.mark.parametrize(
    ("module", "name"), [(torch, "save"), (os, "fsync"), (json, "dump"), (Path, "rename"), (Path, "mkdir")]
)
def test_a_failed_write_keeps_the_old_checkpoints(tmp_path, monkeypatch, module, name):
    save_checkpoint(tmp_path, 1, state(1), keep_last=1)
    monkeypatch.setattr(module, name, fail)
    assert_the_old_one_stays(tmp_path, "No space left on device")


@pytest.mark.parametrize(("num_values", "room"), [(1, 500), (1_000_000, 100_000)])
def test_a_full_disk_keeps_the_old_checkpoints(tmp_path, num_values, room):
    """It is full while torch writes, or only when its buffers are flushed."""
    save_checkpoint(tmp_path, 1, state(1), keep_last=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        assert_the_old_one_stays(tmp_path, "File too large", num_values)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_the_manifest_is_written_after_the_state_is_on_the_disk(tmp_path, monkeypatch):
    events = []
    fsync, rename, replace, dump = os.fsync, Path.rename, os.replace, json.dump
    monkeypatch.setattr(os, "fsync", lambda number: (events.append("sync"), fsync(number)))
    monkeypatch.setattr(json, "dump", lambda *a, **k: (events.append("manifest"), dump(*a, **k)))
    monkeypatch.setattr(Path, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("replace"), replace(a, b)))
    save_checkpoint(tmp_path, 1, state(), keep_last=1)
    # The names of the files are on the disk, too, before that of the folder is.
    assert events == ["sync", "manifest", "sync", "sync", "rename", "sync"]
    events.clear()
    save_part(tmp_path, 1, {'["templates"]': HeldRows(torch.zeros(3, 2), 0)})
    assert events == ["sync", "replace", "sync"]


class Foreign:
    def __reduce__(self):
        return builtins.exec, ("raise SystemError('code ran')",)


def test_code_in_a_checkpoint_is_never_run(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"foreign": Foreign()}, keep_last=1)
    with pytest.raises(Exception, match="weights_only|Unsupported|unsupported"):
        load_checkpoint(path, CPU)


def test_a_nan_score_is_no_score():
    assert best_of({"7": float("nan"), "14": 50.0, "21": 40.0}) == "14"
    assert best_of({"7": float("nan"), "14": None}) is None


@pytest.fixture
def two_checkpoints(tmp_path, monkeypatch):
    """The folder of a worker that does not see the newest checkpoint, which the other worker has found."""
    for step in (4, 6):
        save_checkpoint(tmp_path, step, {"step": step}, keep_last=2)
    names = ["step-000000004", "step-000000006"]
    monkeypatch.setattr(resuming, "gather_objects", lambda own: [names if isinstance(own, list) else None, own])
    (tmp_path / "step-000000006").rename(tmp_path / "unseen")
    return tmp_path


def test_a_worker_that_sees_the_newest_checkpoint_late_waits_for_it(two_checkpoints):
    newest = two_checkpoints / "step-000000006"
    threading.Timer(0.3, (two_checkpoints / "unseen").rename, (newest,)).start()
    assert agreed_checkpoint(two_checkpoints).path == newest


def test_a_worker_that_never_sees_it_fails_with_its_name_and_node(two_checkpoints, monkeypatch):
    monkeypatch.setattr(visibility, "VISIBLE_WITHIN_S", 0.0)
    with pytest.raises(StorageError, match=r"step-000000006: no manifest on \S+, but whole on another node$"):
        agreed_checkpoint(two_checkpoints)


def hashed_files(folder):
    """The agreed checkpoint, and the files whose contents this worker has compared."""
    compared = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "file_sha256", lambda path: compared.append(path.name) or file_sha256(path))
        found = agreed_checkpoint(folder)
        load_checkpoint(found.path, CPU, is_whole=True)
    return found.path.name, compared


@pytest.mark.distributed
def test_the_workers_read_a_checkpoint_once_and_all_skip_one_that_is_damaged(tmp_path):
    for step in (4, 6):
        parts = [save_part(tmp_path, step, {'["rows"]': HeldRows(torch.ones(2, 3) * step, first)}) for first in (0, 2)]
        save_checkpoint(tmp_path, step, {"step": step}, keep_last=2, parts=[part.name for part in parts])
    first, second = on_workers(2, tmp_path, hashed_files, tmp_path)
    assert first == ("step-000000006", ["rows-000000000000.safetensors", "state.pt"])
    assert second == ("step-000000006", ["rows-000000000002.safetensors"])
    part = tmp_path / "step-000000006" / "rows-000000000002.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"x")  # of the same size
    found = [name for name, _ in on_workers(2, tmp_path, hashed_files, tmp_path)]
    assert found == ["step-000000004", "step-000000004"]


def test_without_checkpoints_all_agree_on_none(tmp_path):
    assert agreed_checkpoint(tmp_path) == Found(path=None, skipped=())
