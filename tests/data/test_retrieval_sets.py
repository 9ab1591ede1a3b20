import pickle
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.io import savemat

from ssl_sec.data.crops import CentreCrop
from ssl_sec.data.decode import Decoding
from ssl_sec.data.retrieval_sets import CUB_COUNTS, RETRIEVAL_SETS, Counts, open_retrieval_set
from ssl_sec.errors import MissingDataError
from tests.data.files import plain, write_folder
from tests.data.test_image_set import values
from tests.data.test_sources import line

CROPPED = Decoding(crop=CentreCrop(short_side_px=8, size_px=8), on_bad_image="raise")

FOUR_TWO = {"train": Counts(4, 2), "test": Counts(2, 1)}
COUNTS = {
    "cub": FOUR_TWO,
    "cars196": FOUR_TWO,
    "sop": FOUR_TWO,
    "inshop": {"train": Counts(3, 2), "query": Counts(2, 2), "gallery": Counts(3, 2), "test": Counts(5, 2)},
}
LISTS = {
    "cub": "images.txt",
    "sop": "Ebay_train.txt",
    "inshop": "Eval/list_eval_partition.txt",
}

CUB = {
    "images.txt": b"1 001.Albatross/a.jpg\n2 001.Albatross/b.jpg\n3 002.Finch/c.jpg\n4 003.Crow/d.jpg\n"
    b"5 003.Crow/e.jpg\n6 002.Finch/f.jpg\n",
    "image_class_labels.txt": b"1 1\n2 1\n4 3\n3 2\n5 3\n6 2\n",
    "images/001.Albatross/a.jpg": plain(1, 30, 21),
    "images/001.Albatross/b.jpg": plain(2, 5, 9),
    "images/002.Finch/c.jpg": plain(3),
    "images/003.Crow/d.jpg": plain(4),
    "images/003.Crow/e.jpg": plain(5),
    "images/002.Finch/f.jpg": plain(6),
}
CARS = {f"car_ims/{number}.jpg": plain(number) for number in range(1, 7)}
SOP = {
    "Ebay_train.txt": b"image_id class_id super_class_id path\n1 1 1 bicycle_final/1.JPG\n2 1 1 bicycle_final/2.JPG\n"
    b"3 2 1 bicycle_final/3.JPG\n4 2 1 bicycle_final/4.JPG\n",
    "Ebay_test.txt": b"image_id class_id super_class_id path\r\n5 11319 2 sofa_final/5.JPG\r\n"
    b"6 11319 2 sofa_final/6.JPG\r\n",
    **{f"bicycle_final/{number}.JPG": plain(number) for number in range(1, 5)},
    **{f"sofa_final/{number}.JPG": plain(number) for number in range(5, 7)},
}
INSHOP_PLACES = {
    "WOMEN/Tees/id_7/01_front.jpg": ("id_7", "train"),
    "WOMEN/Tees/id_7/01_side.jpg": ("id_7", "train"),
    "MEN/Denim/id_3/01_front.jpg": ("id_3", "query"),
    "MEN/Denim/id_3/01_side.jpg": ("id_3", "gallery"),
    "MEN/Denim/id_1/02_front.jpg": ("id_1", "train"),
    "MEN/Denim/id_2/02_front.jpg": ("id_2", "gallery"),
    "MEN/Denim/id_2/02_side.jpg": ("id_2", "query"),
    "MEN/Denim/id_3/01_back.jpg": ("id_3", "gallery"),
}
INSHOP_LIST = "8\nimage_name item_id evaluation_status\n" + "".join(
    f"img/{path:40} {item:8} {part}\n" for path, (item, part) in INSHOP_PLACES.items()
)
INSHOP = {
    "Eval/list_eval_partition.txt": INSHOP_LIST.encode(),
    **{f"Img/img/{path}": plain(number) for number, path in enumerate(INSHOP_PLACES, start=1)},
}


def write_cars(path, rows, names=("Hummer", "Acura", "Audi")) -> None:
    """An annotation file with the fields of the published one."""
    types = [(name, object) for name in ("relative_im_path", "bbox_x1", "class", "test")]
    annotations = np.array([(path, 112, label, number % 2) for number, (path, label) in enumerate(rows)], types)
    savemat(path, {"annotations": annotations[None], "class_names": np.array([list(names)], object)})


CAR_ROWS = [("car_ims/1.jpg", 1), ("car_ims/2.jpg", 1), ("car_ims/3.jpg", 3), ("car_ims/4.jpg", 2)] + [
    ("car_ims/5.jpg", 3),
    ("car_ims/6.jpg", 2),
]


def write(name, root):
    """The miniature of a set in its published layout."""
    write_folder(root, {"cub": CUB, "cars196": CARS, "sop": SOP, "inshop": INSHOP}[name])
    if name == "cars196":
        write_cars(root / "cars_annos.mat", CAR_ROWS)
    return root


def opened(name, root, split, on_bad_image="raise"):
    read, _ = RETRIEVAL_SETS[name]
    return read(root, COUNTS[name]).open(split, replace(CROPPED, on_bad_image=on_bad_image))


def edit(path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "split", "pixels", "labels", "class_names"),
    [
        ("cub", "train", [1, 2, 3, 6], [0, 0, 1, 1], ("001.Albatross", "002.Finch")),
        ("cub", "test", [4, 5], [0, 0], ("003.Crow",)),
        ("cars196", "train", [1, 2, 4, 6], [0, 0, 1, 1], ("Hummer", "Acura")),
        ("cars196", "test", [3, 5], [0, 0], ("Audi",)),
        ("sop", "train", [1, 2, 3, 4], [0, 0, 1, 1], ("1", "2")),
        ("sop", "test", [5, 6], [0, 0], ("11319",)),
        ("inshop", "train", [1, 2, 5], [1, 1, 0], ("id_1", "id_7")),
        ("inshop", "test", [3, 4, 6, 7, 8], [1, 1, 0, 0, 1], ("id_2", "id_3")),
    ],
)
def test_published_layouts(tmp_path, name, split, pixels, labels, class_names):
    image_set = pickle.loads(pickle.dumps(opened(name, write(name, tmp_path), split)))
    batch = image_set.read(torch.arange(len(image_set)))
    assert values(batch) == pixels
    assert image_set.labels.tolist() == labels == batch.labels.tolist()
    assert image_set.class_names == class_names
    assert image_set.image_shape == (3, 8, 8) and image_set.crop == CROPPED.crop
    assert image_set.name == f"{name}/{split}" and str(tmp_path) in image_set.description
    if (name, split) == ("inshop", "test"):
        assert image_set.queries.tolist() == [True, False, False, True, False]
    else:
        assert image_set.queries is None


def test_inshop_without_its_two_folders(tmp_path):
    write("inshop", tmp_path)
    (tmp_path / "Img/img").rename(tmp_path / "img")
    (tmp_path / "Eval/list_eval_partition.txt").rename(tmp_path / "list_eval_partition.txt")
    assert values(opened("inshop", tmp_path, "train").read(torch.arange(3))) == [1, 2, 5]


@pytest.mark.parametrize("name", RETRIEVAL_SETS)
def test_a_missing_set_is_described(tmp_path, name):
    for root in (tmp_path / "none", tmp_path):
        message = line(lambda root=root: open_retrieval_set(name, "train", root, CROPPED), MissingDataError)
        assert str(root) in message and "not there" in message and "https://" in message and "data.root" in message


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("cub", "images"),
        ("cub", "image_class_labels.txt"),
        ("cars196", "car_ims"),
        ("sop", "Ebay_test.txt"),
        ("inshop", "Img"),
    ],
)
def test_missing_files_are_named(tmp_path, name, gone):
    write(name, tmp_path)
    (tmp_path / gone).rename(tmp_path / "elsewhere")
    message = line(lambda: open_retrieval_set(name, "train", str(tmp_path), CROPPED), MissingDataError)
    assert message.startswith(str(tmp_path / gone))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cub", "cub: found 6 images of 3 classes in {root}, train; expected 5,864 images of 100 classes"),
        ("cars196", "cars196: found 6 images of 3 classes in {root}, train; expected 8,054 images of 98 classes"),
        ("sop", "sop: found 4 images of 2 classes in {root}, train; expected 59,551 images of 11,318 classes"),
        ("inshop", "inshop: found 3 images of 2 classes in {root}, train; expected 25,882 images of 3,997 classes"),
    ],
)
def test_the_published_numbers_are_expected(tmp_path, name, expected):
    write(name, tmp_path)
    message = line(lambda: open_retrieval_set(name, "train", tmp_path, CROPPED))
    assert message == f"{expected.format(root=tmp_path)}, as published"


def test_every_part_is_counted(tmp_path):
    path = write("inshop", tmp_path) / "Eval/list_eval_partition.txt"
    edit(path, b"id_2     query", b"id_2     gallery")
    assert "found 1 image of 1 class" in line(lambda: opened("inshop", tmp_path, "train"))
    assert "query; expected 2 images of 2 classes" in line(lambda: opened("inshop", tmp_path, "train"))


WRONG_LINES = [
    ("cub", "images.txt", b"003.Crow/d.jpg", b"003.Crow/d.jpg 9", "images.txt line 4: 3 fields found, 2 expected"),
    ("cub", "images.txt", b"2 001", b"\n2 001", "images.txt line 2: 0 fields found, 2 expected"),
    ("cub", "images.txt", b"4 003", b"9 003", "images.txt line 4: image '9' has no label in image_class_labels.txt"),
    ("cub", "image_class_labels.txt", b"5 3", b"4 3", "image_class_labels.txt line 5: image '4' is listed again"),
    ("cub", "image_class_labels.txt", b"5 3", b"5 x", "labels.txt line 5: label 'x'; allowed: integers, 1 or more"),
    ("cub", "image_class_labels.txt", b"5 3", b"5 0", "labels.txt line 5: label '0'; allowed: integers, 1 or more"),
    ("cub", "image_class_labels.txt", b"5 3", b"5 -3", "labels.txt line 5: label '-3'; allowed"),
    ("cub", "image_class_labels.txt", b"5 3", b"5 " + b"9" * 5000, "allowed: integers, 1 or more"),
    ("cub", "images.txt", b"001.Albatross/b", b"001.Albatross/a", "line 2: images/001.Albatross/a.jpg is listed again"),
    ("cub", "images.txt", b"001.Albatross/b", b"001.Albatross/x", "line 2: images/001.Albatross/x.jpg is not there"),
    ("cub", "images.txt", b"001.Albatross/b", b"009.Ibis/b", "line 2: images/009.Ibis/b.jpg is not there"),
    ("cub", "images.txt", b"001.Albatross/b", b"../../b", "line 2: images/../../b.jpg leads out of data.root"),
    ("cub", "images.txt", b"001.Albatross/b", b"a\0b", "images.txt line 2: images/a"),
    (
        "sop",
        "Ebay_train.txt",
        b" path\n",
        b" name\n",
        "line 1: found 'image_id class_id super_class_id name', expected",
    ),
    ("sop", "Ebay_train.txt", b"image_id class_id super_class_id path\n", b"", "line 1: found '1 1 1 bicycle"),
    (
        "sop",
        "Ebay_train.txt",
        b"bicycle_final/2",
        b"/etc/2",
        "Ebay_train.txt line 3: /etc/2.JPG leads out of data.root",
    ),
    ("sop", "Ebay_train.txt", b"bicycle_final/2", b"bicycle_final/2 b", "line 3: 5 fields found, 4 expected"),
    ("sop", "Ebay_train.txt", b"2 1 1 b", b"2 1.5 1 b", "line 3: label '1.5'; allowed"),
    ("sop", "Ebay_test.txt", b"11319 2 sofa_final/5", b"2 2 sofa_final/5", "sop: found 2 images of 2 classes"),
    ("inshop", LISTS["inshop"], b"train", b"validation", "line 3: status 'validation'; allowed: train, query, gallery"),
    ("inshop", LISTS["inshop"], b"item_id", b"id", "line 2: found 'image_name id evaluation_status', expected"),
    ("inshop", LISTS["inshop"], b"img/WOMEN", b"../img/WOMEN", "line 3: Img/../img/WOMEN"),
]


@pytest.mark.parametrize(("name", "file", "old", "new", "message"), WRONG_LINES)
def test_a_wrong_line_is_named(tmp_path, name, file, old, new, message):
    edit(write(name, tmp_path) / file, old, new)
    found = line(lambda: opened(name, tmp_path, "train"))
    assert message in found
    assert found.startswith(str(tmp_path / file)) or found.startswith("sop: ")


@pytest.mark.parametrize("name", LISTS)
def test_an_empty_list(tmp_path, name):
    path = write(name, tmp_path) / LISTS[name]
    path.write_bytes(b"")
    assert line(lambda: opened(name, tmp_path, "train")).startswith(f"{path} line ")


def test_classes_in_both_splits_are_refused(tmp_path):
    edit(write("sop", tmp_path) / "Ebay_test.txt", b"11319 2 sofa_final/5", b"2 2 sofa_final/5")
    edit(tmp_path / "Ebay_test.txt", b"11319 2 sofa_final/6", b"2 2 sofa_final/6")
    assert "sop: classes in both splits: 2;" in line(lambda: opened("sop", tmp_path, "train"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("car_ims/1.jpg", 4), *CAR_ROWS[1:]], "annotation 1: class 4, but 3 classes have names"),
        ([("car_ims/1.jpg", 0), *CAR_ROWS[1:]], "annotation 1: label '0'; allowed: integers, 1 or more"),
        ([("car_ims/1.jpg", "one"), *CAR_ROWS[1:]], "annotation 1: label 'one'; allowed"),
        ([*CAR_ROWS[:3], ("car_ims/7.jpg", 2), *CAR_ROWS[4:]], "annotation 4: car_ims/7.jpg is not there"),
        ([*CAR_ROWS[:3], ("../7.jpg", 2), *CAR_ROWS[4:]], "annotation 4: ../7.jpg leads out of data.root"),
    ],
)
def test_a_wrong_annotation_of_cars_is_named(tmp_path, rows, message):
    write_cars(write("cars196", tmp_path) / "cars_annos.mat", rows)
    assert line(lambda: opened("cars196", tmp_path, "train")).startswith(f"{tmp_path / 'cars_annos.mat'} {message}")


def test_another_or_a_damaged_annotation_file(tmp_path):
    path = write("cars196", tmp_path) / "cars_annos.mat"
    whole = path.read_bytes()
    savemat(path, {"annotations": np.array([[(1,)]], [("fname", object)])})
    message = line(lambda: opened("cars196", tmp_path, "train"))
    assert f"{path}: no annotations.relative_im_path, annotations.class" in message
    savemat(path, {"other": 1})
    assert "no annotations.relative_im_path" in line(lambda: opened("cars196", tmp_path, "train"))
    for content in (b"", b"text", whole[: len(whole) // 2], whole[:200] + b"\xff" * 50 + whole[250:]):
        path.write_bytes(content)
        assert line(lambda: opened("cars196", tmp_path, "train")).startswith(f"{path}")


@pytest.mark.parametrize("link", ["images", "images/001.Albatross", "images/001.Albatross/b.jpg"])
def test_links_out_of_the_set_are_refused(tmp_path, link):
    root = write("cub", tmp_path / "root")
    (root / link).rename(tmp_path / "outside")
    (root / link).symlink_to(tmp_path / "outside")
    message = line(lambda: opened("cub", root, "train"))
    assert "images.txt line " in message and "leads out of data.root" in message


def test_links_within_the_set_and_to_it_are_followed(tmp_path):
    root = write("cub", tmp_path / "root")
    (root / "images/001.Albatross").rename(root / "birds")
    (root / "images/001.Albatross").symlink_to(root / "birds")
    (root / "images/002.Finch/c.jpg").unlink()
    (root / "images/002.Finch/c.jpg").symlink_to(root / "images/003.Crow/d.jpg")
    (tmp_path / "link").symlink_to(root)
    assert values(opened("cub", tmp_path / "link", "train").read(torch.arange(4))) == [1, 2, 4, 6]


def test_an_unreadable_image_is_replaced_or_named(tmp_path):
    path = write("cub", tmp_path) / "images/001.Albatross/b.jpg"
    path.write_bytes(b"text")
    assert str(path) in line(lambda: opened("cub", tmp_path, "train").read(torch.tensor([1])))
    skipping = opened("cub", tmp_path, "train", on_bad_image="skip")
    assert values(skipping.read(torch.tensor([0, 1]))) == [1, 1] and skipping.num_bad_images == 1


def test_names_that_are_not_utf8(tmp_path):
    write("sop", tmp_path)
    name = b"bicycle_final/\xff.JPG".decode("utf-8", "surrogateescape")
    (tmp_path / "bicycle_final/2.JPG").rename(tmp_path / name)
    edit(tmp_path / "Ebay_train.txt", b"final/2", b"final/\xff")
    assert values(opened("sop", tmp_path, "train").read(torch.arange(4))) == [1, 2, 3, 4]


def test_a_set_of_the_published_size_opens_quickly(tmp_path):
    """The lists are complete; only the images of the opened split need to exist."""
    counts = CUB_COUNTS
    class_ids = [i % 100 + 1 for i in range(counts["train"].images)]
    class_ids += [i % 100 + 101 for i in range(counts["test"].images)]
    names = [f"{class_id:03}.Bird/{i:05}.jpg" for i, class_id in enumerate(class_ids)]
    write_folder(
        tmp_path,
        {
            "images.txt": "".join(f"{i} {name}\n" for i, name in enumerate(names)).encode(),
            "image_class_labels.txt": "".join(f"{i} {class_id}\n" for i, class_id in enumerate(class_ids)).encode(),
            **{f"images/{name}": b"" for name in names[counts["train"].images :]},
        },
    )
    started = time.process_time()
    image_set = open_retrieval_set("cub", "test", tmp_path, CROPPED)
    assert time.process_time() - started < 3
    assert len(image_set) == 5_924 and image_set.labels.unique().tolist() == list(range(100))
    assert (image_set.class_names[0], image_set.class_names[-1]) == ("101.Bird", "200.Bird")
    missing = f"{tmp_path}/images.txt line 1: images/001.Bird/00000.jpg is not there"
    assert line(lambda: open_retrieval_set("cub", "train", tmp_path, CROPPED)) == missing
