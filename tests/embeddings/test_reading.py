"""Embeddings in files of ours and of other programs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ssl_sec.embeddings.parts import Rows, encoded, part_name
from ssl_sec.embeddings.reading import BLOCK_ROWS, EmbeddingSet, read_set, require_all_parts
from ssl_sec.errors import DataError


def read(*paths: Path) -> EmbeddingSet:
    return read_set((str(path), lambda path=path: path.open("rb")) for path in paths)


def ours(path: Path, values: np.ndarray, first_row: int = 0, weights: str = "w") -> Path:
    rows = Rows(
        rows=np.arange(first_row, first_row + len(values)),
        paths=[f"{first_row + row}.png" for row in range(len(values))],
        labels=np.arange(len(values)) % 3 - 1,
        embeddings=values,
    )
    path.write_bytes(encoded(rows, ["a", "b"], {"weights": weights}))
    return path


def values_of(count: int, dim: int = 3) -> np.ndarray:
    return np.random.default_rng(count).normal(size=(count, dim)).astype(np.float32)


def test_positions_count_through_the_files_and_any_range_can_be_read(tmp_path: Path):
    parts = [values_of(BLOCK_ROWS + 5), values_of(7)]
    names = [part_name("train", part, 2) for part in range(2)]
    found = read(
        *(ours(tmp_path / name, part, 100 * at) for at, (name, part) in enumerate(zip(names, parts, strict=True)))
    )
    every = np.concatenate(parts)
    assert (len(found), found.dim) == (len(every), 3)
    for start, stop in (
        (0, len(every)),
        (BLOCK_ROWS - 2, BLOCK_ROWS + 8),
        (3, 4),
        (BLOCK_ROWS + 6, len(every)),
        (5, 5),
    ):
        blocks = list(found.blocks(start, stop))
        assert [at for at, _ in blocks] == list(np.cumsum([start, *(len(block) for _, block in blocks)])[: len(blocks)])
        rows = torch.cat([torch.zeros(0, 3), *(block for _, block in blocks)])
        np.testing.assert_array_equal(rows.numpy(), every[start:stop])
    about = found.about(BLOCK_ROWS + 4, BLOCK_ROWS + 7).to_pydict()
    assert about["row"] == [BLOCK_ROWS + 4, 100, 101]
    assert about["path"] == [f"{BLOCK_ROWS + 4}.png", "100.png", "101.png"]
    assert about["split"] == ["train"] * 3
    assert found.about(0, 3)["label"].to_pylist() == [None, 0, 1]  # without a label, there is none
    some = np.array([0, 2, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 11])
    assert found.about_some(some).to_pylist() == [found.about(at, at + 1).to_pylist()[0] for at in some.tolist()]


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.large_list(pa.float16()), pa.list_(pa.float32(), 3)])
def test_a_file_of_another_program_needs_only_embeddings(tmp_path: Path, kind: pa.DataType):
    values = values_of(10).astype(np.float16)
    pq.write_table(
        pa.table({"embedding": pa.array(values.tolist(), kind)}), tmp_path / "mine.parquet", row_group_size=4
    )
    found = read(tmp_path / "mine.parquet")
    np.testing.assert_array_equal(torch.cat([block for _, block in found.blocks()]).numpy(), values.astype(np.float32))
    assert found.about(8, 10).to_pylist() == [
        {"split": None, "row": row, "path": None, "label": None} for row in (8, 9)
    ]


def table(path: Path, /, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_images_without_a_row_are_counted_through_the_files_of_their_split(tmp_path: Path):
    names = ["a.parquet", "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    found = read(*(table(tmp_path / name, embedding=[[1.0], [2.0]]) for name in names))
    assert found.about(0, 6)["row"].to_pylist() == [0, 1, 0, 1, 2, 3]
    assert found.about_some(np.array([1, 2, 5]))["row"].to_pylist() == [1, 0, 3]
    assert found.about(0, 6)["split"].to_pylist() == ["a"] * 2 + ["train"] * 4
    some = [table(tmp_path / f"{name}.parquet", embedding=[[1.0], [2.0]], split=["x", "y"]) for name in "bc"]
    about = read(*some).about(0, 4)
    assert list(zip(about["split"].to_pylist(), about["row"].to_pylist(), strict=True)) == [
        ("x", 0),
        ("y", 1),
        ("x", 2),
        ("y", 3),
    ]


def test_files_whose_names_state_no_split_are_one_set(tmp_path: Path):
    names = ["part-00000-1c2d-c000.snappy.parquet", "part-00001-1c2d-c000.snappy.parquet"]
    found = read(*(table(tmp_path / name, embedding=[[1.0], [2.0]]) for name in names)).about(0, 4)
    assert (found["split"].to_pylist(), found["row"].to_pylist()) == ([None] * 4, [0, 1, 2, 3])
    whole = read(*(table(tmp_path / f"{name}.parquet", embedding=[[1.0]]) for name in ("test", "train"))).about(0, 2)
    assert (whole["split"].to_pylist(), whole["row"].to_pylist()) == (["test", "train"], [0, 0])
    table(tmp_path / "mine.parquet", embedding=[[1.0], [2.0]], split=["x", None])
    assert read(tmp_path / "mine.parquet").about(0, 2)["split"].to_pylist() == ["x", None]


def test_a_file_of_ours_with_another_name_keeps_its_split(tmp_path: Path):
    rows = Rows(rows=np.arange(1), paths=[None], labels=np.zeros(1, np.int64), embeddings=values_of(1))
    (tmp_path / "mine.parquet").write_bytes(encoded(rows, (), {"split": "test"}))
    assert read(tmp_path / "mine.parquet").about(0, 1)["split"].to_pylist() == ["test"]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda folder: [table(folder / "a.parquet", x=[1.0])],
            "a.parquet has no column 'embedding' with lists of floats",
        ),
        (
            lambda folder: [table(folder / "a.parquet", embedding=[1.0])],
            "a.parquet has no column 'embedding' with lists",
        ),
        (
            lambda folder: [table(folder / "a.parquet", embedding=pa.array([[1, 2]], pa.list_(pa.int8())))],
            "a.parquet has no column 'embedding' with lists of floats",
        ),
        (
            lambda folder: [table(folder / "a.parquet", embedding=pa.array([None, None], pa.list_(pa.float32())))],
            "a.parquet has no column 'embedding' with lists of floats",
        ),
        (
            lambda folder: [ours(folder / "a.parquet", values_of(2)), ours(folder / "b.parquet", values_of(2, 4))],
            "found 3 numbers in .*a.parquet, 4 in .*b.parquet, must be of one length",
        ),
        (
            lambda folder: [
                ours(folder / "a.parquet", values_of(2)),
                ours(folder / "b.parquet", values_of(2), weights="v"),
            ],
            "a.parquet and .*b.parquet are of different encoders",
        ),
        (lambda folder: [], "found no rows"),
    ],
)
def test_tables_that_cannot_be_searched_are_refused_in_one_line(
    tmp_path: Path, write: Callable[[Path], list[Path]], message: str
):
    with pytest.raises(DataError, match=message) as error:
        read(*write(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("split", ["train", "my-split2"])
def test_all_files_of_a_divided_set_are_required(split: str):
    names = [part_name(split, part, 3) for part in range(3)]
    require_all_parts([*names, part_name("other", 0, 1), "mine.parquet"])
    with pytest.raises(DataError, match=f"^embeddings: found 2 of the 3 files of the {split} split, must be all"):
        require_all_parts([*names[1:], part_name("other", 0, 1), "mine.parquet"])


def test_a_first_row_without_an_embedding_is_named_as_any_other(tmp_path: Path):
    found = read(table(tmp_path / "mine.parquet", embedding=pa.array([None, [1.0, 2.0]], pa.list_(pa.float32()))))
    with pytest.raises(DataError, match=r"mine.parquet has rows without an embedding of 2 numbers$"):
        list(found.blocks())


def test_a_damaged_file_and_rows_without_numbers_are_named(tmp_path: Path):
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(DataError, match=r"torn.parquet cannot be read: "):
        read(tmp_path / "torn.parquet")
    values = values_of(BLOCK_ROWS + 9)
    values[BLOCK_ROWS + 3, 1] = np.nan
    found = read(ours(tmp_path / "nan.parquet", values))
    with pytest.raises(DataError, match=re.escape(f"row {BLOCK_ROWS + 3} of {tmp_path}/nan.parquet is not finite")):
        list(found.blocks())
    for rows in ([[1.0, 2.0], [1.0]], [[1.0, 2.0], [1.0], [3.0, 4.0, 5.0]]):
        short = read(table(tmp_path / "short.parquet", embedding=rows))
        with pytest.raises(DataError, match=r"short.parquet has rows without an embedding of 2 numbers"):
            list(short.blocks())


def test_the_mean_is_summed_in_float64(tmp_path: Path):
    files = [table(tmp_path / f"{at}.parquet", embedding=[[value]]) for at, value in enumerate([2.0**24, *[1.0] * 7])]
    assert read(*files).mean().item() == pytest.approx((2**24 + 7) / 8, abs=0.2)


def test_different_values_have_different_digests(tmp_path: Path):
    first, second = (ours(tmp_path / f"{seed}.parquet", values_of(20) + seed) for seed in range(2))
    assert read(first).digest == read(first).digest != read(second).digest


def test_another_order_of_the_rows_of_another_program_has_another_digest(tmp_path: Path):
    values = values_of(20)
    for name, rows in (("a", values), ("b", np.roll(values, 1, axis=0))):
        # Compressed, they would differ in their sizes, which are in the metadata.
        pq.write_table(pa.table({"embedding": rows.tolist()}), tmp_path / f"{name}.parquet", compression="none")
    first, second = (read(tmp_path / f"{name}.parquet") for name in "ab")
    assert first.files[0].metadata_digest == second.files[0].metadata_digest
    assert first.digest == read(tmp_path / "a.parquet").digest != second.digest


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("label", ["cat", "dog"]),
        ("label", [[1], [2, 3]]),
        ("label", pa.array(["cat", "dog"]).dictionary_encode()),
        ("row", ["a", "b"]),
        ("path", [1, 2]),
        ("split", [1, 2]),
    ],
)
def test_columns_of_other_types_are_ignored_with_a_warning(name, values, tmp_path: Path, caplog):
    found = read(table(tmp_path / "mine.parquet", embedding=[[1.0], [2.0]], **{name: values}))
    without = [{"split": None, "row": row, "path": None, "label": None} for row in (0, 1)]
    assert found.about(0, 2).to_pylist() == without
    assert found.about_some(np.array([1])).to_pylist() == without[1:]
    assert f"mine.parquet: columns are ignored: {name!r} is " in caplog.text


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("label", [1.0, None]),
        ("row", [7, 8]),
        ("path", pa.array(["a.png", "b.png"]).dictionary_encode()),
        ("split", ["x", "y"]),
    ],
)
def test_columns_of_usable_types_are_read(name, values, tmp_path: Path, caplog):
    found = read(table(tmp_path / "mine.parquet", embedding=[[1.0], [2.0]], **{name: values}))
    assert found.about(0, 2)[name].to_pylist() == (values.to_pylist() if isinstance(values, pa.Array) else values)
    assert caplog.text == ""


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_a_label_that_is_no_number_is_none(kind, tmp_path: Path):
    labels = pa.array(np.array([3, np.nan], kind))
    assert labels.null_count == 0
    found = read(table(tmp_path / "mine.parquet", embedding=[[1.0], [2.0]], label=labels))
    assert found.about(0, 2)["label"].to_pylist() == [3, None]


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float32(), 2)])
def test_files_without_rows_are_left_out(kind: pa.DataType, tmp_path: Path):
    some = [
        table(tmp_path / f"part-{at}.parquet", embedding=pa.array(rows, kind))
        for at, rows in enumerate(([], [[1.0, 2.0]], []))
    ]
    found = read(*some)
    assert (len(found), found.dim, len(found.files)) == (1, 2, 1)
    with pytest.raises(DataError, match="^embeddings: found no rows; allowed: Parquet files with a column 'embedding'"):
        read(some[0])


def test_a_column_that_cannot_be_converted_is_named(tmp_path: Path):
    found = read(table(tmp_path / "mine.parquet", embedding=[[1.0]], label=[1.5]))
    with pytest.raises(DataError, match=r"embeddings: .*mine.parquet: column 'label': Float value 1.5.* was truncated"):
        found.about(0, 1)
