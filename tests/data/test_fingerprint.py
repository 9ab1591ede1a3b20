"""Whether two sets are the same."""

import shutil
from pathlib import Path

import pytest
import torch

from ssl_sec.data import fingerprint as module
from ssl_sec.data.decode import Decoding
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.fingerprint import file_sizes, fingerprint
from ssl_sec.data.folders.opening import open_folder
from ssl_sec.data.image_set import subset
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.data.stores import MemoryStore
from tests.data.files import plain
from tests.data.shards.test_streamed import made


def write_image(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(plain(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label in "ab":
        for number in range(4):
            write_image(tmp_path / "set" / "train" / label / f"{number}.png", number)
    return tmp_path / "set"


def opened(root: Path, **options):
    return open_folder("train", root, Decoding(**options))


def test_a_fingerprint_never_changes_between_versions():
    """Runs that have stored it are resumed, and embeddings compared, by later versions."""
    assert fingerprint(open_digits("train")) == "f9d00f26309165d3"
    names = list(map(str, range(600)))
    encoded = EncodedImages(
        store=MemoryStore.of(names, map(str.encode, names)),
        labels=torch.arange(600) % 3,
        class_names=("a", "b", "c"),
        image_shape=(3, 8, 8),
        name="made/train",
        description="made",
    )
    assert fingerprint(encoded) == "0badb051574d6f2f"
    _, streamed = made([3, 1, 2] * 9, bad=range(54))
    assert fingerprint(streamed) == "629219bad8467adb"


def test_the_fingerprint_does_not_depend_on_the_folder(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert len({fingerprint(opened(root)) for root in (folder, folder, tmp_path / "elsewhere")}) == 1
    assert fingerprint(open_digits("train")) != fingerprint(open_digits("test"))
    assert len(fingerprint(open_digits("train"))) == 16


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("change", ["other images", "renamed class", "moved image"])
def test_other_images_of_the_same_number_are_another_set(folder, streamed, change):
    """The description and the counts stay the same."""
    options = {"resident_limit_mib": 0} if streamed else {}
    before = opened(folder, **options)
    first = fingerprint(before)
    train = folder / "train"
    if change == "other images":
        write_image(train / "a" / "3.png", 99)
    elif change == "renamed class":
        (train / "b").rename(train / "c")
    else:
        (train / "a" / "3.png").rename(train / "b" / "9.png")
        (train / "b" / "0.png").rename(train / "a" / "0b.png")
    after = opened(folder, **options)
    assert after.description == before.description
    assert fingerprint(after) != first


def test_a_part_of_a_set_is_another_set(folder):
    for image_set in (opened(folder), opened(folder, resident_limit_mib=0)):
        parts = [subset(image_set, torch.tensor(rows)) for rows in ([0, 4], [1, 5], [0, 4])]
        first, second, third = map(fingerprint, parts)
        assert first == third != second
        assert first != fingerprint(image_set)


def test_an_unreadable_image_does_not_stop_it(folder):
    streamed = opened(folder, resident_limit_mib=0)
    (folder / "train" / "a" / "1.png").unlink()
    assert len(fingerprint(streamed)) == 16


def test_the_sizes_of_all_files_of_a_folder_are_compared(folder, monkeypatch):
    streamed = opened(folder, resident_limit_mib=0)
    monkeypatch.setattr(module, "_FILES", 1)
    whole, sizes = fingerprint(streamed), file_sizes(streamed)
    changed = folder / "train" / "b" / "2.png"
    changed.write_bytes(changed.read_bytes() + b"\0")
    assert fingerprint(streamed) == whole
    assert len({sizes, file_sizes(streamed), file_sizes(subset(streamed, torch.tensor([0, 1])))}) == 3
    changed.unlink()
    assert file_sizes(streamed) != sizes
    assert file_sizes(opened(folder)) is None is file_sizes(open_digits("test"))
