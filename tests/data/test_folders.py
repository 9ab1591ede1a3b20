import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from ssl_sec.data import log
from ssl_sec.data.decode import EXTENSIONS, UNREAD_EXTENSIONS, Decoding
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.fingerprint import fingerprint
from ssl_sec.data.folders import listing
from ssl_sec.data.folders.listing import has_images, image_paths
from ssl_sec.data.folders.opening import find_test_folders, open_folder
from ssl_sec.data.image_set import require_labels
from ssl_sec.errors import MissingDataError
from tests.data.files import encode, plain, write_folder
from tests.data.test_image_set import values
from tests.data.test_sources import line

SPLITS, CLASSES = ("train", "test"), ("Dog", "cat")


def names(images) -> list[str]:
    assert isinstance(images, EncodedImages)
    return [images.store.image_name(row) for row in range(len(images))]


@pytest.mark.parametrize("labels", [None, True])
def test_images_below_a_class_folder_are_of_its_class(tmp_path, labels):
    files = ["cat/1.png", "cat/2019/05/2.jpg", "cat/2019/3.png", "cat/b.png/4.png", "dog/5.png"]
    write_folder(tmp_path, {f"train/{file}": plain(int(file[-5])) for file in files})
    write_folder(tmp_path, {f"test/{file}": plain(int(file[-5])) for file in files[1:]})
    hidden = ["cat/.hidden/9.png", "cat/2019/.9.png", "cat/mlruns/9.png", "dog/run/plots/9.png"]
    write_folder(tmp_path, {f"train/{file}": plain(9) for file in hidden} | {"train/dog/run/metrics.jsonl": b""})
    train, test = (open_folder(split, tmp_path, Decoding(resident_limit_mib=0), labels=labels) for split in SPLITS)
    assert names(train) == [f"{tmp_path}/train/{file}" for file in files]
    assert train.labels.tolist() == [0, 0, 0, 0, 1] and train.class_names == ("cat", "dog")
    assert values(test.read(torch.arange(4))) == [2, 3, 4, 5] and test.labels.tolist() == [0, 0, 0, 1]


def test_folders_that_systems_add_hold_neither_images_nor_classes(tmp_path, caplog):
    write_folder(tmp_path, {f"train/{name}/1.jpg": plain(1) for name in ("cat", "dog")})
    of_systems = ("lost+found", "@eaDir/1.jpg", "#recycle", "$RECYCLE.BIN")
    write_folder(tmp_path, {f"{name}/SYNOPHOTO_THUMB_M.jpg": plain(2) for name in of_systems})
    write_folder(tmp_path, {f"train/{name}/SYNOPHOTO_THUMB_M.jpg": plain(2) for name in of_systems})
    write_folder(tmp_path, {"train/cat/@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg": plain(2)})
    assert open_folder("train", tmp_path, labels=True).class_names == ("cat", "dog")
    assert len(open_folder("train", tmp_path)) == len(open_folder("train", tmp_path / "train")) == 2
    assert not caplog.messages
    assert image_paths(tmp_path) == ["train/cat/1.jpg", "train/dog/1.jpg"]
    assert has_images(tmp_path, 2) and not has_images(tmp_path, 3)


def test_images_beside_the_class_folders_are_left_out_with_a_word(tmp_path, caplog):
    files = {"train/cat/1.png": plain(1), "train/dog/2.png": plain(2)}
    write_folder(tmp_path, files)
    open_folder("train", tmp_path, labels=True)
    assert not caplog.messages
    write_folder(tmp_path, {"train/a.png": plain(3), "train/b.jpg": plain(4)})
    assert open_folder("train", tmp_path, labels=True).labels.tolist() == [0, 1]
    assert caplog.messages == [f"{tmp_path}/train: left out: 2 images beside the class folders, first: a.png"]


def test_folders_beside_the_training_split_are_named_where_they_hold_images(tmp_path, caplog):
    files = ["train/a/1.png", "train/b/1.png", "test/a/1.png", "val/a/1.png", "bus/1.png", "unlabeled/x/1.png"]
    others = ["notes/a.txt", ".hidden/1.png", "mlruns/1.png", "runs/1/metrics.jsonl", "runs/1/plot.png"]
    write_folder(tmp_path, {name: plain(1) for name in [*files, *others]})
    assert len(open_folder("train", tmp_path)) == 2
    assert caplog.messages == [
        f"{tmp_path}: the images in bus/, unlabeled/ are not read, as train/ is there; rename train/ if it is one of "
        "the classes",
        f"{tmp_path}: the images in val/ are not read, as test/ is there",
    ]
    caplog.clear()
    assert len(open_folder("test", tmp_path)) == 1 and not caplog.messages


def test_splits_in_capital_letters_are_named(tmp_path, caplog):
    write_folder(tmp_path, {f"{name}/a/1.png": plain(1) for name in ("Train", "TEST", "other")})
    assert len(open_folder("train", tmp_path)) == 3
    assert caplog.messages == [
        f"{tmp_path}: all images are trained on, those in TEST/, Train/ too; splits are named train/ and test/"
    ]


def test_folders_of_runs_are_left_out_with_a_word(tmp_path, caplog):
    write_folder(tmp_path, {"1.jfif": plain(1), "2.jpe": plain(2), "c/3.png": plain(3)})
    write_folder(tmp_path, {"b/metrics.jsonl": b"", "b/1.png": plain(4)})
    with caplog.at_level("INFO", "ssl_sec.data"):
        assert values(open_folder("train", tmp_path).read(torch.arange(3))) == [1, 2, 3]
    assert caplog.messages == [f"{tmp_path}: left out: 1 folder of runs, first: b"]


@pytest.mark.parametrize("labels", [True, False])
def test_no_file_is_looked_up_by_its_own(tmp_path, monkeypatch, labels):
    write_folder(tmp_path, {f"train/{name}/{number}.png": plain(1) for name in "ab" for number in range(50)})
    asked = []

    def counted(ask):
        return lambda path, *args, **more: asked.append(path) or ask(path, *args, **more)

    with monkeypatch.context() as patch:  # pytest asks for the folder when it reports a failure
        patch.setattr(os, "stat", counted(os.stat))
        for name in ("isdir", "isfile", "exists"):  # of pathlib too, from Python 3.14 on
            patch.setattr(os.path, name, counted(getattr(os.path, name)))
        patch.setattr(os, "getcwd", lambda: pytest.fail("a path is made absolute"))
        images = open_folder("train", tmp_path, Decoding(image_size_px=8, resident_limit_mib=0), labels=labels)
    assert len(images) == 100 and len(asked) < 20


def test_a_folder_may_be_the_current_one(tmp_path, monkeypatch):
    write_folder(tmp_path, {"train/a/1.png": plain(1), "train/b/2.png": plain(2)})
    expected = fingerprint(open_folder("train", tmp_path, Decoding(image_size_px=8, resident_limit_mib=0)))
    monkeypatch.chdir(tmp_path)
    for root in (".", "train/..", "train/../"):
        images = open_folder("train", root, Decoding(image_size_px=8, resident_limit_mib=0))
        assert fingerprint(images) == expected and values(images.read(torch.arange(2))) == [1, 2]


def test_a_class_folder_may_hold_nothing_but_folders(tmp_path):
    write_folder(tmp_path, {"train/cat/2019/1.png": plain(1), "train/dog/2.png": plain(2)})
    images = open_folder("train", tmp_path)
    assert values(images.read(torch.arange(2))) == [1, 2] and images.class_names == ("cat", "dog")
    (tmp_path / "train/cat/2019/1.png").unlink()
    assert line(lambda: open_folder("train", tmp_path)).startswith(f"{tmp_path}/train/cat: no images in it or below it")


def test_links_below_a_class_folder_are_followed_but_not_up(tmp_path):
    write_folder(tmp_path, {"train/cat/1.png": plain(1), "train/dog/2.png": plain(2), "more/3.png": plain(3)})
    for name, target in (("more", "../../more"), ("itself", "."), ("classes", ".."), ("all", "../..")):
        (tmp_path / "train/cat" / name).symlink_to(target)
    images = open_folder("train", tmp_path, Decoding(resident_limit_mib=0))
    assert values(images.read(torch.arange(3))) == [1, 3, 2] and images.labels.tolist() == [0, 0, 1]
    (tmp_path / "train/cat/out").symlink_to(tmp_path.parent)
    assert f"leads out of {tmp_path}; copy the file" in line(lambda: open_folder("train", tmp_path))


def test_without_folders_below_the_classes_names_order_and_fingerprint_are_as_ever(tmp_path):
    files = ["1.png", "10.png", "2.PNG", "a b.jpg", "é.png", "\udc80.png", "\uffee.png"]
    write_folder(
        tmp_path, {f"train/{name}/{file}": file.encode("utf-8", "ignore") for name in CLASSES for file in files}
    )
    images = open_folder("train", tmp_path, Decoding(image_size_px=8, resident_limit_mib=0))
    shown = [file.replace("\udc80", "\\x80") for file in files]
    assert names(images) == [f"{tmp_path}/train/{name}/{file}" for name in CLASSES for file in shown]
    assert fingerprint(images) == "8e06c4a57b9c9bc1"


@pytest.mark.parametrize("labels", [None, True, False])
@pytest.mark.parametrize(("folders", "named"), [(["test"], "test"), (["val"], "val"), (["test", "val"], "test")])
def test_a_test_split_without_a_training_split_is_refused_alike_for_both(tmp_path, folders, named, labels):
    write_folder(tmp_path, {f"{folder}/cat/1.png": plain(1) for folder in [*folders, "other"]})
    for split in SPLITS:
        told = line(lambda split=split: open_folder(split, tmp_path, labels=labels), MissingDataError)
        assert told == (
            f"{tmp_path}: found {named}/ without train/; data.root must hold train/<class>/ and test/<class>/, "
            "or images in folders of other names"
        )


RETRIEVAL = ["train/a/1.png", "query/b/2.png", "query/c/3.png", "gallery/b/4.png", "gallery/d/5.png"]


def write_files(root, files):
    return write_folder(root, {file: plain(int(file[-5])) for file in files})


@pytest.mark.parametrize("labels", [None, False])
def test_queries_and_a_gallery_are_the_test_images(tmp_path, labels, caplog):
    write_files(tmp_path, RETRIEVAL)
    train, test = (open_folder(split, tmp_path, shared_classes=False, labels=labels) for split in SPLITS)
    assert values(train.read(torch.arange(1))) == [1] and train.queries is None
    assert values(test.read(torch.arange(4))) == [2, 3, 4, 5]
    assert test.queries.tolist() == [True, True, False, False]
    if labels is None:
        assert test.labels.tolist() == [0, 1, 0, 2] and test.class_names == ("b", "c", "d")
    assert len(open_folder("train", tmp_path, labels=labels)) == 1  # as in pretraining
    assert not caplog.messages
    write_folder(tmp_path, {"gallery/stray.png": plain(1), "query/b/1.nef": b""})
    assert len(open_folder("test", tmp_path, shared_classes=False)) == 4
    assert [message.partition(": ")[2][:40] for message in caplog.messages] == [
        "left out: 1 image beside the class folde",
        "left out: 1 image of formats that are no",
    ]


def test_unknown_classes_are_named_with_their_folder(tmp_path):
    write_files(tmp_path, [*RETRIEVAL, "train/b/6.png", "train/c/7.png"])
    told = line(lambda: open_folder("test", tmp_path))
    assert told == f"{tmp_path}/gallery: classes that train does not have: d"


def test_splits_of_different_classes_are_said_to_be_for_metric_learning(tmp_path):
    write_files(tmp_path, ["train/a/1.png", "train/b/2.png", "test/c/3.png", "test/d/4.png"])
    hint = "; metric learning takes splits of different classes (in Python, shared_classes=False)"
    told = line(lambda: open_folder("test", tmp_path))
    assert told == f"{tmp_path}/test: classes that train does not have: c, d{hint}"
    assert open_folder("test", tmp_path, shared_classes=False).class_names == ("c", "d")


def test_a_class_without_images_counts_only_its_own_files(tmp_path):
    write_files(tmp_path, ["train/a/1.png", "train/a/2.nef", "train/b/3.dng"])
    told = line(lambda: open_folder("train", tmp_path))
    assert told.startswith(f"{tmp_path}/train/b: no images in it or below it but 1 of other formats, as 3.dng; ")


@pytest.mark.parametrize(("one", "other"), [("query", "gallery"), ("gallery", "query")])
def test_queries_need_a_gallery_and_the_reverse(tmp_path, one, other, caplog):
    write_files(tmp_path, [file for file in RETRIEVAL if not file.startswith(other)])
    told = line(lambda: open_folder("test", tmp_path), MissingDataError)
    assert told.startswith(f"{tmp_path}: found {one}/ without {other}/; data.root must hold images, or ")
    assert line(lambda: open_folder("train", tmp_path, shared_classes=False), MissingDataError) == told
    assert not find_test_folders(tmp_path) and not caplog.messages
    assert len(open_folder("train", tmp_path)) == 1
    assert caplog.messages[0].startswith(f"{tmp_path}: the images in {one}/ are not read, as train/ is there")
    (tmp_path / other / "empty").mkdir(parents=True)
    told = line(lambda: open_folder("test", tmp_path, shared_classes=False))
    assert told.startswith(f"{tmp_path}/{other}/empty: no images in it or below it")
    (tmp_path / other / "empty").rmdir()
    told = line(lambda: open_folder("test", tmp_path, shared_classes=False))
    assert told.startswith(f"{tmp_path}/{other}: no class folders")


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_queries_and_a_gallery_are_no_test_images_beside_others(tmp_path, held_out):
    write_files(tmp_path, [*RETRIEVAL, f"{held_out}/b/6.png"])
    for split, shared in (("test", True), ("test", False), ("train", False)):
        told = line(lambda split=split, shared=shared: open_folder(split, tmp_path, shared_classes=shared))
        assert told == f"{tmp_path}: found {held_out}/ beside query/ and gallery/; allowed: one or the others"


def test_queries_and_a_gallery_need_a_training_split(tmp_path):
    write_files(tmp_path, [file for file in RETRIEVAL if not file.startswith("train")])
    told = line(lambda: open_folder("train", tmp_path), MissingDataError)
    assert told.startswith(f"{tmp_path}: found query/ and gallery/ without train/; data.root must hold train/<class>/")
    (tmp_path / "query").rename(tmp_path / "more")
    assert len(open_folder("train", tmp_path)) == 4  # any tree of images


@pytest.mark.parametrize("resident_limit_mib", [0, 1])
def test_a_link_to_itself_is_an_image_that_cannot_be_read(tmp_path, resident_limit_mib):
    write_folder(tmp_path, {"train/cat/1.png": plain(1), "train/dog/3.png": plain(3)})
    (tmp_path / "train/cat/2.png").symlink_to("2.png")
    (tmp_path / "train/cat/again").symlink_to("again")
    decoding = Decoding(image_size_px=8, on_bad_image="raise", resident_limit_mib=resident_limit_mib)
    told = line(lambda: open_folder("train", tmp_path, decoding).read(torch.arange(3)))
    assert "2.png: cannot be decoded: [Errno 40]" in told
    images = open_folder("train", tmp_path, replace(decoding, on_bad_image="skip"))
    read = images.read(torch.arange(len(images)))
    assert values(read) == ([1, 3] if resident_limit_mib else [1, 1, 3]) and images.num_bad_images == 1


def test_images_of_other_formats_are_left_out_with_one_warning(tmp_path, caplog, monkeypatch):
    photos = {f"train/{name}/{number}.png": plain(1) for name in ("cat", "dog") for number in (1, 2)}
    write_folder(tmp_path, {**photos, "train/cat/b.JXL": b"", "train/dog/a.dng": b"", "train/dog/notes.txt": b""})
    with monkeypatch.context() as patch:
        patch.setattr(log, "rank", lambda: 1)
        assert len(open_folder("train", tmp_path)) == 4
    assert not caplog.records  # the first worker tells it, once
    assert len(open_folder("train", tmp_path)) == len(open_folder("train", tmp_path)) == 4
    (tmp_path / "train/cat/b.JXL").unlink()
    open_folder("train", tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: left out: {found}; convert them to JPEG, PNG or WebP"
        for found in (
            "2 images of formats that are not read, first: train/cat/b.JXL",
            "1 image of formats that are not read, first: train/dog/a.dng",
        )
    ]
    write_folder(tmp_path / "camera", {"1.NEF": b"", "2.NEF": b""})
    message = line(lambda: open_folder("train", tmp_path / "camera"))
    assert message.startswith(f"{tmp_path}/camera: no images in it or below it but 2 of other formats, as 1.NEF; ")
    assert "; convert them to JPEG, PNG or WebP; " in message


def test_photos_of_phones_are_read_or_the_package_for_them_is_named(tmp_path, caplog, monkeypatch):
    photo = Image.new("RGB", (64, 64), (40, 40, 40))
    photos = {"1.HEIC": encode(photo, "HEIF"), "2.avif": encode(photo, "AVIF"), "3.png": encode(photo)}
    write_folder(tmp_path, photos)
    images = open_folder("train", tmp_path, Decoding(image_size_px=8))
    assert [pytest.approx(value, abs=2) for value in values(images.read(torch.arange(3)))] == [40, 40, 40]

    monkeypatch.setattr(listing, "EXTENSIONS", EXTENSIONS - {".heic"})
    monkeypatch.setattr(listing, "UNREAD_EXTENSIONS", UNREAD_EXTENSIONS | {".heic"})
    assert len(open_folder("train", tmp_path, Decoding(image_size_px=8))) == 2
    (message,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert message == (
        f"{tmp_path}: left out: 1 image of formats that are not read, first: 1.HEIC; "
        "HEIC needs: pip install 'ssl_sec[heif]'"
    )


def test_an_image_beside_folders_of_images_takes_their_labels_with_a_warning(tmp_path, caplog, monkeypatch):
    write_folder(tmp_path, {"train/cat/1.png": plain(1), "train/dog/2.png": plain(2), "train/3.png": plain(3)})
    with monkeypatch.context() as patch:
        patch.setattr(log, "rank", lambda: 1)
        assert open_folder("train", tmp_path).class_names == () and not caplog.records
    for _ in range(2):
        assert open_folder("train", tmp_path).class_names == ()
    (record,) = caplog.records  # of the first worker, once
    assert record.getMessage().startswith(
        f"{tmp_path}/train: the folders are not taken as classes, because of 1 image beside them, first: 3.png;"
    )
    caplog.clear()
    assert open_folder("train", tmp_path, labels=False).class_names == () and not caplog.records


def test_one_class_is_refused_where_labels_are_needed(tmp_path):
    write_folder(tmp_path, {"train/cat/1.png": plain(1), "train/cat/2.png": plain(2)})
    message = line(lambda: require_labels(open_folder("train", tmp_path), "a linear probe"))
    assert message == "folder/train: found one class, cat; a linear probe needs two or more"


def test_a_link_that_leads_out_names_its_target(tmp_path):
    photo, gone = tmp_path / "photo.png", tmp_path / "gone.png"
    photo.write_bytes(plain(1))
    for target, found in ((photo, str(photo)), (gone, f"{gone}, which is not there")):
        root = tmp_path / f"of {target.stem}"
        root.mkdir()
        (root / "1.png").symlink_to(target)
        message = line(lambda root=root: open_folder("train", root))
        assert message == f"{root}/1.png: is a link to {found} and leads out of {root}; copy the file into it"


def test_a_folder_that_cannot_be_entered_is_one_line(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)  # root may enter every folder
    message = line(lambda: open_folder("train", tmp_path))
    assert message.startswith(f"{tmp_path}: cannot be read: [Errno 13] Permission denied: ")


def test_a_folder_is_counted_no_further_than_needed(tmp_path):
    root = write_folder(tmp_path / "train", {f"a/{k}/image.png": plain(k) for k in range(4)} | {"note.txt": b"text"})
    assert [listing.has_images(root, least) for least in (1, 4, 5)] == [True, True, False]
    # Links may form cycles, or lead to many images.
    (root / "b").symlink_to(root / "a")
    assert listing.has_images(root, 5)
    assert not listing.has_images(tmp_path / "none", 1)
