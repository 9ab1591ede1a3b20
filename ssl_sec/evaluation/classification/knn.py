"""Weighted k-nearest-neighbour classification of features: without training, so that it can monitor a run.

Wu et al. 2018, "Unsupervised Feature Learning via Non-Parametric Instance Discrimination", section 3.4.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_sec.collectives import sum_over_workers
from ssl_sec.evaluation.arrays import Labels, Rows, as_labelled, require_same_dim, unit_rows
from ssl_sec.evaluation.classification.scores import is_in_top_k, top_k_accuracy
from ssl_sec.evaluation.feature_table import FeatureTable
from ssl_sec.progress import logged
from ssl_sec.rules import Range

# Rows of the bank that are compared at once.
BANK_ROWS = 2**14


def knn_top1(
    bank: Rows,
    bank_labels: Labels,
    queries: Rows,
    query_labels: Labels,
    *,
    num_classes: int,
    k: int = 200,
    temperature: float = 0.1,
    chunk_size: int = 256,
) -> float:
    """Share of the queries that their nearest neighbours in the bank classify correctly, in [0, 1].

    A tie between classes counts as wrong, and so does a query that is not finite. Rows of the bank that are not finite
    are left out.

    Args:
        bank: features of the training images, of any norm, with shape (bank, dim); one row or more.
        bank_labels: classes of the training images, 0 ≤ label < `num_classes`, with shape (bank,).
        queries: features of the images to classify, with shape (queries, dim); one row or more.
        query_labels: classes of the queries, in the same range, with shape (queries,).
        num_classes: number of classes.
        k: number of neighbours that vote, ≥ 1; the whole bank if it has fewer.
        temperature: a neighbour at cosine s votes with weight exp(s / temperature), > 0.
        chunk_size: queries compared at once, ≥ 1. Beside the features, memory grows with queries · (k + num_classes).

    Raises:
        ConfigError: `k`, `temperature` or `chunk_size` is outside its range.
        DataError: there are no rows in the bank or no queries, the numbers of rows and labels or the dimensions differ,
            or a label is outside its range.
    """
    Range(ge=1).check("k", k)
    Range(gt=0).check("temperature", temperature)
    Range(ge=1).check("chunk_size", chunk_size)
    rows, labels = as_labelled("kNN, bank", bank, bank_labels, num_classes)
    query_rows, true = as_labelled("kNN, queries", queries, query_labels, num_classes)
    require_same_dim("kNN, bank and queries", rows, query_rows)
    votes = knn_votes(FeatureTable(rows, labels), query_rows, num_classes, k, temperature, chunk_size)
    return top_k_accuracy(votes, true, 1)


def shared_knn_top1(bank: FeatureTable, queries: FeatureTable, num_classes: int) -> float:
    """The `knn_top1` of queries that the workers divide; all of them call this function.

    Args:
        bank: features and labels of the training images.
        queries: features and labels of the images to classify.
        num_classes: number of classes, above all labels.
    """
    features, labels = queries.share()
    votes = knn_votes(bank, features, num_classes)
    hits = is_in_top_k(votes, labels.to(votes.device), 1).sum()
    return sum_over_workers(hits).item() / len(queries)


@torch.no_grad()
def knn_votes(
    bank: FeatureTable,
    queries: Float[Tensor, "queries dim"],
    num_classes: int,
    k: int = 200,
    temperature: float = 0.1,
    chunk_size: int = 256,
) -> Float[Tensor, "queries classes"]:
    """The votes of each query's nearest neighbours for each class; arguments as for `knn_top1`."""
    device = bank.features.device
    nearest = torch.empty(len(queries), 0, device=device)
    classes = torch.empty(len(queries), 0, dtype=torch.int64, device=device)
    # One part of the bank after another: the directions of all rows would take the memory of the features again.
    for part, part_labels in logged(bank.parts(BANK_ROWS), "kNN", len(bank), size=lambda part: len(part[1])):
        rows = unit_rows(part.float())
        is_finite = rows.isfinite().all(1)
        rows, labels = rows[is_finite], part_labels.to(device)[is_finite]
        found = [_nearest(unit_rows(chunk.to(rows)), rows, labels, k) for chunk in queries.split(chunk_size)]
        both = torch.cat([nearest, torch.cat([cosines for cosines, _ in found])], 1)
        nearest, places = both.topk(min(k, both.shape[1]), dim=1)
        classes = torch.cat([classes, torch.cat([labels for _, labels in found])], 1).gather(1, places)
    # Relative to the nearest neighbour: the classes' order is the same, and a low temperature cannot overflow.
    votes = ((nearest - nearest[:, :1]) / temperature).exp()
    return votes.new_zeros(len(queries), num_classes).scatter_add_(1, classes, votes)


def _nearest(queries: Tensor, rows: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cosines and classes of the nearest rows of each query."""
    cosines, places = (queries @ rows.T).topk(min(k, len(rows)), dim=1)
    return cosines, labels[places]
