"""Files that are replaced whole, or not at all."""

import errno
import fcntl
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssl_sec import files
from ssl_sec.files import locked, replace_text, replaced


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


def test_a_file_system_with_one_mode_for_all_files_is_no_error(tmp_path, monkeypatch):
    def chmod(path, mode, **options):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chmod", chmod)
    with replaced(tmp_path / "weights.safetensors") as temporary:
        save_file({"weight": torch.ones(1)}, temporary)
    assert load_file(tmp_path / "weights.safetensors")["weight"] == 1


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
