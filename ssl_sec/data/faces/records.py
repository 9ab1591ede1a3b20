"""Training images in record files of MXNet, as InsightFace publishes its face sets: train.rec, train.idx, property.

A record file (dmlc-core's RecordIO) is a row of parts, little-endian and padded to 4 bytes: the magic number, a word
with the part's kind (3 bits) and its length (29 bits), and the payload. A payload that holds the magic number at a
multiple of 4 bytes is split there, and the number itself left out: kind 1 is the first part of such a record, 2 a
further one, 3 the last; 0 is a whole record. A record is a header (flag, label, two ids), then `flag` labels if there
are several, then the encoded image. The index has a line for each record: its key and where it begins.

Records without an image are InsightFace's entries of its identities and, with key 0, of their number.
"""

import functools
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64

from ssl_sec.data.decode import AS_THEY_ARE, Decoding
from ssl_sec.data.faces.reading import is_number
from ssl_sec.data.image_set import MAX_CLASSES, ImageSet, check_num_classes
from ssl_sec.data.stores import from_store
from ssl_sec.errors import DataError, MissingDataError, counted, first_line, printable

MAGIC = 0xCED7230A

_PART = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")
_LENGTH_BITS = 29
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)


@dataclass(frozen=True, kw_only=True)
class RecordStore:
    """Encoded images in a record file, which every process maps once for itself.

    Attributes:
        path: path of the file.
        keys: key of each record, its name in errors.
        offsets: offset of each record, in bytes.
    """

    path: Path
    keys: Int64[np.ndarray, " images"]
    offsets: Int64[np.ndarray, " images"]

    def image_name(self, row: int) -> str:
        """The file and the record's key."""
        return _name(self.path, self.keys[row])

    def source(self, row: int) -> bytes:
        """The encoded bytes of an image."""
        name = self.image_name(row)
        record, _ = read_record(_map_file(self.path), int(self.offsets[row]), name)
        return _image(record, name)


def open_records(root: str | Path, decoding: Decoding = AS_THEY_ARE) -> ImageSet:
    """The images of train.rec; there is no other split. Class names are the labels' numbers.

    The labels are stored with the images, so the whole file is read once when it is opened, but not kept in memory.

    Args:
        root: folder with train.rec; train.idx has the offset of each record, and is computed if it is missing;
            `property` has the number of classes, as "classes,height,width".
        decoding: how images become pixels.

    Raises:
        MissingDataError: there is no train.rec.
        DataError: a file is damaged or truncated, a label is not a class, or an image cannot be read.
    """
    root = Path(root)
    path, index = find_record_file(root), root / "train.idx"
    _map_file.cache_clear()  # it may have been replaced since this process opened it
    if index.exists():
        keys, offsets = _read_index(index)
    else:
        offsets = find_records(path)
        keys = np.arange(len(offsets))
    labels, has_image = read_labels(path, keys, offsets)
    _check_number(path, keys, labels, has_image)
    keys, offsets, labels = keys[has_image], offsets[has_image], labels[has_image]
    classes = _check_classes(labels, path, keys)
    num_classes = _num_classes(root / "property", classes)
    check_num_classes(num_classes, len(classes), str(path))
    return from_store(
        RecordStore(path=path, keys=keys, offsets=offsets),
        torch.from_numpy(classes),
        tuple(map(str, range(num_classes))),
        name="records/train",
        description=f"{len(keys)} images of {num_classes} classes in {path}",
        decoding=decoding,
    )


def find_record_file(root: Path) -> Path:
    """The path of train.rec.

    Raises:
        MissingDataError: there is no such file.
    """
    path = root / "train.rec"
    if not os.path.isfile(path):
        raise MissingDataError(
            f"{printable(str(path))}: no such file; data.root must hold train.rec, train.idx and property"
        )
    return path


def read_record(content: bytes | mmap.mmap, offset: int, name: str) -> tuple[bytes, int]:
    """A record, joined from its parts, and the offset of the next one.

    Args:
        content: content of a record file.
        offset: offset of the record, in bytes.
        name: name of the record in errors.

    Raises:
        DataError: it is truncated, or no record begins there.
    """
    parts: list[bytes] = []
    kind = None
    while kind not in (_WHOLE, _LAST):
        if offset + _PART.size > len(content):
            raise DataError(f"{name}: truncated, the file ends at byte {len(content)}")
        magic, word = _PART.unpack_from(content, offset)
        kind, length = word >> _LENGTH_BITS, word % 2**_LENGTH_BITS
        if magic != MAGIC or kind not in ((_MIDDLE, _LAST) if parts else (_WHOLE, _FIRST)):
            raise DataError(f"{name}: no record begins at byte {offset}")
        start, offset = offset + _PART.size, offset + _PART.size + length
        if offset > len(content):
            raise DataError(f"{name}: truncated, {length} bytes announced at byte {start}, {len(content) - start} left")
        parts.append(content[start:offset])
        offset += -offset % 4
    return struct.pack("<I", MAGIC).join(parts), offset


def find_records(path: Path) -> Int64[np.ndarray, " records"]:
    """The offset of each record of a file, in bytes, found by going through the whole file.

    Raises:
        DataError: a record is truncated, or none begins where one should; the message gives its number.
    """
    content, offset = _map_file(path), 0
    offsets: list[int] = []
    while offset < len(content):
        offsets.append(offset)
        # The same steps as in `read_record`, without copying whole records, of which there are millions.
        if len(content) - offset >= _PART.size:
            magic, word = _PART.unpack_from(content, offset)
            end = offset + _PART.size + word
            if magic == MAGIC and word >> _LENGTH_BITS == _WHOLE and end <= len(content):
                offset = end + -end % 4
                continue
        _, offset = read_record(content, offset, _name(path, len(offsets) - 1))
    return np.array(offsets, np.int64)


def read_labels(
    path: Path, keys: Int64[np.ndarray, " records"], offsets: Int64[np.ndarray, " records"]
) -> tuple[Float32[np.ndarray, " records"], Bool[np.ndarray, " records"]]:
    """The first label of each record, and whether it holds an image.

    Args:
        path: path of the record file.
        keys: key of each record, its name in errors.
        offsets: offset of each record, in bytes.

    Raises:
        DataError: a record is truncated, or none begins where the index says.
    """
    content = _map_file(path)
    words = np.frombuffer(content, "<u4", len(content) // 4)
    labels, has_image = np.zeros(len(keys), np.float32), np.zeros(len(keys), bool)
    last = 4 * len(words) - _PART.size - _HEADER.size
    rows = np.flatnonzero((offsets >= 0) & (offsets % 4 == 0) & (offsets <= last))
    at = offsets[rows] // 4
    kinds, lengths = words[at + 1] >> _LENGTH_BITS, (words[at + 1] % 2**_LENGTH_BITS).astype(np.int64)
    num_labels = words[at + 2].astype(np.int64)
    header_sizes = _HEADER.size + 4 * num_labels
    whole = (words[at] == MAGIC) & (kinds == _WHOLE) & (lengths >= header_sizes)
    whole &= offsets[rows] + _PART.size + lengths <= len(content)
    labels[rows[whole]] = words[(at + np.where(num_labels > 0, 8, 3))[whole]].view("<f4")
    has_image[rows] = lengths > header_sizes
    # Records in several parts are few; the other ones are damaged, and raise an error here.
    for row in np.setdiff1d(np.arange(len(keys)), rows[whole], assume_unique=True).tolist():
        name = _name(path, keys[row])
        if offsets[row] < 0:
            raise DataError(f"{name}: no record begins at byte {offsets[row]}")
        record, _ = read_record(content, int(offsets[row]), name)
        has_image[row] = len(_image(record, name)) > 0
        flag, labels[row] = _HEADER.unpack_from(record)[:2]
        if flag > 0:
            labels[row] = struct.unpack_from("<f", record, _HEADER.size)[0]
    return labels, has_image


@functools.lru_cache(maxsize=8)
def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # an empty file cannot be mapped
        raise DataError(f"{printable(str(path))}: no records") from error
    except OSError as error:
        raise DataError(f"{printable(str(path))}: cannot be read: {error.strerror}") from error


def _image(record: bytes, name: str) -> bytes:
    """The encoded image after the header and the labels."""
    num_labels = _HEADER.unpack_from(record)[0] if len(record) >= _HEADER.size else 0
    if len(record) < _HEADER.size + 4 * num_labels:
        raise DataError(f"{name}: {len(record)} bytes, too few for a header and {num_labels} labels")
    return record[_HEADER.size + 4 * num_labels :]


def _name(path: Path, key: Any) -> str:
    return f"{printable(str(path))} record {key}"


def _read_index(path: Path) -> tuple[Int64[np.ndarray, " records"], Int64[np.ndarray, " records"]]:
    """Key and offset of each record."""
    import pyarrow as pa
    import pyarrow.csv

    types = {"key": pa.int64(), "offset": pa.int64()}
    try:
        table = pyarrow.csv.read_csv(
            path,
            pyarrow.csv.ReadOptions(column_names=list(types)),
            pyarrow.csv.ParseOptions(delimiter="\t"),
            pyarrow.csv.ConvertOptions(column_types=types, null_values=[]),
        )
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{printable(str(path))}: cannot be read: {first_line(error)}") from error
    return table["key"].to_numpy().copy(), table["offset"].to_numpy().copy()


def _check_number(
    path: Path,
    keys: Int64[np.ndarray, " records"],
    labels: Float32[np.ndarray, " records"],
    has_image: Bool[np.ndarray, " records"],
) -> None:
    """Refuses a file without images, or with another number than record 0 says, the first identity's key minus 1."""
    found = int(has_image.sum())
    if found == 0:
        raise DataError(f"{printable(str(path))}: none of {len(keys)} records holds an image")
    first_identity = labels[(keys == 0) & ~has_image]
    # From 2**24 on, float32 is not exact.
    if len(first_identity) and not first_identity[0] >= 2**24 and found != first_identity[0] - 1:
        raise DataError(
            f"{printable(str(path))}: {counted(found, 'image')} found, {first_identity[0] - 1:.0f} expected by "
            "record 0; train.rec and train.idx must be whole and of one set"
        )


def _check_classes(
    labels: Float32[np.ndarray, " images"], path: Path, keys: Int64[np.ndarray, " images"]
) -> Int64[np.ndarray, " images"]:
    wrong = ~((labels >= 0) & (labels < MAX_CLASSES) & (labels == np.floor(labels)))
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(f"{_name(path, keys[row])}: label {labels[row]:g}; allowed: integers, 0 to {MAX_CLASSES - 1}")
    return labels.astype(np.int64)


def _num_classes(path: Path, classes: Int64[np.ndarray, " images"]) -> int:
    largest = int(classes.max())
    if not path.exists():
        return largest + 1
    try:
        text = path.read_text(errors="replace").strip()
    except OSError as error:
        raise DataError(f"{printable(str(path))}: cannot be read: {error.strerror}") from error
    first = text.split(",")[0]
    if not is_number(first):
        raise DataError(f"{printable(str(path))}: found {printable(text[:40])!r}; allowed: classes,height,width")
    if largest >= int(first):
        raise DataError(f"{printable(str(path))}: {counted(int(first), 'class')}, but train.rec has label {largest}")
    return int(first)
