"""Test files of queries and of a gallery."""

from dataclasses import replace
from functools import partial

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from ssl_sec.data.config import FolderConfig, ParquetConfig, WebDatasetConfig
from ssl_sec.data.crops import CentreCrop
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.data.parquet.opening import open_parquet
from ssl_sec.data.shards.gallery import QueriesAndGallery
from ssl_sec.errors import ConfigError, DataError, MissingDataError
from tests.data.files import plain, write_folder, write_parquet
from tests.data.shards.test_tar import write_tar
from tests.data.test_image_set import values
from tests.data.test_sources import line

CROP = CentreCrop(short_side_px=8, size_px=8)
# Part -> grey value and class of each image: of the classes 2 to 4, which are not trained on, 4 has no queries.
PARTS = {
    "train": [(1, 0), (2, 0), (3, 1)],
    "query": [(11, 2), (12, 2), (13, 3)],
    "gallery": [(21, 2), (22, 3), (23, 3), (24, 4)],
}
VALUES = [11, 12, 13, 21, 22, 23, 24]
KINDS = ["folder", "parquet", "webdataset"]


def write(kind, root, parts=PARTS, damaged=()):
    """The same images in a layout, and their configuration."""
    root.mkdir(exist_ok=True)
    parts = {
        part: [(b"damaged" if value in damaged else plain(value), label) for value, label in images]
        for part, images in parts.items()
    }
    if kind == "folder":
        for part, images in parts.items():
            write_folder(root, {f"{part}/{label}/{at:03d}.png": image for at, (image, label) in enumerate(images)})
        return FolderConfig(root=str(root))
    places = {}
    for part, images in parts.items():
        half = len(images) // 2
        for at, some in enumerate((images[:half], images[half:])):  # in two files, as of any number
            path = root / f"{part}-{at}"
            if kind == "parquet":
                write_parquet(path.with_suffix(".parquet"), [image for image, _ in some], [label for _, label in some])
            else:
                members = {}
                for number, (image, label) in enumerate(some):
                    members |= {f"{number}.png": image, f"{number}.cls": str(label).encode()}
                write_tar(path.with_suffix(".tar"), members)
        places[part] = (str(root / f"{part}-*.{'parquet' if kind == 'parquet' else 'tar'}"),)
    kinds = {"parquet": ParquetConfig, "webdataset": WebDatasetConfig}
    return kinds[kind](**places, cache_folder=str(root / "cache"))


@pytest.mark.parametrize("image_size_px", [None, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_both_are_the_test_images_and_a_mask_says_which_are_queries(tmp_path, kind, image_size_px):
    data = replace(write(kind, tmp_path), image_size_px=image_size_px)
    train, test = (data.open_by_class(split, CROP) for split in ("train", "test"))
    assert isinstance(test, EncodedImages if image_size_px is None else ResidentImages)
    assert values(test.read(torch.arange(7))) == VALUES
    assert test.queries.tolist() == [True] * 3 + [False] * 4
    assert test.labels.tolist() == [0, 0, 1, 0, 1, 1, 2] and test.class_names == ("2", "3", "4")
    assert train.queries is None and values(train.read(torch.arange(3))) == [1, 2, 3]
    assert data.has_test_images and test.name == f"{kind}/test"


@pytest.mark.parametrize("image_size_px", [None, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_is_that_of_the_images_that_can_be_read(tmp_path, kind, image_size_px):
    data = write(kind, tmp_path, damaged=(12, 21, 23))
    data = replace(data, on_bad_image="skip", image_size_px=image_size_px)
    test = data.open_by_class("test", CROP)
    if image_size_px is None:  # they are replaced where they are read, and left out of the measures by their indices
        assert test.queries.tolist() == [True] * 3 + [False] * 4
        return
    assert values(test.read(torch.arange(len(test)))) == [11, 13, 22, 24]
    assert test.queries.tolist() == [True, True, False, False] and test.num_bad_images == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_asks_for_test_images_gets_all_of_them(tmp_path, kind):
    parts = {"train": [(1, 0), (2, 1)], "query": [(3, 1), (4, 1)], "gallery": [(5, 0), (6, 1)]}
    data = replace(write(kind, tmp_path, parts), max_images=1)
    for test in (data.open("test"), data.open_all("test"), data.open_to_embed("test")):
        assert values(test.read(torch.arange(4))) == [3, 4, 5, 6]
        assert test.labels.tolist() == [1, 1, 0, 1] and test.class_names == ("0", "1")


@pytest.mark.parametrize("kind", KINDS)
def test_classes_that_are_trained_on_too_are_refused(tmp_path, kind):
    data = write(kind, tmp_path, {**PARTS, "gallery": [(21, 2), (22, 1)]})
    for split in ("train", "test"):
        told = line(lambda split=split: data.open_by_class(split, CROP))
        assert "classes in both splits: 1; training and test classes must be disjoint" in told


def test_named_classes_are_those_of_both(tmp_path):
    files = {
        part: write_parquet(tmp_path / f"{part}.parquet", [plain(1)] * len(names), pa.array(names))
        for part, names in (("train", ["ant"]), ("query", ["fox", "bee"]), ("gallery", ["cow", "fox"]))
    }
    test = QueriesAndGallery(query=files["query"], gallery=[files["gallery"]])
    images = open_parquet("test", files["train"], test=test, shared_classes=False)
    assert images.class_names == ("bee", "cow", "fox") and images.labels.tolist() == [2, 0, 1, 2]
    assert images.queries.tolist() == [True, True, False, False]


@pytest.mark.parametrize("config", [ParquetConfig, WebDatasetConfig])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"query": ("q",)}, "data.gallery: found null, must be given with data.query"),
        ({"gallery": ("g",)}, "data.query: found null, must be given with data.gallery"),
        (
            {"query": ("q",), "gallery": ("g",), "test": ("t",)},
            r"data.test: found \['t'\], must be null with data.query and data.gallery, which are the test images",
        ),
        (
            {"query": ("q",), "gallery": ("g",), "num_train_classes": 3},
            "data.num_train_classes: found 3, must be null with data.query and data.gallery, which are the test images",
        ),
    ],
)
def test_contradictions_are_one_line(config, values, expected):
    with pytest.raises(ConfigError, match=f"^{expected}$"):
        config(train=("a",), **values)


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
def test_files_on_this_machine_are_checked_before_a_run_begins(tmp_path, kind):
    data, files = write(kind, tmp_path), "Parquet" if kind == "parquet" else "tar"
    data.require_places(with_test=True)
    no, several = str(tmp_path / "no-*.x"), str(tmp_path / "no-{00..01}.x")
    ending = data.train[0].rpartition(".")[2]
    for changed, with_test, expected in (
        ({"train": (no,)}, False, f"no {files} file matches {no}; set data.train"),
        ({"train": (several,)}, False, f"data.train: found '{tmp_path}/no-00.x': no such file"),
        ({"train": data.train * 2}, False, f"{tmp_path}/train-0.{ending}: found twice"),
        ({"gallery": (no,)}, True, f"no {files} file matches {no}; set data.train"),
        ({"gallery": data.query}, True, f"{tmp_path}/query-0.{ending}: found twice"),
        ({"query": data.train}, True, f"{tmp_path}/train-0.{ending}: found in data.train"),
    ):
        wrong = replace(data, **changed)
        assert line(partial(wrong.require_places, with_test=with_test)).startswith(expected)
        if with_test:
            wrong.require_places(with_test=False)
    replace(data, train=("memory://no-*.x",)).require_places(with_test=True)  # known once it is opened


@pytest.mark.parametrize(("part", "other"), [("query", "gallery"), ("gallery", "query")])
def test_both_need_images(tmp_path, part, other):
    data = write("parquet", tmp_path)
    for path in tmp_path.glob(f"{part}-*.parquet"):
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).slice(0, 0), path)
    assert line(lambda: data.open_by_class("test", CROP)) == (
        f"data.{part}: found no images in its Parquet files, must be one or more"
    )
    gone = replace(data, **{part: (str(tmp_path / "gone.parquet"),)})
    gone.require_places(with_test=False)
    assert line(lambda: gone.require_places(with_test=True), MissingDataError).startswith(f"data.{part}: found ")
    told = line(lambda: gone.open_by_class("train", CROP), MissingDataError)
    assert told.endswith("set data.train and data.test, or data.query and data.gallery in place of data.test")
    twice = replace(data, **{part: getattr(data, other)})
    assert "found twice in the list of Parquet files" in line(lambda: twice.open("test"), DataError)


@pytest.mark.parametrize("part", ["query", "gallery"])
def test_no_test_file_is_trained_on(tmp_path, part):
    data = write("webdataset", tmp_path)
    also = replace(data, train=(*data.train, *getattr(data, part)))
    told = line(lambda: also.open("test"))
    assert told.startswith(f"{tmp_path / part}-0.tar: found in data.train and among the test files; allowed: ")


def test_without_test_files_the_keys_are_named():
    with pytest.raises(ConfigError, match="^data.test: found null.*; data.query and data.gallery may take its place$"):
        ParquetConfig(train=("a",)).open_by_class("test", CROP)
    places = ParquetConfig(train=("a",), query=("b",), gallery=("c", "d")).places
    assert places == {"train": ("a",), "test": (), "query": ("b",), "gallery": ("c", "d")}
