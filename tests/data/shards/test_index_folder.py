"""Machines share the indices of shards, in a folder or in object storage."""

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from ssl_sec.data.shards import tar
from ssl_sec.data.shards.config import WebDatasetConfig
from ssl_sec.data.shards.locations import find_files
from ssl_sec.data.shards.opening import shard_class_names
from ssl_sec.errors import ConfigError, DataError
from tests.data.shards.test_tar import write_shards
from tests.data.test_image_set import values
from tests.data.test_sources import line


@pytest.fixture
def scanned(monkeypatch):
    """The names of the shards whose headers have been read, in order."""
    names, scan = [], tar.scan
    monkeypatch.setattr(tar, "scan", lambda file: names.append(file[1].rpartition("/")[2]) or scan(file))
    return names


@pytest.fixture(params=["folder", "storage"])
def index_folder(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path / "shared" / "indices")
    memory = fsspec.filesystem("memory")
    request.addfinalizer(lambda: memory.rm("/ssl_sec_indices", recursive=True))
    return "memory://ssl_sec_indices"


def images_on(tmp_path, machine, location, index_folder):
    config = WebDatasetConfig(
        train=(location,), cache_folder=str(tmp_path / machine), index_folder=index_folder, image_size_px=8
    )
    return config.open("train")


def opened_on(tmp_path, machine, location, index_folder):
    return tar.open_shards(find_files(location, "tar"), tmp_path / machine, index_folder)


def test_a_second_machine_reads_no_shard(tmp_path, scanned, index_folder):
    location = write_shards(tmp_path, num_shards=4)
    first = images_on(tmp_path, "first", location, index_folder)
    assert sorted(scanned) == ["00.tar", "01.tar", "02.tar", "03.tar"]
    second = images_on(tmp_path, "second", location, index_folder)
    assert len(scanned) == 4
    assert second.description == first.description
    assert values(second.read(torch.arange(20))) == list(range(20))


def test_the_classes_of_a_split_need_no_shard_that_another_machine_has_read(tmp_path, scanned, index_folder):
    location = write_shards(tmp_path, num_shards=4)
    opened_on(tmp_path, "first", location, index_folder)
    assert shard_class_names(location, tmp_path / "second", index_folder) == ("0", "1", "2") and len(scanned) == 4


def test_a_machine_reads_only_shards_that_no_other_has_read_meanwhile(tmp_path, scanned, monkeypatch):
    monkeypatch.setattr(tar, "_SCANNERS", 1)
    location, scan = write_shards(tmp_path, num_shards=8), tar.scan

    def scan_after_the_other_machine(file):
        monkeypatch.setattr(tar, "scan", scan)
        opened_on(tmp_path, "second", location, str(tmp_path / "shared"))
        return scan(file)

    monkeypatch.setattr(tar, "scan", scan_after_the_other_machine)
    assert len(opened_on(tmp_path, "first", location, str(tmp_path / "shared")).labels) == 40
    assert len(scanned) == 9  # both have read the shard that the first had begun with


@pytest.mark.parametrize(("num_workers", "in_order"), [(1, True), (2, False)])
def test_each_of_several_workers_has_an_order_of_its_own(tmp_path, scanned, monkeypatch, num_workers, in_order):
    monkeypatch.setattr(tar, "_SCANNERS", 1)
    monkeypatch.setattr(tar, "world_size", lambda: num_workers)
    location = write_shards(tmp_path, num_shards=20, num_images=1)
    assert opened_on(tmp_path, "first", location, None).labels.tolist() == [i % 3 for i in range(20)]
    assert (scanned == sorted(scanned)) == in_order


def test_a_damaged_index_is_made_again(tmp_path, scanned, index_folder):
    location = write_shards(tmp_path, num_shards=1)
    opened_on(tmp_path, "first", location, index_folder)
    file_system, path = fsspec.url_to_fs(index_folder)
    (name,) = file_system.ls(path, detail=False)
    whole = file_system.cat_file(name)
    for content in (b"", whole[:-20], b"<html>"):
        file_system.pipe_file(name, content)
        assert len(opened_on(tmp_path, f"after {content[:9]!r}", location, index_folder).labels) == 5
        assert file_system.cat_file(name) == whole
    assert len(scanned) == 4


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog, monkeypatch):
    def refuse(self, path, content):
        raise PermissionError("Access denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    location = write_shards(tmp_path, num_shards=4)
    assert len(opened_on(tmp_path, "first", location, "memory://ssl_sec_indices").labels) == 20
    (warning,) = caplog.messages
    assert warning.startswith("data.index_folder: /ssl_sec_indices/")
    assert warning.endswith(".arrow: cannot be written: Access denied; other machines read the shards themselves")


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path):
    location = write_shards(tmp_path, num_shards=1)
    (tmp_path / "file").write_text("")
    message = line(lambda: opened_on(tmp_path, "first", location, str(tmp_path / "file" / "indices")), DataError)
    assert message.startswith(f"data.index_folder: {tmp_path}/file/indices/") and "Not a directory" in message


def test_an_empty_name_is_refused(tmp_path):
    message = line(lambda: images_on(tmp_path, "first", "a.tar", " "), ConfigError)
    assert message == "data.index_folder: found ' ', must be a folder, a URL or null"


def test_an_unknown_protocol_is_one_line(tmp_path):
    location = write_shards(tmp_path, num_shards=1)
    message = line(lambda: opened_on(tmp_path, "first", location, "s4://bucket"), DataError)
    assert message.startswith("data.index_folder: s4://bucket: cannot be read: Protocol not known")
