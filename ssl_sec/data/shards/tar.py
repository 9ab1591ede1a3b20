"""Tar files of images as the `webdataset` library names them: `<key>.jpg`, with `<key>.cls` if there are labels.

A sample's key is a file's path up to the first dot of its name. An index of the images' places, made once for a file
and kept in the cache's folder, makes it possible to read part of a shard, and single images of local shards.
"""

import hashlib
import json
import os
import random
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

from ssl_sec.collectives import world_size
from ssl_sec.data.decode import EXTENSIONS
from ssl_sec.data.folders.listing import display
from ssl_sec.data.image_set import UNLABELLED
from ssl_sec.data.shards.cache_files import made_table
from ssl_sec.data.shards.locations import File, one_line, stamp
from ssl_sec.data.shards.scanning import LAYOUT, LEFT_OUT, SCHEMA, scan
from ssl_sec.data.shards.shared_folder import SharedFolder
from ssl_sec.errors import DataError, printable
from ssl_sec.progress import logged

# Images of a block: a part of a shard, so that a window of blocks needs little memory.
IMAGES_PER_BLOCK = 256

# Number of shards whose headers are read at a time.
_SCANNERS = 8


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
    def left_out(self) -> dict[str, tuple[int, str]]:
        """Reason why members are left out -> their number, and the shard and the name of the first."""
        found: dict[str, tuple[int, str]] = {}
        for (_, path), index in zip(self.files, self.indices, strict=True):
            for reason, (count, member) in json.loads(index.schema.metadata[LEFT_OUT]).items():
                before, first = found.get(reason, (0, f"{printable(path)} member {member}"))
                found[reason] = before + count, first
        return found

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
        return f"{display(self.files[shard][1])} member {self.indices[shard]['name'][place].as_py()}"


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


def open_shards(files: Sequence[File], cache_folder: Path, index_folder: str | None = None) -> Shards:
    """Opens tar files with their indices; missing indices are made.

    Processes that open the same shards at once divide them: those of one machine, and machines by `index_folder`.

    Args:
        files: file system and path of each shard.
        cache_folder: folder of the indices; created if missing. A damaged index is made again.
        index_folder: path or fsspec URL of a folder in which machines share the indices; None if they do not.

    Raises:
        DataError: a shard is damaged or has no images, labels are missing for some of the images, the cache's folder
            cannot be written, or the shared one cannot be read.
    """
    shared = None if index_folder is None else SharedFolder(index_folder)
    order = list(range(len(files)))
    if shared is not None or world_size() > 1:
        random.Random().shuffle(order)  # each process in its own order, so that they seldom meet at a shard
    with ThreadPoolExecutor(_SCANNERS, thread_name_prefix="scan-shards") as pool:  # storage answers late
        digests = list(pool.map(_digest, files))
        found = pool.map(lambda place: _index(files[place], digests[place], cache_folder, shared), order)
        by_place = dict(
            zip(order, logged(found, "looking for images in the shards", len(files), "shards"), strict=True)
        )
    indices = tuple(by_place[place] for place in range(len(files)))
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
    made_of = [LAYOUT, sorted(EXTENSIONS), stamp(*file)]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]


def _index(file: File, digest: str, cache_folder: Path, shared: SharedFolder | None) -> pa.Table:
    name = f"{digest}.index.arrow"

    def write(index: BinaryIO) -> None:
        content = None if shared is None else shared.read(name)
        if content is None or not _is_index(content):
            content = _scanned(file)
            if shared is not None:
                shared.write(name, content)
        index.write(content)

    return made_table(cache_folder / name, write)


def _is_index(content: bytes) -> bool:
    try:
        return pa.ipc.open_file(content).read_all().schema.equals(SCHEMA)
    except (OSError, ValueError):  # those of Arrow
        return False


def _scanned(file: File) -> bytes:
    """The index of a shard, as the content of a file."""
    table, content = scan(file), pa.BufferOutputStream()
    with pa.ipc.new_file(content, table.schema) as writer:
        writer.write_table(table)
    return content.getvalue().to_pybytes()
