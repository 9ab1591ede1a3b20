"""Whether two embedded images have the same label."""

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int64

from ssl_sec.embeddings.reading import EmbeddingSet


def same_label(pairs: pa.Table, queries: EmbeddingSet, base: EmbeddingSet) -> pa.BooleanArray:
    """Whether the two images of each pair have the same label; null where one has none, or it cannot be said.

    A label is the number of a class in one split of one data set. Between splits with other classes, the names of the
    classes are compared; it cannot be said where only one of the splits has names.

    Args:
        pairs: rows of two images, with the columns `split` and `label` of both.
        queries: the set of the first images.
        base: the set of the others.
    """
    first, second = (pairs[name].to_numpy().astype(np.float64) for name in ("label", "neighbour_label"))
    is_known, is_same = ~np.isnan(first) & ~np.isnan(second), first == second
    splits, others = (_encoded(pairs[name]) for name in ("split", "neighbour_split"))
    kinds, kind_of_row = np.unique(
        np.stack([each.indices.to_numpy() for each in (splits, others)]), axis=1, return_inverse=True
    )
    for number, (one, other) in enumerate(kinds.T.tolist()):
        rows = (kind_of_row.ravel() == number) & is_known
        names = queries.class_names(splits.dictionary[one].as_py())
        other_names = base.class_names(others.dictionary[other].as_py())
        if names is None or other_names is None or bool(names) != bool(other_names):
            is_known[rows] = False
        elif names != other_names:
            common = {name: label for label, name in enumerate(dict.fromkeys((*names, *other_names)))}
            labels = (_renumbered(first[rows], names, common), _renumbered(second[rows], other_names, common))
            is_same[rows] = (labels[0] == labels[1]) & (labels[0] >= 0)
    return pa.array(is_same, mask=~is_known)


def _encoded(column: pa.ChunkedArray) -> pa.DictionaryArray:
    return column.combine_chunks().dictionary_encode("encode")


def _renumbered(
    labels: Float[np.ndarray, " rows"], names: tuple[str, ...], common: dict[str, int]
) -> Int64[np.ndarray, " rows"]:
    """The numbers of labels among the names of both sets; -1 for a label without a name."""
    numbers = np.array([*(common[name] for name in names), -1])
    return numbers[np.where((labels >= 0) & (labels < len(names)), labels, len(names)).astype(np.int64)]
