"""Losses over pairs of a batch.

NT-Xent (Chen et al. 2020, SimCLR, Eq. 1; the contrastive loss of SEC, Section 3.4). With s_ij = ⟨f̂_i, f̂_j⟩,
temperature T and p(i) the other view of row i,

    ℓ_i = −log( exp(s_{i p(i)} / T) / Σ_{k ≠ i} exp(s_ik / T) ),    L = (1/2N) Σ_i ℓ_i .

Contrastive loss (Hadsell et al. 2006; NormFace, Eq. 7). With d²_ij = ‖f̂_i − f̂_j‖² and margin m,

    ℓ_ij = d²_ij for a positive pair,  max(0, m − d²_ij) for a negative one.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from ssl_sec.losses.base import Embeddings, Labels, Loss, Scalar
from ssl_sec.losses.classes import can_look, classes_of, positive_pairs, sum_rows, take_rows
from ssl_sec.losses.geometry import directions, squared_distances
from ssl_sec.losses.tiles import log_sum_exp_of_others
from ssl_sec.settings import Range


class NTXentLoss(Loss):
    """NT-Xent (SimCLR, Eq. 1).

    Normalised, temperature-scaled cross-entropy over all other rows; the mean over all rows.

    If a row has several positives, its term is the mean over them. Memory is linear in the batch: the logits are
    computed in tiles, and again in the backward pass. A row without a positive is an error.

    Args:
        temperature: T, which the similarities are divided by, > 0.
    """

    def __init__(self, temperature: float = 0.5) -> None:
        super().__init__()
        Range(gt=0).check("temperature", temperature)
        self.temperature = temperature

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        classes = classes_of(labels)
        if can_look(labels) and (alone := classes.size == 1).any():
            raise ValueError(
                f"NTXentLoss needs a positive for every row: label {int(labels[alone][0])} occurs once in the batch"
            )
        # ⟨r_i, r_j⟩ = s_ij / T
        rows = directions(embeddings) / self.temperature**0.5
        number, own = classes.number, rows[anchors]
        positives = take_rows(sum_rows(rows, number, len(rows)), number[anchors]) - own
        at_positives = (own * positives).sum(1) / classes.num_positives[anchors]
        others = log_sum_exp_of_others(rows, anchors, largest_logit=1 / self.temperature)
        return (others - at_positives).sum() / len(rows)

    def compares(self, labels: Labels) -> Bool[Tensor, ""]:
        """Whether every row has a positive."""
        return (classes_of(labels).size > 1).all() & (len(labels) > 0)


class ContrastiveLoss(Loss):
    """Contrastive loss (NormFace, Eq. 7).

    d² for a positive pair, max(0, m − d²) for a negative (NormFace, Eq. 7); the mean over ordered pairs i ≠ j.

    Args:
        margin: m ≥ 0, a squared distance beyond which negatives are left alone.
    """

    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()
        Range(ge=0).check("margin", margin)
        self.margin = margin

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        if len(labels) < 2:
            raise ValueError(f"ContrastiveLoss needs a pair: the batch has {len(labels)} rows")
        squares = squared_distances(directions(embeddings), anchors)
        positive, negative = positive_pairs(labels, anchors)
        hinges = (self.margin - squares).clamp(min=0)
        terms = torch.where(positive, squares, torch.where(negative, hinges, 0.0))
        return terms.sum() / (len(labels) * (len(labels) - 1))

    def compares(self, labels: Labels) -> Bool[Tensor, ""]:
        """Whether there are two rows."""
        return labels.new_tensor(len(labels) > 1, dtype=torch.bool)
