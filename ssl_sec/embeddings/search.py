"""Exact search by cosine: the nearest neighbours of some embeddings among many, and the pairs above a cosine.

The many are read block by block and are never in memory together; all cosines are computed, in float32, and those near
the least cosine of a pair once more in float64.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from ssl_sec.evaluation.arrays import rounded, tiles, unit_rows

# Queries that are compared with a block at once: on a CPU, so that their cosines stay in its cache.
_TILE_ROWS, _TILE_ROWS_ON_CPU = 4096, 1024
# By more than this no cosine in float32 is wrong, in thousands of dimensions.
_ROUNDING = 1e-5
# Cosines that are computed in float64 at once.
_ONCE_MORE = 2**14


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """The nearest of each query, on the CPU.

    Attributes:
        positions: the nearest first; of equally near ones any.
        cosines: descending, in [-1, 1].
    """

    positions: Int64[Tensor, "queries k"]
    cosines: Float32[Tensor, "queries k"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Pairs above a cosine, on the CPU, the most similar first.

    Attributes:
        first: position of the query.
        second: position among the many; if the queries are some of them, after that of the query.
        cosines: cosine of each pair.
        num_found: pairs in all; there are more than listed if only the most similar are kept.
    """

    first: Int64[Tensor, " pairs"]
    second: Int64[Tensor, " pairs"]
    cosines: Float32[Tensor, " pairs"]
    num_found: int


@torch.no_grad()
def search(
    queries: Float32[Tensor, "queries dim"],
    blocks: Iterable[tuple[int, Float32[Tensor, "_ dim"]]],
    *,
    k: int,
    start: int,
    are_among: bool,
    pairs_above: float,
    max_pairs: int,
    device: torch.device,
) -> tuple[Neighbours, Pairs]:
    """The nearest neighbours of the queries, and the pairs of a query and another row above a cosine.

    Beside queries and a block, both on the device, it takes about 40 MiB · (3 + k / 1000) and 20 bytes for each of
    2 · max_pairs pairs.

    Args:
        queries: embeddings of any norm, finite; the cosine with a row of zeros is 0.
        blocks: rows to compare with, each time with the position of the first; `k` or more in all, without the query.
        k: neighbours of each query, ≥ 1.
        start: the position of the first query.
        are_among: whether the queries are among the blocks, at their positions, and are no neighbours of themselves.
        pairs_above: the least cosine of a pair.
        max_pairs: how many are kept, ≥ 1.
        device: where it is computed.
    """
    queries = unit_rows(queries.to(device))
    best = torch.full((len(queries), k), -torch.inf, device=device)
    positions = torch.full((len(queries), k), -1, dtype=torch.int64, device=device)
    pairs = _KeptPairs(max_pairs, pairs_above)
    tile_rows = _TILE_ROWS_ON_CPU if device.type == "cpu" else _TILE_ROWS
    for block_start, block in blocks:
        block = unit_rows(block.to(device))
        for tile in tiles(len(queries), tile_rows):
            cosines = queries[tile] @ block.T
            if are_among:
                cosines.diagonal(start + tile.start - block_start).fill_(-torch.inf)
            # Most queries have neither a pair nor a nearer neighbour in a block, and are done.
            highest = cosines.amax(1)
            first = start + tile.start
            rows = (highest >= pairs_above - _ROUNDING).nonzero().squeeze(1)
            if len(rows) and (not are_among or first + 1 < block_start + len(block)):
                found = cosines[rows]
                if are_among and block_start <= first + len(highest):  # a pair is found at its first row alone
                    later = torch.arange(block_start, block_start + len(block), device=device) > rows[:, None] + first
                    found.masked_fill_(~later, -torch.inf)
                _once_more(found, queries[tile][rows], block, pairs_above)
                pairs.add(found, rows + first, block_start)
            rows = (highest > best[tile, -1]).nonzero().squeeze(1)
            query = rows + tile.start
            nearest = cosines[rows].topk(min(k, len(block)), dim=1)
            both = torch.cat([best[query], nearest.values], dim=1).topk(k, dim=1)
            where = torch.cat([positions[query], nearest.indices + block_start], dim=1)
            best[query], positions[query] = both.values, where.gather(1, both.indices)
    assert not len(queries) or bool((positions >= 0).all()), "there are fewer rows than neighbours"
    return Neighbours(positions=positions.cpu(), cosines=best.clamp(-1, 1).cpu()), pairs.kept()


def _once_more(
    cosines: Float32[Tensor, "queries rows"],
    queries: Float32[Tensor, "queries dim"],
    block: Float32[Tensor, "rows dim"],
    limit: float,
) -> None:
    """Computes the cosines near the limit exactly; with it, equal rows have 1."""
    row, column = ((cosines >= limit - _ROUNDING) & (cosines < limit + _ROUNDING)).nonzero(as_tuple=True)
    for some in tiles(len(row), _ONCE_MORE):
        ours, theirs = (unit_rows(rows.double()) for rows in (queries[row[some]], block[column[some]]))
        cosines[row[some], column[some]] = rounded((ours * theirs).sum(1))


class _KeptPairs:
    """The most similar of the pairs above a cosine.

    Args:
        limit: how many.
        above: the least cosine of a pair.
    """

    def __init__(self, limit: int, above: float) -> None:
        self._limit = limit
        self._above = above
        self._num_found = 0
        self._least = -math.inf  # cosine that a pair must exceed to be kept
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, cosines: Float32[Tensor, "queries rows"], queries: Int64[Tensor, " queries"], start: int) -> None:
        """Adds the pairs of some queries and consecutive rows.

        Args:
            cosines: cosines of the queries and the rows.
            queries: positions of the queries.
            start: position of the first of the rows.
        """
        is_pair = cosines >= self._above
        self._num_found += int(is_pair.sum())
        # Of pairs that are as similar as the last of those that are kept, the earlier ones stay.
        row, column = (is_pair & (cosines > self._least)).nonzero(as_tuple=True)
        if not len(row):
            return
        self._parts.append((queries[row], column + start, cosines[row, column]))
        if sum(len(part[2]) for part in self._parts) > 2 * self._limit:
            self._parts = [self._best()]
            self._least = float(self._parts[0][2][-1])

    def kept(self) -> Pairs:
        """The most similar."""
        if not self._parts:
            none = torch.zeros(0, dtype=torch.int64)
            return Pairs(first=none, second=none, cosines=torch.zeros(0), num_found=0)
        first, second, cosines = (each.cpu() for each in self._best())
        return Pairs(first=first, second=second, cosines=cosines.clamp(max=1), num_found=self._num_found)

    def _best(self) -> tuple[Tensor, Tensor, Tensor]:
        first, second, cosines = (torch.cat(each) for each in zip(*self._parts, strict=True))
        order = cosines.argsort(descending=True, stable=True)[: self._limit]
        return first[order], second[order], cosines[order]
