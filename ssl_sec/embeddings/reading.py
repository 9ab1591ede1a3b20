"""Embeddings read from Parquet files, of ours or of other programs, a block of rows at a time."""

import hashlib
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float32
from torch import Tensor

from ssl_sec.data.parquet.labels import names_in_metadata
from ssl_sec.embeddings.parts import num_parts_of, origin_of, split_of, stem_of
from ssl_sec.errors import DataError, counted, first_line

logger = logging.getLogger("ssl_sec")

# Rows that are read and compared at once: 8 MiB of 512 dimensions.
BLOCK_ROWS = 4096

_ABOUT = pa.schema([("split", pa.string()), ("row", pa.int64()), ("path", pa.string()), ("label", pa.int64())])


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingFile:
    """A Parquet file with a column of embeddings.

    Attributes:
        name: with its folder, for messages.
        open: opens it for reading at any place.
        split: that of its images that name none: the one in its name, or else in its origin; otherwise its whole name
            beside files with a split, and None beside others.
        row_groups: rows of each group.
        dim: dimension of the embeddings; 0 without rows.
        columns: the columns that are read, those with a usable type.
        ignored: name -> type of those that have another type.
        class_names: names of the labels; empty if it has none.
        origin: what its embeddings were computed from; None if another program wrote it.
        metadata_digest: sixteen hexadecimal digits of its metadata, with the least and greatest values of its columns.
    """

    name: str
    open: Callable[[], BinaryIO] = field(repr=False)
    split: str | None
    row_groups: tuple[int, ...]
    dim: int
    columns: frozenset[str]
    ignored: Mapping[str, str]
    class_names: tuple[str, ...] = field(repr=False)
    origin: dict[str, Any] | None
    metadata_digest: str

    def __len__(self) -> int:
        return sum(self.row_groups)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ for other content; a file of another program is read for them.

        Raises:
            DataError: if it cannot be read.
        """
        if self.origin is not None:
            return self.metadata_digest
        try:
            with self.open() as opened:
                return hashlib.file_digest(cast(Any, opened), "sha256").hexdigest()[:16]
        except (OSError, ValueError) as error:
            raise DataError(f"embeddings: {self.name} cannot be read: {first_line(error)}") from error

    def batches(self, columns: Sequence[str], start: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows from `start` to `stop`, at most BLOCK_ROWS at a time, each time with the number of the first.

        Raises:
            DataError: if the file cannot be read.
        """
        bounds = list(pairwise(accumulate(self.row_groups, initial=0)))
        groups = [group for group, (first, end) in enumerate(bounds) if first < stop and start < end]
        if not groups:
            return
        at = bounds[groups[0]][0]
        try:
            with self.open() as opened, pq.ParquetFile(opened) as file:
                for batch in file.iter_batches(BLOCK_ROWS, groups, list(columns)):
                    first, last = max(start - at, 0), min(stop - at, len(batch))
                    if first < last:
                        yield at + first, batch.slice(first, last - first)
                    at += len(batch)
        except (OSError, ValueError) as error:
            raise DataError(f"embeddings: {self.name} cannot be read: {first_line(error)}") from error


@dataclass(frozen=True, kw_only=True)
class EmbeddingSet:
    """The embeddings of some files, in the order of the files; a position counts from the first row of the first.

    Attributes:
        files: with embeddings of one length.
    """

    files: tuple[EmbeddingFile, ...]

    def __len__(self) -> int:
        return sum(map(len, self.files))

    @property
    def dim(self) -> int:
        """Of the embeddings."""
        return self.files[0].dim

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ for other files; see `EmbeddingFile.digest`."""
        return _digest([file.digest for file in self.files])

    def class_names(self, split: str | None) -> tuple[str, ...] | None:
        """The names of the labels of a split; empty if they have none, None if it is not known which they have."""
        return self._class_names[split]

    @cached_property
    def _class_names(self) -> defaultdict[str | None, tuple[str, ...] | None]:
        every = {file.class_names for file in self.files}
        common = every.pop() if len(every) == 1 else None
        found: defaultdict[str | None, tuple[str, ...] | None] = defaultdict(lambda: common)
        # Rows with a split of their own do not say which file they are of.
        if common is None and not any("split" in file.columns for file in self.files):
            for file in self.files:
                names = found.setdefault(file.split, file.class_names)
                found[file.split] = names if names == file.class_names else None
        return found

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Float32[Tensor, "rows dim"]]]:
        """The embeddings at the positions from `start` to `stop`, each time with the position of the first.

        Raises:
            DataError: if a file cannot be read, or an embedding is missing, has another length or is not finite.
        """
        for at, first, file, batch in self._batches(("embedding",), start, len(self) if stop is None else stop):
            values = batch.column("embedding")
            rows = values.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
            is_fixed = pa.types.is_fixed_size_list(values.type)
            if values.null_count or not (is_fixed or bool((np.diff(values.offsets) == self.dim).all())):
                raise DataError(
                    f"embeddings: {file.name} has rows without an embedding of {counted(self.dim, 'number')}"
                )
            block = torch.from_numpy(rows).view(-1, self.dim)
            if not bool((is_finite := block.isfinite().all(dim=1)).all()):
                raise DataError(
                    f"embeddings: row {first + int((~is_finite).nonzero()[0])} of {file.name} is not finite"
                )
            yield at, block

    def mean(self) -> Float32[Tensor, " dim"]:
        """The mean of all embeddings, summed in float64.

        Raises:
            DataError: as for `blocks`.
        """
        total = torch.zeros(self.dim, dtype=torch.float64)
        for _, block in self.blocks():
            total += block.sum(dim=0, dtype=torch.float64)
        return (total / len(self)).float()

    def about(self, start: int, stop: int) -> pa.Table:
        """The columns `split`, `row`, `path` and `label` at the positions from `start` to `stop`.

        Without `row`, the images of a split are counted through its files, and an image without a split is of that of
        its file; `split`, `path` and `label` may be null.
        """
        batches = self._batches(_ABOUT.names, start, stop)
        found = [self._about(first, file, batch) for _, first, file, batch in batches]
        return pa.Table.from_batches(found, _ABOUT)

    def about_some(self, positions: np.ndarray) -> pa.Table:
        """The same columns at some positions, ascending and each once; it reads block by block."""
        found = [pa.RecordBatch.from_pylist([], _ABOUT)]
        if len(positions):
            last = int(positions[-1])
            for at, first, file, batch in self._batches(_ABOUT.names, int(positions[0]), last + 1):
                begin, end = np.searchsorted(positions, (at, at + len(batch)))
                if begin < end:
                    found.append(self._about(first, file, batch).take(pa.array(positions[begin:end] - at)))
        return pa.Table.from_batches(found, _ABOUT)

    def _batches(
        self, columns: Iterable[str], start: int, stop: int
    ) -> Iterator[tuple[int, int, EmbeddingFile, pa.RecordBatch]]:
        """Some rows at a time: the position of the first, its row in its file, and the file."""
        bounds = pairwise(accumulate(map(len, self.files), initial=0))
        for file, (first, end) in zip(self.files, bounds, strict=True):
            # A file without any of the columns still says how many rows there are.
            wanted = [name for name in columns if name in file.columns] or ["embedding"]
            for row, batch in file.batches(wanted, max(start, first) - first, min(stop, end) - first):
                yield first + row, row, file, batch

    @cached_property
    def _num_before(self) -> dict[str, int]:
        """By the name of each file, how many rows of its split are in earlier files."""
        found: dict[str, int] = {}
        totals: Counter[str | None] = Counter()
        for file in self.files:
            split = None if "split" in file.columns else file.split  # files of several splits are counted together
            found[file.name] = totals[split]
            totals[split] += len(file)
        return found

    def _about(self, first: int, file: EmbeddingFile, batch: pa.RecordBatch) -> pa.RecordBatch:
        first += self._num_before[file.name]
        columns = {
            "row": pa.array(np.arange(first, first + len(batch))),
            **{name: batch.column(name) for name in _ABOUT.names if name in batch.schema.names},
        }
        given: list[pa.Array] = []
        for each in _ABOUT:
            try:
                found = _without_nan(columns[each.name]).cast(each.type) if each.name in columns else None
            except pa.ArrowException as error:
                raise DataError(f"embeddings: {file.name}: column {each.name!r}: {first_line(error)}") from error
            found = pa.nulls(len(batch), each.type) if found is None else found
            given.append(found.fill_null(file.split) if each.name == "split" and file.split else found)
        return pa.record_batch(given, schema=_ABOUT)


def read_set(files: Iterable[tuple[str, Callable[[], BinaryIO]]]) -> EmbeddingSet:
    """The embeddings of some files, of which only the metadata are read now.

    Args:
        files: the name of each, with its folder, and what opens it.

    Raises:
        DataError: if there are none, or one cannot be read or has no embeddings; see also `require_alike`.
    """
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    found = [_read(name, opener, known) for name, opener in files]
    if not any(map(len, found)):
        raise DataError("embeddings: found no rows; allowed: Parquet files with a column 'embedding'")
    found = [file for file in found if len(file)]  # other programs write files without rows, too
    require_alike(found)
    if any(file.split for file in found):  # the others are not of these
        found = [replace(file, split=file.split or PurePosixPath(file.name).stem) for file in found]
    if file := next((file for file in found if file.ignored), None):
        types = ", ".join(f"{column!r} is {kind}" for column, kind in file.ignored.items())
        logger.warning(
            "%s: columns are ignored: %s; allowed: numbers in 'row' and 'label', strings in 'split' and 'path'",
            file.name,
            types,
        )
    return EmbeddingSet(files=tuple(found))


def require_all_parts(names: Iterable[str]) -> None:
    """Refuses a folder that lacks files of a set that was divided.

    Args:
        names: names of the files in the folder.

    Raises:
        DataError: if files are missing.
    """
    found = Counter((stem_of(name), num_parts) for name in names if (num_parts := num_parts_of(name)) is not None)
    for (split, num_parts), num_found in found.items():
        if num_found != num_parts:
            raise DataError(
                f"embeddings: found {num_found} of the {num_parts} files of the {split} split, must be all of them, "
                "which the same jobs.embed, started again, writes, or one file by its name"
            )


def require_alike(files: Sequence[EmbeddingFile]) -> None:
    """Refuses embeddings that cannot be compared.

    Raises:
        DataError: if they differ in length, or are known to come from different weights.
    """
    first = files[0]
    for file in files[1:]:
        if file.dim != first.dim:
            lengths = f"{counted(first.dim, 'number')} in {first.name}, {file.dim} in {file.name}"
            raise DataError(f"embeddings: found {lengths}, must be of one length")
        weights = [(each.origin or {}).get("weights") for each in (first, file)]
        if None not in weights and weights[0] != weights[1]:
            raise DataError(f"embeddings: {first.name} and {file.name} are of different encoders")


def _read(name: str, opener: Callable[[], BinaryIO], known: dict[tuple[str, ...], tuple[str, ...]]) -> EmbeddingFile:
    """A file; the names of its classes are the object in `known` if that has them, as faces have many."""
    try:
        with opener() as opened, pq.ParquetFile(opened) as file:
            about, schema = file.metadata, file.schema_arrow
            groups = [about.row_group(group) for group in range(about.num_row_groups)]
            dim = _dim(file) if about.num_rows and "embedding" in schema.names else 0
    except (OSError, ValueError) as error:
        raise DataError(f"embeddings: {name} cannot be read: {first_line(error)}") from error
    if about.num_rows and not dim:
        raise DataError(f"embeddings: {name} has no column 'embedding' with lists of floats")
    ignored = {each.name: str(each.type) for each in schema if not _is_usable(each)}
    names = names_in_metadata(schema, "label") or ()
    origin = origin_of(schema)
    return EmbeddingFile(
        name=name,
        open=opener,
        split=split_of(PurePosixPath(name).name) or (origin or {}).get("split"),
        row_groups=tuple(group.num_rows for group in groups),
        dim=dim,
        columns=frozenset(schema.names) - frozenset(ignored),
        ignored=ignored,
        class_names=known.setdefault(names, names),
        origin=origin,
        metadata_digest=_digest([origin, [group.to_dict() for group in groups]]),
    )


def _without_nan(column: pa.Array) -> pa.Array:
    """The column with null for NaN, which programs without null write for a label that is missing."""
    if not pa.types.is_floating(column.type):
        return column
    values = column.to_numpy(zero_copy_only=False).astype(np.float64)  # with NaN for null
    return pa.array(values, mask=np.isnan(values))


def _is_usable(column: pa.Field) -> bool:
    """Whether a column has the kind of values that its name stands for."""
    if column.name not in _ABOUT.names:
        return True
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_string(_ABOUT.field(column.name).type):
        return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)
    return any(is_kind(kind) for is_kind in (pa.types.is_integer, pa.types.is_floating, pa.types.is_null))


def _dim(file: pq.ParquetFile) -> int:
    """The length of the embeddings, by their type or the first that is there; 0 if they are no lists of numbers."""
    kind = file.schema_arrow.field("embedding").type
    if pa.types.is_fixed_size_list(kind):
        return kind.list_size if pa.types.is_floating(kind.value_type) else 0
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_floating(kind.value_type):
        return 0
    columns = (batch.column("embedding") for batch in file.iter_batches(64, columns=["embedding"]))
    return next((len(column.drop_null()[0]) for column in columns if column.null_count < len(column)), 0)


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(cast(Any, values), sort_keys=True, default=str).encode()).hexdigest()[:16]
