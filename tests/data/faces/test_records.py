import logging
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ssl_sec.data.config import RecordsConfig
from ssl_sec.data.crops import CentreCrop
from ssl_sec.data.decode import Decoding
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.faces.records import MAGIC, open_records, read_record
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.data.loading import batches
from ssl_sec.errors import ConfigError, DataError, MissingDataError
from tests.data.files import plain
from tests.data.test_image_set import values
from tests.data.test_sources import line

MAGIC_BYTES = struct.pack("<I", MAGIC)


def record(payload: bytes) -> bytes:
    """A payload as dmlc-core's RecordIO writes it: word by word, and split at each word that is the magic number."""
    parts, start = [], 0
    for place in range(0, len(payload) - 3, 4):
        if payload[place : place + 4] == MAGIC_BYTES:
            parts.append(payload[start:place])
            start = place + 4
    parts.append(payload[start:])
    kinds = [0] if len(parts) == 1 else [1, *[2] * (len(parts) - 2), 3]
    written = b""
    for kind, part in zip(kinds, parts, strict=True):
        written += MAGIC_BYTES + struct.pack("<I", kind << 29 | len(part)) + part + bytes(-len(part) % 4)
    return written


def entry(label: float | tuple[float, ...], image: bytes = b"", key: int = 0) -> bytes:
    """The payload that MXNet packs."""
    if isinstance(label, tuple):
        return struct.pack(f"<IfQQ{len(label)}f", len(label), 0, key, 0, *label) + image
    return struct.pack("<IfQQ", 0, label, key, 0) + image


def write_records(root: Path, entries: dict[int, bytes], num_classes: int | None = None, index: bool = True) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    content, lines = b"", ""
    for key, payload in entries.items():
        lines += f"{key}\t{len(content)}\n"
        content += record(payload)
    (root / "train.rec").write_bytes(content)
    if index:
        (root / "train.idx").write_text(lines)
    if num_classes is not None:
        (root / "property").write_text(f"{num_classes},8,8\n")
    return root


# As InsightFace writes them: the images, then the number of them, then where each identity begins and ends.
FACES = {
    1: entry((0.0, 1.0), plain(1)),
    2: entry((0.0, 1.0), plain(2)),
    3: entry((2.0, 1.0), plain(3)),
    0: entry((4.0, 6.0)),
    4: entry((1.0, 3.0)),
    5: entry((3.0, 4.0)),
}
# As MXNet's im2rec does.
PLAIN = {key: entry(float(key % 2), plain(key)) for key in range(4)}


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.one_of(st.just(MAGIC_BYTES), st.binary(max_size=5)), max_size=6).map(b"".join),
        min_size=1,
        max_size=5,
    )
)
@example([MAGIC_BYTES, MAGIC_BYTES * 2, b"abc" + MAGIC_BYTES, b"abcd" + MAGIC_BYTES + b"e", b""])
def test_a_record_round_trips(payloads):
    content, offset = b"".join(map(record, payloads)), 0
    for number, payload in enumerate(payloads):
        found, offset = read_record(content, offset, f"record {number}")
        assert found == payload
    assert offset == len(content)


@settings(max_examples=20)
@given(st.data())
def test_a_truncated_record_is_detected(data):
    payload = data.draw(st.lists(st.one_of(st.just(MAGIC_BYTES), st.binary(max_size=5)), max_size=6).map(b"".join))
    written = record(payload)
    unpadded = len(written) - (len(written) - 8 - len(payload)) % 4 if MAGIC_BYTES not in payload else len(written) - 3
    left = data.draw(st.integers(0, unpadded - 1))
    assert line(lambda: read_record(written[:left], 0, "record 7")).startswith("record 7: truncated, ")


@pytest.mark.parametrize("resident_limit_mib", [0, 1])
@pytest.mark.parametrize("index", [True, False])
def test_faces(tmp_path, resident_limit_mib, index):
    root = write_records(tmp_path, FACES, 3, index)
    images = open_records(root, Decoding(resident_limit_mib=resident_limit_mib))
    assert isinstance(images, ResidentImages if resident_limit_mib else EncodedImages)
    assert images.labels.tolist() == [0, 0, 2] and images.class_names == ("0", "1", "2")
    assert images.image_shape == (3, 8, 8) and images.name == "records/train"
    assert images.description == f"3 images of 3 classes in {tmp_path / 'train.rec'}"
    batch = pickle.loads(pickle.dumps(images)).read(torch.tensor([2, 0, 1]))
    assert values(batch) == [3, 1, 2] and batch.labels.tolist() == [2, 0, 0]


def test_records_without_identities_are_all_images(tmp_path):
    images = open_records(str(write_records(tmp_path, PLAIN)), Decoding(image_size_px=4, num_channels=1))
    assert values(images.read(torch.arange(4))) == [0, 1, 2, 3] and images.image_shape == (1, 4, 4)
    assert images.labels.tolist() == [0, 1, 0, 1] and images.class_names == ("0", "1")


def test_an_image_with_the_magic_number_inside(tmp_path):
    # Pillow ignores what follows the image.
    image = plain(7)
    image += bytes(-len(image) % 4) + MAGIC_BYTES + b"\0\0\0\0" + MAGIC_BYTES
    root = write_records(tmp_path, {0: entry(1.0, image), 1: entry((3.0, 0.0), image), 2: entry(0.0, plain(2))})
    for index in (True, False):
        images = open_records(root, Decoding(resident_limit_mib=0))
        assert images.store.source(0) == images.store.source(1) == image
        assert values(images.read(torch.arange(3))) == [7, 7, 2] and images.labels.tolist() == [1, 3, 0]
        if index:
            (root / "train.idx").unlink()


def test_workers_stream_records_with_a_crop(tmp_path):
    entries = {key: entry(0.0, plain(key, 9, 12)) for key in range(12)}
    images = open_records(write_records(tmp_path, entries), Decoding(crop=CentreCrop(short_side_px=8, size_px=6)))
    asked = [torch.tensor([5, 0, 11]), torch.tensor([7, 7, 3])]
    read = list(batches(images, asked, torch.device("cpu"), num_loader_workers=2))
    assert [values(batch) for batch in read] == [indices.tolist() for indices in asked]
    assert images.image_shape == (3, 6, 6)


def test_unreadable_images_are_replaced_and_named(tmp_path, caplog):
    root = write_records(tmp_path, {1: entry(0.0, plain(1)), 2: entry(1.0, b"text"), 3: entry(2.0, plain(3))})
    assert line(lambda: open_records(root)).startswith(f"{root / 'train.rec'} record 2: not an image")
    images = open_records(root, Decoding(on_bad_image="skip", resident_limit_mib=0))
    with caplog.at_level(logging.WARNING, "ssl_sec.data"):
        assert values(images.read(torch.arange(3))) == [1, 3, 3]
    assert images.num_bad_images == 1 and "train.rec record 2: not an image" in caplog.text
    assert values(open_records(root, Decoding(on_bad_image="skip")).read(torch.arange(2))) == [1, 3]


def test_sizes_must_agree(tmp_path):
    root = write_records(tmp_path, {1: entry(0.0, plain(1)), 2: entry(1.0, plain(2, 9, 8))})
    assert "record 2: 9 x 8 pixels found, but the first image has 8 x 8" in line(lambda: open_records(root))


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize(("whole", "left", "number"), [(0, 1, 0), (2, 7, 2), (2, 30, 2), (3, 100, 3)])
def test_a_truncated_file_names_the_record(tmp_path, index, whole, left, number):
    root = write_records(tmp_path, PLAIN, index=index)
    content = (root / "train.rec").read_bytes()
    (root / "train.rec").write_bytes(content[: sum(len(record(PLAIN[key])) for key in range(whole)) + left])
    assert f"train.rec record {number}: truncated, " in line(lambda: open_records(root))


def test_a_file_may_end_at_any_byte_of_a_record(tmp_path):
    before = len(record(PLAIN[0]))
    for left in range(48):
        root = write_records(tmp_path / str(left), dict(list(PLAIN.items())[:2]))
        (root / "train.rec").write_bytes((root / "train.rec").read_bytes()[: before + left])
        assert line(lambda root=root: open_records(root)).startswith(f"{root}/train.rec record 1: truncated, ")


def test_a_file_that_ends_between_records(tmp_path):
    root = write_records(tmp_path, PLAIN)
    (root / "train.rec").write_bytes((root / "train.rec").read_bytes()[: -len(record(PLAIN[3]))])
    assert "train.rec record 3: truncated, the file ends at byte" in line(lambda: open_records(root))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "train.rec").touch()
    assert line(lambda: open_records(tmp_path / "empty")) == f"{tmp_path / 'empty' / 'train.rec'}: no records"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.idx", b"0\t4\n", "train.rec record 0: no record begins at byte 4"),
        ("train.idx", b"0\t-8\n", "train.rec record 0: no record begins at byte -8"),
        ("train.idx", b"0\t2\n", "train.rec record 0: no record begins at byte 2"),
        ("train.idx", b"0\t999999999\n", "train.rec record 0: truncated, the file ends at byte"),
        ("train.idx", b"0 0\n", "train.idx: cannot be read: "),
        ("train.idx", b"0\tx\n", "train.idx: cannot be read: "),
        ("train.idx", b"", "train.idx: cannot be read: "),
        ("train.rec", b"no record", "train.rec record 0: no record begins at byte 0"),
        ("train.rec", record(b"short") * 30, "train.rec record 0: 5 bytes, too few for a header and 0 labels"),
        (
            "train.rec",
            record(struct.pack("<IfQQ", 9, 0, 0, 0)),
            "record 0: 24 bytes, too few for a header and 9 labels",
        ),
        ("train.rec", record(entry(0.5, b"i")), "train.rec record 0: label 0.5; allowed: integers, 0 to 16777215"),
        ("train.rec", record(entry(-1.0, b"i")), "train.rec record 0: label -1; allowed"),
        ("train.rec", record(entry(float("nan"), b"i")), "train.rec record 0: label nan; allowed"),
        ("train.rec", record(entry((1e30, 0), b"i")), "train.rec record 0: label 1e+30; allowed"),
        ("train.rec", record(entry((1.0, 1.0))), "train.rec: none of 1 records holds an image"),
        ("property", b"many", "property: found 'many'; allowed: classes,height,width"),
        ("property", b"1,8,8", "property: 1 class, but train.rec has label 1"),
        ("property", b"999999999,8,8", "train.rec: classes up to 999999998 in 4 images; allowed: 0 to 1048575"),
    ],
)
def test_damaged_files(tmp_path, file, content, message):
    root = write_records(tmp_path, PLAIN)
    if file == "train.rec":
        (root / "train.idx").unlink()
    (root / file).write_bytes(content)
    assert message in line(lambda: open_records(root))


def test_an_index_that_lost_its_end(tmp_path):
    root = write_records(tmp_path, {0: FACES[0], **FACES})
    index = (root / "train.idx").read_text().splitlines()
    (root / "train.idx").write_text("\n".join(index[:3]) + "\n")
    assert "train.rec: 2 images found, 3 expected by record 0" in line(lambda: open_records(root))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), -1.0])
def test_a_first_record_whose_ids_are_no_numbers(tmp_path, number):
    root = write_records(tmp_path, {**FACES, 0: entry((number, number))})
    if number == float("inf"):  # beyond float32's whole numbers nothing can be compared
        assert len(open_records(root)) == 3
    else:
        assert f"images found, {number - 1:.0f} expected by record 0" in line(lambda: open_records(root))


@pytest.mark.parametrize("file", ["train.rec", "train.idx", "property"])
def test_a_folder_instead_of_a_file(tmp_path, file):
    root = write_records(tmp_path, PLAIN)
    (root / file).unlink(missing_ok=True)
    (root / file).mkdir()
    kind = MissingDataError if file == "train.rec" else DataError
    assert line(lambda: open_records(root), kind).startswith(f"{root / file}: ")


def test_a_replaced_file_is_read_anew(tmp_path):
    for first in (1, 101):
        root = write_records(tmp_path / str(first), {key: entry(key % 2, plain(first + key)) for key in range(6)})
        (tmp_path / "faces").mkdir(exist_ok=True)
        for path in root.iterdir():
            path.replace(tmp_path / "faces" / path.name)
        images = open_records(tmp_path / "faces", Decoding(resident_limit_mib=0))
        assert values(images.read(torch.arange(6))) == [first + key for key in range(6)]


def test_an_offset_near_the_largest_number(tmp_path):
    root = write_records(tmp_path, PLAIN)
    (root / "train.idx").write_text(f"0\t{2**63 - 8}\n")
    assert line(lambda: open_records(root)).startswith(f"{root / 'train.rec'} record 0: truncated")


def test_labels_may_begin_anywhere_in_a_large_file(tmp_path):
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 50, 300)
    entries = {
        key: entry(float(label) if key % 3 else (float(label), 1.0), rng.bytes(int(rng.integers(1, 90))))
        for key, label in enumerate(classes)
    }
    root = write_records(tmp_path, {int(key): entries[int(key)] for key in rng.permutation(300)})
    images = open_records(root, Decoding(crop=CentreCrop(short_side_px=8, size_px=6)))
    assert images.labels.tolist() == [int(classes[key]) for key in images.store.keys]


def test_only_the_training_split_exists(tmp_path):
    assert "data.root must hold train.rec" in line(lambda: open_records(tmp_path), MissingDataError)
    data = RecordsConfig(root=str(write_records(tmp_path, FACES, 3)))
    crop = CentreCrop(short_side_px=8, size_px=8)
    assert len(data.open("train")) == 3
    assert data.open_by_class("train", crop).class_names == ("0", "2")
    for opened in (lambda: data.open("test"), lambda: data.open_by_class("test", crop)):
        assert line(opened, ConfigError) == (
            "data.num_train_classes: found null, must be given: 'records' has no test split of its own"
        )
    split = RecordsConfig(root=str(tmp_path), num_train_classes=1)
    assert [split.open_by_class(part, crop).class_names for part in ("train", "test")] == [("0",), ("2",)]
