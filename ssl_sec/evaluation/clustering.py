"""Clusters of embeddings, and how well they agree with the classes."""

import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.arrays import Embeddings, Labels, as_tensor, unit_rows


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
        DataError: the numbers of images differ, or there are none.
    """
    clusters, classes = (as_tensor(each).cpu().long() for each in (assignments, labels))
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
    embeddings: Embeddings, num_clusters: int, seed: int, *, num_iterations: int = 20
) -> Int64[Tensor, " images"]:
    """The cluster of each image by k-means over the embeddings' directions (faiss), on the CPU.

    The rows are normalised first and the distance is Euclidean. The initial centres are those of scikit-learn's greedy
    k-means++ (Arthur and Vassilvitskii 2007, the best of 2 + ln k draws for each centre), as in the SEC authors' code.
    faiss then runs the iterations over all images and assigns the images. The initial centres take one pass over the
    images each: seconds for the 98 classes of Cars196, many minutes for the 11,316 of SOP. A cluster may be empty if
    images coincide.

    Args:
        embeddings: one row for each image, of any norm, finite.
        num_clusters: 1 to the number of images; the number of classes, by convention.
        seed: seed of the draw of the first centres, 0 to 2³² - 1.
        num_iterations: iterations of Lloyd's algorithm, ≥ 1.

    Raises:
        ConfigError: `num_clusters` is outside its range.
        DataError: an embedding is not finite.
    """
    # Imported late: these load OpenMP runtimes of their own in addition to torch's.
    import faiss
    from sklearn.cluster import kmeans_plusplus

    rows = as_tensor(embeddings).cpu().float()
    if not 1 <= num_clusters <= len(rows):
        raise ConfigError(f"k-means with {num_clusters} clusters; allowed: 1 to the number of images, {len(rows)}")
    if num_not_finite := int((~rows.isfinite().all(1)).sum()):
        raise DataError(f"k-means: {num_not_finite} of {len(rows)} embeddings are not finite")
    rows = unit_rows(rows).numpy()
    kmeans = faiss.Kmeans(
        rows.shape[1],
        num_clusters,
        niter=num_iterations,
        # By default faiss samples the images of large clusters, and warns about small ones.
        max_points_per_centroid=len(rows),
        min_points_per_centroid=1,
    )
    centres, _ = kmeans_plusplus(rows, num_clusters, random_state=seed)
    kmeans.train(rows, init_centroids=centres.astype(rows.dtype))
    _, assignments = kmeans.index.search(rows, 1)
    return torch.from_numpy(assignments[:, 0])
