import bz2
import gzip
import io
import lzma
import subprocess
import tarfile

import fsspec
import pytest
import torch

from ssl_sec.data import log
from ssl_sec.data.config import WebDatasetConfig
from ssl_sec.data.crops import CentreCrop
from ssl_sec.data.decode import Decoding
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.image_set import UNLABELLED, ResidentImages
from ssl_sec.data.shards import blocks, tar
from ssl_sec.data.shards.locations import find_files
from ssl_sec.data.shards.opening import open_webdataset
from ssl_sec.data.shards.streamed import StreamedImages
from ssl_sec.data.stores import mapped_table
from ssl_sec.errors import ConfigError, DataError, MissingDataError
from ssl_sec.settings import from_values
from tests.data.files import plain
from tests.data.test_image_set import values
from tests.data.test_sources import line


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_shards(folder, num_shards=3, num_images=5, labelled=True):
    for shard in range(num_shards):
        members = {}
        for number in range(num_images):
            value = shard * num_images + number
            members[f"part/{value:04d}.png"] = plain(value)
            members[f"part/{value:04d}.json"] = b"{}"
            if labelled:
                members[f"part/{value:04d}.cls"] = f"{value % 3}\n".encode()
        write_tar(folder / f"{shard:02d}.tar", members)
    return str(folder / f"{{00..{num_shards - 1:02d}}}.tar")


def opened(tmp_path, location, **more):
    return open_webdataset("train", location, cache_folder=tmp_path / "cache", **more)


def test_a_shard_that_became_shorter_is_named(tmp_path, monkeypatch):
    """As when it is written again while a run reads it."""
    monkeypatch.setattr(blocks, "RETRY_AFTER_S", (0.0,))
    location = write_shards(tmp_path, num_shards=1)
    images = opened(tmp_path, location, decoding=Decoding(resident_limit_mib=0), shuffle_window=5)
    with (tmp_path / "00.tar").open("r+b") as file:
        file.truncate(4096)
    message = line(lambda: images.read(torch.arange(5)))
    assert message.startswith(f"{tmp_path}/00.tar: 3584 bytes at 512, but its index has ")


def test_a_scan_keeps_few_members_of_a_shard(tmp_path, monkeypatch):
    alive, most = set(), []

    class Member(tarfile.TarInfo):
        def __init__(self, name=""):
            super().__init__(name)
            alive.add(id(self))
            most.append(len(alive))

        def __del__(self):
            alive.discard(id(self))

    write_shards(tmp_path, num_shards=1, num_images=40)
    monkeypatch.setattr(tarfile.TarFile, "tarinfo", Member)
    assert len(opened(tmp_path, tmp_path / "00.tar")) == 40
    assert len(most) >= 120 and max(most) < 10


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({}, ResidentImages),
        ({"decoding": Decoding(resident_limit_mib=0)}, EncodedImages),
        ({"decoding": Decoding(resident_limit_mib=0), "shuffle_window": 4}, StreamedImages),
    ],
)
@pytest.mark.parametrize("labelled", [True, False])
def test_images_of_shards_in_order(tmp_path, monkeypatch, more, kind, labelled):
    monkeypatch.setattr(tar, "IMAGES_PER_BLOCK", 2)
    images = opened(tmp_path, write_shards(tmp_path, labelled=labelled), **more)
    assert isinstance(images, kind) and len(images) == 15 and images.image_shape == (3, 8, 8)
    assert values(images.read(torch.tensor([14, 0, 7]))) == [14, 0, 7]
    assert images.class_names == (("0", "1", "2") if labelled else ())
    assert images.labels.tolist() == ([i % 3 for i in range(15)] if labelled else [UNLABELLED] * 15)
    assert images.description.startswith(f"15 images in {tmp_path}/00.tar and 2 more shards, digest ")


@pytest.mark.parametrize("window", [None, 4])
def test_an_array_before_its_image_leaves_the_images_in_order(tmp_path, monkeypatch, window):
    """As the order of a folder has them."""
    monkeypatch.setattr(tar, "IMAGES_PER_BLOCK", 2)
    names = ["0.npy", "1.npy", "1.png", "0.png", "2.png"]
    members = {name: b"array" if name.endswith("npy") else plain(int(name[0])) for name in names}
    images = opened(
        tmp_path, write_tar(tmp_path / "a.tar", members), decoding=Decoding(resident_limit_mib=0), shuffle_window=window
    )
    assert values(images.read(torch.arange(3))) == [1, 0, 2]


@pytest.mark.parametrize("window", [None, 4])
def test_names_that_are_not_utf_8_are_escaped(tmp_path, window):
    (folder := tmp_path / "Jos\udce9").mkdir()
    path = write_tar(folder / "a.tar", {"caf\udce9.png": plain(7), "b.png": plain(8)})
    images = opened(tmp_path, path, decoding=Decoding(resident_limit_mib=0), shuffle_window=window)
    assert values(images.read(torch.arange(2))) == [7, 8]
    assert images.image_name(0) == f"{tmp_path}/Jos\\xe9/a.tar member caf\\xe9.png"


def test_remote_shards_are_streamed(tmp_path):
    memory = fsspec.filesystem("memory")
    write_shards(tmp_path)
    for path in sorted(tmp_path.glob("*.tar")):
        memory.pipe(f"/ssl_sec_shards/{path.name}", path.read_bytes())
    location, decoding = "memory://ssl_sec_shards/*.tar", Decoding(resident_limit_mib=0)
    images = opened(tmp_path, location, decoding=decoding, shuffle_window=4)
    assert values(images.read(torch.arange(15))) == list(range(15))
    assert "shuffle_window: found null" in line(lambda: opened(tmp_path, location, decoding=decoding), ConfigError)
    assert isinstance(opened(tmp_path, location), ResidentImages)


def test_an_index_is_made_once_and_remade_for_a_changed_file(tmp_path, monkeypatch):
    scanned, scan = [], tar.scan
    monkeypatch.setattr(tar, "scan", lambda file: scanned.append(file[1]) or scan(file))
    location = write_shards(tmp_path)
    first = tar.open_shards(find_files(location, "tar"), tmp_path / "cache")
    assert tar.open_shards(find_files(location, "tar"), tmp_path / "cache").digest == first.digest
    assert len(scanned) == 3
    write_tar(tmp_path / "01.tar", {"a.png": plain(9), "a.cls": b"0"})
    assert tar.open_shards(find_files(location, "tar"), tmp_path / "cache").digest != first.digest
    assert len(scanned) == 4


def test_a_damaged_index_is_made_again(tmp_path, caplog):
    path = write_tar(tmp_path / "a.tar", {f"{i}.png": plain(i) for i in range(3)})
    opened(tmp_path, path)
    (index,) = (tmp_path / "cache").glob("*.arrow")
    index.unlink()
    index.write_bytes(b"")
    mapped_table.cache_clear()  # as in another process
    assert values(opened(tmp_path, path).read(torch.arange(3))) == [0, 1, 2]
    assert caplog.messages == [f"{index} is damaged and is made again"]


def test_images_whose_names_have_a_further_dot_are_counted_in_one_warning(tmp_path, caplog):
    dotted = ["b.0.png", "part.1/b.v2.JPG", "b.1.png", "b.seg.png"]
    write_tar(tmp_path / "0.tar", {"a.png": plain(0), "a.tar.gz": b"", "part.1/c.png": plain(1), ".b.0.png": b""})
    write_tar(tmp_path / "1.tar", {"b.PNG": plain(2), **dict.fromkeys(dotted[:2], b""), "b.0.cls": b"1"})
    write_tar(tmp_path / "2.tar", {**dict.fromkeys(dotted[2:], b""), "b.jpg": plain(3)})
    location = str(tmp_path / "{0..2}.tar")
    for _ in range(2):  # scanned, and from the cached index
        mapped_table.cache_clear()
        log._log.cache_clear()
        caplog.clear()
        assert values(opened(tmp_path, location).read(torch.arange(4))) == [0, 1, 2, 3]
        assert caplog.messages == [
            "webdataset/train: 4 images are not read, as a key ends at the first dot of a file's name, first: "
            f"{tmp_path}/1.tar member b.0.png"
        ]
    caplog.clear()
    for quiet in (location, tmp_path / "0.tar"):  # told already, and without such images
        opened(tmp_path, str(quiet))
    assert caplog.messages == []


def test_a_shard_of_nothing_but_such_images_says_where_a_key_ends(tmp_path):
    path = write_tar(tmp_path / "a.tar", {"img.0.png": plain(0), "img.1.png": plain(1)})
    told = line(lambda: opened(tmp_path, path))
    assert told.startswith(f"{path}: no images; allowed: members named .avif, .bmp")
    assert told.endswith("; a key ends at the first dot of a file's name, as in img.0.png")


def test_members_that_are_left_out_are_counted_by_reason(tmp_path, caplog):
    members = {"a.png": plain(0), "a.json": b"{}", "b.nef": b"", "b.jxl": b"", "c.json": b"{}", "c.cls": b"1"}
    path = write_tar(tmp_path / "a.tar", members)
    with tarfile.open(path, "a") as archive:
        for name, kind in (("e.png", tarfile.SYMTYPE), ("f.jpg", tarfile.LNKTYPE), ("g.txt", tarfile.SYMTYPE)):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, "a.png"
            archive.addfile(link)
    assert values(opened(tmp_path, path).read(torch.arange(1))) == [0]
    assert sorted(caplog.messages) == [
        f"webdataset/train: 1 .cls and .json files are of no image, first: {path} member c.json",
        f"webdataset/train: 2 images are not read, as they are links, first: {path} member e.png",
        f"webdataset/train: 2 images of formats that are not read are left out, first: {path} member b.nef",
    ]


def test_archives_joined_by_cat_are_refused(tmp_path):
    first, second = (write_tar(tmp_path / f"{n}.tar", {f"{n}.png": plain(n)}).read_bytes() for n in (1, 2))
    path = tmp_path / "both.tar"
    path.write_bytes(first + second)
    assert line(lambda: opened(tmp_path, path)) == (
        f"{path}: another archive begins at byte {len(first):,}, as in files joined by cat; list the files instead"
    )
    path.write_bytes(first + b"no archive".ljust(512))
    assert len(opened(tmp_path, path)) == 1


def test_compressed_and_damaged_shards_are_named_as_such(tmp_path):
    content = write_tar(tmp_path / "a.tar", {f"{n}.png": plain(n) for n in range(3)}).read_bytes()
    path = tmp_path / "b.tar.gz"
    for compress in (gzip.compress, bz2.compress, lzma.compress):
        path.write_bytes(compress(content))
        expected = f"{path}: is compressed, so that no part of it can be read alone; unpack it"
        assert line(lambda: opened(tmp_path, path)) == expected
    with tarfile.open(tmp_path / "a.tar") as archive:
        offset = archive.getmembers()[1].offset
    path.write_bytes(content[:offset] + b"\xff" * 512 + content[offset + 512 :])
    assert line(lambda: opened(tmp_path, path)) == f"{path}: damaged at byte {offset:,}: there is no header of a member"


def test_ranges_of_shards(tmp_path):
    for number in range(8, 12):
        write_tar(tmp_path / f"a-{number:03d}.tar", {"a.png": plain(1)})
    names = [path.rpartition("/")[2] for _, path in find_files(str(tmp_path / "a-{008..011}.tar"), "tar")]
    assert names == ["a-008.tar", "a-009.tar", "a-010.tar", "a-011.tar"]
    with pytest.raises(MissingDataError, match=r"a-012\.tar: no such file"):
        opened(tmp_path, str(tmp_path / "a-{011..012}.tar"))


@pytest.mark.parametrize(
    ("members", "found"),
    [
        ({"a.txt": b"x"}, "no images; allowed: members named .avif, .bmp"),
        ({"a.png": plain(1), "a.cls": b"cat"}, "member a.cls: label 'cat'; allowed: 0 to"),
        ({"a.png": plain(1), "a.cls": b"-1"}, "member a.cls: label '-1'; allowed: 0 to"),
        ({"a.png": plain(1), "a.jpg": plain(1)}, "member a.jpg: a second image of its key"),
        ({"a.png": plain(1), "a.cls": b"1", "a.CLS": b"2"}, "member a.CLS: a second label of its key"),
        ({"a.png": plain(1), "a.cls": b"0", "b.png": plain(2)}, "member b.png: no .cls; allowed: a label for each"),
    ],
)
def test_wrong_shards_are_one_line(tmp_path, members, found):
    path = write_tar(tmp_path / "a.tar", members)
    assert line(lambda: opened(tmp_path, path), DataError).startswith(f"{path}")
    assert found in line(lambda: opened(tmp_path, path), DataError)


def test_an_image_with_holes_is_refused_by_name(tmp_path):
    with (tmp_path / "a.png").open("wb") as file:
        file.write(plain(1))
        file.truncate(1 << 20)
    subprocess.run(["tar", "-S", "--format=gnu", "-cf", "a.tar", "a.png"], cwd=tmp_path, check=True)
    assert "member a.png: is sparse; allowed: whole files" in line(
        lambda: opened(tmp_path, tmp_path / "a.tar"), DataError
    )


def test_a_shard_that_is_cut_off_is_named(tmp_path):
    path = write_tar(tmp_path / "a.tar", {f"{i}.png": plain(i) for i in range(9)})
    path.write_bytes(b"no tar file" * 200)
    assert line(lambda: opened(tmp_path, path)).startswith(f"{path}: cannot be read: ")


def test_a_shard_is_refused_wherever_it_is_cut_off(tmp_path):
    content = write_tar(tmp_path / "whole.tar", {f"{i}.png": plain(i) for i in range(3)}).read_bytes()
    end = len(content.rstrip(b"\0")) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE + tarfile.BLOCKSIZE
    path = tmp_path / "a.tar"
    for length in (*range(tarfile.BLOCKSIZE, end, 100), end):
        path.write_bytes(content[:length])
        assert "a.tar" in line(lambda: opened(tmp_path, path)), length
    path.write_bytes(content[: end + tarfile.BLOCKSIZE])
    assert len(opened(tmp_path, path)) == 3


def test_splits_with_different_classes(tmp_path):
    for name, labels in (("train", (4, 2)), ("test", (7, 9)), ("both", (2, 9))):
        members = {
            f"{label}.{kind}": content
            for label in labels
            for kind, content in (("png", plain(label)), ("cls", b"%d" % label))
        }
        write_tar(tmp_path / f"{name}.tar", members)

    def opened(split, test):
        files = {"train": [str(tmp_path / "train.tar")], "test": [str(tmp_path / f"{test}.tar")]}
        config = from_values(WebDatasetConfig, {**files, "cache_folder": str(tmp_path / "cache")})
        return config.open_by_class(split, CentreCrop(short_side_px=8, size_px=8))

    assert opened("train", "test").class_names == ("2", "4") and opened("test", "test").class_names == ("7", "9")
    assert line(lambda: opened("train", "both")).startswith("webdataset: classes in both splits: 2;")
