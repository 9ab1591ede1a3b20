"""The angular loss (Wang et al. 2017), which bounds the angle at the negative of a triangle a, p, n.

On normalised rows, with p the positive of a and the negatives n of every other class,

    f_apn = 4 tan²α (x_a + x_p)ᵀ x_n − 2 (1 + tan²α) x_aᵀ x_p,    ℓ_a = log(1 + Σ_n exp f_apn)             (Eq. 8)

and, with the N-pair loss, L = L_npair + λ L_ang                                                          (Eq. 9).
"""

import math

import torch

from ssl_sec.losses.base import Embeddings, Labels, Loss, Scalar, log_one_plus_sum_exp, require_triplets
from ssl_sec.losses.classes import classes_of, negative_pairs
from ssl_sec.losses.geometry import directions
from ssl_sec.losses.pair import NPairLoss
from ssl_sec.settings import Range


class AngularLoss(Loss):
    """Angular loss (Eq. 8).

    The angular loss on normalised rows (Eq. 8); the mean over rows, each an anchor once.

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
        own, positives = unit[anchors], unit[classes.positive[anchors]]
        negative = negative_pairs(labels, anchors)
        at_positives = (own * positives).sum(1, keepdim=True)
        exponents = 4 * squared_tangent * ((own + positives) @ unit.T) - 2 * (1 + squared_tangent) * at_positives
        terms = log_one_plus_sum_exp(exponents, negative)
        return torch.where(classes.size[anchors] > 1, terms, 0.0).sum() / len(labels)


class NPairAngularLoss(Loss):
    """N-pair + angular loss (angular loss, Eq. 9).

    N-pair loss on raw rows + λ · angular loss on normalised rows (Eq. 9).

    Args:
        alpha_degrees: α in (0, 90), the largest angle at the negative.
        weight: λ ≥ 0, of the angular loss beside N-pair.
    """

    def __init__(self, alpha_degrees: float = 45.0, weight: float = 2.0) -> None:
        super().__init__()
        Range(ge=0).check("weight", weight)
        self.weight = weight
        self.n_pair = NPairLoss()
        self.angular = AngularLoss(alpha_degrees)

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        return self.n_pair(embeddings, labels, anchors) + self.weight * self.angular(embeddings, labels, anchors)
