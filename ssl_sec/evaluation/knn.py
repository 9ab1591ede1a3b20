"""Weighted k-nearest-neighbour classification of features: without training, so that it can monitor a run.

Wu et al. 2018, "Unsupervised Feature Learning via Non-Parametric Instance Discrimination", section 3.4.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from ssl_sec.evaluation.linear_probe import top_k_accuracy


def knn_top1(
    bank: Float[Tensor, "bank dim"],
    bank_labels: Int64[Tensor, " bank"],
    queries: Float[Tensor, "queries dim"],
    query_labels: Int64[Tensor, " queries"],
    *,
    num_classes: int,
    k: int = 200,
    temperature: float = 0.1,
    chunk_size: int = 256,
) -> float:
    """Share of the queries that their nearest neighbours in the bank classify correctly, in [0, 1].

    A tie between classes counts as wrong, and so does a query whose votes are not finite.

    Args:
        bank: features of the training images, of any norm; at least one row.
        bank_labels: classes of the training images, below `num_classes`.
        queries: features of the images to classify.
        query_labels: classes of the queries.
        num_classes: number of classes.
        k: number of neighbours that vote; the whole bank if it has fewer.
        temperature: a neighbour at cosine s votes with weight exp(s / temperature), > 0.
        chunk_size: queries compared at once; memory grows with chunk_size · bank.
    """
    votes = knn_votes(bank, bank_labels, queries, num_classes, k, temperature, chunk_size)
    return top_k_accuracy(votes, query_labels, 1)


@torch.no_grad()
def knn_votes(
    bank: Float[Tensor, "bank dim"],
    bank_labels: Int64[Tensor, " bank"],
    queries: Float[Tensor, "queries dim"],
    num_classes: int,
    k: int = 200,
    temperature: float = 0.1,
    chunk_size: int = 256,
) -> Float[Tensor, "queries classes"]:
    """The votes of each query's nearest neighbours for each class; arguments as for `knn_top1`."""
    bank = functional.normalize(bank.float(), dim=1)
    bank_labels = bank_labels.to(bank.device)
    scores: list[Tensor] = []
    for chunk in queries.split(chunk_size):
        similarities = functional.normalize(chunk.to(bank), dim=1) @ bank.T
        nearest, indices = similarities.topk(min(k, len(bank)), dim=1)
        # Relative to the nearest neighbour: the classes' order is the same, and a low temperature cannot overflow.
        votes = ((nearest - nearest[:, :1]) / temperature).exp()
        scores.append(votes.new_zeros(len(chunk), num_classes).scatter_add_(1, bank_labels[indices], votes))
    return torch.cat(scores)
