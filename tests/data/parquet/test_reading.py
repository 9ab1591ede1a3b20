import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from ssl_sec.data.image_set import UNLABELLED, check_num_classes
from ssl_sec.data.parquet import cache, reading
from ssl_sec.data.parquet.blocks import RowGroups
from ssl_sec.data.parquet.columns import Columns
from ssl_sec.data.shards.locations import find_files
from ssl_sec.data.stores import mapped_table
from ssl_sec.errors import DataError, MissingDataError
from tests.data.files import plain, write_parquet


@pytest.fixture
def file(tmp_path):
    return write_parquet(tmp_path / "a.parquet", [plain(i) for i in range(10)], [i % 2 for i in range(10)])


def inspect(*locations, **columns):
    return reading.inspect(list(locations), Columns(**columns))


def test_rows_come_in_order(tmp_path, file, monkeypatch):
    monkeypatch.setattr(reading, "_ROWS_PER_BATCH", 3)
    other = write_parquet(tmp_path / "b.parquet", [b"x"], [7])
    files = inspect(file, other)
    rows = list(reading.iterate_rows(files))
    assert files.num_rows == 11 and max(len(some.names) for some in rows) == 3
    assert [image for some in rows for image in some.encoded.to_pylist()] == [*(plain(i) for i in range(10)), b"x"]
    assert [int(label) for some in rows for label in some.labels] == [*(i % 2 for i in range(10)), 7]
    names = [name for some in rows for name in some.names]
    assert names[9:] == [f"{file} row 9", f"{other} row 0"]


def test_a_row_group_is_read_some_rows_at_a_time(tmp_path, file, monkeypatch):
    """More than 2 GiB of images do not fit into one Arrow array of structs."""

    def refuse(*args, **more):
        raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")

    monkeypatch.setattr(pa.parquet.ParquetFile, "read_row_group", refuse)
    monkeypatch.setattr(reading, "_ROWS_PER_BATCH", 3)
    files = inspect(file, write_parquet(tmp_path / "b.parquet", [None, b"x"], [0, 1]))
    groups = RowGroups(files=files)
    read = [image for block in range(len(groups.sizes)) for image in groups.read(block)]
    assert read == [image for rows in reading.iterate_rows(files) for image in rows.encoded.to_pylist()]
    assert groups.sizes.tolist() == [4, 4, 2, 2] and list(map(len, map(groups.read, range(4)))) == [4, 4, 2, 2]


@pytest.mark.parametrize(("most", "rows"), [(1, [1] * 6), (4000, [2, 2, 2]), (2**28, [6])])
def test_fewer_rows_of_large_images_are_held_at_once(tmp_path, monkeypatch, most, rows):
    images = [os.urandom(1000) for _ in range(4)] + [b"", b""]  # in groups of four rows
    files = inspect(write_parquet(tmp_path / "a.parquet", images, [0] * 6))
    monkeypatch.setattr(reading, "_BYTES_PER_BATCH", most)
    found = [some.encoded.to_pylist() for some in reading.iterate_rows(files)]
    assert list(map(len, found)) == rows and [image for some in found for image in some] == images
    assert RowGroups(files=files).read(0) == images[:4]


def test_missing_bytes_are_empty(tmp_path):
    images = pa.array([None, {"bytes": None, "path": "a"}, {"bytes": b"x", "path": None}], parquet_image())
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"image": images, "label": [0, 1, 2]}), path)
    (rows,) = reading.iterate_rows(inspect(path))
    assert rows.encoded.to_pylist() == [b"", b"", b"x"]


@pytest.mark.parametrize(
    ("kind", "read"), [(pa.string(), ["a", ""]), (pa.large_string(), ["a", ""]), (pa.null(), ["", ""])], ids=str
)
def test_paths_of_any_type_of_text(tmp_path, kind, read):
    """As polars writes them, and as pandas does where no image has one."""
    given = [{"bytes": b"x", "path": None if pa.types.is_null(kind) else "a"}, {"bytes": b"y", "path": None}]
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"image": pa.array(given, parquet_image(kind)), "label": [0, 1]}), path)
    (rows,) = reading.iterate_rows(inspect(path))
    assert rows.paths == read


def parquet_image(of_path=None):
    return pa.struct({"bytes": pa.binary(), "path": of_path or pa.string()})


@pytest.mark.parametrize("integers", [pa.int8(), pa.uint16(), pa.int64(), pa.uint64()])
def test_integer_types(tmp_path, integers):
    path = write_parquet(tmp_path / "a.parquet", [b"x", b"y"], pa.array([3, 100], pa.int64()).cast(integers))
    (rows,) = reading.iterate_rows(inspect(path))
    assert rows.labels.dtype == "int64" and rows.labels.tolist() == [3, 100]


def test_globs_lists_and_urls(tmp_path, file):
    write_parquet(tmp_path / "b[1].parquet", [b"x"], [0])

    def names(location):
        return [os.path.basename(path) for _, path in find_files(location, "Parquet")]

    assert names(str(tmp_path / "*.parquet")) == ["a.parquet", "b[1].parquet"]
    assert names(tmp_path / "b[1].parquet") == ["b[1].parquet"]
    assert names([file, f"file://{tmp_path}/b*.parquet"]) == ["a.parquet", "b[1].parquet"]


def test_remote_files(tmp_path, file):
    memory = fsspec.filesystem("memory")
    memory.pipe("/ssl_sec_test/a.parquet", file.read_bytes())
    files = inspect("memory://ssl_sec_test/*.parquet")
    assert files.num_rows == 10
    cached = cache.cached_table(files, tmp_path / "cache")
    assert pa.ipc.open_file(pa.memory_map(str(cached))).read_all()["encoded"][4].as_py() == plain(4)
    memory.rm("/ssl_sec_test", recursive=True)


def lines(action) -> str:
    with pytest.raises(DataError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_files(tmp_path):
    for location in (tmp_path / "no.parquet", tmp_path / "no*.parquet", "memory://none/a.parquet"):
        with pytest.raises(MissingDataError, match="data.train"):
            inspect(location)
    with pytest.raises(MissingDataError, match="empty"):
        inspect()
    assert "nosuch" in lines(lambda: inspect("nosuch://a/b.parquet"))


def test_columns(tmp_path, file):
    assert "did you mean 'label'" in lines(lambda: inspect(file, label_column="labels"))
    assert "did you mean 'image'" in lines(lambda: inspect(file, image_column="images"))
    assert "int64" in lines(lambda: inspect(file, image_column="label"))
    path = tmp_path / "b.parquet"
    pa.parquet.write_table(pa.table({"pixels": [b"x"], "label": [1]}), path)
    assert "columns: pixels, label" in lines(lambda: inspect(path))
    both = pa.array([{"bytes": b"x", "path": ""}], parquet_image())
    pa.parquet.write_table(pa.table({"left": both, "right": both, "label": [1]}), path)
    assert "left, right; set data.image_column" in lines(lambda: inspect(path))
    assert inspect(path, image_column="right").image_column == "right"
    real = write_parquet(tmp_path / "c.parquet", [b"x"], pa.array([0.5]))
    assert "is double; allowed: integers or strings" in lines(lambda: inspect(real))
    assert "no rows" in lines(lambda: inspect(write_parquet(tmp_path / "d.parquet", [], [])))


@pytest.mark.parametrize(("label", "found"), [(-1, "label -1"), (2**40, "label 1099511627776"), (None, "no label")])
def test_labels(tmp_path, label, found):
    path = write_parquet(tmp_path / "a.parquet", [b"x"] * 3, [0, 1, label])
    message = lines(lambda: list(reading.iterate_rows(inspect(path))))
    assert message.startswith(f"{path} row 2: {found}")


@pytest.mark.parametrize("strings", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_names_of_classes_become_numbers_in_the_order_of_the_alphabet(tmp_path, strings):
    first = write_parquet(tmp_path / "a.parquet", [b"x"] * 3, pa.array(["dog", "ant", "dog"]).cast(strings))
    second = write_parquet(tmp_path / "b.parquet", [b"y"], pa.array(["cat"]).cast(strings))
    files = inspect(first, second)
    assert files.class_names == ("ant", "cat", "dog")
    assert [int(label) for rows in reading.iterate_rows(files) for label in rows.labels] == [2, 0, 2, 1]
    assert reading.distinct_labels(files).tolist() == [0, 1, 2]
    assert cache.digest(replace(files, class_names=("ant", "bee", "cat", "dog"))) != cache.digest(files)
    unknown = replace(inspect(second), class_names=("ant", "cart"))
    assert lines(lambda: list(reading.iterate_rows(unknown))).startswith(
        f"{second} row 0: class 'cat'; did you mean 'cart'"
    )
    missing = inspect(write_parquet(tmp_path / "c.parquet", [b"x"] * 2, pa.array(["dog", None]).cast(strings)))
    assert f"{tmp_path}/c.parquet row 1: no label" in lines(lambda: list(reading.iterate_rows(missing)))


def test_files_without_labels(tmp_path, file):
    table = pa.parquet.read_table(file)
    path = tmp_path / "b.parquet"
    pa.parquet.write_table(table.drop_columns("label"), path)
    for files in (inspect(path), inspect(file, label_column=None)):
        (rows,) = reading.iterate_rows(files)
        assert rows.labels.tolist() == [UNLABELLED] * 10 and rows.encoded.to_pylist() == [plain(i) for i in range(10)]
        assert reading.names_of_classes(files, rows.labels) == () and len(reading.distinct_labels(files)) == 0
        assert cache.digest(files) != cache.digest(inspect(file))
    assert lines(lambda: inspect(file, path)) == (
        f"{path}: no labels found; allowed: labels that are integers, as in {file}"
    )
    names = write_parquet(tmp_path / "c.parquet", [b"x"], pa.array(["cat"]))
    assert "labels that are strings found; allowed: labels that are integers" in lines(lambda: inspect(file, names))


def test_class_names(tmp_path):
    named = write_parquet(tmp_path / "a.parquet", [b"x"], [0], class_names=["cat", "dog"])
    assert inspect(named).class_names == ("cat", "dog")
    for metadata in ("{", "[]", '{"info": null}', '{"info": {"features": {"label": {"names": "cat"}}}}'):
        table = pa.parquet.read_table(named).replace_schema_metadata({"huggingface": metadata})
        pa.parquet.write_table(table, tmp_path / "b.parquet")
        assert inspect(tmp_path / "b.parquet").class_names is None


def test_labels_without_a_name_are_refused_and_names_without_images_logged(tmp_path, caplog):
    named = write_parquet(tmp_path / "a.parquet", [b"x", b"y"], [0, 2], class_names=["cat", "dog", "owl", "fox"])
    files = inspect(named)
    with caplog.at_level("INFO", logger=reading.logger.name):
        assert reading.names_of_classes(files, np.array([0, 2])) == ("cat", "dog", "owl", "fox")
    assert f"{named}: 2 of the 4 classes that have names have images" in caplog.text
    with pytest.raises(
        DataError, match=r"a.parquet: label 4 in column 'label', but the metadata names 4 classes.* 0 to 3"
    ):
        reading.names_of_classes(files, np.array([0, 4]))


def test_a_file_of_paths_alone_says_so(tmp_path, file):
    path = tmp_path / "b.parquet"

    def write(*rows):
        images = pa.array(rows, parquet_image())
        pa.parquet.write_table(pa.table({"image": images, "label": [0] * len(rows)}), path, row_group_size=1)

    write({"bytes": None, "path": "a.png"}, {"bytes": None, "path": "b.png"})
    assert lines(lambda: inspect(file, path)) == (
        f"{path}: column 'image' holds only paths of images; write the file with the images embedded, as their bytes"
    )
    write({"bytes": None, "path": "a.png"}, {"bytes": b"x", "path": "b.png"})
    assert inspect(file, path).num_rows == 12
    write(None, {"bytes": None, "path": None})  # images that cannot be read
    assert inspect(path).num_rows == 2


def test_a_wrong_label_of_several_files_is_not_said_to_be_in_the_first(tmp_path):
    named = [write_parquet(tmp_path / f"{n}.parquet", [b"x"], [n], class_names=["a", "b"]) for n in (0, 2)]
    files = inspect(*named)
    message = lines(lambda: reading.names_of_classes(files, reading.all_labels(files)))
    assert message.startswith(f"{named[0]} and 1 more: label 2 in column 'label'")
    unknown = write_parquet(tmp_path / "a.parquet", [b"x"], [-1])
    assert lines(lambda: reading.all_labels(inspect(unknown))).endswith(
        "data.label_column=null reads images without labels"
    )


@pytest.mark.parametrize("twice", ["image", "label"])
def test_a_duplicate_column(tmp_path, twice):
    table = pa.parquet.read_table(write_parquet(tmp_path / "a.parquet", [plain(1)] * 2, [0, 1]))
    path = tmp_path / "b.parquet"
    pa.parquet.write_table(pa.Table.from_arrays([*table.columns, table[twice]], [*table.column_names, twice]), path)
    with pytest.raises(DataError) as caught:
        inspect(path, image_column="image")
    assert str(caught.value) == f"{path}: 2 columns are named {twice!r}; allowed: one"


@pytest.mark.parametrize("opening", ["[", '{"info":'])
def test_metadata_nested_too_deep_to_be_read_names_no_classes(tmp_path, file, opening):
    table = pa.parquet.read_table(file).replace_schema_metadata({"huggingface": opening * 10**5})
    pa.parquet.write_table(table, tmp_path / "b.parquet")
    assert inspect(tmp_path / "b.parquet").class_names is None


def test_files_of_one_split_name_the_same_classes(tmp_path):
    paths = [tmp_path / f"{number}.parquet" for number in range(3)]
    for path, names in zip(paths, (None, ["a", "b"], ["b", "a"]), strict=True):
        write_parquet(path, [plain(1)] * 2, [0, 1], names)
    assert inspect(*paths[:2]).class_names == ("a", "b")
    reason = r"its metadata names other classes \(2: b, a\) than that of an earlier file \(2: a, b\); allowed: the same"
    with pytest.raises(DataError, match=f"^{paths[2]}: {reason}"):
        inspect(*paths)
    write_parquet(paths[2], [plain(1)] * 2, [0, 1], [f"c{number}" for number in range(1000)])
    with pytest.raises(DataError, match=r"other classes \(1000: c0, c1, c2, c3, c4, c5, c6, c7, …\) than that"):
        inspect(*paths)


def test_more_classes_than_images_explain_are_refused():
    check_num_classes(2**20, 4, "a.parquet")
    check_num_classes(2**21, 2**17, "a.parquet")
    with pytest.raises(DataError, match="^a.parquet: classes up to 1048576 in 4 images; allowed: 0 to 1048575$"):
        check_num_classes(2**20 + 1, 4, "a.parquet")


def test_damaged_files(tmp_path, file):
    whole = file.read_bytes()
    for damaged in (b"", b"text", whole[: len(whole) // 2], b"PAR1" + b"\xff" * 100 + b"PAR1"):
        file.write_bytes(damaged)
        assert str(file) in lines(lambda: list(reading.iterate_rows(inspect(file))))
    body = bytearray(whole)
    body[4:200] = b"\xff" * 196
    file.write_bytes(body)
    assert str(file) in lines(lambda: list(reading.iterate_rows(inspect(file))))


def test_copies_of_changed_files_are_removed_when_they_are_old(tmp_path, file, caplog):
    folder, month = tmp_path / "cache", 30 * 24 * 3600
    with caplog.at_level("INFO", "ssl_sec.data"):
        first = cache.cached_table(inspect(file), folder)
        assert caplog.messages[-1].startswith(f"{file}: 10 images are copied, 0.0 MiB")
        other = cache.cached_table(inspect(write_parquet(tmp_path / "b.parquet", [b"x"], [0])), folder)
        os.utime(file, ns=(0, 0))
        second = cache.cached_table(inspect(file), folder)
        assert first.exists() and caplog.messages[-1].startswith(f"{first}: a copy of 0.0 MiB from before its files")
        mapped = mapped_table(first)
        for each in (first, second, other):
            os.utime(each, (time.time() - month - 10, each.stat().st_mtime))
        assert cache.cached_table(inspect(file), folder) == second and not first.exists() and other.exists()
        assert caplog.messages[-1].endswith("from before its files changed: removed")
        assert mapped["encoded"][4].as_py() == plain(4)  # who reads it goes on
        caplog.clear()
        cache.cached_table(inspect(file), folder)
    assert not caplog.messages and time.time() - second.stat().st_atime < month


def test_a_copy_that_cannot_be_removed_leaves_the_others_to_be_removed(tmp_path, file, monkeypatch):
    folder = tmp_path / "cache"
    made: list[Path] = []
    for second in range(3):
        os.utime(file, (0, second))
        made.append(cache.cached_table(inspect(file), folder))
    for path in made:
        os.utime(path, (0, path.stat().st_mtime))
    refused, unlink = [], Path.unlink

    def refuse_once(path, **options):
        if path in made and not refused:
            refused.append(path)
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refuse_once)
    cache.cached_table(inspect(file), folder)
    assert {path for path in made if path.exists()} == {*refused, made[-1]} and len(refused) == 1


def test_an_unfinished_copy_of_a_killed_process_is_removed_after_an_hour(tmp_path, file, caplog):
    folder = tmp_path / "cache"
    whole = cache.cached_table(inspect(file), folder)
    killed, written = (folder / f".{whole.name}.{name}" for name in ("killed", "written"))
    for path in (killed, written):
        path.write_bytes(b"half")
    os.utime(killed, (time.time(), time.time() - 3610))
    caplog.clear()  # a test before may have left the level at INFO
    with caplog.at_level("INFO", "ssl_sec.data"):
        assert cache.cached_table(inspect(file), folder) == whole
    assert caplog.messages == [f"{killed}: an unfinished copy of 0.0 MiB: removed"]
    assert written.exists() and not killed.exists() and whole.exists()


def test_a_copy_that_was_removed_while_it_is_mapped_is_made_again(tmp_path, file):
    path = cache.cached_table(inspect(file), tmp_path / "cache")
    path.unlink()
    assert cache.cached_table(inspect(file), tmp_path / "cache") == path and path.exists()


def test_a_file_that_is_gone_before_it_is_copied_is_one_line(tmp_path, file):
    files = inspect(file)
    file.unlink()
    for use in (cache.digest, lambda files: cache.cached_table(files, tmp_path / "cache")):
        with pytest.raises(MissingDataError, match=f"^{file}: no such file"):
            use(files)


def test_a_full_disk_is_one_line(tmp_path, file, monkeypatch):
    def write(files, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "_write_table", write)
    assert lines(lambda: cache.cached_table(inspect(file), tmp_path / "cache")) == (
        f"cache folder {tmp_path}/cache: cannot be written: [Errno 28] No space left on device"
    )
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []


def test_the_cache_is_made_once_and_follows_the_files(tmp_path, file):
    first = cache.cached_table(inspect(file), tmp_path / "cache")
    made = first.stat().st_mtime_ns
    assert cache.cached_table(inspect(file), tmp_path / "cache") == first and first.stat().st_mtime_ns == made
    os.utime(file, ns=(0, 0))
    assert cache.cached_table(inspect(file), tmp_path / "cache") != first
    table = pa.ipc.open_file(pa.memory_map(str(first))).read_all()
    assert table["label"].to_pylist() == [i % 2 for i in range(10)]
    assert table["encoded"].to_pylist() == [plain(i) for i in range(10)]
    assert table["name"][3].as_py() == f"{file} row 3"


def test_a_cache_is_complete_or_absent(tmp_path, file):
    path = write_parquet(tmp_path / "b.parquet", [b"x"] * 3, [0, 1, -1])
    lines(lambda: cache.cached_table(inspect(file, path), tmp_path / "cache"))
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]
    (tmp_path / "occupied").write_text("a file")
    assert "occupied" in lines(lambda: cache.cached_table(inspect(file), tmp_path / "occupied"))


def test_processes_can_make_the_cache_concurrently(tmp_path, file, monkeypatch):
    written = []
    write = cache._write_table
    monkeypatch.setattr(cache, "_write_table", lambda *args: (written.append(threading.get_ident()), write(*args)))
    files = inspect(file)
    with ThreadPoolExecutor(6) as pool:
        paths = list(pool.map(lambda _: cache.cached_table(files, tmp_path / "cache"), range(6)))
    assert len(set(paths)) == 1 and len(written) == 1
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".arrow", ".lock"]
