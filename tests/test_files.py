"""Files that are replaced whole, or not at all."""

import os

import pytest

from ssl_sec import files
from ssl_sec.files import replace_text, replaced


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


def test_the_content_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(files, "sync_path", lambda path: done.append(path.is_dir()))
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("rename"), rename(*paths)))
    replace_text(tmp_path / "figures.csv", "é")
    assert done == [False, "rename", True]
    assert (tmp_path / "figures.csv").read_bytes() == "é".encode()
