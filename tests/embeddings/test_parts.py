"""The division of a set into files, and what a file has."""

import io
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssl_sec.embeddings.parts import PartPlan, Rows, encoded, num_parts_of, origin_of, part_name, stem_of


@given(num_images=st.integers(1, 200), rows_per_part=st.integers(1, 250))
def test_the_parts_are_full_but_the_last_and_have_each_image_once(num_images, rows_per_part):
    plan = PartPlan(split="train", num_images=num_images, rows_per_part=rows_per_part)
    parts = [plan.rows(part) for part in range(plan.num_parts)]
    assert [row for rows in parts for row in rows] == list(range(num_images))
    assert all(len(rows) == rows_per_part for rows in parts[:-1]) and len(parts[-1]) > 0


def test_a_name_has_its_split_and_the_number_of_parts():
    name = part_name("my-split2", 3, 12)
    assert (name, stem_of(name), num_parts_of(name)) == ("my-split2-00003-of-00012.parquet", "my-split2", 12)
    for other in ("mine.parquet", "train-3-of.parquet", f"{name}.part"):
        assert (stem_of(other), num_parts_of(other)) == (None, None)


@pytest.mark.parametrize(
    ("names", "label"),
    [((), {"dtype": "int64", "_type": "Value"}), (("a", "b"), {"names": ["a", "b"], "_type": "ClassLabel"})],
)
def test_a_file_says_what_its_columns_are_and_has_numbers_as_they_are(names, label):
    values = np.random.default_rng(0).normal(size=(5000, 3)).astype(np.float32)
    rows = Rows(
        rows=np.arange(5000),
        paths=["a.png", *[None] * 4999],
        labels=np.array([-1, *[1] * 4999]),
        embeddings=values,
    )
    file = pq.ParquetFile(io.BytesIO(encoded(rows, names, {"weights": "w"})))
    table, schema = file.read(), file.schema_arrow
    assert origin_of(schema) == {"weights": "w"}
    assert json.loads(schema.metadata[b"huggingface"])["info"]["features"]["label"] == label
    assert (table["label"].null_count, table["path"].null_count) == (1, 4999)
    np.testing.assert_array_equal(np.stack(table["embedding"].to_numpy(zero_copy_only=False)), values)
    np.testing.assert_allclose(table["norm"].to_numpy(), np.linalg.norm(values, axis=1), rtol=1e-6)
    groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
    assert [group.num_rows for group in groups] == [4096, 904]
    columns = {groups[0].column(place).path_in_schema: groups[0].column(place) for place in range(5)}
    with_dictionary = {name for name, column in columns.items() if column.has_dictionary_page}
    assert with_dictionary == {"row", "path", "label"}  # floats would only be larger
