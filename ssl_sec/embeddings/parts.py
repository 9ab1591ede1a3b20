"""Embeddings as Parquet: files of consecutive images, each whole or absent, that say what they were computed from.

The columns are `row` (of the image in its set), `path` (of its file, or the file and row that it is in; null where a
set has none), `label` (null without one), `embedding` (a list of fixed size, as the network returned it) and `norm`
(its L2 norm). The files are named as in the Hugging Face layout, `train-00000-of-00007.parquet`, and their metadata
have the columns and the names of the classes as its `datasets` library writes them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float, Int64

from ssl_sec.data.image_set import UNLABELLED

# What the embeddings were computed from, in the metadata of each file.
_ORIGIN = b"ssl_sec"
_NAME = re.compile(r"(?P<split>[\w.-]+?)-(?P<part>\d+)-of-(?P<parts>\d+)\.parquet")
# Splits for which other programs name whole files.
_SPLITS = ("train", "validation", "val", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartPlan:
    """How the images of a set are divided into parts.

    Attributes:
        split: split of the set, with which the file names begin.
        num_images: number of images of the set.
        rows_per_part: number of rows of every part but the last.
    """

    split: str
    num_images: int
    rows_per_part: int

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return -(-self.num_images // self.rows_per_part)

    def rows(self, part: int) -> range:
        """The rows of a part in the set."""
        return range(part * self.rows_per_part, min((part + 1) * self.rows_per_part, self.num_images))

    def name(self, part: int) -> str:
        """The name of a part's file."""
        return part_name(self.split, part, self.num_parts)


def part_name(stem: str, part: int, num_parts: int) -> str:
    """The name of the file of a part, counted from 0."""
    return f"{stem}-{part:05d}-of-{num_parts:05d}.parquet"


def stem_of(name: str) -> str | None:
    """What the name of a part's file begins with; None if it is no such name."""
    match = _NAME.fullmatch(name)
    return None if match is None else match["split"]


def split_of(name: str) -> str | None:
    """The split that a file's name states, as that of a part or `test.parquet`; None if it states none."""
    whole = name.removesuffix(".parquet")
    return stem_of(name) or (whole if whole in _SPLITS else None)


def num_parts_of(name: str) -> int | None:
    """The number of parts that the name of a part's file states; None if it is no such name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match["parts"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The embeddings of some images.

    Attributes:
        rows: rows of the images in their set, ascending.
        paths: path of each image; None where there is none.
        labels: label of each image; UNLABELLED without one.
        embeddings: as the network returned them.
    """

    rows: Int64[np.ndarray, " images"]
    paths: Sequence[str | None]
    labels: Int64[np.ndarray, " images"]
    embeddings: Float[np.ndarray, "images dim"]


def encoded(found: Rows, class_names: Sequence[str], origin: Mapping[str, Any]) -> bytes:
    """A Parquet file with these rows.

    Args:
        found: the rows.
        class_names: names of the classes of the set; none without labels.
        origin: plain values: what the embeddings were computed from.
    """
    embeddings = np.ascontiguousarray(found.embeddings, np.float32)
    dim = embeddings.shape[1]
    columns = {
        "row": pa.array(found.rows, pa.int64()),
        "path": pa.array(found.paths, pa.string()),
        "label": pa.array(found.labels, pa.int64(), mask=found.labels == UNLABELLED),
        "embedding": pa.FixedSizeListArray.from_arrays(pa.array(embeddings.ravel()), dim),
        "norm": pa.array(np.linalg.norm(embeddings.astype(np.float64), axis=1).astype(np.float32)),
    }
    description = {b"huggingface": json.dumps({"info": {"features": _features(dim, class_names)}})}
    return parquet_of(pa.table(columns), origin, description)


def parquet_of(
    table: pa.Table, origin: Mapping[str, Any], metadata: Mapping[bytes, str] = MappingProxyType({})
) -> bytes:
    """A Parquet file with a table.

    Args:
        table: with floats, which hardly compress, and other columns.
        origin: plain values: what the table was computed from.
        metadata: more of them.
    """
    table = table.replace_schema_metadata({_ORIGIN: json.dumps(dict(origin), sort_keys=True), **metadata})
    # The bytes of embeddings in a dictionary are only larger.
    repeating = [
        each.name for each in table.schema if not pa.types.is_nested(each.type) and not pa.types.is_floating(each.type)
    ]
    file = BytesIO()
    pq.write_table(table, file, compression="zstd", use_dictionary=cast(Any, repeating), row_group_size=4096)
    return file.getvalue()


def origin_of(schema: pa.Schema) -> dict[str, Any] | None:
    """What embeddings were computed from; None for a file of another program."""
    try:
        return json.loads((schema.metadata or {})[_ORIGIN])
    except (KeyError, ValueError):
        return None


def _features(dim: int, class_names: Sequence[str]) -> dict[str, Any]:
    """The columns, as the `datasets` library describes them."""

    def of(dtype: str) -> dict[str, Any]:
        return {"dtype": dtype, "_type": "Value"}

    return {
        "row": of("int64"),
        "path": of("string"),
        "label": {"names": list(class_names), "_type": "ClassLabel"} if class_names else of("int64"),
        "embedding": {"feature": of("float32"), "length": dim, "_type": "Sequence"},
        "norm": of("float32"),
    }
