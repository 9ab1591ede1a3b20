"""Losses over pairs of a batch.

NT-Xent (Chen et al. 2020, SimCLR, Eq. 1; the contrastive loss of SEC, Section 3.4). With s_ij = ⟨f̂_i, f̂_j⟩,
temperature T and p(i) the other view of row i,

    ℓ_i = −log( exp(s_{i p(i)} / T) / Σ_{k ≠ i} exp(s_ik / T) ),    L = (1/2N) Σ_i ℓ_i .

SupCon (Khosla et al. 2020, Eq. 2) takes the mean over the set P(i) of all rows of one class, and DCL (Yeh et al. 2022,
Eq. 5) leaves the positives out of the denominator:

    SupCon: ℓ_i = −(1/|P(i)|) Σ_{p ∈ P(i)} log( exp(s_ip / T) / Σ_{k ≠ i} exp(s_ik / T) ),
    DCL:    ℓ_i = −s_{i p(i)} / T + log Σ_{k ∉ P(i) ∪ {i}} exp(s_ik / T).

Against the rows k of a teacher, which have no gradient, with predictions q and P(i) the teacher's rows of the other
views of the image of row i:

    BYOL (Grill et al. 2020, Eq. 2):       ℓ_i = (1/|P(i)|) Σ_{p ∈ P(i)} (2 − 2 ⟨q̂_i, k̂_p⟩),
    MoCo v3 (Chen et al. 2021, Alg. 1):    ℓ_i = −(2 T / |P(i)|) Σ_{p ∈ P(i)} log( exp(⟨q̂_i, k̂_p⟩ / T) / Z_i ),

with Z_i = Σ_j exp(⟨q̂_i, k̂_j⟩ / T) over the rows j of all images in other views than i's. The mean over all rows is half
of the papers' value, which adds the two directions of two views.

Contrastive loss (Hadsell et al. 2006; NormFace, Eq. 7). With d²_ij = ‖f̂_i − f̂_j‖² and margin m,

    ℓ_ij = d²_ij for a positive pair,  max(0, m − d²_ij) for a negative one.
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float, Int64, Integer
from torch import Tensor, nn

from ssl_sec.errors import counted
from ssl_sec.losses.base import Embeddings, Labels, Loss, Scalar, described, require_labels, require_range
from ssl_sec.losses.classes import Classes, classes_of, may_read_values, positive_pairs, sum_rows, take_rows
from ssl_sec.losses.geometry import directions, squared_distances
from ssl_sec.losses.tiles import log_sum_exp_of_keys, log_sum_exp_of_others
from ssl_sec.rules import Range

_Rows = Float[Tensor, "anchors dim"]
_Terms = Float[Tensor, " anchors"]


class NTXentLoss(Loss):
    """NT-Xent (SimCLR, Eq. 1).

    Normalised, temperature-scaled cross-entropy over all other rows; the mean over all rows.

    If a row has several positives, its term is the mean over them. Memory is linear in the batch: the logits are
    computed in tiles, and again in the backward pass. A row without a positive is an error.

    Args:
        temperature: T > 0, the divisor of the similarities.
    """

    def __init__(self, temperature: float = 0.5) -> None:
        super().__init__()
        Range(gt=0).check("temperature", temperature)
        self.temperature = temperature

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        classes = classes_of(labels)
        if not len(labels):
            raise ValueError(f"{type(self).__name__} needs a positive for every row: the batch has no rows")
        if may_read_values(labels) and (alone := classes.size == 1).any():
            raise ValueError(
                f"{type(self).__name__} needs a positive for every row: label {int(labels[alone][0])} occurs once in "
                "the batch"
            )
        return self._terms(embeddings, classes, anchors).sum() / len(labels)

    def _terms(self, embeddings: Embeddings, classes: Classes, anchors: slice, negatives_only: bool = False) -> _Terms:
        """ℓ_i of each anchor that has a positive."""
        # ⟨r_i, r_j⟩ = s_ij / T
        rows = directions(embeddings) / self.temperature**0.5
        number, own = classes.number, rows[anchors]
        positives = take_rows(sum_rows(rows, number, len(rows)), number[anchors]) - own
        at_positives = (own * positives).sum(1) / classes.num_positives[anchors].clamp(min=1)
        left_out = number if negatives_only else None
        return log_sum_exp_of_others(rows, anchors, 1 / self.temperature, left_out) - at_positives

    def compares(self, labels: Labels) -> Bool[Tensor, ""]:
        """Whether every row has a positive."""
        return (classes_of(labels).size > 1).all() & (len(labels) > 0)


class SupConLoss(NTXentLoss):
    """Supervised contrastive loss (Khosla et al. 2020).

    L_out (Eq. 2), as the mean over the rows that have a positive; other positives stay in the denominator. If the
    classes are the images, it is NT-Xent. Memory is linear in the batch.

    Args:
        temperature: T > 0, the divisor of the similarities.
    """

    def __init__(self, temperature: float = 0.1) -> None:
        super().__init__(temperature)

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        classes = classes_of(labels)
        compared = classes.size > 1
        if may_read_values(labels) and not compared.any():
            raise ValueError("SupConLoss needs a positive: no label occurs twice in the batch")
        terms = self._terms(embeddings, classes, anchors)
        return terms.masked_fill(~compared[anchors], 0).sum() / self.num_terms(classes).sum()

    def num_terms(self, classes: Classes) -> Int64[Tensor, " batch"]:
        """One of each row that has a positive."""
        return (classes.size > 1).long()

    def compares(self, labels: Labels) -> Bool[Tensor, ""]:
        """Whether a row has a positive."""
        return (classes_of(labels).size > 1).any()


class DCLLoss(NTXentLoss):
    """Decoupled contrastive loss (Yeh et al. 2022, Eq. 5).

    NT-Xent without the positives in the denominator, so that a positive that already agrees does not weaken the
    gradient of the negatives; the mean over all rows. Its value may be negative. Memory is linear in the batch. A row
    without a positive or a negative is an error.

    Args:
        temperature: T > 0, the divisor of the similarities.
    """

    def __init__(self, temperature: float = 0.1) -> None:
        super().__init__(temperature)

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        if may_read_values(labels) and (classes_of(labels).size == len(labels)).any():
            raise ValueError("DCLLoss needs a negative: all rows of the batch have one label")
        return super()._share(embeddings, labels, anchors)

    def _terms(self, embeddings: Embeddings, classes: Classes, anchors: slice, negatives_only: bool = True) -> _Terms:
        return super()._terms(embeddings, classes, anchors, negatives_only)

    def compares(self, labels: Labels) -> Bool[Tensor, ""]:
        """Whether every row has a positive and a negative."""
        return super().compares(labels) & (classes_of(labels).size < len(labels)).all()


class ContrastiveLoss(Loss):
    """Contrastive loss (NormFace, Eq. 7).

    d² for a positive pair, max(0, m − d²) for a negative; the mean over ordered pairs i ≠ j.

    Args:
        margin: m ≥ 0, a squared distance beyond which negatives are left alone.
    """

    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()
        Range(ge=0).check("margin", margin)
        self.margin = margin

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        if len(labels) < 2:
            raise ValueError(f"ContrastiveLoss needs a pair: the batch has {counted(len(labels), 'row')}")
        squares = squared_distances(directions(embeddings), anchors)
        positive, negative = positive_pairs(labels, anchors)
        hinges = (self.margin - squares).clamp(min=0)
        terms = torch.where(positive, squares, torch.where(negative, hinges, 0.0))
        return terms.sum() / (len(labels) * (len(labels) - 1))

    def compares(self, labels: Labels) -> Bool[Tensor, ""]:
        """Whether there are two rows."""
        return labels.new_full((), len(labels) > 1, dtype=torch.bool)


class TeacherLoss(nn.Module, ABC):
    """A loss of predictions against a teacher's rows of other views of the same images.

    Both are raw and of the global batch. It computes in float32 or better, also under autocast, and memory is linear in
    the batch. A row that is an image's only view is an error on the CPU; elsewhere the loss is then NaN.
    """

    def forward(
        self,
        predictions: Embeddings,
        targets: Embeddings,
        labels: Integer[Tensor, " batch"],
        anchors: slice = slice(None),
    ) -> Scalar:
        """The loss, or the share of it that a range of rows contributes.

        Args:
            predictions: q, raw rows.
            targets: k, the teacher's raw rows of the same views; they have no gradient.
            labels: the image that each row is a view of.
            anchors: the range of rows whose terms are summed, with step 1; the shares of a partition add up to the
                loss.

        Raises:
            TypeError: `labels` are not one whole number for each row, or `anchors` is no such slice.
            ValueError: a row has no other view, there are no rows, or the shapes of both differ.
        """
        name = type(self).__name__
        require_labels(name, predictions, labels)
        require_range(name, anchors)
        if not len(labels) or targets.shape != predictions.shape:
            raise ValueError(
                f"{name}: found {described(predictions)} and {described(targets)}, must be predictions and targets of "
                "the same views, one row or more"
            )
        classes = classes_of(labels.long())
        if may_read_values(labels) and (alone := classes.size == 1).any():
            raise ValueError(
                f"{name} needs two views of every image: label {int(labels[alone][0])} occurs once in the batch"
            )
        with torch.autocast(predictions.device.type, enabled=False):
            rows = directions(predictions[anchors])
            keys = directions(targets.detach())
            number = classes.number
            others = take_rows(sum_rows(keys, number, len(keys)), number[anchors]) - keys[anchors]
            at_positives = (rows * others).sum(1) / classes.num_positives[anchors]  # NaN, 0 / 0, of an only view
            return self._terms(rows, keys, at_positives, classes, anchors).sum() / len(labels)

    @abstractmethod
    def _terms(
        self, rows: _Rows, keys: Embeddings, at_positives: _Terms, classes: Classes, anchors: slice
    ) -> _Terms: ...


class BYOLLoss(TeacherLoss):
    """Mean squared distance to the teacher's directions (BYOL, Grill et al. 2020, Eq. 2)."""

    def _terms(self, rows: _Rows, keys: Embeddings, at_positives: _Terms, classes: Classes, anchors: slice) -> _Terms:
        return 2 - 2 * at_positives


class MoCoV3Loss(TeacherLoss):
    """Softmax over the teacher's rows of the other views of all images (MoCo v3, Chen et al. 2021, Alg. 1).

    Args:
        temperature: T > 0, the divisor of the similarities.
    """

    def __init__(self, temperature: float = 0.2) -> None:
        super().__init__()
        Range(gt=0).check("temperature", temperature)
        self.temperature = temperature

    def _terms(self, rows: _Rows, keys: Embeddings, at_positives: _Terms, classes: Classes, anchors: slice) -> _Terms:
        # The views of all images have the same order in the batch.
        view = classes.occurrence
        others = log_sum_exp_of_keys(rows / self.temperature, keys, view[anchors], view)
        return 2 * self.temperature * (others - at_positives / self.temperature)
