import pytest

from ssl_sec.data.parquet.opening import open_parquet
from ssl_sec.data.shards.locations import find_files, require_apart
from ssl_sec.data.shards.opening import open_webdataset
from ssl_sec.errors import DataError
from tests.data.files import plain, write_parquet
from tests.data.shards.test_tar import write_tar
from tests.data.test_sources import line


@pytest.fixture
def files(tmp_path):
    return [write_tar(tmp_path / f"set-{name}.tar", {"a.png": plain(1)}) for name in ("0", "1", "test")]


def test_a_file_is_listed_once(tmp_path, files):
    expected = f"{files[0]}: found twice in the list of tar files; allowed: each file once"
    globs = [tmp_path / "*.tar", tmp_path / "*0.tar"]
    for locations in ([files[0]] * 2, [files[0], f"file://{files[0]}"], globs):
        assert line(lambda locations=locations: find_files(locations, "tar"), DataError) == expected
    assert len(find_files([tmp_path / "*0.tar", tmp_path / "*1.tar"], "tar")) == 2


def test_a_test_file_is_no_training_file(tmp_path, files):
    more = {"cache_folder": tmp_path / "cache"}
    train, test = tmp_path / "set-*.tar", tmp_path / "*-test.tar"
    assert len(open_webdataset("train", train, test=test, **more)) == 3
    message = line(lambda: open_webdataset("test", train, test=test, **more), DataError)
    assert message.startswith(f"{files[2]}: found in data.train and among the test files; allowed: ")
    assert len(open_webdataset("test", tmp_path / "set-[01].tar", test=test, **more)) == 1
    assert len(open_webdataset("test", tmp_path / "gone-*.tar", test=test, **more)) == 1
    table = write_parquet(tmp_path / "a.parquet", [plain(1)], [0])
    assert line(lambda: open_parquet("test", tmp_path / "*.parquet", test=table)).startswith(
        f"{table}: found in data.train"
    )
    require_apart(find_files(test, "tar"), None, "tar")


def test_a_list_as_in_webdataset_is_refused(tmp_path, files):
    for location in (f"{files[0]}::{files[1]}", f"file://{files[0]}::file://{files[1]}", f"a.tar::file://{files[1]}"):
        assert line(lambda location=location: find_files(location, "tar"), DataError) == (
            f"{location}: '::' chains protocols of fsspec, not files; give several files as a list: [a.tar,b.tar]"
        )
    ((file_system, path),) = find_files(f"simplecache::file://{files[0]}", "tar")
    assert file_system.cat_file(path) == files[0].read_bytes()
    ((file_system, path),) = find_files(f"tar://a.png::file://{files[0]}", "tar")
    assert file_system.cat_file(path) == plain(1)


def test_a_server_that_does_not_answer_is_no_missing_file():
    location = "http://127.0.0.1:9/a.parquet"  # the port of a service that nobody runs
    message = line(lambda: open_parquet("train", location), DataError)
    assert message.startswith(f"{location}: cannot be read: ") and "127.0.0.1" in message.removeprefix(location)


def test_an_empty_range_is_refused_also_beside_other_files(tmp_path, files):
    location = f"{tmp_path}/{{0..1}}-{{10..9}}.tar"
    expected = f"{location.replace('{0..1}', '0')}: the range {{10..9}} is empty; allowed: {{9..10}}"
    assert line(lambda: find_files([files[0], location], "tar"), DataError) == expected
