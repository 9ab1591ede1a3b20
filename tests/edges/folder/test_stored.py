"""What a resume of a run in object storage takes from there and from the folder of an earlier process; its removal."""

import atexit
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ssl_sec.edges.folder.stored import StoredFolder, open_folder
from ssl_sec.edges.run.running import _lock_path, remove_staged, running
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.checkpoints import WAITING
from ssl_sec.edges.storage.holder import HOLDER, holder_of
from ssl_sec.edges.storage.places import local_folder, split_url
from ssl_sec.errors import Stopped, StorageError
from ssl_sec.training.checkpoint import defect_of, save_checkpoint
from tests.workers import on_workers

NEWEST = "step-000000020"


def resumed_step(url: str, staging: str, num_damaged: int) -> int | str:
    """The step that this worker resumes from, or its error; the first downloads of worker 1 are damaged."""
    rank, left = dist.get_rank(), [num_damaged]
    download = Bucket.download

    def damaging(self: Bucket, name: str, path: Path) -> None:
        download(self, name, path)
        if rank == 1 and name.startswith(NEWEST) and left[0] > 0:
            left[0] -= 1
            path.write_bytes(path.read_bytes()[:-10])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_SEC_STAGING", f"{staging}/{rank}")
        patch.setattr(Bucket, "download", damaging)
        output_dir, recipe, name = split_url(url)
        folder = StoredFolder(local_folder(output_dir) / recipe / name, Bucket(url))
        try:
            return folder.restored_state(torch.device("cpu"))["step"]
        except StorageError as error:
            return str(error)


def resumed_step_and_warnings(url: str, staging: str) -> tuple[int | str, list[str]]:
    """The step that this worker resumes from, and what it warns of."""
    warnings: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        warn = lambda message, *values: warnings.append(message % values)  # noqa: E731
        patch.setattr("ssl_sec.edges.folder.folder.logger.warning", warn)
        return resumed_step(url, staging, 0), warnings


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A run in object storage with two checkpoints."""
    checkpoints = tmp_path / "bucket" / "runs" / "digits" / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for step in (10, 20):
        save_checkpoint(checkpoints, step, {"step": step, "weights": torch.zeros(3)}, keep_last=2)
    return f"local://{checkpoints.parent}"


def test_a_damaged_download_is_repeated_so_that_all_workers_resume_from_one_step(url, tmp_path):
    assert on_workers(2, tmp_path, resumed_step, url, str(tmp_path / "staging"), 1) == [20, 20]


def test_a_checkpoint_that_one_worker_cannot_download_stops_all(url, tmp_path):
    first, second = on_workers(2, tmp_path, resumed_step, url, str(tmp_path / "staging"), 9)
    assert first == second
    assert first.startswith(f"checkpoint {NEWEST}: state.pt has ")
    assert first.endswith(" on worker 1, but whole on another one")


def test_a_checkpoint_that_is_damaged_in_the_storage_is_skipped_by_all_and_named_once(url, tmp_path):
    state = Path(url.removeprefix("local://")) / "checkpoints" / NEWEST / "state.pt"
    state.write_bytes(state.read_bytes()[:-10])
    first, second = on_workers(2, tmp_path, resumed_step_and_warnings, url, str(tmp_path / "staging"))
    assert (first[0], second) == (10, (10, []))
    (warning,) = first[1]
    assert warning.startswith(f"skipped an incomplete checkpoint: {NEWEST}: state.pt has ")


@pytest.fixture
def left(url, tmp_path, monkeypatch) -> StoredFolder:
    """The folder of a process that was killed while it held the run, with a checkpoint that waits for its upload."""
    monkeypatch.setenv("SSL_SEC_STAGING", str(tmp_path / "staging"))
    output_dir, recipe, name = split_url(url)
    Bucket(url).write("config.yaml", b"recipe: digits")
    folder = open_folder(local_folder(output_dir) / recipe / name)
    assert isinstance(folder, StoredFolder)
    with folder.held():
        word = holder_of(folder.path)
        (folder.checkpoints_path / WAITING).mkdir(parents=True)
        save_checkpoint(folder.checkpoints_path / WAITING, 30, {"step": 30}, keep_last=1)
    (folder.path / HOLDER).write_text(word)
    return folder


def test_a_file_that_is_missing_where_a_killed_process_ran_is_restored(left, url):
    Path(url.removeprefix("local://"), "checkpoints", "step-000000030").mkdir()
    left.config_path.unlink()
    with left.held():
        assert left.config_path.read_text() == "recipe: digits"
        assert left.checkpoint_names()[-1] == "step-000000030"
    assert Bucket(url).read("config.yaml") == b"recipe: digits"


@pytest.mark.parametrize("missing", ["here", "in the bucket"])
def test_a_checkpoint_that_may_be_the_newest_is_kept_and_named(missing, left, url, caplog):
    (left.path / HOLDER).unlink() if missing == "here" else Bucket(url).remove([HOLDER])
    with left.held():
        assert left.checkpoint_names()[-1] == NEWEST
    (message,) = [text for text in caplog.messages if "step-000000030" in text]
    assert "it is not known whether another process has held the run since; it is kept in " in message
    kept = Path(message.rpartition(" ")[2])
    assert defect_of(kept) is None
    with left.held():  # a second resume leaves it there
        left.write_outcome("finished")
    assert not kept.exists()  # of no use once the run is complete


def test_a_checkpoint_is_not_kept_if_another_process_has_held_the_run_since(left, url, caplog):
    Bucket(url).write(HOLDER, b"another process")
    with left.held():
        assert not left.checkpoints_path.exists() and left.checkpoint_names()[-1] == NEWEST
    assert "another process has held the run since" in caplog.text and "it is kept in" not in caplog.text


@pytest.fixture
def staged(tmp_path: Path, monkeypatch) -> StoredFolder:
    """The folder of a run in object storage, before its process has started."""
    monkeypatch.setenv("SSL_SEC_STAGING", str(tmp_path))
    url = f"memory://{tmp_path.name}/runs"
    folder = open_folder(local_folder(url) / "recipe" / "run")
    assert isinstance(folder, StoredFolder)
    return folder


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_folder_of_a_run_that_is_stored_is_removed_at_the_end_of_its_process(staged, monkeypatch, is_stopped):
    at_end = []
    monkeypatch.setattr(atexit, "register", lambda call, *arguments: at_end.append(lambda: call(*arguments)))
    try:
        with running(staged), staged.held():
            staged.start({"epochs": 3})
            remove_staged(staged)  # not while a process holds the run
            if is_stopped:
                raise Stopped
    except Stopped:
        assert is_stopped
    assert staged.config_path.exists()  # for what follows in the process
    at_end[0]()
    assert not staged.path.exists() and not list(staged.path.parent.parent.glob(".running"))
    assert Bucket(staged.location).read("config.yaml") is not None
    staged.refresh()
    assert staged.holds_run


@pytest.mark.parametrize("needed_for", ["an upload", "a checkpoint", "another process", "a later job"])
def test_a_folder_that_is_still_needed_is_not_removed(staged, needed_for):
    with staged.held():
        staged.start({"epochs": 3})
    if needed_for == "an upload":
        (staged.path / ".holder").write_text("word")
    elif needed_for == "a checkpoint":
        (staged.checkpoints_path / ".uploads" / "step-000000010").mkdir(parents=True)
    elif needed_for == "another process":
        with running(staged):
            remove_staged(staged)
            assert staged.holds_run
        return
    else:
        lock = _lock_path(staged)
        lock.parent.mkdir()
        lock.write_text(json.dumps({"folder": str(staged.path)}))
    remove_staged(staged)
    assert staged.holds_run
