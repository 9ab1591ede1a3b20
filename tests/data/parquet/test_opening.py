import logging
import pickle

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from ssl_sec.data.decode import Decoding
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.image_set import ResidentImages, require_labels
from ssl_sec.data.parquet import cache
from ssl_sec.data.parquet.columns import Columns
from ssl_sec.data.parquet.opening import open_parquet, parquet_class_names
from ssl_sec.data.stores import mapped_table
from ssl_sec.errors import DataError, MissingDataError
from tests.data.files import plain, write_parquet
from tests.data.test_image_set import values
from tests.data.test_sources import line


@pytest.mark.parametrize("resident_limit_mib", [0, 1])
@pytest.mark.parametrize("image_size_px", [None, 6])
def test_parquet(tmp_path, resident_limit_mib, image_size_px):
    write_parquet(tmp_path / "0.parquet", [plain(i) for i in range(5)], [0, 1, 2, 0, 1], ["a", "b", "c"], "img")
    write_parquet(tmp_path / "1.parquet", [plain(i) for i in range(5, 9)], [2, 0, 1, 2], ["a", "b", "c"], "img")
    images = open_parquet(
        "train",
        train=str(tmp_path / "?.parquet"),
        test=None,
        decoding=Decoding(image_size_px=image_size_px, resident_limit_mib=resident_limit_mib),
        cache_folder=tmp_path / "cache",
    )
    assert isinstance(images, ResidentImages if resident_limit_mib else EncodedImages)
    assert values(images.read(torch.arange(9))) == list(range(9))
    assert images.labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2] and images.class_names == ("a", "b", "c")
    assert images.image_shape == (3, image_size_px or 8, image_size_px or 8)
    assert (tmp_path / "cache").exists() == (resident_limit_mib == 0)
    batch = pickle.loads(pickle.dumps(images)).read(torch.tensor([8, 3]))
    assert values(batch) == [8, 3]


@pytest.mark.parametrize("resident_limit_mib", [0, 1])
def test_parquet_with_bad_images(tmp_path, resident_limit_mib, caplog):
    path = write_parquet(tmp_path / "a.parquet", [None, plain(1), b"text", plain(3)], [0, 1, 5, 3])

    def opened(on_bad_image):
        return open_parquet(
            "test",
            train=None,
            test=path,
            decoding=Decoding(on_bad_image=on_bad_image, resident_limit_mib=resident_limit_mib),
            cache_folder=tmp_path,
        )

    assert f"{path} row 0: " in line(lambda: opened("raise"))
    with caplog.at_level(logging.WARNING, "ssl_sec.data"):
        images = opened("skip")
        read = images.read(torch.arange(len(images)))
    assert values(read) == ([1, 3] if resident_limit_mib else [1, 1, 3, 3]) == read.labels.tolist()
    assert images.num_bad_images == 2
    assert f"{path} row 2" in " ".join(caplog.messages)


def test_parquet_without_class_names(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [plain(1), plain(2)], [0, 3])
    assert open_parquet("train", path).class_names == ("0", "1", "2", "3")
    assert open_parquet("test", test=path).name == "parquet/test"
    path = write_parquet(tmp_path / "b.parquet", [plain(1), plain(2)], [0, 3], class_names=["a", "b", "c"])
    assert "label 3" in line(lambda: open_parquet("train", path))


@pytest.mark.parametrize("resident_limit_mib", [0, 1])
def test_the_test_images_of_parquet_have_the_classes_of_the_training_images(tmp_path, resident_limit_mib):
    train = write_parquet(tmp_path / "a.parquet", [plain(1), plain(2)], pa.array(["dog", "cat"]))
    test = write_parquet(tmp_path / "b.parquet", [plain(3)], pa.array(["dog"]))
    places = {"decoding": Decoding(resident_limit_mib=resident_limit_mib), "cache_folder": tmp_path / "cache"}
    images = open_parquet("test", train, test=test, **places)
    assert images.class_names == ("cat", "dog") and images.labels.tolist() == [1]
    assert open_parquet("test", train, test=test, **places, shared_classes=False).class_names == ("dog",)
    table = pa.parquet.read_table(train).drop_columns("label")
    pa.parquet.write_table(table, tmp_path / "c.parquet")
    unlabelled = open_parquet("train", tmp_path / "c.parquet", **places)
    assert unlabelled.class_names == () and values(unlabelled.read(torch.arange(2))) == [1, 2]
    message = line(lambda: require_labels(unlabelled, "a linear probe"))
    assert message.endswith("give labelled images, or data.label_column=<name> if a column holds the classes")


def test_the_classes_of_parquet_files_are_those_that_have_images(tmp_path):
    names = ["a", "b", "c", "d", "e"]
    first = write_parquet(tmp_path / "0.parquet", [plain(1)] * 4, [4, 1, 1, 4], names, "img")
    second = write_parquet(tmp_path / "1.parquet", [plain(1)] * 2, [2, 1], names, "img")
    assert parquet_class_names([first, second]) == ("b", "c", "e")
    assert parquet_class_names(second, Columns(image_column="img")) == ("b", "c")
    unnamed = write_parquet(tmp_path / "2.parquet", [b"no image"], [7], label_column="y")
    assert parquet_class_names(unnamed, Columns(label_column="y")) == ("7",)
    wrong = write_parquet(tmp_path / "3.parquet", [plain(1)] * 3, [0, 1, -2])
    assert f"{wrong} row 2: label -2" in line(lambda: parquet_class_names(wrong))


def test_a_damaged_cache_is_made_again(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "ssl_sec.data")
    path = write_parquet(tmp_path / "a.parquet", [plain(i) for i in range(5)], [0, 1, 2, 0, 1])

    def opened():
        mapped_table.cache_clear()  # as in another process
        decoding = Decoding(resident_limit_mib=0)
        return open_parquet("train", path, decoding=decoding, cache_folder=tmp_path / "cache")

    opened()
    (cached,) = (tmp_path / "cache").glob("*.arrow")
    whole = cached.read_bytes()
    for damaged in (b"", whole[:-1], b"\0" * len(whole), b"\0" * 1000 + whole[1000:], whole[:-40] + whole[-30:]):
        cached.unlink()  # it may still be mapped
        cached.write_bytes(damaged)
        caplog.clear()
        images = opened()
        assert values(images.read(torch.arange(5))) == [0, 1, 2, 3, 4] and cached.read_bytes() == whole
        assert caplog.messages == [f"{cached} is damaged and is made again"]
    caplog.clear()
    opened()
    assert caplog.messages == []


def test_a_cache_that_is_damaged_again_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_write_table", lambda files, file: file.write(b"damaged"))
    path = write_parquet(tmp_path / "a.parquet", [plain(1)], [0])
    with pytest.raises(DataError) as caught:
        open_parquet("train", path, decoding=Decoding(resident_limit_mib=0), cache_folder=tmp_path / "cache")
    (cached,) = (tmp_path / "cache").glob("*.arrow")
    assert str(caught.value).startswith(f"{cached}: cannot be read: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("window", [None, 4])
def test_a_folder_whose_name_is_not_utf_8_is_escaped(tmp_path, window):
    (folder := tmp_path / "Jos\udce9").mkdir()
    write_parquet(tmp_path / "a.parquet", [plain(7)], [0]).rename(folder / "a.parquet")
    decoding, cache = Decoding(resident_limit_mib=0), tmp_path / "cache"
    images = open_parquet("train", folder / "a.parquet", decoding=decoding, cache_folder=cache, shuffle_window=window)
    assert images.image_name(0) == f"{tmp_path}/Jos\\xe9/a.parquet row 0"


def test_parquet_without_files(tmp_path):
    assert "set data.test" in line(lambda: open_parquet("test", "a.parquet"), MissingDataError)
    assert "no such file" in line(lambda: open_parquet("train", tmp_path / "a.parquet"), MissingDataError)
