import os
import shutil
import tempfile
from pathlib import Path

import pytest

from ssl_sec.edges.storage.copies import new_copy
from ssl_sec.edges.storage.places import is_remote, local_folder, split_url, url_of
from ssl_sec.errors import StorageError


def test_a_path_is_its_own_location(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("runs", str(tmp_path / "runs"), f"file://{tmp_path}/runs"):
        assert not is_remote(given)
        assert local_folder(given) == tmp_path / "runs"
        assert url_of(local_folder(given) / "digits" / "name") is None


def test_each_url_has_a_staging_folder(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SSL_SEC_STAGING", str(tmp_path))
    one, other = local_folder("s3://bucket/runs/"), local_folder("s3://bucket/other")
    assert is_remote("s3://bucket/runs") and one != other and one == local_folder("s3://bucket/runs")
    assert url_of(one / "digits" / "name") == "s3://bucket/runs/digits/name"
    part = local_folder("s3://bucket/runs", "workers", "1")
    assert part.is_relative_to(one) and url_of(part / "digits" / "name") == "s3://bucket/runs/digits/name"


def test_a_staging_folder_that_cannot_be_made_names_its_variable(tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SSL_SEC_STAGING", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="SSL_SEC_STAGING: .*/file/.* cannot be written"):
        local_folder("s3://bucket/runs")


def test_the_users_of_a_machine_have_their_own_parts_of_a_given_folder(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SSL_SEC_STAGING", str(tmp_path))
    folders = []
    for user in (1, 2):
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        folders += [local_folder("s3://bucket/runs"), new_copy("s3://bucket/runs")]
    assert [folder.relative_to(tmp_path).parts[0] for folder in folders] == ["1", "1", "2", "2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]  # nothing that one user owns for all


def test_a_staging_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("SSL_SEC_STAGING", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = tmp_path / f"ssl_sec-{os.getuid()}"
    assert local_folder("s3://bucket/runs").is_relative_to(root)
    shutil.rmtree(root)
    (tmp_path / "other").mkdir()
    root.symlink_to(tmp_path / "other")
    with pytest.raises(StorageError, match=f"SSL_SEC_STAGING: {root} is not a folder of this user"):
        local_folder("s3://bucket/runs")
    assert not any((tmp_path / "other").iterdir())


def test_the_url_of_a_run_has_three_parts():
    assert split_url("s3://bucket/a/runs/digits/name/") == ("s3://bucket/a/runs", "digits", "name")
    with pytest.raises(StorageError, match="must be the URL of a run"):
        split_url("s3://name")


def test_an_existing_url_file_is_not_rewritten(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SSL_SEC_STAGING", str(tmp_path))
    file = local_folder("s3://bucket/runs") / ".url"
    written = file.stat()
    local_folder("s3://bucket/runs")
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
