"""Tar files of images as the `webdataset` library names them: `<key>.jpg`, with `<key>.cls` if there are labels.

A sample's key is a file's path up to the first dot of its name. An index of the images' places, made once for a file
and kept in the cache's folder, makes it possible to read part of a shard, and single images of local shards.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import torch
from fsspec.implementations.local import LocalFileSystem
from jaxtyping import Int64
from torch import Tensor

from ssl_sec.data.decode import EXTENSIONS
from ssl_sec.data.image_set import MAX_CLASSES, UNLABELLED
from ssl_sec.data.shards.cache_files import made_table
from ssl_sec.data.shards.locations import File, one_line, stamp
from ssl_sec.errors import DataError, printable

# Images of a block: a part of a shard, so that a window of blocks needs little memory.
IMAGES_PER_BLOCK = 256

# Number of shards whose headers are read at a time.
_SCANNERS = 8

# Part of the index's name; increase it when its columns or its metadata change.
_LAYOUT = 2
# Metadata of an index: the number of images that are not read, as their names have a further dot, and the first name.
_NUM_DOTTED, _FIRST_DOTTED = b"num_dotted", b"first_dotted"
_SCHEMA = pa.schema({"name": pa.string(), "offset": pa.int64(), "size": pa.int64(), "label": pa.int64()})


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Some tar files with the positions of their images.

    Attributes:
        files: file system and path of each shard.
        digest: digest of the files' names, sizes and modification times.
        indices: names, offsets, sizes and labels of the images of each file, in order.
    """

    files: tuple[File, ...]
    digest: str
    indices: tuple[pa.Table, ...]

    @cached_property
    def labels(self) -> Int64[Tensor, " images"]:
        """Class of each image; UNLABELLED without a `.cls`."""
        return torch.from_numpy(np.concatenate([index["label"].to_numpy() for index in self.indices]))

    @property
    def sizes(self) -> Int64[Tensor, " blocks"]:
        """Images of each block."""
        return self._sizes

    @property
    def are_local(self) -> bool:
        """Whether all files are on this machine's file systems."""
        return all(isinstance(file_system, LocalFileSystem) for file_system, _ in self.files)

    @property
    def num_dotted(self) -> int:
        """Number of images that are not read, as their names have a further dot (`img.0.png`)."""
        return sum(map(_num_dotted, self.indices))

    @property
    def first_dotted(self) -> str:
        """The shard and the member of the first of them; there must be one."""
        shard = next(shard for shard, index in enumerate(self.indices) if _num_dotted(index))
        member = self.indices[shard].schema.metadata[_FIRST_DOTTED].decode()
        return f"{printable(self.files[shard][1])} member {member}"

    @cached_property
    def _sizes(self) -> Int64[Tensor, " blocks"]:
        return torch.tensor([last - first for _, first, last in self._blocks])

    @cached_property
    def _blocks(self) -> list[tuple[int, int, int]]:
        """For each block the shard, the block's first image in it, and the image after its last."""
        return [
            (shard, first, min(first + IMAGES_PER_BLOCK, len(index)))
            for shard, index in enumerate(self.indices)
            for first in range(0, len(index), IMAGES_PER_BLOCK)
        ]

    def read(self, block: int) -> Sequence[bytes]:
        """The encoded images of a block, in one request."""
        shard, first, last = self._blocks[block]
        index, (file_system, path) = self.indices[shard], self.files[shard]
        offsets, sizes = (index[name].to_numpy()[first:last] for name in ("offset", "size"))
        begin, end = int(offsets[0]), int(offsets[-1] + sizes[-1])
        with one_line(path):
            content: Any = file_system.cat_file(path, start=begin, end=end)
        if len(content) != end - begin:
            raise DataError(f"{printable(path)}: {len(content)} bytes at {begin}, but its index has {end - begin}")
        return [content[start - begin : start - begin + size] for start, size in zip(offsets, sizes, strict=True)]

    def image_name(self, block: int, row: int) -> str:
        """The shard and the member."""
        shard, first, _ = self._blocks[block]
        return self.member_name(shard, first + row)

    def member_name(self, shard: int, place: int) -> str:
        """The name in errors of an image, given its place in a shard."""
        return f"{self.files[shard][1]} member {self.indices[shard]['name'][place].as_py()}"


@dataclass(frozen=True, kw_only=True)
class ShardStore:
    """The images of local shards, read by row.

    Attributes:
        shards: shards on file systems of this machine.
    """

    shards: Shards

    def image_name(self, row: int) -> str:
        """The shard and the member."""
        return self.shards.member_name(*self._place(row))

    def source(self, row: int) -> bytes:
        """The encoded bytes of an image."""
        shard, place = self._place(row)
        index, (_, path) = self.shards.indices[shard], self.shards.files[shard]
        with one_line(path), open(path, "rb") as file:
            return os.pread(file.fileno(), index["size"][place].as_py(), index["offset"][place].as_py())

    @cached_property
    def _ends(self) -> Int64[np.ndarray, " shards"]:
        return np.cumsum([len(index) for index in self.shards.indices])

    def _place(self, row: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, row, side="right"))
        return shard, row - int(self._ends[shard - 1] if shard else 0)


def open_shards(files: Sequence[File], cache_folder: Path) -> Shards:
    """Opens tar files with their indices; missing indices are made.

    Args:
        files: file system and path of each shard.
        cache_folder: folder of the indices; created if missing. A damaged index is made again.

    Raises:
        DataError: a shard is damaged or has no images, labels are missing for some of the images, or the folder cannot
            be written.
    """
    with ThreadPoolExecutor(_SCANNERS, thread_name_prefix="scan-shards") as pool:  # storage answers late
        digests = list(pool.map(_digest, files))
        indices = tuple(pool.map(lambda file, digest: _index(file, digest, cache_folder), files, digests))
    whole = hashlib.sha256("".join(digests).encode()).hexdigest()[:32]
    shards = Shards(files=tuple(files), digest=whole, indices=indices)
    without = [(index["label"].to_numpy() == UNLABELLED) for index in indices]
    if any(missing.any() for missing in without) and not all(missing.all() for missing in without):
        shard = next(number for number, missing in enumerate(without) if missing.any())
        member = indices[shard]["name"][int(without[shard].argmax())].as_py()
        name = f"{printable(files[shard][1])} member {printable(member)}"
        raise DataError(f"{name}: no .cls; allowed: a label for each image, or none")
    return shards


def _digest(file: File) -> str:
    with one_line(file[1]):
        return hashlib.sha256(json.dumps([_LAYOUT, stamp(*file)]).encode()).hexdigest()[:32]


def _index(file: File, digest: str, cache_folder: Path) -> pa.Table:
    def write(index: BinaryIO) -> None:
        table = _scan(file)
        with pa.ipc.new_file(index, table.schema) as writer:
            writer.write_table(table)

    return made_table(cache_folder / f"{digest}.index.arrow", write)


def _scan(file: File) -> pa.Table:
    """The positions of the images in a shard, from its headers."""
    file_system, path = file
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    dotted: list[str] = []
    # Remote files are read once, in order; other caches of fsspec would read parts of them twice.
    with one_line(path), file_system.open(path, "rb", cache_type="readahead") as opened, _archive(opened) as archive:
        for member in archive:
            folder, _, base = member.name.rpartition("/")
            stem, _, extension = base.partition(".")
            key = f"{folder}/{stem}"
            if not member.isfile() or base.startswith("."):
                continue
            if f".{extension.lower()}" in EXTENSIONS:
                if key in images:
                    raise DataError(f"{printable(path)} member {printable(member.name)}: a second image of its key")
                images[key] = member.name, member.offset_data, member.size
            elif extension.lower() == "cls":
                content = archive.extractfile(member)
                labels[key] = _label(b"" if content is None else content.read(), f"{path} member {member.name}")
            elif os.path.splitext(base)[1].lower() in EXTENSIONS:
                dotted.append(printable(member.name))
        opened.seek(archive.offset)  # tarfile treats a truncated header as the end
        if opened.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise DataError(
                f"{printable(path)}: cut off after {archive.offset:,} bytes: it has no end-of-archive block"
            )
    if not images:
        ends = f"; a key ends at the first dot of a file's name, as in {dotted[0]}" if dotted else ""
        raise DataError(f"{printable(path)}: no images; allowed: members named {', '.join(sorted(EXTENSIONS))}{ends}")
    names, offsets, sizes = zip(*images.values(), strict=True)
    of_images = [labels.get(key, UNLABELLED) for key in images]
    about = {_NUM_DOTTED: str(len(dotted)), _FIRST_DOTTED: dotted[0] if dotted else ""}
    return pa.table([list(names), list(offsets), list(sizes), of_images], schema=_SCHEMA.with_metadata(about))


def _num_dotted(index: pa.Table) -> int:
    return int(index.schema.metadata[_NUM_DOTTED])


def _archive(file: Any) -> tarfile.TarFile:
    return tarfile.open(fileobj=file, mode="r:")


def _label(content: bytes, name: str) -> int:
    text = content.decode("ascii", "replace").strip()
    if not text.isdigit() or len(text) > 9 or int(text) >= MAX_CLASSES:
        raise DataError(f"{printable(name)}: label {printable(text)!r}; allowed: 0 to {MAX_CLASSES - 1}")
    return int(text)
