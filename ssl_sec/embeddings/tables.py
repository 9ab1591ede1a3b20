"""What a search found, as tables: neighbours, pairs, and how usual each image is.

An image is named by `split`, `row`, `path` and `label`, as in the files of its embedding; the columns of the image that
was found begin with `neighbour_`.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int64
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ssl_sec.embeddings.reading import EmbeddingSet
from ssl_sec.embeddings.search import Neighbours, Pairs


def neighbour_table(queries: pa.Table, base: EmbeddingSet, found: Neighbours) -> pa.Table:
    """A row for each query and neighbour: both images, `rank` from 1 and `cosine`.

    Args:
        queries: the columns that name each query.
        base: where the neighbours are.
        found: neighbours of the queries.
    """
    count, k = found.positions.shape
    table = _beside(queries.take(np.repeat(np.arange(count), k)), base, found.positions.numpy().ravel())
    ranks = np.tile(np.arange(1, k + 1, dtype=np.int32), count)
    return table.append_column("rank", pa.array(ranks)).append_column("cosine", pa.array(found.cosines.numpy().ravel()))


def image_table(norms: Float[np.ndarray, " queries"], queries: pa.Table, neighbours: pa.Table) -> pa.Table:
    """A row for each query, which says how usual it is.

    Its `norm`, the `nearest_label` and `nearest_cosine` of its nearest neighbour, and the mean cosine of its k nearest,
    `mean_cosine`.

    Args:
        norms: norm of each query.
        queries: the columns that name each query.
        neighbours: their rows of `neighbour_table`.
    """
    k = len(neighbours) // len(queries)
    cosines = neighbours["cosine"].to_numpy().reshape(-1, k)
    return (
        queries.append_column("norm", pa.array(norms.astype(np.float32)))
        .append_column("nearest_label", neighbours["neighbour_label"].take(np.arange(0, len(neighbours), k)))
        .append_column("nearest_cosine", pa.array(cosines[:, 0]))
        .append_column("mean_cosine", pa.array(cosines.mean(axis=1)))
    )


def pair_table(queries: EmbeddingSet, base: EmbeddingSet, found: Pairs) -> pa.Table:
    """A row for each pair: both images, `cosine`, and the positions `first` and `second`."""
    first, second = found.first.numpy(), found.second.numpy()
    table = _beside(_named(queries, first), base, second)
    for name, values in (("cosine", found.cosines.numpy()), ("first", first), ("second", second)):
        table = table.append_column(name, pa.array(values))
    return table


def most_similar(tables: Iterable[pa.Table], limit: int) -> pa.Table:
    """The most similar of many pairs, those first.

    Args:
        tables: tables as `pair_table` makes them; at least one.
        limit: how many are kept.
    """
    order = [("cosine", "descending"), ("first", "ascending"), ("second", "ascending")]
    kept: pa.Table | None = None
    for table in tables:
        kept = (table if kept is None else pa.concat_tables([kept, table])).sort_by(order).slice(0, limit)
    assert kept is not None
    return kept


def grouped(pairs: pa.Table, is_one_set: bool) -> pa.Table:
    """Pairs with the `group` of each instead of the positions.

    Two images are of one group if pairs lead from one to the other. Groups are numbered by their first pair, from 0.

    Args:
        pairs: a table as `pair_table` makes it.
        is_one_set: whether the first and second images of the pairs are of one set.
    """
    first, second = pairs["first"].to_numpy(), pairs["second"].to_numpy()
    names, ends = np.unique(np.concatenate([first, second if is_one_set else -1 - second]), return_inverse=True)
    first, second = ends[: len(pairs)], ends[len(pairs) :]
    links = coo_array((np.ones(len(pairs), dtype=bool), (first, second)), shape=(len(names), len(names)))
    _, of_image = connected_components(links, directed=False)
    of_pair = of_image[first]
    _, begins, labels = np.unique(of_pair, return_index=True, return_inverse=True)
    numbers = begins.argsort().argsort()[labels]
    return pairs.drop(["first", "second"]).append_column("group", pa.array(numbers, pa.int64()))


def grouped_images(pairs: pa.Table, is_one_set: bool) -> pa.Table:
    """A row for each image of grouped pairs: what names it, its `group`, and whether it is a `query`.

    Args:
        pairs: a table as `grouped` makes it.
        is_one_set: whether the first and second images of the pairs are of one set, in which all are queries.
    """
    names = ["split", "row", "path", "label"]
    ends: list[pa.Table] = []
    for is_query, columns in ((True, names), (is_one_set, _neighbour(names))):
        end = pairs.select([*columns, "group"]).rename_columns([*names, "group"])
        ends.append(end.append_column("query", pa.array([is_query] * len(pairs), pa.bool_())))
    images = pa.concat_tables(ends)
    return images.group_by(images.column_names).aggregate([])


def redundant(pairs: pa.Table) -> pa.Table:
    """The images of each group but one, as a list that `data.leave_out` takes: each with its `group`.

    The first image of a group stays, or if some are of the split `test`, these do.

    Args:
        pairs: a table as `grouped` makes it, of one set.
    """
    images = grouped_images(pairs, is_one_set=True).drop(["query"])
    images = images.sort_by([(name, "ascending") for name in ("group", "split", "row", "path")])
    groups = images["group"].to_numpy()
    is_test = images["split"].to_numpy() == "test"
    is_first = np.append(True, groups[1:] != groups[:-1])[: len(groups)]
    stays = is_test | (is_first & ~np.isin(groups, groups[is_test]))
    return images.filter(pa.array(~stays))


class Outliers:
    """The images whose norm is farthest from the mean, and those that are farthest from their neighbours.

    Args:
        limit: how many of each are kept.
        mean: mean of all norms.
        std: standard deviation of all norms.
    """

    def __init__(self, limit: int, mean: float, std: float) -> None:
        self._limit, self._mean, self._std = limit, mean, std
        self._by_norm: pa.Table | None = None
        self._by_distance: pa.Table | None = None

    def add(self, images: pa.Table) -> None:
        """Adds rows of `image_table`."""
        deviations = (images["norm"].to_numpy().astype(np.float64) - self._mean) / max(self._std, 1e-30)
        images = images.append_column("norm_z", pa.array(deviations.astype(np.float32)))
        self._by_norm = self._first(self._by_norm, images, lambda table: -np.abs(table["norm_z"].to_numpy()))
        self._by_distance = self._first(self._by_distance, images, lambda table: table["mean_cosine"].to_numpy())

    def table(self) -> pa.Table:
        """The images; `by` is `norm` or `distance`, and the most unusual come first."""
        kinds = (("norm", self._by_norm), ("distance", self._by_distance))
        return pa.concat_tables(
            table.append_column("by", pa.array([kind] * len(table), pa.string()))
            for kind, table in kinds
            if table is not None
        )

    def _first(self, kept: pa.Table | None, more: pa.Table, key: Callable[[pa.Table], np.ndarray]) -> pa.Table:
        table = more if kept is None else pa.concat_tables([kept, more])
        return table.take(np.argsort(key(table), kind="stable")[: self._limit])


def _beside(queries: pa.Table, base: EmbeddingSet, positions: Int64[np.ndarray, " rows"]) -> pa.Table:
    """The named queries with the named rows at some positions."""
    named = _named(base, positions)
    return pa.table([*queries.columns, *named.columns], [*queries.column_names, *_neighbour(named.column_names)])


def _neighbour(names: Sequence[str]) -> list[str]:
    return [f"neighbour_{name}" for name in names]


def _named(images: EmbeddingSet, positions: Int64[np.ndarray, " rows"]) -> pa.Table:
    chosen, where = np.unique(positions, return_inverse=True)
    return images.about_some(chosen).take(where)
