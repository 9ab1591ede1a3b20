"""Clusters of embeddings, and how well they agree with the classes."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.arrays import Embeddings, Labels, as_labels, as_rows, unit_rows

# Iterations after which k-means compares the assignments with those before: an assignment costs nearly an iteration.
_ITERATIONS_A_LOOK = 10


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
            f"clustering: {len(clusters)} assignments for {len(classes)} labels; allowed: as many, 1 or more"
        )
    # Imported late: it loads an OpenMP runtime of its own beside torch's.
    from sklearn.metrics import normalized_mutual_info_score
    from sklearn.metrics.cluster import pair_confusion_matrix

    nmi = normalized_mutual_info_score(classes.numpy(), clusters.numpy())
    (_, only_clusters), (only_classes, both) = pair_confusion_matrix(classes.numpy(), clusters.numpy()).tolist()
    num_pairs = 2 * both + only_clusters + only_classes
    return float(nmi), 2 * both / num_pairs if num_pairs else 1.0


def kmeans_assignments(
    embeddings: Embeddings, num_clusters: int, seed: int, *, num_starts: int = 1, num_iterations: int = 20
) -> Int64[Tensor, " images"]:
    """The cluster of each image by k-means over the embeddings' directions (faiss), on the CPU.

    The rows are normalised first and the distance is Euclidean. The initial centres are those of scikit-learn's greedy
    k-means++ (Arthur and Vassilvitskii 2007, the best of 2 + ln k draws for each centre). faiss then runs the
    iterations over all images and assigns the images, until no image changes its cluster. Of several starts, the one
    with the smallest sum of squared distances counts. The SEC authors' code is scikit-learn's KMeans with a seed alone,
    which had 10 starts and up to 300 iterations at the time. One start of 20 iterations is cheaper, and finds clusters
    with a lower NMI and F1.

    The initial centres take one pass over the images each: seconds for the 98 classes of Cars196, many minutes for the
    11,316 of SOP, at every start. A cluster may be empty if images coincide.

    Args:
        embeddings: one row for each image, of any norm, finite.
        num_clusters: 1 to the number of images; the number of classes, by convention.
        seed: seed of the draws of all starts, 0 to 2³² - 1.
        num_starts: initial centres to start from, ≥ 1.
        num_iterations: the largest number of iterations of Lloyd's algorithm from each start, ≥ 1.

    Raises:
        ConfigError: `num_clusters` is outside its range.
        DataError: an embedding is not finite.
    """
    # Imported late: it loads an OpenMP runtime of its own in addition to torch's.
    from sklearn.cluster import kmeans_plusplus

    rows = as_rows(embeddings).cpu().float()
    if not 1 <= num_clusters <= len(rows):
        raise ConfigError(f"k-means with {num_clusters} clusters; allowed: 1 to the number of images, {len(rows)}")
    if num_not_finite := int((~rows.isfinite().all(1)).sum()):
        raise DataError(f"k-means: {num_not_finite} of {len(rows)} embeddings are not finite")
    rows = unit_rows(rows).numpy()
    draws = np.random.RandomState(seed)
    found = (
        _lloyd(rows, kmeans_plusplus(rows, num_clusters, random_state=draws)[0], num_iterations)
        for _ in range(num_starts)
    )
    return torch.from_numpy(min(found, key=lambda clustering: clustering.inertia).assignments)


class _Clustering(NamedTuple):
    """Clusters of images, and the sum of the squared distances to their centres."""

    assignments: Int64[np.ndarray, " images"]
    inertia: float


def _lloyd(
    rows: Float[np.ndarray, "images dim"], centres: Float[np.ndarray, "clusters dim"], num_iterations: int
) -> _Clustering:
    """Lloyd's algorithm until no image changes its cluster between two looks."""
    import faiss

    clustering = None
    for done in range(0, num_iterations, _ITERATIONS_A_LOOK):
        kmeans = faiss.Kmeans(
            rows.shape[1],
            len(centres),
            niter=min(_ITERATIONS_A_LOOK, num_iterations - done),
            # By default faiss samples the images of large clusters, and warns about small ones.
            max_points_per_centroid=len(rows),
            min_points_per_centroid=1,
        )
        kmeans.train(rows, init_centroids=centres.astype(rows.dtype))
        assert kmeans.centroids is not None, "they are there after the training"
        centres = kmeans.centroids
        squares, nearest = kmeans.index.search(rows, 1)
        before, clustering = clustering, _Clustering(nearest[:, 0], float(squares.sum(dtype=np.float64)))
        if before is not None and np.array_equal(before.assignments, clustering.assignments):
            break
    assert clustering is not None
    return clustering
