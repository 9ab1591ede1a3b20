import hashlib
import logging
import os
import pickle
from dataclasses import replace
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from ssl_sec.data.config import MNISTConfig
from ssl_sec.data.crops import CentreCrop
from ssl_sec.data.decode import Decoding
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.folders.opening import open_folder
from ssl_sec.data.image_set import UNLABELLED, ResidentImages
from ssl_sec.data.parquet.opening import open_parquet
from ssl_sec.data.selection.class_splits import own_classes
from ssl_sec.data.shards.opening import open_webdataset
from ssl_sec.data.standard_sets import open_cifar10, open_cifar100, open_digits, open_mnist
from ssl_sec.data.stores import limit_images
from ssl_sec.errors import ConfigError, DataError, MissingDataError
from tests.data.files import encode, noise, plain, write_folder, write_parquet
from tests.data.test_image_set import encoded, resident, values


def line(action, kind=DataError) -> str:
    with pytest.raises(kind) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_digits():
    train, test = open_digits("train"), open_digits("test")
    assert len(train) == 1437 and len(test) == 360
    assert train.image_shape == (1, 8, 8) and train.images.max() == 255 and train.images.min() == 0
    # 16 levels and nought: 0, 16, 32, 48, 64, 80, 96, 112, 128, 143, …
    assert train.images.unique().tolist() == np.rint(np.arange(17) * 255 / 16).astype(int).tolist()
    counts = train.labels.bincount() / (train.labels.bincount() + test.labels.bincount())
    assert ((counts - 0.8).abs() < 0.01).all()
    assert torch.equal(open_digits("test").images, test.images)
    every = torch.cat((train.images, test.images)).flatten(1)
    assert len(every.unique(dim=0)) == 1797


def write_cifar(root, monkeypatch, dataset, label_key, class_key) -> None:
    """A CIFAR of 4 training and 2 test images, with the checksums that torchvision is to expect."""
    folder = root / dataset.base_folder
    folder.mkdir(parents=True)

    def write(name, content) -> str:
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    def images(first, count):
        return {"data": np.arange(first, first + count * 3072).reshape(count, 3072).astype(np.uint8)}

    train = write("part_1", images(0, 4) | {label_key: [0, 1, 1, 0]})
    test = write("part_2", images(9, 2) | {label_key: [1, 0]})
    meta = write("names", {class_key: ["cat", "dog"]})
    monkeypatch.setattr(dataset, "train_list", [["part_1", train]])
    monkeypatch.setattr(dataset, "test_list", [["part_2", test]])
    monkeypatch.setattr(dataset, "meta", {"filename": "names", "key": class_key, "md5": meta})


@pytest.mark.parametrize(
    ("opener", "dataset", "label_key", "class_key"),
    [
        (open_cifar10, CIFAR10, "labels", "label_names"),
        (open_cifar100, CIFAR100, "fine_labels", "fine_label_names"),
    ],
)
def test_cifar(tmp_path, monkeypatch, opener, dataset, label_key, class_key):
    write_cifar(tmp_path, monkeypatch, dataset, label_key, class_key)
    for download in (False, True):
        train, test = opener("train", tmp_path, download), opener("test", tmp_path, download)
        assert train.labels.tolist() == [0, 1, 1, 0] and test.labels.tolist() == [1, 0]
        assert train.image_shape == (3, 32, 32) and train.class_names == ("cat", "dog")
        assert torch.equal(train.images[0].flatten(), torch.arange(3072).to(torch.uint8))
    (tmp_path / dataset.base_folder / "part_1").write_bytes(b"damaged")
    assert "incomplete" in line(lambda: opener("train", tmp_path, download=False), MissingDataError)


def test_a_complete_set_is_opened_with_download_without_writing_to_its_folder(tmp_path, monkeypatch):
    """The folder may be another user's, or mounted read-only."""
    write_cifar(tmp_path, monkeypatch, CIFAR10, "labels", "label_names")
    files = sorted(tmp_path.rglob("*"))
    assert open_cifar10("train", tmp_path, download=True).labels.tolist() == [0, 1, 1, 0]
    assert sorted(tmp_path.rglob("*")) == files


def test_mnist(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, count in (("train", 3), ("t10k", 2)):  # in the format of its files: type, dimensions, sizes, bytes
        pixels = np.arange(count * 784).astype(np.uint8)
        header = np.array([0x803, count, 28, 28], ">i4").tobytes()
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = np.array([0x801, count], ">i4").tobytes() + bytes([7, 0, 9][:count])
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    train, test = (MNISTConfig(root=str(tmp_path)).open(split) for split in ("train", "test"))
    assert train.labels.tolist() == [7, 0, 9] and test.labels.tolist() == [7, 0] and train.labels.dtype == torch.int64
    assert train.image_shape == (1, 28, 28) and train.class_names == tuple("0123456789")
    assert torch.equal(train.images[0].flatten(), torch.arange(784).to(torch.uint8))
    for content in (b"", b"damaged", (folder / "t10k-images-idx3-ubyte").read_bytes()[:-1]):
        (folder / "train-images-idx3-ubyte").write_bytes(content)
        message = line(lambda: open_mnist("train", tmp_path, download=False), MissingDataError)
        assert f"mnist: {folder} is missing or incomplete; set data.download=true" in message
        message = line(lambda: open_mnist("train", tmp_path, download=True))
        assert message.endswith(f"; if {folder} is damaged, remove it")


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("split", ["training", "val", "Train"])
def test_an_unknown_split_is_refused(tmp_path, split):
    openers = [
        open_digits,
        lambda split: open_cifar10(split, tmp_path, download=False),
        lambda split: open_mnist(split, tmp_path, download=False),
        lambda split: open_folder(split, tmp_path),
        lambda split: open_parquet(split, tmp_path / "a.parquet", test=tmp_path / "b.parquet"),
        lambda split: open_webdataset(split, tmp_path / "a.tar", test=tmp_path / "b.tar"),
    ]
    for opener in openers:
        message = line(lambda opener=opener: opener(split), ConfigError)
        assert message.startswith(f"split: found '{split}'; ") and message.endswith("allowed: test, train")


@pytest.mark.usefixtures("unchecked_types")
def test_an_unknown_action_on_bad_images_is_refused():
    told = line(lambda: Decoding(on_bad_image="Skip"), ConfigError)
    assert told == "data.on_bad_image: found 'Skip'; did you mean 'skip'? allowed: raise, skip"


def test_missing_cifar(tmp_path, monkeypatch):
    message = line(lambda: open_cifar10("train", tmp_path), MissingDataError)
    assert str(tmp_path / "cifar-10-batches-py") in message and "data.download=true" in message

    def fail(self):
        raise URLError("no network\nreally")

    monkeypatch.setattr(CIFAR10, "download", fail)
    message = line(lambda: open_cifar10("train", tmp_path / "new", download=True))
    assert message == f"cifar10: cannot be downloaded to {tmp_path}/new: <urlopen error no network"


FOLDER = {
    "train/cat/1.png": plain(1),
    "train/cat/2.PNG": plain(2),
    "train/dog/3.jpg": encode(Image.new("RGB", (8, 8), (3, 3, 3)), "JPEG"),
    "train/dog/notes.txt": b"no image",
    "train/dog/._3.jpg": b"left by another system",
    "train/.cache/9.png": plain(9),
    "test/dog/4.png": plain(4),
}


@pytest.mark.parametrize("resident_limit_mib", [0, 1])
def test_folder(tmp_path, resident_limit_mib):
    write_folder(tmp_path, FOLDER)
    decoding = Decoding(resident_limit_mib=resident_limit_mib)
    train = open_folder("train", tmp_path, decoding)
    test = open_folder("test", str(tmp_path), decoding)
    assert isinstance(train, ResidentImages if resident_limit_mib else EncodedImages)
    assert values(train.read(torch.arange(3))) == [1, 2, 3] and train.labels.tolist() == [0, 0, 1]
    assert values(test.read(torch.arange(1))) == [4] and test.labels.tolist() == [1]
    assert train.class_names == test.class_names == ("cat", "dog")
    assert (train.name, test.name) == ("folder/train", "folder/test") and str(tmp_path) in train.description


def test_folder_with_val(tmp_path):
    write_folder(tmp_path, {"train/cat/1.png": plain(1), "val/cat/2.png": plain(2)})
    assert values(open_folder("test", tmp_path).read(torch.arange(1))) == [2]


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_folders_with_different_classes(tmp_path, held_out):
    files = {"train/cat/1.png": plain(1), "train/dog/2.png": plain(2)}
    write_folder(tmp_path, {**files, f"{held_out}/ant/3.png": plain(3), f"{held_out}/cow/4.png": plain(4)})
    train, test = (open_folder(split, tmp_path, shared_classes=False) for split in ("train", "test"))
    assert train.labels.tolist() == test.labels.tolist() == [0, 1]
    assert (train.class_names, test.class_names) == (("cat", "dog"), ("ant", "cow"))
    assert values(train.read(torch.arange(2))) == [1, 2] and values(test.read(torch.arange(2))) == [3, 4]
    write_folder(tmp_path, {f"{held_out}/cat/5.png": plain(5)})
    for split in ("train", "test"):
        message = line(lambda split=split: open_folder(split, tmp_path, shared_classes=False))
        assert message.startswith(f"{tmp_path}: classes in both splits: cat;")


def test_both_folders_are_needed_to_compare_their_classes(tmp_path):
    write_folder(tmp_path, {"train/cat/1.png": plain(1)})
    message = line(lambda: open_folder("train", tmp_path, shared_classes=False), MissingDataError)
    assert f"{tmp_path}/test: no such folder" in message


@pytest.mark.parametrize("resident_limit_mib", [0, 1])
@pytest.mark.parametrize("num_channels", [1, 3])
def test_folder_resizes(tmp_path, resident_limit_mib, num_channels):
    write_folder(tmp_path, {"train/a/1.png": plain(1, 9, 30), "train/a/2.png": plain(2, 31, 16)})
    decoding = Decoding(image_size_px=12, num_channels=num_channels, resident_limit_mib=resident_limit_mib)
    images = open_folder("train", tmp_path, decoding)
    assert images.image_shape == (num_channels, 12, 12)
    assert values(images.read(torch.arange(2))) == [1, 2]


@pytest.mark.parametrize("num_channels", [1, 3])
def test_with_a_crop_images_of_any_size_are_streamed(tmp_path, num_channels):
    pictures = [plain(1, 9, 30), plain(2, 31, 16)]
    crop = CentreCrop(short_side_px=8, size_px=6)
    root = write_folder(tmp_path / "root", {f"train/a/{number}.png": image for number, image in enumerate(pictures)})
    file = write_parquet(tmp_path / "a.parquet", pictures, [0, 0])
    for images in (
        open_folder("train", root, Decoding(num_channels=num_channels, crop=crop)),
        open_parquet(
            "train", file, decoding=Decoding(num_channels=num_channels, crop=crop), cache_folder=tmp_path / "cache"
        ),
    ):
        assert isinstance(images, EncodedImages) and images.crop == crop
        assert images.image_shape == (num_channels, 6, 6)
        assert values(images.read(torch.arange(2))) == [1, 2]


def test_folder_errors(tmp_path):
    assert str(tmp_path / "no") in line(lambda: open_folder("train", tmp_path / "no"), MissingDataError)
    (tmp_path / "file.png").write_bytes(plain(1))
    message = line(lambda: open_folder("train", tmp_path / "file.png"), MissingDataError)
    assert message.startswith(f"{tmp_path}/file.png: is a file, must be a folder; data.root must hold images")
    (tmp_path / "file.png").unlink()
    nothing = line(lambda: open_folder("train", tmp_path))
    assert (
        nothing.startswith(f"{tmp_path}: no images in it or below it; allowed: .avif, .bmp, .gif")
        and "train/<class>/" in nothing
    )
    (tmp_path / "train").mkdir()
    assert "no class folders" in line(lambda: open_folder("train", tmp_path, labels=True))
    (tmp_path / "train" / "cat").mkdir()
    assert "cat: no images" in line(lambda: open_folder("train", tmp_path, labels=True))
    assert "train: no images in it or below it" in line(lambda: open_folder("train", tmp_path))
    write_folder(tmp_path, {"train/cat/1.png": plain(1)})
    assert "test: no such folder" in line(lambda: open_folder("test", tmp_path), MissingDataError)
    write_folder(tmp_path, {"test/cat/1.png": plain(1), "test/cow/2.png": plain(2)})
    assert "classes that train does not have: cow" in line(lambda: open_folder("test", tmp_path))
    assert line(lambda: Decoding(num_channels=0), ConfigError) == "data.num_channels: found 0, must be ≥ 1"
    assert line(lambda: Decoding(image_size_px=0), ConfigError).startswith("data.image_size_px: found 0, must be ≥ 1")


TREES = {
    "flat": ["1.png", "2.png", "3.png"],
    "nested": ["a/1.png", "a/b/2.png", "c/3.png"],
    "a split": ["train/1.png", "train/a/2.png", "train/a/b/3.png"],
    "a split, nested": ["train/a/b/1.png", "train/a/c/2.png", "train/b/b/3.png"],
    "both splits, flat": ["train/1.png", "train/2.png", "train/3.png", "test/4.png"],
}


@pytest.mark.parametrize("resident_limit_mib", [0, 1])
@pytest.mark.parametrize("tree", TREES)
def test_any_tree_of_images_without_labels(tmp_path, tree, resident_limit_mib):
    files = {path: plain(int(path[-5])) for path in TREES[tree]}
    write_folder(tmp_path, {**files, "notes.txt": b"no image", ".hidden/9.png": plain(9)})
    images = open_folder("train", tmp_path, Decoding(resident_limit_mib=resident_limit_mib))
    assert values(images.read(torch.arange(3))) == [1, 2, 3] and len(images) == 3
    assert images.labels.tolist() == [UNLABELLED] * 3 and images.class_names == ()
    assert "3 images without labels" in images.description
    if "both" in tree:
        assert values(open_folder("test", tmp_path).read(torch.arange(1))) == [4]
    else:
        assert "test: no such folder" in line(lambda: open_folder("test", tmp_path), MissingDataError)
    limited = limit_images(images, 2, seed=0)
    assert len(limited) == 2 and limited.description.endswith("2 of 3 images, drawn, seed 0")
    assert line(lambda: own_classes(images)) == (
        "folder/train: 3 images without labels found; training by classes needs the class of each image: give "
        "labelled images, or data.labels=true if the folders are classes"
    )


def test_labels_of_folders_can_be_ignored_or_required(tmp_path):
    root = write_folder(tmp_path / "labelled", FOLDER)
    assert open_folder("train", root, labels=False).class_names == ()
    other = write_folder(tmp_path / "other", {"cat/1.png": plain(1), "dog/2.png": plain(2)})
    assert open_folder("train", other).class_names == ()
    images = open_folder("train", other, labels=True)
    assert images.class_names == ("cat", "dog") and values(images.read(torch.arange(2))) == [1, 2]


def test_the_plots_of_runs_are_no_images(tmp_path):
    write_folder(tmp_path, {"a/1.png": plain(1), "runs/mlflow.db": b"", "runs/flat/plots/2.png": plain(2)})
    write_folder(
        tmp_path, {"other/run/metrics.jsonl": b"", "other/run/plots/3.png": plain(3), "mlruns/0/4.png": plain(4)}
    )
    assert (
        values(open_folder("train", tmp_path).read(torch.arange(1))) == [1] and len(open_folder("train", tmp_path)) == 1
    )


def test_links_in_a_circle_end(tmp_path):
    write_folder(tmp_path, {"a/1.png": plain(1), "b/2.png": plain(2)})
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert values(open_folder("train", tmp_path).read(torch.arange(2))) == [1, 2]


@pytest.mark.parametrize("link", ["train", "train/cat", "train/cat/2.png"])
def test_links_out_of_the_folder_are_refused(tmp_path, link):
    outside = write_folder(tmp_path / "outside", {"a/1.png": plain(1), "1.png": plain(1)})
    root = tmp_path / "root"
    write_folder(root, {} if link == "train" else {"train/dog/1.png": plain(1)})
    if link.endswith("png"):
        write_folder(root, {"train/cat/1.png": plain(1)})
    (root / link).parent.mkdir(parents=True, exist_ok=True)
    (root / link).symlink_to(outside / "1.png" if link.endswith("png") else outside)
    assert f"leads out of {root}; copy the file" in line(lambda: open_folder("train", root))


def test_links_within_the_folder_are_followed(tmp_path):
    root = write_folder(tmp_path / "root", {"train/cat/1.png": plain(1)})
    (root / "train/cat/2.png").symlink_to("1.png")
    (tmp_path / "alias").symlink_to(root)
    assert len(open_folder("train", tmp_path / "alias")) == 2
    (root / "train/cat/3.png").symlink_to("gone.png")
    assert "3.png: cannot be decoded: [Errno 2]" in line(lambda: open_folder("train", root))


def test_a_pipe_is_not_waited_for(tmp_path):
    write_folder(tmp_path, {"train/cat/1.png": plain(1)})
    os.mkfifo(tmp_path / "train/cat/2.png")
    assert len(open_folder("train", tmp_path)) == 1


@pytest.mark.parametrize("image_size_px", [None, 8])
def test_bad_images_of_a_resident_folder(tmp_path, image_size_px, caplog):
    names = ["0.png", "2.jpg", "4.png"]
    bad = {f"train/cat/{name}": encode(noise(), "JPEG")[:700] if name[-1] == "g" else b"" for name in names}
    good = {f"train/{path}": plain(int(path[4])) for path in ("cat/1.png", "cat/3.png", "dog/5.png")}
    write_folder(tmp_path, bad | good)
    decoding = Decoding(image_size_px=image_size_px, on_bad_image="raise")
    message = line(lambda: open_folder("train", tmp_path, decoding))
    assert "0.png" in message and "; data.on_bad_image=skip leaves such images out" in message
    with caplog.at_level(logging.WARNING, "ssl_sec.data"):
        images = open_folder("train", tmp_path, replace(decoding, on_bad_image="skip"))
    assert values(images.read(torch.arange(3))) == [1, 3, 5] and images.labels.tolist() == [0, 0, 1]
    assert images.num_bad_images == 3 and len(images) == 3
    (message,) = caplog.messages
    assert "3 of 6 images" in message and all(name in message for name in names)


@pytest.mark.parametrize("resident_limit_mib", [0, 1])
@pytest.mark.parametrize("image_size_px", [None, 8])
def test_nothing_readable(tmp_path, resident_limit_mib, image_size_px):
    write_folder(tmp_path, {"train/cat/1.png": b"", "train/cat/2.png": b""})
    decoding = Decoding(image_size_px=image_size_px, on_bad_image="skip", resident_limit_mib=resident_limit_mib)
    message = line(lambda: open_folder("train", tmp_path, decoding).read(torch.tensor([0])))
    assert "1.png" in message


@pytest.mark.parametrize("on_bad_image", ["raise", "skip"])
def test_sizes_must_agree(tmp_path, on_bad_image):
    write_folder(tmp_path, {"train/cat/1.png": plain(1), "train/cat/2.png": plain(2, 8, 9)})
    message = line(lambda: open_folder("train", tmp_path, Decoding(on_bad_image=on_bad_image)))
    assert "2.png: 8 x 9 pixels" in message and "data.image_size_px" in message


def test_limits_are_balanced_and_repeatable(tmp_path):
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 3 + [4] * 17)
    images = ResidentImages(
        images=torch.zeros(100, 1, 1, 1, dtype=torch.uint8),
        labels=labels[torch.randperm(100, generator=torch.Generator().manual_seed(0))],
        class_names=tuple("abcde"),
        name="x",
        description="made up",
    )
    limited = limit_images(images, 24, seed=1)
    # Three of the smallest class are all it has; seven of each other make 24.
    assert limited.labels.bincount().tolist() == [7, 7, 3, 0, 7]
    assert limited.description.endswith("24 of 100 images, balanced by class, seed 1")
    assert isinstance(limited, ResidentImages) and limited.rows is not None
    assert limited.rows.tolist() == sorted(set(limited.rows.tolist()))
    again, other = limit_images(images, 24, seed=1), limit_images(images, 24, seed=2)
    assert isinstance(again, ResidentImages) and isinstance(other, ResidentImages)
    assert again.rows.tolist() == limited.rows.tolist() != other.rows.tolist()
    assert limit_images(images, 100, seed=0) is images
    assert max(limit_images(images, 2, seed=0).labels.bincount()) == 1
    assert len(limit_images(encoded(tmp_path), 4, seed=0)) == 4
    assert "data.max_images = 0" in line(lambda: limit_images(resident(), 0, seed=0), ConfigError)
