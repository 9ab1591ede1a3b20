"""Row groups of Parquet files as blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_sec.data.folders.listing import display
from ssl_sec.data.parquet.reading import ParquetFiles, encoded_images, opened, rows_per_batch
from ssl_sec.data.shards.locations import one_line


@dataclass(frozen=True, kw_only=True)
class RowGroups:
    """The row groups of some files, in order.

    Attributes:
        files: file system and path of each file.
    """

    files: ParquetFiles

    @property
    def sizes(self) -> Int64[Tensor, " blocks"]:
        """Rows of each group."""
        return self._sizes

    @cached_property
    def _sizes(self) -> Int64[Tensor, " blocks"]:
        return torch.tensor([self.files.footers[file].row_group(group).num_rows for file, group in self._groups])

    @cached_property
    def _groups(self) -> list[tuple[int, int]]:
        """The file and the group of each block."""
        counts = [footer.num_row_groups for footer in self.files.footers]
        return [(file, group) for file, count in enumerate(counts) for group in range(count)]

    def image_name(self, block: int, row: int) -> str:
        """The file and the row in it, as where the set is read by row."""
        file, group = self._groups[block]
        before = int(self._sizes[block - group : block].sum())
        return f"{display(self.files.files[file][1])} row {before + row}"

    def read(self, block: int) -> Sequence[bytes]:
        """The encoded images of a row group; no other column is read."""
        file, group = self._groups[block]
        (file_system, path), footer = self.files.files[file], self.files.footers[file]
        with opened(file_system, path, footer) as parquet, one_line(path):
            batches = parquet.iter_batches(rows_per_batch(footer), [group], [self.files.image_column])
            return [image for batch in batches for image in encoded_images(batch.column(0)).to_pylist()]
