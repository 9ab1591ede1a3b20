import errno
import json
import threading
import time
from pathlib import Path

import pytest
import torch

from ssl_sec.edges.storage import checkpoints as module
from ssl_sec.edges.storage.bucket import Bucket, RefusedError
from ssl_sec.edges.storage.checkpoints import CheckpointUpload, Workers, download_checkpoint, whole_checkpoints
from ssl_sec.errors import StorageError
from ssl_sec.training.checkpoint import load_checkpoint, save_checkpoint, save_part
from ssl_sec.training.class_sharding import HeldRows

ALONE = Workers(rank=0, world_size=1, start="start")
CPU = torch.device("cpu")


def saved(folder: Path, step: int, score: float | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    return save_checkpoint(folder, step, {"weights": torch.full((5,), float(step))}, keep_last=99, score=score)


def restored(bucket: Bucket, name: str, folder: Path) -> dict:
    assert download_checkpoint(bucket, name, folder) is None
    return load_checkpoint(folder / name, CPU, None)


def no_links(self: Path, target: Path) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("has_links", [True, False])
def test_a_checkpoint_round_trips(bucket: Bucket, tmp_path: Path, monkeypatch, has_links: bool):
    if not has_links:
        monkeypatch.setattr(Path, "hardlink_to", no_links)
    upload = CheckpointUpload(bucket, ALONE, keep_last=2)
    upload.offer(saved(tmp_path / "here", 4))
    upload.close()
    assert whole_checkpoints(bucket.files()) == ["step-000000004"]
    assert torch.equal(restored(bucket, "step-000000004", tmp_path / "there")["weights"], torch.full((5,), 4.0))
    assert not any((tmp_path / "here" / module.WAITING).iterdir())


def test_the_metrics_are_uploaded_before_the_manifest(bucket: Bucket, tmp_path: Path, monkeypatch):
    written, upload, write = [], Bucket.upload, Bucket.write
    monkeypatch.setattr(Bucket, "upload", lambda self, path, name: (written.append(name), upload(self, path, name)))
    monkeypatch.setattr(Bucket, "write", lambda self, name, content: (written.append(name), write(self, name, content)))
    uploads = CheckpointUpload(bucket, ALONE, keep_last=2, on_uploaded=lambda: written.append("the figures"))
    uploads.offer(saved(tmp_path / "here", 4))
    uploads.close()
    assert written == ["step-000000004/state.pt", "the figures", "step-000000004/manifest.json"]


def test_the_newest_and_the_best_are_kept_and_partial_uploads_removed(bucket: Bucket, tmp_path: Path, monkeypatch):
    removed, remove = [], Bucket.remove
    monkeypatch.setattr(Bucket, "remove", lambda self, names: (removed.extend(names), remove(self, names)))
    bucket.write("step-000000003/state.pt", b"of an upload that broke off")
    bucket.write("step-000000009/rows-000000000000.safetensors", b"of another worker that is faster")
    uploads = CheckpointUpload(bucket, ALONE, keep_last=2)
    for step, score in ((2, 70.0), (4, 50.0), (5, None), (6, 60.0), (7, 70.0), (8, None)):
        uploads.offer(saved(tmp_path / "here", step, score))
        while uploads._waiting:  # one after the other, so that none is skipped
            uploads.check()
            time.sleep(0.001)
    uploads.close()
    assert whole_checkpoints(bucket.files()) == ["step-000000007", "step-000000008"]
    assert {name.partition("/")[0] for name in bucket.files()} == {"step-000000007", "step-000000008", "step-000000009"}
    for step in (2, 4, 5, 6):  # without its manifest, a checkpoint is absent
        files = [f"step-{step:09d}/{name}" for name in ("manifest.json", "state.pt")]
        assert [name for name in removed if name in files] == files


def hold_uploads(monkeypatch) -> tuple[threading.Event, list[str]]:
    """Holds uploads until an event; they are noted when they begin."""
    may_upload, uploaded, upload = threading.Event(), [], Bucket.upload

    def slow(self, path, name):
        may_upload.wait(30)
        uploaded.append(name)
        upload(self, path, name)

    monkeypatch.setattr(Bucket, "upload", slow)
    return may_upload, uploaded


def test_checkpoints_in_between_are_skipped_but_for_the_best(bucket: Bucket, tmp_path: Path, monkeypatch):
    may_upload, uploaded = hold_uploads(monkeypatch)
    uploads = CheckpointUpload(bucket, ALONE, keep_last=9)
    for step, score in ((1, 1.0), (2, 2.0), (3, 9.0), (4, 3.0), (5, None), (6, None)):
        uploads.offer(saved(tmp_path / "here", step, score))  # it does not wait
    may_upload.set()
    uploads.close()
    assert uploaded == [f"step-{step:09d}/state.pt" for step in (1, 3, 6)]


def test_a_checkpoint_is_kept_locally_until_it_is_uploaded(bucket: Bucket, tmp_path: Path, monkeypatch):
    may_upload, _ = hold_uploads(monkeypatch)
    uploads = CheckpointUpload(bucket, ALONE, keep_last=1)
    path = saved(tmp_path / "here", 1)
    uploads.offer(path)
    for file in path.iterdir():
        file.unlink()
    may_upload.set()
    uploads.close()
    assert torch.equal(restored(bucket, path.name, tmp_path / "there")["weights"], torch.ones(5))


def test_storage_gets_the_checkpoint_after_an_outage(bucket: Bucket, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    failures, upload = [StorageError("away")] * 3, Bucket.upload

    def away(self, path, name):
        if failures:
            raise failures.pop()
        upload(self, path, name)

    monkeypatch.setattr(Bucket, "upload", away)
    uploads = CheckpointUpload(bucket, ALONE, keep_last=1)
    uploads.offer(saved(tmp_path / "here", 1))
    uploads.close()
    assert whole_checkpoints(bucket.files()) == ["step-000000001"]


@pytest.mark.parametrize(
    ("error", "patience_s"), [(RefusedError("it is full"), 1e9), (StorageError("it is full"), 0.0)]
)
def test_a_refused_upload_or_a_lasting_outage_ends_the_run(
    bucket: Bucket, tmp_path: Path, monkeypatch, error, patience_s
):
    def refuse(self, path, name):
        raise error

    monkeypatch.setattr(module, "_END_WITHIN_S", patience_s)
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)
    monkeypatch.setattr(Bucket, "upload", refuse)
    uploads = CheckpointUpload(bucket, ALONE, keep_last=1)
    uploads.offer(saved(tmp_path / "here", 1))
    with pytest.raises(StorageError, match="step-000000001 .*: it is full; it is in .*/.uploads/step-000000001 on "):
        uploads.close()
    with pytest.raises(StorageError, match="it is full"):
        uploads.offer(saved(tmp_path / "here", 2))


def test_parts_of_checkpoints_that_worker_0_skips_are_not_uploaded(bucket: Bucket, tmp_path: Path, monkeypatch):
    may_upload, uploaded = hold_uploads(monkeypatch)
    monkeypatch.setattr(module, "_ASKED_EVERY_S", 0.01)
    uploads = [CheckpointUpload(bucket, Workers(rank=rank, world_size=2, start="now"), keep_last=9) for rank in (0, 1)]
    for step in range(1, 7):
        rows = {'["templates"]': HeldRows(torch.zeros(3, 2), 0)}, {'["templates"]': HeldRows(torch.ones(3, 2), 3)}
        uploads[1].offer_part(step, save_part(tmp_path / "1", step, rows[1]))
        parts = [save_part(tmp_path / "0", step, rows[0]).name]
        uploads[0].offer(save_checkpoint(tmp_path / "0", step, {"num_classes": 6}, keep_last=9, parts=parts))
    may_upload.set()
    for each in uploads:
        each.close()
    assert whole_checkpoints(bucket.files()) == ["step-000000001", "step-000000006"]
    parts = [name for name in uploaded if name.endswith("rows-000000000003.safetensors")]
    assert [name.partition("/")[0] for name in parts] == ["step-000000001", "step-000000006"]
    assert not list((tmp_path / "1").rglob("*.safetensors"))


def test_the_parts_of_all_workers_make_one_checkpoint(bucket: Bucket, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "_ASKED_EVERY_S", 0.01)
    rows = torch.arange(12.0).reshape(6, 2)
    uploads = [CheckpointUpload(bucket, Workers(rank=rank, world_size=2, start="now"), keep_last=1) for rank in (0, 1)]
    bucket.write("step-000000001/.part-before-1", b'{"name": "stale", "file": {}}')  # of a start that crashed
    for rank in (1, 0):
        folder = tmp_path / str(rank)  # each worker has its own
        part = save_part(folder, 1, {'["templates"]': HeldRows(rows[3 * rank : 3 * rank + 3], 3 * rank)})
        if rank:
            uploads[1].offer_part(1, part)
        else:
            uploads[0].offer(save_checkpoint(folder, 1, {"num_classes": 6}, keep_last=1, parts=[part.name]))
    for each in uploads:
        each.close()
    assert sorted(bucket.files()) == [
        "step-000000001/manifest.json",
        "step-000000001/rows-000000000000.safetensors",
        "step-000000001/rows-000000000003.safetensors",
        "step-000000001/state.pt",
    ]
    assert download_checkpoint(bucket, "step-000000001", tmp_path / "there") is None
    state = load_checkpoint(tmp_path / "there" / "step-000000001", CPU, slice(1, 5))
    assert torch.equal(state["templates"], rows[1:5])
    assert not list((tmp_path / "1").rglob("*.safetensors"))


def test_an_outage_after_the_manifest_does_not_ask_for_the_parts_again(bucket: Bucket, tmp_path: Path, monkeypatch):
    """The other workers have removed theirs by then."""
    remove, outages = Bucket.remove, [StorageError("away")]

    def breaks_off(self, names):
        remove(self, names)
        if outages and any(".part-" in name for name in names):
            raise outages.pop()

    monkeypatch.setattr(Bucket, "remove", breaks_off)
    monkeypatch.setattr(module, "_ASKED_EVERY_S", 0.01)
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(module, "_PARTS_WITHIN_S", 1.0)
    uploads = [CheckpointUpload(bucket, Workers(rank=rank, world_size=2, start="now"), keep_last=1) for rank in (0, 1)]
    own, other = (
        save_part(tmp_path / str(rank), 1, {'["templates"]': HeldRows(torch.zeros(3, 2), 3 * rank)}) for rank in (0, 1)
    )
    uploads[1].offer_part(1, other)
    uploads[0].offer(save_checkpoint(tmp_path / "0", 1, {"num_classes": 6}, keep_last=1, parts=[own.name]))
    for each in reversed(uploads):
        each.close()
    assert not outages
    assert download_checkpoint(bucket, "step-000000001", tmp_path / "there") is None
    assert len(bucket.files()) == 4


def test_a_missing_part_is_named(bucket: Bucket, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "_PARTS_WITHIN_S", 0.0)
    uploads = CheckpointUpload(bucket, Workers(rank=0, world_size=2, start="now"), keep_last=1)
    part = save_part(tmp_path / "here", 1, {'["templates"]': HeldRows(torch.zeros(3, 2), 0)})
    uploads.offer(save_checkpoint(tmp_path / "here", 1, {"num_classes": 6}, keep_last=1, parts=[part.name]))
    message = "worker 1 has not uploaded its part; the part of worker 0 is in .*/.uploads/step-000000001 on "
    with pytest.raises(StorageError, match=message):
        uploads.close()
    assert whole_checkpoints(bucket.files()) == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda bucket: bucket.write("step-000000001/state.pt", b"short"), "state.pt has 5 bytes instead of"),
        (lambda bucket: bucket.remove(["step-000000001/state.pt"]), "state.pt is missing"),
        (lambda bucket: bucket.remove(["step-000000001/manifest.json"]), "no manifest"),
        (lambda bucket: bucket.write("step-000000001/manifest.json", b"{"), "unreadable manifest"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_the_reason(bucket: Bucket, tmp_path: Path, damage, reason):
    uploads = CheckpointUpload(bucket, ALONE, keep_last=1)
    uploads.offer(saved(tmp_path / "here", 1))
    uploads.close()
    damage(bucket)
    assert (download_checkpoint(bucket, "step-000000001", tmp_path / "there") or "").startswith(reason)


def test_a_local_checkpoint_is_not_downloaded_again(bucket: Bucket, tmp_path: Path, monkeypatch):
    uploads = CheckpointUpload(bucket, ALONE, keep_last=1)
    uploads.offer(saved(tmp_path / "here", 1))
    uploads.close()
    assert download_checkpoint(bucket, "step-000000001", tmp_path / "there") is None
    downloads = []
    download = Bucket.download
    monkeypatch.setattr(
        Bucket, "download", lambda self, name, path: (downloads.append(name), download(self, name, path))
    )
    assert download_checkpoint(bucket, "step-000000001", tmp_path / "there") is None
    assert downloads == []
    manifest = json.loads(bucket.read("step-000000001/manifest.json") or b"")
    bucket.write("step-000000001/manifest.json", json.dumps({**manifest, "score": 1.0}).encode())  # another one now
    assert download_checkpoint(bucket, "step-000000001", tmp_path / "there") is None
    assert downloads == ["step-000000001/state.pt"]
