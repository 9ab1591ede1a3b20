"""The angular loss (Wang et al. 2017), which bounds the angle at the negative of a triangle a, p, n.

On disjoint triplets, which do not interact, with c = (a + p) / 2,

    ℓ_tri = max(0, ‖x_a − x_p‖² − ‖x_a − x_n‖² + m)                                             (Triplet-I, Eq. 2)
    ℓ_ang = max(0, ‖x_a − x_p‖² − 4 tan²α ‖x_n − x_c‖²)                                                    (Eq. 6)

On a whole batch of normalised rows, with p the positive of a and the negatives n of every other class,

    f_apn = 4 tan²α (x_a + x_p)ᵀ x_n − 2 (1 + tan²α) x_aᵀ x_p,    ℓ_a = log(1 + Σ_n exp f_apn)             (Eq. 8)

and, with the N-pair loss, L = L_npair + λ L_ang                                                          (Eq. 9).
"""

import math
from abc import abstractmethod

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ssl_sec.losses.base import Embeddings, Labels, Loss, Scalar, log_one_plus_sum_exp, require_triplets
from ssl_sec.losses.classes import classes_of, may_read_values, negative_pairs, take_rows
from ssl_sec.losses.geometry import directions
from ssl_sec.losses.pair import NPairLoss
from ssl_sec.rules import Range

_Rows = Float[Tensor, "triplets dim"]


class AngularLoss(Loss):
    """Angular loss (Eq. 8).

    log(1 + Σ_n exp f_apn) on normalised rows; the mean over rows, each an anchor once.

    The positive is the first other row of the class; a row without one contributes 0.

    Args:
        alpha_degrees: α in (0, 90), the largest angle at the negative.
    """

    def __init__(self, alpha_degrees: float = 45.0) -> None:
        super().__init__()
        Range(gt=0, lt=90).check("alpha_degrees", alpha_degrees)
        self.alpha_degrees = alpha_degrees

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        classes = classes_of(labels)
        require_triplets(type(self).__name__, classes)
        squared_tangent = math.tan(math.radians(self.alpha_degrees)) ** 2
        unit = directions(embeddings)
        own, positives = unit[anchors], take_rows(unit, classes.positive[anchors])
        negative = negative_pairs(labels, anchors)
        at_positives = (own * positives).sum(1, keepdim=True)
        exponents = 4 * squared_tangent * ((own + positives) @ unit.T) - 2 * (1 + squared_tangent) * at_positives
        terms = log_one_plus_sum_exp(exponents, negative)
        return torch.where(classes.size[anchors] > 1, terms, 0.0).sum() / len(labels)


class NPairAngularLoss(Loss):
    """N-pair + angular loss (angular loss, Eq. 9).

    N-pair loss on raw rows + λ · angular loss on normalised rows.

    Args:
        alpha_degrees: α in (0, 90), the largest angle at the negative.
        weight: weight λ ≥ 0 of the angular loss, added to the N-pair loss.
    """

    def __init__(self, alpha_degrees: float = 45.0, weight: float = 2.0) -> None:
        super().__init__()
        Range(ge=0).check("weight", weight)
        self.weight = weight
        self.n_pair = NPairLoss()
        self.angular = AngularLoss(alpha_degrees)

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        return self.n_pair(embeddings, labels, anchors) + self.weight * self.angular(embeddings, labels, anchors)


class DisjointLoss(Loss):
    """A loss over disjoint triplets: rows 3i, 3i + 1 and 3i + 2 are an anchor, a positive and a negative.

    The mean over the triplets, including those that are 0; a triplet counts in the share of its anchor's row.
    """

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        require_disjoint_triplets(type(self).__name__, labels)
        rows = range(len(labels))[anchors]
        own = slice(-(-rows.start // 3), -(-rows.stop // 3))  # rounded up, to the next anchor
        terms = self._terms(embeddings[0::3][own], embeddings[1::3][own], embeddings[2::3][own])
        return 3 * terms.sum() / len(labels)

    def compares(self, labels: Labels) -> Bool[Tensor, ""]:
        """Whether the rows form triplets."""
        if len(labels) % 3 != 0 or len(labels) == 0:
            return labels.new_zeros((), dtype=torch.bool)
        return ((labels[0::3] == labels[1::3]) & (labels[0::3] != labels[2::3])).all()

    @abstractmethod
    def _terms(self, anchors: _Rows, positives: _Rows, negatives: _Rows) -> Float[Tensor, " triplets"]: ...


def require_disjoint_triplets(name: str, labels: Labels) -> None:
    """Raises a ValueError if the rows do not form triplets; labels are checked only where that waits for no device."""
    needed = "rows 3i, 3i + 1 and 3i + 2 must be an anchor, a positive and a negative, as of sampler=triplets"
    if len(labels) % 3 != 0 or len(labels) == 0:
        raise ValueError(f"{name} needs a multiple of 3 rows: the batch has {len(labels)}; {needed}")
    if not may_read_values(labels):
        return
    has_no_positive, has_no_negative = labels[0::3] != labels[1::3], labels[0::3] == labels[2::3]
    for missing, wrong in (("positive", has_no_positive), ("negative", has_no_negative)):
        if wrong.any():
            row = 3 * int(wrong.nonzero()[0])
            found = ", ".join(str(int(label)) for label in labels[row : row + 3])
            raise ValueError(f"{name} needs a {missing}: rows {row} to {row + 2} have the labels {found}; {needed}")


class DisjointTripletLoss(DisjointLoss):
    """Disjoint triplets, Triplet-I (angular loss, Eq. 2).

    max(0, d²_ap − d²_an + m) of disjoint triplets (Fig. 4a); the mean over triplets.

    Rows 3i, 3i + 1 and 3i + 2 are the anchor, the positive and the negative of a triplet, as in sampler=triplets.

    Args:
        margin: m ≥ 0, how much farther negatives must be than positives, in squared distances.
    """

    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()
        Range(ge=0).check("margin", margin)
        self.margin = margin

    def _terms(self, anchors: _Rows, positives: _Rows, negatives: _Rows) -> Float[Tensor, " triplets"]:
        anchors, positives, negatives = directions(anchors), directions(positives), directions(negatives)
        nearer = 2 * (anchors * (negatives - positives)).sum(1)  # d² = 2 − 2s, as in all losses
        return (nearer + self.margin).clamp(min=0)


class AngularHingeLoss(DisjointLoss):
    """Angular loss of disjoint triplets on raw rows (Eq. 6).

    max(0, ‖x_a − x_p‖² − 4 tan²α ‖x_n − (x_a + x_p) / 2‖²) on raw rows; the mean over triplets.

    Rows 3i, 3i + 1 and 3i + 2 are the anchor, the positive and the negative of a triplet, as in sampler=triplets.

    Args:
        alpha_degrees: α in (0, 90), the largest angle at the negative.
    """

    def __init__(self, alpha_degrees: float = 45.0) -> None:
        super().__init__()
        Range(gt=0, lt=90).check("alpha_degrees", alpha_degrees)
        self.alpha_degrees = alpha_degrees

    def _terms(self, anchors: _Rows, positives: _Rows, negatives: _Rows) -> Float[Tensor, " triplets"]:
        # 4 ‖x_n − x_c‖² without a division.
        to_negative = (2 * negatives - anchors - positives).square().sum(1)
        squared_tangent = math.tan(math.radians(self.alpha_degrees)) ** 2
        return ((anchors - positives).square().sum(1) - squared_tangent * to_negative).clamp(min=0)
