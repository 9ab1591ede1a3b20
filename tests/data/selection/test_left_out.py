"""Training images that lists leave out."""

import dataclasses
import itertools
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ssl_sec.data.config import DigitsConfig, FolderConfig, ParquetConfig, WebDatasetConfig
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.fingerprint import fingerprint
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.data.selection.left_out import without_listed
from ssl_sec.data.shards.streamed import StreamedImages
from ssl_sec.errors import DataError, MissingDataError
from tests.data.files import noisy_set, plain, write_folder, write_parquet
from tests.data.shards.test_tar import write_shards

KINDS = {
    "resident": ({}, ResidentImages),
    "encoded": ({"resident_limit_mib": 0}, EncodedImages),
    "streamed": ({"resident_limit_mib": 0, "shuffle_window": 4}, StreamedImages),
}


def listed(folder, name="out.parquet", **columns):
    path = folder / name
    if path.suffix == ".csv":
        rows = zip(*columns.values(), strict=True)
        lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        pq.write_table(pa.table(columns), path)
    return str(path)


def values(image_set):
    return image_set.read(torch.arange(len(image_set))).images[:, 0, 0, 0].tolist()


@pytest.fixture
def sets(tmp_path):
    """Fifteen training images of the values 0 to 14, in three kinds of files, and three test images."""
    write_folder(tmp_path / "folder", {f"train/{v % 3}/{v:02d}.png": plain(v) for v in range(15)})
    write_folder(tmp_path / "folder", {f"test/{v % 3}/{v:02d}.png": plain(v) for v in range(3)})
    write_parquet(tmp_path / "train.parquet", [plain(v) for v in range(15)], [v % 3 for v in range(15)])
    write_parquet(tmp_path / "test.parquet", [plain(v) for v in range(3)], [0, 1, 2])
    cache = str(tmp_path / "cache")
    (tmp_path / "shards").mkdir()
    shards, test = write_shards(tmp_path / "shards"), str(tmp_path / "test.parquet")
    return {
        "folder": FolderConfig(root=str(tmp_path / "folder"), num_channels=1),
        "parquet": ParquetConfig(train=(str(tmp_path / "train.parquet"),), test=(test,), cache_folder=cache),
        "webdataset": WebDatasetConfig(train=(shards,), cache_folder=cache),
    }


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("folder", "resident"), ("folder", "encoded"), *itertools.product(["parquet", "webdataset"], KINDS)],
)
def test_the_listed_training_images_are_left_out(sets, tmp_path, name, kind, suffix):
    more, expected = KINDS[kind]
    data = dataclasses.replace(sets[name], **more)
    whole = values(data.open("train"))
    out = listed(tmp_path, f"out.{suffix}", row=[14, 3, 4, 3, 0], split=["train", "", "train", "train", "test"])
    data = dataclasses.replace(data, leave_out=(out,))
    image_set = data.open("train")
    assert isinstance(image_set, expected)
    kept = [row for row in range(15) if row not in (3, 4, 14)]
    assert values(image_set) == [whole[row] for row in kept]
    assert image_set.labels.tolist() == [data.open_to_embed("train").labels.tolist()[row] for row in kept]
    assert image_set.description.endswith("12 of 15 images, without 3 listed in data.leave_out")
    assert values(data.open_all("train")) == values(image_set) and values(data.open_to_embed("train")) == whole
    assert fingerprint(image_set) != fingerprint(dataclasses.replace(data, leave_out=()).open("train"))
    few = dataclasses.replace(data, max_images=6)
    assert len(few.open("train")) == 6 and set(values(few.open("train"))) <= set(values(image_set))
    assert values(few.open_all("train")) == values(image_set)


@pytest.mark.parametrize(("name", "kind"), [*itertools.product(["parquet", "webdataset"], KINDS)])
def test_the_names_of_the_images_are_the_same_however_a_set_is_read(sets, tmp_path, name, kind):
    """They are embedded from a set that is read by row, and may be left out of one that is read by blocks."""
    embedded = dataclasses.replace(sets[name], resident_limit_mib=0).open("train")
    columns = {"row": [9, 2], "path": [embedded.image_name(9), embedded.image_name(2)]}
    data = dataclasses.replace(sets[name], leave_out=(listed(tmp_path, **columns),), **KINDS[kind][0])
    assert len(data.open("train")) == 13


def test_test_images_stay(sets, tmp_path):
    out = listed(tmp_path, row=[0, 1], split=["test", "test"])
    for name in ("folder", "parquet"):
        data = dataclasses.replace(sets[name], leave_out=(out,))
        assert (len(data.open("test")), len(data.open("train"))) == (3, 15)


def test_lists_together_leave_out_the_images_of_all(tmp_path, caplog):
    caplog.set_level("INFO", "ssl_sec.data")
    lists = listed(tmp_path, "a.csv", row=[1, 2]), listed(tmp_path, "b.parquet", row=[2, 1436])
    image_set = DigitsConfig(leave_out=lists).open("train")
    assert image_set.rows.tolist() == [0, *range(3, 1436)]
    assert caplog.messages == ["digits/train: data.leave_out leaves out 3 of 1437 images"]
    assert DigitsConfig(leave_out=(str(tmp_path / "*.*"),)).open("train").rows.tolist() == image_set.rows.tolist()


def test_rows_of_a_set_that_is_split_by_classes_are_those_of_its_part(tmp_path):
    data = DigitsConfig(num_train_classes=5, leave_out=(listed(tmp_path, row=[0, 7]),))
    whole = data.open_to_embed("train")
    found = data.open_by_class("train", None)
    assert found.labels.tolist() == [label for row, label in enumerate(whole.labels.tolist()) if row not in (0, 7)]
    assert len(data.open_by_class("test", None)) == len(data.open_to_embed("test"))


def test_rows_of_the_part_of_a_set_that_was_decoded_at_once(sets, tmp_path):
    parquet = dataclasses.replace(sets["parquet"], test=None)
    data = dataclasses.replace(parquet, num_train_classes=2, leave_out=(listed(tmp_path, row=[0, 9]),))
    found = data.open_by_class("train", None)
    assert isinstance(found, ResidentImages)
    assert values(found) == [v for v in range(15) if v % 3 < 2 and v not in (0, 13)]


def test_labels_and_rows_of_a_set_with_classes_of_its_own_are_those_that_were_embedded(tmp_path):
    """Its training labels have gaps, and one of its images is unreadable."""
    labels = [1, 3, 5] * 3
    images = [b"damaged" if value == 2 else plain(value) for value in range(9)]
    train = write_parquet(tmp_path / "train.parquet", images, labels)
    test = write_parquet(tmp_path / "test.parquet", [plain(9), plain(9)], [0, 2])
    data = ParquetConfig(train=(str(train),), test=(str(test),), on_bad_image="skip")
    listed_rows = [2, 5, 6]
    out = listed(tmp_path, row=listed_rows, label=[labels[row] for row in listed_rows])
    found = dataclasses.replace(data, leave_out=(out,)).open_by_class("train", None)
    assert (values(found), found.labels.tolist()) == ([0, 1, 3, 4, 7, 8], [0, 1, 0, 1, 1, 2])
    assert found.class_names == ("1", "3", "5")


def test_only_the_images_that_stay_are_decoded(tmp_path):
    """An unreadable image may be left out by a list, and the rows of the others stay those that were embedded."""
    images = {f"train/{'ab'[v % 2]}/{v}.png": b"damaged" if v in (0, 4) else plain(v) for v in range(8)}
    write_folder(tmp_path / "folder", images)
    data = FolderConfig(root=str(tmp_path / "folder"), num_channels=1, image_size_px=8)  # 0 2 4 6 1 3 5 7
    data = dataclasses.replace(data, leave_out=(listed(tmp_path, row=[0, 2, 5]),))
    assert values(data.open("train")) == [2, 6, 1, 5, 7]
    skipping = dataclasses.replace(data, leave_out=(listed(tmp_path, row=[2, 5]),), on_bad_image="skip")
    assert values(skipping.open("train")) == [2, 6, 1, 5, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_list_count_unreadable_images(tmp_path, kind):
    images = [b"damaged" if value in (1, 4) else plain(value) for value in range(8)]
    write_parquet(tmp_path / "train.parquet", images, [0, 1] * 4)
    data = ParquetConfig(
        train=(str(tmp_path / "train.parquet"),),
        image_size_px=8,
        cache_folder=str(tmp_path / "cache"),
        on_bad_image="skip",
        leave_out=(listed(tmp_path, row=[7, 4, 2], label=[1, 0, 0]),),
        **KINDS[kind][0],
    )
    found = set(values(data.open("train")))
    assert found == {0, 3, 5, 6}
    with pytest.raises(DataError, match=r"found label 1 at row 2, where parquet/train has 0: the list is of other im"):
        dataclasses.replace(data, leave_out=(listed(tmp_path, row=[4, 2], label=[0, 1]),)).open("train")
    with pytest.raises(DataError, match="found row 8; parquet/train has the rows 0 to 7"):
        dataclasses.replace(data, leave_out=(listed(tmp_path, row=[8]),)).open("train")


def test_rows_that_have_changed_by_unreadable_images_are_refused(tmp_path):
    """A set that is split by classes does not know the class of an image that it could not read."""
    write_parquet(tmp_path / "train.parquet", [plain(1), b"damaged", plain(3), plain(4)], [0, 1, 0, 1])
    data = ParquetConfig(
        train=(str(tmp_path / "train.parquet"),),
        cache_folder=str(tmp_path / "cache"),
        on_bad_image="skip",
        num_train_classes=1,
        leave_out=(listed(tmp_path, row=[1]),),
    )
    message = (
        "data.leave_out: found 1 unreadable image in parquet/train, by which the rows of the others have changed; with "
        "data.resident_limit_mib=0 they are as listed"
    )
    with pytest.raises(DataError) as caught:
        data.open_by_class("train", None)
    assert str(caught.value) == message
    assert len(dataclasses.replace(data, resident_limit_mib=0, image_size_px=8).open_by_class("train", None)) == 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"number": [1]}, "{out}: found no column 'row', the numbers of the images, as jobs.embed writes it"),
        (
            {"row": [1], "neighbour_row": [2]},
            "{out}: found pairs of images, must be a list of images; jobs.neighbours lists those that others make "
            "redundant in redundant.parquet",
        ),
        ({"row": [1.5]}, "{out}: found double in the column 'row', must be whole numbers"),
        ({"row": [1, None]}, "{out}: found empty entries in the column 'row', must be whole numbers"),
        ({"row": ["cat"]}, "{out}: found string in the column 'row', must be whole numbers"),
        ({"row": [0, 20]}, "{out}: found row 20; noise/train has the rows 0 to 19: the list is of other images"),
        ({"row": [-1]}, "{out}: found row -1; noise/train has the rows 0 to 19: the list is of other images"),
        (
            {"row": [2], "label": [9]},
            "{out}: found label 9 at row 2, where noise/train has {label}: the list is of other images",
        ),
        (
            {"row": [2], "path": ["/photos/3"]},
            "{out}: found path '3' at row 2, where noise/train has '2': the list is of other images",
        ),
        ({"row": list(range(20))}, "the whole of noise/train is listed, 20 images"),
    ],
)
def test_a_list_of_other_images_is_refused_in_one_line(tmp_path, columns, message):
    image_set, out = noisy_set(20, ()), listed(tmp_path, **columns)
    with pytest.raises(DataError) as caught:
        without_listed(image_set, [out])
    assert str(caught.value) == "data.leave_out: " + message.format(out=out, label=int(image_set.labels[2]))


@pytest.mark.parametrize(
    "columns",
    [
        {"row": [2], "path": ["/elsewhere/2"], "label": [None]},
        {"row": [2], "path": [None], "split": [None]},
        {"row": [2], "label": ["a name"], "path": [""]},
    ],
)
def test_a_list_need_not_say_more_than_rows(tmp_path, columns):
    assert len(without_listed(noisy_set(20, ()), [listed(tmp_path, **columns)])) == 19


def test_an_empty_list_leaves_all(tmp_path):
    image_set = noisy_set(20, ())
    for out in (listed(tmp_path, row=pa.array([], pa.int64())), listed(tmp_path, "out.csv", row=[])):
        assert without_listed(image_set, [out]) is image_set


def test_a_missing_list_is_named_before_the_training(tmp_path):
    with pytest.raises(MissingDataError, match="^data.leave_out: found 'no.parquet': no such file or folder$"):
        DigitsConfig(leave_out=("no.parquet",)).require_places(with_test=False)
    with pytest.raises(MissingDataError, match="no.parquet: no such file; data.leave_out gives the lists$"):
        DigitsConfig(leave_out=(str(tmp_path / "no.parquet"),)).open("train")
    (tmp_path / "text.parquet").write_text("no table", encoding="utf-8")
    pq.write_table(pa.table({"row": ["1"]}), tmp_path / "words.parquet")
    for name, message in (("text", "cannot be read: "), ("words", "found string in the column 'row', must be whole")):
        config = DigitsConfig(leave_out=(str(tmp_path / f"{name}.parquet"),))
        for use in (partial(config.open, "train"), partial(config.require_places, with_test=False)):
            with pytest.raises(DataError, match=f"^data.leave_out: .*{name}.parquet: {message}"):
                use()
