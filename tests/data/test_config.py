"""Data sets opened by their configs."""

import dataclasses
import shutil

import pyarrow as pa
import pytest
import torch
from PIL import Image

from ssl_sec.data import stores
from ssl_sec.data.config import (
    Cars196Config,
    CIFARConfig,
    CUBConfig,
    DigitsConfig,
    FolderConfig,
    InShopConfig,
    MNISTConfig,
    ParquetConfig,
    RecordsConfig,
    SOPConfig,
    same_set,
)
from ssl_sec.data.crops import CentreCrop
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.data.stores import limit_images
from ssl_sec.errors import ConfigError, DataError, MissingDataError
from tests.data.files import plain, write_folder, write_parquet
from tests.data.test_sources import line

CROP = CentreCrop(short_side_px=8, size_px=8)


def test_digits_open_with_a_balanced_subset_of_the_training_split_only():
    assert len(DigitsConfig().open("train")) == 1437
    few = DigitsConfig(max_images=50)
    assert len(few.open("test")) == 360
    assert few.open("train").labels.bincount().tolist() == [5] * 10
    assert len(DigitsConfig(max_images=5000).open("train")) == 1437


@pytest.mark.parametrize(("split", "has_test"), [("train", False), ("test", True), ("val", True), ("other", False)])
def test_a_folder_has_test_images_if_it_has_a_folder_of_them_or_is_elsewhere(tmp_path, split, has_test):
    write_folder(tmp_path, {f"{split}/cat/1.png": plain(1)})
    assert FolderConfig(root=str(tmp_path)).has_test_images == has_test
    assert FolderConfig(root=str(tmp_path / "missing")).has_test_images


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (FolderConfig(root="photos"), "photos: found test/ without train/"),
        (RecordsConfig(root="photos"), "photos/train.rec: no such file"),
        *((kind(root="photos"), "not there; the set is") for kind in (CUBConfig, Cars196Config, SOPConfig)),
        (InShopConfig(root="photos"), "photos/Eval/list_eval_partition.txt: not there; the set is"),
    ],
)
def test_a_folder_that_holds_no_such_set_is_refused_without_opening_it(tmp_path, monkeypatch, data, message):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path, {"photos/test/cat/1.png": plain(1)})
    for use in (lambda: data.require_places(with_test=False), lambda: data.open("train", CROP)):
        assert message in line(use, MissingDataError)
    write_folder(tmp_path, {"plain/1.png": plain(1)})
    FolderConfig(root="plain").require_places(with_test=True)


def test_the_channels_of_a_set_are_known_before_it_is_opened():
    assert DigitsConfig().channels == DigitsConfig().open("test").image_shape[0] == 1
    assert (MNISTConfig().channels, CIFARConfig(name="cifar10").channels, CUBConfig().channels) == (1, 3, 3)
    assert [FolderConfig(root="x", num_channels=number).channels for number in (1, 3)] == [1, 3]


def test_files_are_read_at_the_size_of_the_set_or_else_at_another_one():
    data = FolderConfig(root="x")
    assert data.read_as() == data and DigitsConfig().read_as(16, 3) == DigitsConfig()
    assert data.read_as(16, 1) == FolderConfig(root="x", image_size_px=16, num_channels=1)
    assert data.read_as(16).read_as(8) == data.read_as(16)


def test_digits_are_split_by_class():
    data = DigitsConfig(num_train_classes=5)
    train, test = data.open_by_class("train", CROP), data.open_by_class("test", CROP)
    assert (train.class_names, test.class_names) == (tuple("01234"), tuple("56789"))
    assert len(train) + len(test) == 1437 and train.image_shape == (1, 8, 8)
    assert train.labels.unique().tolist() == test.labels.unique().tolist() == [0, 1, 2, 3, 4]
    whole = data.open("train")
    assert len(whole) == 1437 and len(whole.class_names) == 10
    few = DigitsConfig(num_train_classes=5, max_images=50)
    assert few.open_by_class("train", CROP).labels.bincount().tolist() == [10] * 5
    assert len(few.open_by_class("test", CROP)) == len(test)


@pytest.mark.parametrize("data", [DigitsConfig(), CIFARConfig(name="cifar10", root="none")])
def test_splits_of_the_same_classes_need_a_number_of_training_classes(data):
    with pytest.raises(ConfigError, match="^data.num_train_classes: found null, must be given: both splits have"):
        data.open_by_class("train", CROP)


def test_folders_open_by_class(tmp_path):
    write_folder(
        tmp_path, {f"{place}/1.png": plain(1) for place in ("train/a", "train/b", "test/c", "test/d", "test/e")}
    )
    data = FolderConfig(root=str(tmp_path))
    assert [data.open_by_class(split, CROP).class_names for split in ("train", "test")] == [("a", "b"), ("c", "d", "e")]
    data = FolderConfig(root=str(tmp_path), num_train_classes=1)
    assert [data.open_by_class(split, CROP).class_names for split in ("train", "test")] == [("a",), ("b",)]
    with pytest.raises(DataError, match="classes that train does not have: c, d, e"):
        data.open("test")


def test_a_split_to_embed_has_all_images_and_may_have_classes_of_its_own(tmp_path):
    digits = DigitsConfig(num_train_classes=6, max_images=50)
    train, test = (digits.open_to_embed(split) for split in ("train", "test"))
    assert (train.class_names, test.class_names) == (tuple("012345"), tuple("6789"))
    assert len(train) + len(test) == 1437 == len(DigitsConfig(max_images=50).open_to_embed("train"))
    write_folder(tmp_path, {f"{place}/1.png": plain(1) for place in ("train/a", "train/b", "test/c", "val/b")})
    data = FolderConfig(root=str(tmp_path))
    assert [data.open_to_embed(split).class_names for split in ("train", "test")] == [("a", "b"), ("c",)]
    write_folder(tmp_path, {"test/b/1.png": plain(1)})
    with pytest.raises(DataError, match="classes that train does not have: c"):
        data.open_to_embed("test")
    shutil.rmtree(tmp_path / "test")
    found = data.open_to_embed("test")
    assert found.class_names == ("a", "b") and found.labels.tolist() == [1]


def test_parquet_to_embed_may_have_names_of_its_own(tmp_path):
    train, other, same = (
        str(write_parquet(tmp_path / f"{at}.parquet", [plain(1)] * len(names), pa.array(names)))
        for at, names in enumerate((["dog", "cat"], ["fox"], ["dog"]))
    )
    one, two = (ParquetConfig(train=(train,), test=(each,), cache_folder=str(tmp_path)) for each in (other, same))
    assert one.open_to_embed("test").class_names == ("fox",)
    found = two.open_to_embed("test")
    assert found.class_names == ("cat", "dog") and found.labels.tolist() == [1]
    with pytest.raises(DataError, match="class 'fox'"):
        one.open_all("test")


def test_parquet_opens_by_class(tmp_path):
    names = ["a", "b", "c", "d"]
    train = str(write_parquet(tmp_path / "train.parquet", [plain(1)] * 3, [1, 0, 1], names))
    test = str(write_parquet(tmp_path / "test.parquet", [plain(1)] * 2, [3, 2], names))
    data = ParquetConfig(train=(train,), test=(test,), cache_folder=str(tmp_path))
    opened = [data.open_by_class(split, CROP) for split in ("train", "test")]
    assert [part.labels.tolist() for part in opened] == [[1, 0, 1], [1, 0]]
    assert [part.class_names for part in opened] == [("a", "b"), ("c", "d")]
    assert data.open("test").labels.tolist() == [3, 2]
    data = ParquetConfig(train=(train, test), num_train_classes=3, cache_folder=str(tmp_path))
    opened = [data.open_by_class(split, CROP) for split in ("train", "test")]
    assert [part.class_names for part in opened] == [("a", "b", "c"), ("d",)]
    with pytest.raises(MissingDataError, match="set data.test"):
        data.open("test")
    with pytest.raises(ConfigError, match="^data.test: found null, must be given, unless data.num_train_classes"):
        ParquetConfig(train=(train,)).open_by_class("train", CROP)
    data = ParquetConfig(train=(train,), test=(train, test), cache_folder=str(tmp_path))
    with pytest.raises(DataError, match="^parquet: classes in both splits: a, b;"):
        data.open_by_class("train", CROP)


@pytest.mark.parametrize(("image_size_px", "kind"), [(4, ResidentImages), (None, EncodedImages)])
def test_images_are_cut_unless_they_have_one_size(tmp_path, image_size_px, kind):
    path = str(write_parquet(tmp_path / "a.parquet", [plain(1)] * 2, [0, 1]))
    write_folder(tmp_path, {f"train/{label}/1.png": plain(1) for label in "ab"})
    folder = FolderConfig(root=str(tmp_path), num_train_classes=1, image_size_px=image_size_px)
    parquet = ParquetConfig(train=(path,), num_train_classes=1, image_size_px=image_size_px, cache_folder=str(tmp_path))
    for data in (folder, parquet):
        image_set = data.open_by_class("test", CROP)
        assert isinstance(image_set, kind) and image_set.image_shape == (3, image_size_px or 8, image_size_px or 8)
        assert isinstance(data.open("train"), ResidentImages)


@pytest.mark.parametrize(
    ("kind", "looked_for"),
    [
        (CUBConfig, "images.txt"),
        (Cars196Config, "cars_annos.mat"),
        (SOPConfig, "Ebay_train.txt"),
        (InShopConfig, "Eval/list_eval_partition.txt"),
    ],
)
def test_retrieval_sets_are_looked_for_in_their_root_and_need_a_crop(tmp_path, kind, looked_for):
    data = kind(root=str(tmp_path))
    for config in (data, dataclasses.replace(data, num_train_classes=3)):
        with pytest.raises(MissingDataError) as caught:
            config.open_by_class("test", CROP)
        assert str(caught.value).startswith(f"{tmp_path / looked_for}: not there")
    with pytest.raises(ConfigError, match=f"^data.name: found '{data.name}', whose images have no common size;"):
        data.open("train")


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_looked_for_in_its_root(tmp_path, name):
    with pytest.raises(MissingDataError, match=str(tmp_path)):
        CIFARConfig(name=name, root=str(tmp_path)).open("train")


def test_a_folder_opens(tmp_path):
    for split in ("train", "test"):
        for place, label in enumerate("ab"):
            path = tmp_path / split / label / "image.png"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (8, 6), (place, 0, 0)).save(path)
    image_set = FolderConfig(root=str(tmp_path), image_size_px=4, num_channels=1).open("train")
    assert image_set.image_shape == (1, 4, 4) and image_set.class_names == ("a", "b")


@pytest.mark.parametrize("resident_limit_mib", [0, 1])
def test_only_the_images_of_a_subset_are_decoded(tmp_path, monkeypatch, resident_limit_mib):
    write_folder(tmp_path, {f"train/{label}/{n}.png": plain(4 * n) for label in "abc" for n in range(20)})
    data = FolderConfig(root=str(tmp_path), image_size_px=4, resident_limit_mib=resident_limit_mib)
    expected = limit_images(data.open("train"), 6, seed=0)
    decoded, decode = [], stores.decode_image
    monkeypatch.setattr(stores, "decode_image", lambda *args, **more: decoded.append(args[1]) or decode(*args, **more))
    images = dataclasses.replace(data, max_images=6).open("train")
    assert len(decoded) == 6 * resident_limit_mib
    assert isinstance(images, ResidentImages if resident_limit_mib else EncodedImages)
    assert images.labels.tolist() == expected.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.equal(images.read(torch.arange(6)).images, expected.read(torch.arange(6)).images)
    assert images.description == expected.description
    assert len(dataclasses.replace(data, max_images=600).open("train")) == 60


def test_parquet_is_looked_for(tmp_path):
    data = ParquetConfig(train=(str(tmp_path / "no.parquet"),), test=("x",), cache_folder=str(tmp_path))
    with pytest.raises(MissingDataError, match="no.parquet"):
        data.open("train")


def test_a_data_set_is_the_same_in_any_folder():
    def photos(folder, **others):
        train, test = (f"{folder}/photos/{split}.parquet" for split in ("train", "test"))
        return ParquetConfig(train=(train,), test=(test,), **others)

    there = photos("s3://b", resident_limit_mib=3, cache_folder="/c")
    assert same_set(photos("/a"), there, set()) and not same_set(photos("/a", max_images=9), there, set())
    assert same_set(photos("/a", max_images=9), there, {"max_images"})
    assert not same_set(photos("/a"), photos("/a", image_size_px=32), set())
    assert not same_set(photos("/a"), ParquetConfig(train=("/a/photos/other.parquet",)), set())
