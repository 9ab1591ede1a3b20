"""Files that are replaced whole, or not at all."""

import errno
import fcntl
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssl_sec import files
from ssl_sec.files import locked, rename_folder, replace_text, replaced, sync_path


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path, sync):
    path = tmp_path / "figures.csv"
    path.write_text("old")
    with replaced(path, sync) as temporary:
        temporary.write_text("new")
        assert temporary.parent == tmp_path and path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["figures.csv"]


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_an_error_leaves_the_old_file(tmp_path, error):
    replace_text(tmp_path / "figures.csv", "old")
    with pytest.raises(type(error)), replaced(tmp_path / "figures.csv") as temporary:
        temporary.write_text("half")
        raise error
    assert (tmp_path / "figures.csv").read_text() == "old" and os.listdir(tmp_path) == ["figures.csv"]


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_others_may_read_a_file_as_any_other_new_one(tmp_path, mask):
    """Also one of safetensors, which gives its files no rights of others."""
    before = os.umask(mask)
    try:
        (tmp_path / "usual").write_text("")
        with replaced(tmp_path / "weights.safetensors") as temporary:
            save_file({"weight": torch.zeros(1)}, temporary)
    finally:
        os.umask(before)
    assert (tmp_path / "weights.safetensors").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_mounted_bucket_takes_files_and_folders(tmp_path, mounted_bucket):
    with replaced(tmp_path / "weights.safetensors") as temporary:
        save_file({"weight": torch.ones(1)}, temporary)
    assert load_file(tmp_path / "weights.safetensors")["weight"] == 1
    (tmp_path / "made").mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / "made" / name).write_text(name)
    rename_folder(tmp_path / "made", tmp_path / "final")
    assert [path.read_text() for path in sorted((tmp_path / "final").iterdir())] == ["a.txt", "b.txt", "c.txt"]
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_the_files_of_a_folder_that_cannot_be_moved_stay(tmp_path, mounted_bucket, monkeypatch, error):
    """The file that makes it whole is moved after the others."""
    (tmp_path / "made").mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / "made" / name).write_text(name)
    moved, rename = [], os.rename

    def interrupted(path, to):
        if os.path.basename(to) == "a.txt" and to.parent.name == "final":
            raise error
        rename(path, to)
        moved.append(to.name)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(type(error)):
        rename_folder(tmp_path / "made", tmp_path / "final", last="a.txt")
    assert sorted(moved[:2]) == ["b.txt", "c.txt"]
    assert sorted(os.listdir(tmp_path / "made")) == ["a.txt", "b.txt", "c.txt"] and os.listdir(tmp_path) == ["made"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_other_errors_of_a_folder_are_raised(tmp_path, monkeypatch, code):
    def fails(*paths):
        raise OSError(code, os.strerror(code))

    (tmp_path / "made").mkdir()
    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match=re.escape(os.strerror(code))):
        rename_folder(tmp_path / "made", tmp_path / "final")
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=re.escape(os.strerror(code))):
        sync_path(tmp_path)
    assert os.listdir(tmp_path) == ["made"]


def test_two_that_write_a_file_at_once_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "figures.csv"
    with replaced(path) as first:
        first.write_text("first")
        with replaced(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["figures.csv"]


def test_a_locked_block_runs_alone(tmp_path):
    with (tmp_path / "lock").open("w") as other:
        with locked(tmp_path / "lock"), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_content_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(files, "sync_path", lambda path: done.append(path.is_dir()))
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("rename"), rename(*paths)))
    replace_text(tmp_path / "figures.csv", "é")
    assert done == [False, "rename", True]
    assert (tmp_path / "figures.csv").read_bytes() == "é".encode()
