"""Clusters of embeddings, and how well they agree with the classes."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from ssl_sec.errors import ConfigError, DataError, counted
from ssl_sec.evaluation.arrays import Embeddings, Labels, as_labels, as_rows, tiles, unit_rows
from ssl_sec.progress import logged
from ssl_sec.rules import Range

# Distances, and coordinates, that k-means has at once: 64 MiB.
_ELEMENTS_AT_ONCE = 2**24


def nmi_f1(assignments: Labels, labels: Labels) -> tuple[float, float]:
    """Normalised mutual information and pairwise F1 of clusters and classes, each in [0, 1].

    NMI = 2 I(A; L) / (H(A) + H(L)), with the arithmetic mean of the entropies, and I(A; L) = H(A) + H(L) - H(A, L).
    F1 = 2 TP / (pairs in the same cluster + pairs in the same class), where TP counts the pairs that are in both: the
    harmonic mean of precision and recall over pairs (Song et al. 2016, "Deep Metric Learning via Lifted Structured
    Feature Embedding", section 6). If a denominator is 0, both partitions are the same trivial one, which scores 1.

    Work and memory grow with the number of images, not with clusters · classes.

    Args:
        assignments: cluster of each image; any whole numbers.
        labels: class of each image; any whole numbers.

    Raises:
        DataError: the numbers of images differ, there are none, or the values are no whole numbers.
    """
    clusters, classes = as_labels("clustering, assignments", assignments).cpu(), as_labels("clustering", labels).cpu()
    if len(clusters) != len(classes) or len(classes) == 0:
        raise DataError(
            f"clustering: {counted(len(clusters), 'assignment')} for {counted(len(classes), 'label')}; allowed: as "
            "many, 1 or more"
        )
    # Imported late: it loads an OpenMP runtime of its own beside torch's.
    from sklearn.metrics import normalized_mutual_info_score
    from sklearn.metrics.cluster import pair_confusion_matrix

    nmi = normalized_mutual_info_score(classes.numpy(), clusters.numpy())
    (_, only_clusters), (only_classes, both) = pair_confusion_matrix(classes.numpy(), clusters.numpy()).tolist()
    num_pairs = 2 * both + only_clusters + only_classes
    return float(nmi), 2 * both / num_pairs if num_pairs else 1.0


def kmeans_assignments(
    embeddings: Embeddings,
    num_clusters: int,
    seed: int,
    *,
    num_starts: int = 1,
    num_iterations: int = 20,
    on_pass: Callable[[], object] = lambda: None,
) -> Int64[Tensor, " images"]:
    """The cluster of each image by k-means over the embeddings' directions, computed on their device.

    The rows are normalised first and the distance is Euclidean. As in scikit-learn's KMeans, whose draws these are, the
    initial centres are those of greedy k-means++ (Arthur and Vassilvitskii 2007, the best of 2 + ln k draws for each
    centre), Lloyd's algorithm takes all images and ends when none changes its cluster, an empty cluster moves to the
    image farthest from its centre, and of several starts the one with the smallest sum of squared distances counts. The
    SEC authors' code is that class with a seed alone, which had 10 starts and up to 300 iterations at the time. One
    start of 20 iterations is cheaper, and finds clusters with a lower NMI and F1.

    Each initial centre takes a pass over the images, and each iteration images · clusters · dim multiplications.

    Args:
        embeddings: one row for each image, of any norm, finite.
        num_clusters: 1 to the number of images; the number of classes, by convention.
        seed: seed of the draws of all starts, 0 to 2³² - 1.
        num_starts: initial centres to start from, ≥ 1.
        num_iterations: the largest number of iterations of Lloyd's algorithm from each start, ≥ 1.
        on_pass: function called for each initial centre and each iteration.

    Returns:
        The clusters, on the CPU. One may be empty if images coincide.

    Raises:
        ConfigError: `num_clusters`, `num_starts` or `num_iterations` is outside its range.
        DataError: an embedding is not finite.
    """
    Range(ge=1).check("num_starts", num_starts)
    Range(ge=1).check("num_iterations", num_iterations)
    rows = as_rows(embeddings)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    if not 1 <= num_clusters <= len(rows):
        raise ConfigError(f"k-means with {num_clusters} clusters; allowed: 1 to the number of images, {len(rows)}")
    if num_not_finite := int((~rows.isfinite().all(1)).sum()):
        raise DataError(f"k-means: {num_not_finite} of {len(rows)} embeddings are not finite")
    rows, draws = _centred_directions(rows), np.random.RandomState(seed)
    starts = logged(range(num_starts), "clustering", num_starts, "starts")
    centres = (_greedy_centres(rows, num_clusters, draws, on_pass) for _ in starts)
    found = (_lloyd(rows, each, num_iterations, on_pass) for each in centres)
    return min(found, key=lambda clustering: clustering.inertia).assignments.cpu()


def _centred_directions(embeddings: Float[Tensor, "images dim"]) -> Float32[Tensor, "images dim"]:
    """The rows' directions less their mean: those of collapsed embeddings differ by less than float32 tells apart."""
    parts = list(tiles(len(embeddings), max(_ELEMENTS_AT_ONCE // max(embeddings.shape[1], 1), 1)))
    directions = (unit_rows(embeddings[part].double()) for part in parts)
    mean = torch.stack([each.sum(0) for each in directions]).sum(0) / len(embeddings)
    found = torch.empty_like(embeddings, dtype=torch.float32)
    for part in parts:
        found[part] = unit_rows(embeddings[part].double()) - mean
    return found


def _greedy_centres(
    rows: Float[Tensor, "images dim"], num_clusters: int, draws: np.random.RandomState, on_pass: Callable[[], object]
) -> Float[Tensor, "clusters dim"]:
    """The initial centres of greedy k-means++: of some rows, drawn by squared distance, the one that leaves the least.

    Without a wait for the device.
    """
    num_draws = 2 + int(np.log(num_clusters))
    first = int(draws.random_sample() * len(rows))
    shares = torch.from_numpy(draws.random_sample((num_clusters - 1, num_draws))).to(rows.device)
    squares = rows.square().sum(1)

    def distances(centres: Tensor) -> Float64[Tensor, "images _"]:
        found = torch.addmm(squares.unsqueeze(1) + squares[centres], rows, rows[centres].T, alpha=-2)
        return found.double().clamp_(min=0)

    # One tensor: small ones that are kept from each pass fragment the memory that the pass has freed.
    chosen = torch.full((num_clusters,), first, device=rows.device)
    nearest = distances(chosen[:1])
    for number, share in enumerate(shares, start=1):
        on_pass()
        sums = nearest.squeeze(1).cumsum(0)
        drawn = torch.searchsorted(sums, share * sums[-1]).clamp_(max=len(rows) - 1)
        left = torch.minimum(nearest, distances(drawn))
        best = left.sum(0).argmin(keepdim=True)
        nearest = left.index_select(1, best)
        chosen[number : number + 1] = drawn[best]
    return rows[chosen]


class _Clustering(NamedTuple):
    """Clusters of images, the sum of the squared distances to their centres, and the next centres."""

    assignments: Int64[Tensor, " images"]
    inertia: float
    centres: Float[Tensor, "clusters dim"]


def _lloyd(
    rows: Float[Tensor, "images dim"],
    centres: Float[Tensor, "clusters dim"],
    num_iterations: int,
    on_pass: Callable[[], object],
) -> _Clustering:
    """Lloyd's algorithm until no image changes its cluster."""
    clustering = _assigned(rows, centres)
    for _ in range(num_iterations):
        on_pass()
        before, clustering = clustering, _assigned(rows, clustering.centres)
        if torch.equal(before.assignments, clustering.assignments):
            break
    return clustering


def _assigned(rows: Float[Tensor, "images dim"], centres: Float[Tensor, "clusters dim"]) -> _Clustering:
    """The cluster of each row, that of the nearest centre, and the means of the clusters as the next centres.

    For each empty cluster, the row that is farthest from its centre leaves its own cluster and is the next centre.
    """
    half_squares = centres.square().sum(1) / 2
    parts: list[Tensor] = []
    sums = torch.zeros_like(centres, dtype=torch.float64)
    for tile in tiles(len(rows), max(_ELEMENTS_AT_ONCE // max(centres.shape), 1)):
        nearest = torch.addmm(half_squares, rows[tile], centres.T, alpha=-1).argmin(1)
        sums.index_add_(0, nearest, rows[tile].double())
        parts.append(nearest)
    assignments = torch.cat(parts)
    counts = torch.bincount(assignments, minlength=len(centres))
    distances = (rows - centres[assignments]).square().sum(1)
    empty = (counts == 0).nonzero().squeeze(1)
    moved = distances.topk(len(empty)).indices
    left = assignments[moved]
    sums.index_add_(0, left, rows[moved].double(), alpha=-1)
    counts -= torch.bincount(left, minlength=len(centres))
    sums[empty], counts[empty] = rows[moved].double(), 1
    counts = counts.unsqueeze(1)
    means = torch.where(counts > 0, sums / counts, centres.double())
    return _Clustering(assignments, float(distances.sum(dtype=torch.float64)), means.to(rows.dtype))
