"""Labels of embedded images of one or several data sets."""

import io
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ssl_sec.embeddings.labels import same_label
from ssl_sec.embeddings.parts import Rows, encoded
from ssl_sec.embeddings.reading import EmbeddingSet, read_set


def embedded(**names: Sequence[str]) -> EmbeddingSet:
    """A set with a file for each split, whose classes have these names."""
    rows = Rows(rows=np.arange(1), paths=[None], labels=np.zeros(1, np.int64), embeddings=np.ones((1, 2), np.float32))
    files = {split: encoded(rows, of_split, {}) for split, of_split in names.items()}
    return read_set((f"{split}.parquet", lambda split=split: io.BytesIO(files[split])) for split in files)


def pairs(*rows: tuple[str, int | None, str, int | None]) -> pa.Table:
    names = ("split", "label", "neighbour_split", "neighbour_label")
    kinds = (pa.string(), pa.int64(), pa.string(), pa.int64())
    columns = zip(*rows, strict=True)
    return pa.table({name: pa.array(each, kind) for name, kind, each in zip(names, kinds, columns, strict=True)})


def test_labels_of_sets_with_other_classes_are_compared_by_their_names():
    one, other = embedded(train=["cat", "dog"]), embedded(train=["dog", "fox"])
    rows = [("train", 0, "train", 0), ("train", 1, "train", 0), ("train", 1, "train", 1), ("train", None, "train", 0)]
    assert same_label(pairs(*rows), one, other).to_pylist() == [False, True, False, None]
    assert same_label(pairs(*rows), one, one).to_pylist() == [True, False, True, None]


def test_splits_without_common_classes_have_no_equal_labels():
    found = embedded(test=["fox"], train=["cat", "dog"])
    rows = [("train", 0, "test", 0), ("train", 0, "train", 0), ("test", 0, "train", 1), ("test", 0, "test", 0)]
    assert same_label(pairs(*rows), found, found).to_pylist() == [False, True, False, True]


def test_a_label_without_a_name_equals_no_other():
    one, other = embedded(train=["cat"]), embedded(train=["dog", "cat"])
    rows = [("train", 7, "train", 7), ("train", -2, "train", 1), ("train", 0, "train", 1)]
    assert same_label(pairs(*rows), one, other).to_pylist() == [False, False, True]


def test_numbers_are_compared_only_with_numbers():
    named, numbered = embedded(train=["cat", "dog"]), embedded(mine=[])
    assert same_label(pairs(("mine", 1, "train", 1)), numbered, named).to_pylist() == [None]
    assert same_label(pairs(("mine", 1, "mine", 1), ("mine", 1, "mine", 2)), numbered, numbered).to_pylist() == [
        True,
        False,
    ]
    assert len(same_label(pairs(("mine", 1, "mine", 1)).slice(0, 0), numbered, numbered)) == 0


def test_the_names_of_rows_with_a_split_of_their_own_are_known_if_all_files_have_them():
    def with_splits(names: Sequence[str]) -> bytes:
        rows = Rows(rows=np.arange(1), paths=[None], labels=np.zeros(1, np.int64), embeddings=np.ones((1, 2)))
        table = pq.read_table(io.BytesIO(encoded(rows, names, {})))
        file = io.BytesIO()
        pq.write_table(table.append_column("split", pa.array(["x"])), file)
        return file.getvalue()

    def read(*contents: bytes) -> EmbeddingSet:
        named = enumerate(contents)
        return read_set((f"{at}.parquet", lambda content=content: io.BytesIO(content)) for at, content in named)

    one, other = with_splits(["cat"]), with_splits(["dog"])
    assert read(one, one).class_names("x") == ("cat",)
    assert read(one, other).class_names("x") is None
    assert same_label(pairs(("x", 0, "x", 0)), read(one, other), read(one, other)).to_pylist() == [None]
