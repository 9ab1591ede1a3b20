"""The index of a tar shard, made from the headers of its members.

The shard is read once, in order. Its index has the name, the position and the size of each image, and its label.
"""

import json
import os
import tarfile
from contextlib import suppress
from typing import Any, cast

import pyarrow as pa

from ssl_sec.data.bands import NUMPY_EXTENSION
from ssl_sec.data.decode import EXTENSIONS, UNREAD_EXTENSIONS
from ssl_sec.data.folders.listing import display
from ssl_sec.data.image_set import MAX_CLASSES, UNLABELLED
from ssl_sec.data.shards.locations import File, one_line
from ssl_sec.errors import DataError, printable

# Part of the index's name; increase it when its columns, its rows or its metadata change.
LAYOUT = 5
SCHEMA = pa.schema({"name": pa.string(), "offset": pa.int64(), "size": pa.int64(), "label": pa.int64()})
# Metadata of an index: for each reason why members are left out, their number and the name of the first.
LEFT_OUT = b"left_out"
_DOTTED = "images are not read, as a key ends at the first dot of a file's name"
_LINKS = "images are not read, as they are links"
_UNREAD = "images of formats that are not read are left out"
_ALONE = ".cls and .json files are of no image"

# The first bytes of files that are compressed as a whole: gzip, bzip2, xz, Zstandard.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


def scan(file: File) -> pa.Table:
    """The index of a shard.

    Raises:
        DataError: the shard is damaged or compressed, has no images, or has two images or labels of one sample.
    """
    file_system, path = file
    found = _Members(path)
    # Remote files are read once, in order; other caches of fsspec would read parts of them twice.
    with (
        one_line(path),
        file_system.open(path, "rb", cache_type="readahead") as opened,
        _archive(opened, path) as archive,
    ):
        while (member := archive.next()) is not None:
            cast(Any, archive).members.clear()  # those of all samples, which it keeps, need more memory than the index
            found.add(member, archive)
        _require_end(opened, archive.offset, path)
    return found.index()


class _Members:
    """What the headers of a shard say about its members.

    Args:
        path: path of the shard.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # By key: the name, position and size of the image, the label, and the first file that describes the sample.
        self._images: dict[str, tuple[str, int, int]] = {}
        self._labels: dict[str, int] = {}
        self._described: dict[str, str] = {}
        self._left_out: dict[str, list[str]] = {_DOTTED: [], _LINKS: [], _UNREAD: []}

    def add(self, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        """Takes the next member."""
        folder, _, base = member.name.rpartition("/")
        if base.startswith("."):
            return
        stem, _, extension = base.partition(".")
        key, extension = f"{folder}/{stem}", extension.lower()
        is_image = os.path.splitext(base)[1].lower() in EXTENSIONS
        if extension in ("cls", "json"):
            self._described.setdefault(key, member.name)
        if not member.isfile():
            if is_image and (member.issym() or member.islnk()):
                self._left_out[_LINKS].append(member.name)
        elif f".{extension}" in EXTENSIONS:
            self._add_image(key, member)
        elif extension == "cls":
            self._add_label(key, member, archive)
        elif is_image:
            self._left_out[_DOTTED].append(member.name)
        elif f".{extension}" in UNREAD_EXTENSIONS:
            self._left_out[_UNREAD].append(member.name)

    def _add_image(self, key: str, member: tarfile.TarInfo) -> None:
        # An array beside an image is a feature, a mask or a label.
        if key in self._images and member.name.lower().endswith(NUMPY_EXTENSION):
            return
        if key in self._images and not self._images[key][0].lower().endswith(NUMPY_EXTENSION):
            raise DataError(f"{self._name(member)}: a second image of its key")
        if member.issparse():  # the shard has only its parts that are not zero
            raise DataError(f"{self._name(member)}: is sparse; allowed: whole files")
        self._images.pop(key, None)  # the array, so that images stay in the order of their positions
        self._images[key] = display(member.name), member.offset_data, member.size

    def _add_label(self, key: str, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        if key in self._labels:
            raise DataError(f"{self._name(member)}: a second label of its key")
        content = archive.extractfile(member)
        text = (b"" if content is None else content.read()).decode("ascii", "replace").strip()
        if not text.isdigit() or len(text) > 9 or int(text) >= MAX_CLASSES:
            raise DataError(f"{self._name(member)}: label {printable(text)!r}; allowed: 0 to {MAX_CLASSES - 1}")
        self._labels[key] = int(text)

    def _name(self, member: tarfile.TarInfo) -> str:
        return f"{printable(self._path)} member {printable(member.name)}"

    def index(self) -> pa.Table:
        """The index of the members taken so far."""
        if not self._images:
            dotted = self._left_out[_DOTTED]
            ends = f"; a key ends at the first dot of a file's name, as in {printable(dotted[0])}" if dotted else ""
            allowed = f"members named {', '.join(sorted(EXTENSIONS))}{ends}"
            raise DataError(f"{printable(self._path)}: no images; allowed: {allowed}")
        names, offsets, sizes = zip(*self._images.values(), strict=True)
        labels = [self._labels.get(key, UNLABELLED) for key in self._images]
        alone = [member for key, member in self._described.items() if key not in self._images]
        left_out = {
            reason: (len(members), printable(members[0]))
            for reason, members in {**self._left_out, _ALONE: alone}.items()
            if members
        }
        schema = SCHEMA.with_metadata({LEFT_OUT: json.dumps(left_out)})
        return pa.table([list(names), list(offsets), list(sizes), labels], schema=schema)


def _archive(file: Any, path: str) -> tarfile.TarFile:
    if file.read(6).startswith(_COMPRESSED):
        raise DataError(f"{printable(path)}: is compressed, so that no part of it can be read alone; unpack it")
    file.seek(0)
    return tarfile.open(fileobj=file, mode="r:")


def _require_end(file: Any, offset: int, path: str) -> None:
    """Refuses a shard without an end at `offset`, where its headers end, or with more members after it.

    `tarfile` ends at a truncated or damaged header, as at the end of the first of several archives in one file.
    """
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise DataError(f"{printable(path)}: cut off after {offset:,} bytes: it has no end-of-archive block")
    if any(block):
        raise DataError(f"{printable(path)}: damaged at byte {offset:,}: there is no header of a member")
    while block := file.read(tarfile.BLOCKSIZE):
        if any(block):
            with suppress(tarfile.HeaderError):  # other bytes after the end mean nothing
                tarfile.TarInfo.frombuf(block, tarfile.ENCODING, "surrogateescape")
                raise DataError(
                    f"{printable(path)}: another archive begins at byte {file.tell() - tarfile.BLOCKSIZE:,}, as in "
                    "files joined by cat; list the files instead"
                )
            return
