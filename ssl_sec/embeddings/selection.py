"""Images to label first: the most typical one of each cluster of embeddings (TypiClust, Hacohen et al. 2022).

With few labels, typical images of all regions teach a classifier more than random or unusual ones. The embeddings'
directions are clustered into as many clusters as there will be labelled images. Clusters without a labelled image come
first, the largest before the others, and of each the image is chosen whose k nearest in the cluster are nearest:

    typicality(x) = 1 / ( (1/k) Σ_{y ∈ k nearest of x} ‖x̂ − ŷ‖ )

Embeddings are read block by block: clusters are found on a sample, and the members of only some clusters are in memory
at once.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from ssl_sec.errors import ConfigError
from ssl_sec.evaluation.arrays import tiles, unit_rows
from ssl_sec.evaluation.clustering import kmeans_assignments

# Images on which clusters are found, and for each cluster at least; all are assigned to these clusters.
_SAMPLE, _SAMPLE_PER_CLUSTER = 100_000, 20
# Members of a cluster that are compared with each other; of more, a sample.
_MEMBERS = 20_000
# Numbers of the members that are in memory at once: 1 GiB.
_VALUES_AT_ONCE = 2**28
# Clusters of so few images hold outliers: the authors' code leaves them out, and here they come after all others.
_SMALL = 5

# Rows with the position of the first, as `EmbeddingSet.blocks` yields them.
Blocks = Callable[[], Iterator[tuple[int, Float32[Tensor, "rows dim"]]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The chosen images, the first to label first.

    Attributes:
        positions: position of each.
        clusters: number of the cluster of each.
        cluster_sizes: number of images in that cluster.
        typicality: see the module; infinite for an image that equals its k nearest, 0 for one without others.
    """

    positions: Int64[np.ndarray, " chosen"]
    clusters: Int64[np.ndarray, " chosen"]
    cluster_sizes: Int64[np.ndarray, " chosen"]
    typicality: Float32[np.ndarray, " chosen"]


@torch.no_grad()
def select_typical(
    blocks: Blocks,
    eligible: Bool[np.ndarray, " images"],
    labelled: Bool[np.ndarray, " images"],
    count: int,
    *,
    k: int = 20,
    seed: int = 0,
    device: torch.device | None = None,
    on_pass: Callable[[], object] = lambda: None,
) -> Selection:
    """Chooses images to label.

    Args:
        blocks: reads all embeddings, of any norm, finite.
        eligible: whether each image may be chosen, or is labelled; others are left aside.
        labelled: whether each image is labelled already.
        count: images to choose, 1 to the number of those that are eligible and not labelled.
        k: nearest images that define how typical one is, ≥ 1; half of the cluster if that is smaller.
        seed: seed of the samples and of k-means, 0 to 2³² - 1.
        device: device of the computation; None for the CPU.
        on_pass: function called for each pass of k-means, and of the embeddings.

    Raises:
        ConfigError: `count` is outside its range.
        DataError: an embedding is not finite.
    """
    device = device or torch.device("cpu")
    labelled = labelled & eligible
    num_free = int(eligible.sum() - labelled.sum())
    if not 1 <= count <= num_free:
        raise ConfigError(f"count: found {count:,}, must be 1 to {num_free:,}, the number of images without a label")
    draws = np.random.default_rng(seed)
    num_clusters = count + int(labelled.sum())
    positions = eligible.nonzero()[0]
    if len(positions) > (limit := max(_SAMPLE, _SAMPLE_PER_CLUSTER * num_clusters)):
        positions = np.sort(draws.choice(positions, limit, replace=False))
    sample = _rows_at(blocks, positions).to(device)
    on_pass()
    centres = _centres(sample, kmeans_assignments(sample, num_clusters, seed, on_pass=on_pass).to(device))
    del sample
    clusters = _nearest(blocks, centres, eligible)
    on_pass()
    chosen_of, max_members = _shares(clusters, labelled, count), _VALUES_AT_ONCE // centres.shape[1]
    return _most_typical(blocks, clusters, labelled, chosen_of, max_members, k, seed, device, on_pass)


def _rows_at(blocks: Blocks, positions: Int64[np.ndarray, " some"]) -> Float32[Tensor, "some dim"]:
    """The unit rows at ascending positions."""
    parts: list[Tensor] = []
    for start, block in blocks():
        begin, end = np.searchsorted(positions, (start, start + len(block)))
        parts.append(unit_rows(block[torch.from_numpy(positions[begin:end] - start)]))
    return torch.cat(parts)


def _centres(rows: Float32[Tensor, "rows dim"], clusters: Int64[Tensor, " rows"]) -> Float32[Tensor, "clusters dim"]:
    """The mean of each cluster that has images: where images coincide, others are empty."""
    sizes = clusters.bincount()
    sums = rows.new_zeros(len(sizes), rows.shape[1]).index_add_(0, clusters, rows)
    return sums[sizes > 0] / sizes[sizes > 0].unsqueeze(1)


def _nearest(
    blocks: Blocks, centres: Float32[Tensor, "clusters dim"], eligible: Bool[np.ndarray, " images"]
) -> Int64[np.ndarray, " images"]:
    """The cluster of each image; -1 for those that are not eligible."""
    middle = centres.mean(0)  # from which collapsed embeddings differ by less than float32 tells apart in squares of 1
    centres = centres - middle
    squares = centres.square().sum(1)
    found = np.full(len(eligible), -1, dtype=np.int64)
    for start, block in blocks():
        rows = unit_rows(block.to(centres.device)) - middle
        nearest = torch.addmm(squares, rows, centres.T, alpha=-2).argmin(1)
        found[start : start + len(block)] = nearest.cpu().numpy()
    found[~eligible] = -1
    return found


def _shares(clusters: Int64[np.ndarray, " images"], labelled: Bool[np.ndarray, " images"], count: int) -> list[int]:
    """The cluster of each image to choose: that with the fewest labelled and chosen ones, of these the largest."""
    sizes = np.bincount(clusters[clusters >= 0])
    taken = np.bincount(clusters[labelled], minlength=len(sizes))
    waiting = [
        (size <= _SMALL, num, -size, cluster) for cluster, (size, num) in enumerate(zip(sizes, taken, strict=True))
    ]
    waiting = [each for each in waiting if -each[2] > each[1]]
    heapq.heapify(waiting)
    chosen: list[int] = []
    while len(chosen) < count:
        is_small, num, minus_size, cluster = heapq.heappop(waiting)
        chosen.append(cluster)
        if -minus_size > num + 1:
            heapq.heappush(waiting, (is_small, num + 1, minus_size, cluster))
    return chosen


def _members(
    clusters: Int64[np.ndarray, " images"],
    wanted: Mapping[int, int],
    free: Bool[np.ndarray, " images"],
    draws: np.random.Generator,
) -> dict[int, Int64[np.ndarray, " _"]]:
    """The positions of the members of each wanted cluster, ascending; of many, a sample with those to choose from."""
    is_wanted = np.zeros(int(clusters.max()) + 2, dtype=bool)  # the last one, at -1, for images that are left aside
    is_wanted[list(wanted)] = True
    positions = np.flatnonzero(is_wanted[clusters])
    in_order = positions[np.argsort(clusters[positions], kind="stable")]
    bounds = np.searchsorted(clusters[in_order], list(range(len(is_wanted))))
    found: dict[int, Int64[np.ndarray, " _"]] = {}
    for cluster, num in wanted.items():
        members = in_order[bounds[cluster] : bounds[cluster + 1]]
        if len(members) > _MEMBERS:
            to_choose = draws.choice(members[free[members]], min(num, _MEMBERS), replace=False)
            members = np.union1d(to_choose, draws.choice(members, _MEMBERS, replace=False))
        found[cluster] = members
    return found


def _most_typical(
    blocks: Blocks,
    clusters: Int64[np.ndarray, " images"],
    labelled: Bool[np.ndarray, " images"],
    chosen_of: Sequence[int],
    max_members: int,
    k: int,
    seed: int,
    device: torch.device,
    on_pass: Callable[[], object],
) -> Selection:
    """The most typical images of the clusters in `chosen_of`, as often as each is there; see `_groups`."""
    wanted = Counter(chosen_of)
    free = (clusters >= 0) & ~labelled
    members = _members(clusters, wanted, free, np.random.default_rng(seed))
    best: dict[int, list[tuple[int, float]]] = {}
    for some in _groups(members, max_members):
        positions = np.sort(np.concatenate([members[cluster] for cluster in some]))
        rows = _rows_at(blocks, positions)
        on_pass()
        for cluster in some:
            own = rows[torch.from_numpy(np.searchsorted(positions, members[cluster]))].to(device)
            typicality = _typicality(own, k).cpu().numpy()
            num = wanted[cluster]
            parts = kmeans_assignments(own, num, seed).numpy() if num > 1 else np.zeros(len(own), np.int64)
            best[cluster] = _best(members[cluster], typicality, parts, free[members[cluster]], num)
    sizes = np.bincount(clusters[clusters >= 0])
    found = [(*best[cluster].pop(0), cluster, sizes[cluster]) for cluster in chosen_of]
    positions, typicality, of_cluster, of_size = zip(*found, strict=True)
    return Selection(
        positions=np.array(positions, np.int64),
        clusters=np.array(of_cluster, np.int64),
        cluster_sizes=np.array(of_size, np.int64),
        typicality=np.array(typicality, np.float32),
    )


def _groups(members: Mapping[int, Int64[np.ndarray, " _"]], limit: int) -> Iterator[list[int]]:
    """The clusters in groups of at most `limit` members together, or of one cluster."""
    group: list[int] = []
    size = 0
    for cluster, positions in members.items():
        if group and size + len(positions) > limit:
            yield group
            group, size = [], 0
        group.append(cluster)
        size += len(positions)
    yield group


def _typicality(rows: Float32[Tensor, "members dim"], k: int) -> Float32[Tensor, " members"]:
    """The inverse of the mean distance of each unit row to its k nearest others, or half of all if that is fewer."""
    k = min(k, max(len(rows) // 2, 1))
    if len(rows) == 1:
        return rows.new_zeros(1)
    found: list[Tensor] = []
    for tile in tiles(len(rows), max(_VALUES_AT_ONCE // 8 // len(rows), 1)):
        cosines = rows[tile] @ rows.T
        cosines.diagonal(tile.start).fill_(-torch.inf)
        distances = (2 - 2 * cosines.topk(k, dim=1).values).clamp(min=0).sqrt()
        found.append(1 / distances.mean(1))
    return torch.cat(found)


def _best(
    positions: Int64[np.ndarray, " members"],
    typicality: Float32[np.ndarray, " members"],
    parts: Int64[np.ndarray, " members"],
    free: Bool[np.ndarray, " members"],
    count: int,
) -> list[tuple[int, float]]:
    """The most typical free member of each part, the most typical first; then the most typical of the others."""
    in_order = np.argsort(-typicality, kind="stable")
    in_order = in_order[free[in_order]]
    is_first = np.zeros(len(in_order), dtype=bool)
    is_first[np.unique(parts[in_order], return_index=True)[1]] = True
    chosen = np.concatenate([in_order[is_first], in_order[~is_first]])[:count]
    return list(zip(positions[chosen].tolist(), typicality[chosen].tolist(), strict=True))
