"""Retrieval by embeddings: Recall@K, R-precision and MAP@R, exact, and the nearest neighbours of some images.

Recall@K is the share of the queries that have an image of their class among their K nearest (Song et al. 2016, "Deep
Metric Learning via Lifted Structured Feature Embedding", section 6). It needs no search for the K nearest: a query is
correct if fewer than K images of other classes are at least as similar as its most similar positive, so one pass that
counts them is enough. R-precision and MAP@R (Musgrave et al. 2020, "A Metric Learning Reality Check", section 3.2) need
the rank of every positive, which is counted likewise.
"""

from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from ssl_sec.batch import Batch
from ssl_sec.errors import ConfigError, DataError, counted
from ssl_sec.evaluation.arrays import (
    Embeddings,
    Labels,
    Selection,
    as_labels,
    as_rows,
    as_tensor,
    several,
    tiles,
    unit_rows,
)
from ssl_sec.progress import logged
from ssl_sec.seeding import derived_seed

# Number of images that a run shows with their neighbours.
_EXAMPLES = 8
# Cosines are counted in units of 2⁻⁴⁰, in which the order of a sum changes them by one at most. Images that are not
# finite are further away, or nearer, than all others.
_UNIT = 2.0**-40
_NEAREST, _FARTHEST = 2**41, -(2**41)
# If one of that many similarities is needed in float64, all are computed, which is faster.
_DENSE = 16


class RPrecision(NamedTuple):
    """Means over the queries, in [0, 1].

    Attributes:
        r_precision: share of a query's R nearest images that are of its class, where R is the number of its positives.
        map_at_r: (1/R) Σ P(i) over the places i ≤ R that have an image of its class; P(i) is the share of such images
            among the i nearest.
    """

    r_precision: float
    map_at_r: float


class _Images(NamedTuple):
    """Images sorted by label, so that those of one class are consecutive.

    Attributes:
        rows: embeddings of length 1, or 0 where they were 0, with shape (images, dim).
        labels: classes, ascending, with shape (images,).
        ids: position of each image before sorting, by which a query recognises itself.
    """

    rows: Tensor
    labels: Tensor
    ids: Tensor

    def at(self, where: slice | Tensor) -> "_Images":
        return _Images(self.rows[where], self.labels[where], self.ids[where])


@torch.no_grad()
def recall_at_k(
    embeddings: Embeddings,
    labels: Labels,
    ks: Iterable[int],
    query: Selection | None = None,
    *,
    tile_size: int = 1536,
) -> dict[int, float]:
    """Share of the queries that have an image of their class among their k nearest, in [0, 1], by cosine.

    Doubtful cases count against the query. An image of another class that is as similar as the best positive ranks
    before it, so collapsed embeddings score 0. A query without a positive in the gallery is wrong, by convention. So is
    a query that is not finite; a gallery image that is not finite ranks before all others, but never as a positive.

    The similarities are computed in float32. A query that rounding leaves undecided is ranked again in float64, so the
    result depends neither on the order of the images nor on the tiles. If the encoder has collapsed, all queries are
    undecided, and ranking takes several times as long.

    All embeddings are needed in one process. Besides them it takes up to 20 bytes for each of their values, on their
    device, and about 20 bytes · tile_size².

    Args:
        embeddings: one row for each image, of any norm.
        labels: class of each image.
        ks: numbers of neighbours, each ≥ 1; above the size of the gallery, the whole gallery counts.
        query: mask or indices of the queries; they rank the other images, the gallery (the protocol
            of In-Shop). By default every image ranks all others.
        tile_size: queries and gallery images compared at once, ≥ 1. It affects only memory and speed: with smaller
            tiles threads wait for each other more often, and larger ones do not fit into the caches.

    Raises:
        ConfigError: a k is below 1, or `ks` is one number.
        DataError: labels are no whole numbers, or not as many as embeddings, `query` does not fit them or has an index
            twice, or there are no queries or no gallery.
    """
    ks = several("ks", ks, "numbers")
    for k in ks:
        if k < 1:
            raise ConfigError(f"Recall@K with k = {k}; allowed: 1 or more")
    queries, gallery = _queries_and_gallery(embeddings, labels, query)
    ranks = _ranks(queries, gallery, ks, tile_size)
    return {k: int((ranks < k).sum()) / len(queries.ids) for k in ks}


@torch.no_grad()
def precision_at_r(
    embeddings: Embeddings, labels: Labels, query: Selection | None = None, *, tile_size: int = 1536
) -> RPrecision:
    """R-precision and MAP@R by cosine (Musgrave et al. 2020, section 3.2).

    As for `recall_at_k`, doubtful cases count against the query: an image of another class that is as similar as a
    positive ranks before it, and a query without a positive in the gallery, or that is not finite, has 0. A gallery
    image that is not finite ranks before all others, but never as a positive.

    The similarities are computed in float64, and those that differ by less than about 10⁻¹² tie. All embeddings are
    needed in one process. Besides them it takes up to 20 bytes for each of their values, on their device, and about 3
    bytes · tile_size times the images of the largest classes, or times tile_size if that is more.

    Args:
        embeddings: one row for each image, of any norm.
        labels: class of each image.
        query: mask or indices of the queries; they rank the other images, the gallery (the protocol of In-Shop). By
            default every image ranks all others.
        tile_size: images of the gallery that are compared at once, with a sixteenth as many queries, ≥ 1. It affects
            only memory and speed.

    Raises:
        DataError: labels are no whole numbers, or not as many as embeddings, `query` does not fit them or has an index
            twice, or there are no queries or no gallery.
    """
    queries, gallery = _queries_and_gallery(embeddings, labels, query)
    screened = gallery._replace(rows=gallery.rows.float())
    asking = list(tiles(len(queries.ids), _few(tile_size)))
    found = [
        _precisions(queries.at(rows), gallery, screened, tile_size)
        for rows in logged(asking, "MAP@R", len(asking), "tiles")
    ]
    r_precision, map_at_r = torch.cat(found, dim=1).mean(1).tolist()
    return RPrecision(r_precision, map_at_r)


def num_without_positive(labels: Labels, query: Selection | None = None) -> int:
    """How many queries have no image of their class to find, and are wrong at every k.

    Args:
        labels: class of each image.
        query: mask or indices of the queries, as for `recall_at_k`.
    """
    labels = as_labels("retrieval", labels).cpu()
    if query is None:
        _, numbers, sizes = labels.unique(return_inverse=True, return_counts=True)
        return int((sizes[numbers] == 1).sum())
    is_query = _mask(query, len(labels), "query")
    return int((~torch.isin(labels[is_query], labels[~is_query])).sum())


@torch.no_grad()
def nearest(
    embeddings: Embeddings, queries: Selection, k: int, gallery: Selection | None = None
) -> Int64[Tensor, "queries k"]:
    """Indices of the k images nearest to each query by cosine, the nearest first; never the query itself.

    It is meant for figures: it takes 8 bytes · images · (queries + dim) in addition to the embeddings, on their device.

    Args:
        embeddings: one row for each image, of any norm; those that are not finite come last.
        queries: indices of the queries, or a mask.
        k: number of neighbours, 1 to the size of the gallery without the query.
        gallery: indices of the candidates, or a mask; all images by default.

    Raises:
        ConfigError: `k` is outside its range.
        DataError: `queries` or `gallery` does not fit the embeddings.
    """
    embeddings = as_rows(embeddings)
    chosen, is_listed = _indices(queries, len(embeddings), "queries"), torch.ones(len(embeddings), dtype=torch.bool)
    if gallery is not None:
        is_listed = _mask(gallery, len(embeddings), "gallery")
    fewest = int(is_listed.sum()) - bool(is_listed[chosen].any())
    if not 1 <= k <= fewest:
        raise ConfigError(f"nearest neighbours with k = {k}; allowed: 1 to {fewest}")
    chosen, is_listed = chosen.to(embeddings.device), is_listed.to(embeddings.device)
    rows = unit_rows(embeddings.double())
    similarities = (rows[chosen] @ rows.T).nan_to_num(nan=-2.0)
    similarities = similarities.masked_fill(~is_listed, -torch.inf).scatter(1, chosen.unsqueeze(1), -torch.inf)
    return similarities.topk(k, dim=1).indices


def examples(
    read: Callable[[Int64[Tensor, " chosen"]], Batch],
    embeddings: Embeddings,
    k: int,
    queries: Bool[Tensor, " images"] | None = None,
) -> dict[str, Tensor]:
    """The pixels of eight images and of their k nearest neighbours; all runs on the same images show the same ones.

    Args:
        read: reads the images of some rows of the embeddings.
        embeddings: one row for each image, of any norm.
        k: number of neighbours; fewer if the gallery is smaller.
        queries: mask of the queries, with the others as the gallery, on the CPU; None: each image is both.

    Returns:
        `queries`, uint8 [queries, channels, height, width]; `neighbours`, uint8 [queries, k, channels, height, width],
        nearest first; and `correct`, bool [queries, k]: whether they have the query's label.
    """
    candidates = torch.arange(len(embeddings)) if queries is None else queries.nonzero().flatten()
    gallery = None if queries is None else ~queries
    generator = torch.Generator().manual_seed(derived_seed(0, "examples"))
    chosen = candidates[torch.randperm(len(candidates), generator=generator)[:_EXAMPLES]]
    num_listed = len(embeddings) - 1 if gallery is None else int(gallery.sum())
    found = nearest(embeddings, chosen, min(k, num_listed), gallery).cpu()
    asking, answers = read(chosen), read(found.flatten())
    return {
        "queries": asking.images.cpu(),
        "neighbours": answers.images.unflatten(0, found.shape).cpu(),
        "correct": (answers.labels.unflatten(0, found.shape) == asking.labels.unsqueeze(1)).cpu(),
    }


def _queries_and_gallery(embeddings: Embeddings, labels: Labels, query: Selection | None) -> tuple[_Images, _Images]:
    """The images that rank and those that are ranked, one object if each is both; rows in float64."""
    embeddings, labels = as_rows(embeddings), as_labels("retrieval", labels)
    if len(labels) != len(embeddings):
        raise DataError(f"retrieval: {counted(len(labels), 'label')} for {counted(len(embeddings), 'embedding')}")
    labels = labels.to(embeddings.device)
    order = labels.argsort(stable=True)
    queries = gallery = _Images(unit_rows(embeddings.double())[order], labels[order], order)
    if query is not None:
        is_query = _mask(query, len(labels), "query").to(order.device)[order]
        queries, gallery = gallery.at(is_query), gallery.at(~is_query)
    num_queries, num_ranked = len(queries.ids), len(gallery.ids) - (queries is gallery)
    if num_queries < 1 or num_ranked < 1:
        raise DataError(
            f"retrieval: {counted(num_queries, 'query')} and {counted(max(num_ranked, 0), 'image')} to rank; 1 or more"
        )
    return queries, gallery


def _ranks(queries: _Images, gallery: _Images, ks: list[int], tile_size: int) -> Int64[Tensor, " queries"]:
    """How many images of other classes rank before each query's best positive; exact where `ks` needs it."""
    ranked = queries._replace(rows=queries.rows.float())
    others = ranked if queries is gallery else gallery._replace(rows=gallery.rows.float())
    certain, possible = _rank_bounds(ranked, others, tile_size)
    is_open = torch.zeros_like(certain, dtype=torch.bool)
    for k in ks:
        is_open |= (certain < k) & (k <= possible)
    if is_open.any():
        _, possible[is_open] = _rank_bounds(queries.at(is_open), gallery, tile_size)
    return possible


def _rank_bounds(queries: _Images, gallery: _Images, tile_size: int) -> Int64[Tensor, "2 queries"]:
    """The least and the greatest rank that rounding allows; beyond the gallery for a query without a positive."""
    best = _best_positives(queries, gallery, tile_size)
    margin = _margin(queries)
    thresholds = torch.stack([best + margin, best - margin])
    num_below = torch.zeros(thresholds.shape, dtype=torch.int64, device=best.device)
    # If images rank each other, a tile also ranks for its columns, as the similarities are symmetric.
    is_mirrored = queries is gallery
    pairs = product(tiles(len(best), tile_size), tiles(len(gallery.ids), tile_size))
    compared = [(rows, columns) for rows, columns in pairs if not is_mirrored or columns.start >= rows.start]
    for rows, columns in logged(compared, "ranking the images", len(compared), "tiles"):
        tile, others = queries.at(rows), gallery.at(columns)
        similarities = tile.rows @ others.rows.T
        if tile.labels[0] <= others.labels[-1] and others.labels[0] <= tile.labels[-1]:
            similarities.masked_fill_(tile.labels.unsqueeze(1) == others.labels, -torch.inf)
        for counts, threshold in zip(num_below, thresholds, strict=True):
            # A comparison with NaN is never true. Summing bools to int32 is several times as fast as to int64.
            counts[rows] += (similarities < threshold[rows].unsqueeze(1)).sum(1, dtype=torch.int32)
            if is_mirrored and columns.start > rows.start:
                counts[columns] += (similarities < threshold[columns]).sum(0, dtype=torch.int32)
    return (len(gallery.ids) - num_below).masked_fill(best.isneginf(), torch.iinfo(torch.int64).max)


def _best_positives(queries: _Images, gallery: _Images, tile_size: int) -> Float[Tensor, " queries"]:
    """The similarity of each query's most similar positive; -inf if there is none."""
    best = queries.rows.new_full((len(queries.ids),), -torch.inf)
    for rows in tiles(len(best), _few(tile_size)):
        tile = queries.at(rows)
        classmates = _classmates(tile, gallery)
        for columns in tiles(len(classmates.ids), tile_size):
            others = classmates.at(columns)
            is_positive = _is_positive(tile, others)
            similarities = (tile.rows @ others.rows.T).nan_to_num(nan=-torch.inf)
            similarities.masked_fill_(~is_positive, -torch.inf)
            best[rows] = best[rows].maximum(similarities.amax(1))
    return best


def _precisions(queries: _Images, gallery: _Images, screened: _Images, tile_size: int) -> Float[Tensor, "2 queries"]:
    """R-precision and average precision at R of a few queries; `screened` is the gallery in float32."""
    classmates = _classmates(queries, gallery)
    is_positive = _is_positive(queries, classmates)
    num_positives = is_positive.sum(1, keepdim=True)
    longest = int(num_positives.max())
    if not longest:
        return queries.rows.new_zeros(2, len(queries.ids))
    similarities = _in_units(queries.rows @ classmates.rows.T, _FARTHEST).masked_fill_(~is_positive, _FARTHEST)
    # Each query's positives, the nearest first, and a last one that ranks after all images.
    positives = functional.pad(similarities.topk(longest, dim=1).values, (0, 1), value=_FARTHEST)
    places = torch.arange(1, longest + 2, device=positives.device)
    num_before = torch.zeros_like(positives)
    # One ascending sequence for all queries, in which the first positive that an image ranks before is searched.
    offsets = torch.arange(len(positives), device=positives.device) * 2 * (_NEAREST - _FARTHEST)
    sequence = (offsets.unsqueeze(1) - positives).flatten()
    is_counted = (places <= num_positives) & (positives > _FARTHEST)
    asking = queries._replace(rows=queries.rows.float())
    margin = _margin(asking)
    for columns in tiles(len(gallery.ids), tile_size):
        # Images below the last positive that may still be among the R nearest change nothing.
        last = positives.masked_fill(~is_counted, _NEAREST).amin(1, keepdim=True) * _UNIT - margin
        others = screened.at(columns)
        is_below = (asking.rows @ others.rows.T) < last
        if queries.labels[0] <= others.labels[-1] and others.labels[0] <= queries.labels[-1]:
            is_below |= queries.labels.unsqueeze(1) == others.labels
        asked, found = (~is_below).nonzero(as_tuple=True)
        exact = gallery.rows[columns]
        if len(asked) * _DENSE > is_below.numel():
            similarities = (queries.rows @ exact.T)[asked, found]
        else:
            similarities = (queries.rows[asked] * exact[found]).sum(1)
        # One unit more: of two images that are equally similar, the one of another class comes first.
        first = torch.searchsorted(sequence, offsets[asked] - _in_units(similarities, _NEAREST) - 1)
        num_before += torch.bincount(first, minlength=len(sequence)).view_as(positives).cumsum(1)
        is_counted &= num_before + places <= num_positives
    precision = places.double() / (places + num_before) * is_counted
    return torch.stack([is_counted.sum(1).double(), precision.sum(1)]) / num_positives.clamp(min=1).squeeze(1)


def _in_units(cosines: Float[Tensor, "*shape"], not_finite: int) -> Int64[Tensor, "*shape"]:
    return (cosines / _UNIT).round_().nan_to_num_(nan=float(not_finite)).long()


def _classmates(queries: _Images, gallery: _Images) -> _Images:
    """The images of the gallery of the classes from the first query's to the last one's."""
    first = int(torch.searchsorted(gallery.labels, queries.labels[0]))
    end = int(torch.searchsorted(gallery.labels, queries.labels[-1], right=True))
    return gallery.at(slice(first, end))


def _is_positive(queries: _Images, others: _Images) -> Bool[Tensor, "queries others"]:
    return (queries.labels.unsqueeze(1) == others.labels) & (queries.ids.unsqueeze(1) != others.ids)


def _margin(images: _Images) -> float:
    """The difference below which rounding may decide which of two images is more similar to a query."""
    # It changes an inner product of two rows of length 1 by at most about (dim / 2) eps, in any order of its terms, and
    # normalising a row changes it by as much; two of them are compared.
    return 2 * (images.rows.shape[1] + 4) * torch.finfo(images.rows.dtype).eps


def _few(tile_size: int) -> int:
    """Queries at a time that are compared with all images of all their classes."""
    return max(1, tile_size // 16)


def _mask(selection: Selection, num_images: int, name: str) -> Bool[Tensor, " images"]:
    mask = torch.zeros(num_images, dtype=torch.bool)
    indices = _indices(selection, num_images, name)
    if len(indices.unique()) < len(indices):
        raise DataError(
            f"retrieval: {name} has an index more than once; allowed: different ones, or a mask of booleans"
        )
    mask[indices] = True
    return mask


def _indices(selection: Selection, num_images: int, name: str) -> Int64[Tensor, " selected"]:
    """The selected images, on the CPU."""
    selected = as_tensor(selection).cpu()
    if selected.ndim != 1 or (selected.is_floating_point() and len(selected)):
        found = f"{str(selected.dtype).removeprefix('torch.')}{list(selected.shape)}"
        raise DataError(f"retrieval: {name} is {found}; allowed: a list of whole numbers, or a mask of booleans")
    if selected.dtype == torch.bool:
        if len(selected) != num_images:
            raise DataError(f"retrieval: {name} is a mask of {len(selected)} for {num_images} embeddings")
        return selected.nonzero().squeeze(1)
    outside = selected[(selected < 0) | (selected >= num_images)]
    if len(outside):
        raise DataError(f"retrieval: {name} has the index {int(outside[0])}; allowed: 0 to {num_images - 1}")
    return selected.long()
