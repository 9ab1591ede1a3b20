"""Groups of near-duplicates and outliers."""

import numpy as np
import pyarrow as pa

from ssl_sec.embeddings.tables import Outliers, grouped, image_table, most_similar, redundant


def pairs(*rows: tuple[int, int, float]) -> pa.Table:
    first, second, cosines = zip(*rows, strict=True)
    return pa.table({"cosine": pa.array(cosines), "first": pa.array(first), "second": pa.array(second)})


def test_pairs_that_share_an_image_are_of_one_group_numbered_by_the_most_similar():
    tables = [pairs((0, 5, 0.96), (7, 8, 0.99)), pairs((5, 6, 0.97), (1, 2, 0.951))]
    found = grouped(most_similar(tables, 10), is_one_set=True)
    assert found["cosine"].to_pylist() == [0.99, 0.97, 0.96, 0.951]
    assert found["group"].to_pylist() == [0, 1, 1, 2]
    assert found.column_names == ["cosine", "group"]


def test_positions_in_two_sets_are_different_images():
    found = grouped(pairs((0, 1, 0.99), (1, 2, 0.98), (0, 2, 0.97)), is_one_set=False)
    assert found["group"].to_pylist() == [0, 0, 0]
    for others in ((1, 2), (2, 5), (0, 1)):
        found = grouped(pairs((0, others[0], 0.99), (1, others[1], 0.98)), is_one_set=False)
        assert found["group"].to_pylist() == [0, 1]
    assert grouped(pairs((0, 1, 0.99), (1, 2, 0.98)), is_one_set=True)["group"].to_pylist() == [0, 0]


def test_no_more_pairs_than_the_limit_are_kept_and_none_is_no_group():
    assert most_similar([pairs((0, 1, 0.9), (0, 2, 0.95)), pairs((3, 4, 0.94))], 2)["cosine"].to_pylist() == [
        0.95,
        0.94,
    ]
    none = grouped(most_similar([pairs((0, 1, 0.9)).slice(0, 0)], 2), is_one_set=True)
    assert none["group"].to_pylist() == []


def named(*rows: tuple[str | None, int, str | None, int, int]) -> pa.Table:
    """Grouped pairs: split and row of both images, and the group."""
    splits, numbers, other_splits, other_numbers, groups = zip(*rows, strict=True)
    columns = {"split": pa.array(splits, pa.string()), "row": pa.array(numbers)}
    columns |= {"path": pa.nulls(len(rows), pa.string()), "label": pa.nulls(len(rows), pa.int64())}
    others = {"split": pa.array(other_splits, pa.string()), "row": pa.array(other_numbers)}
    others |= {"path": columns["path"], "label": columns["label"]}
    return pa.table(
        columns | {f"neighbour_{name}": each for name, each in others.items()} | {"group": pa.array(groups)}
    )


def test_one_image_of_each_group_stays_or_those_of_the_test_split():
    pairs = named(
        ("train", 9, "train", 4, 0),
        ("train", 4, "train", 12, 0),
        ("train", 1, "test", 5, 1),
        ("test", 5, "test", 6, 1),
        (None, 3, None, 2, 2),
    )
    found = redundant(pairs)
    assert found.select(["split", "row", "group"]).to_pylist() == [
        {"split": "train", "row": 9, "group": 0},
        {"split": "train", "row": 12, "group": 0},
        {"split": "train", "row": 1, "group": 1},
        {"split": None, "row": 3, "group": 2},
    ]
    assert found.column_names == ["split", "row", "path", "label", "group"]
    assert len(redundant(pairs.slice(0, 0))) == 0


def test_an_image_has_the_label_and_cosine_of_its_nearest_and_the_mean_cosine_of_all():
    neighbours = pa.table({"cosine": [0.9, 0.5, 0.8, 0.2], "neighbour_label": [4, 1, None, 3]})
    found = image_table(np.array([2.0, 3.0]), pa.table({"row": [7, 9]}), neighbours)
    assert found.select(["row", "norm", "nearest_label", "nearest_cosine"]).to_pylist() == [
        {"row": 7, "norm": 2.0, "nearest_label": 4, "nearest_cosine": 0.9},
        {"row": 9, "norm": 3.0, "nearest_label": None, "nearest_cosine": 0.8},
    ]
    np.testing.assert_allclose(found["mean_cosine"].to_numpy(), [0.7, 0.5])


def test_outliers_are_the_farthest_from_the_mean_norm_and_from_their_neighbours():
    norms, cosines = np.array([1.0, 5.0, 1.1, -2.0, 0.9]), np.array([0.9, 0.8, 0.2, 0.95, 0.5])
    outliers = Outliers(2, mean=1.0, std=0.5)
    for part in (slice(0, 2), slice(2, 5)):
        columns = {"norm": pa.array(norms[part]), "mean_cosine": pa.array(cosines[part])}
        outliers.add(pa.table({"row": pa.array(np.arange(5)[part]), **columns}))
    table = outliers.table()
    assert table["by"].to_pylist() == ["norm", "norm", "distance", "distance"]
    assert table["row"].to_pylist() == [1, 3, 2, 4]
    assert table["norm_z"].to_pylist()[:2] == [8.0, -6.0]
