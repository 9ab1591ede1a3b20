"""Softmax over the classes with a margin: the similarity to the own class's template is reduced.

Cross-entropies of s cos θ_k, as NormFace's, with cos θ_y replaced by

    SphereFace       (−1)^j cos(m θ_y) − 2j, j = ⌊m θ_y / π⌋                                 (Liu et al. 2017)
    CosFace          cos θ_y − m                                                                 (SEC, Eq. 19)
    ArcFace          cos(θ_y + m)                                                            (Deng et al. 2019)

With K sub-centres w_k1 … w_kK of class k, cos θ_k is the highest cosine of the row with any of them: images that are
unlike the most of their class, as those with a wrong label, have a template of their own    (Sub-center ArcFace, Deng
et al. 2020).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_sec.losses.geometry import root
from ssl_sec.losses.templates.softmax import TemplateSoftmaxLoss
from ssl_sec.rules import Range, check


def cosine_of_sum(cosines: Float[Tensor, " rows"], radians: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """cos(θ + m), with a bounded gradient also at θ = 0 and π.

    Args:
        cosines: cos θ.
        radians: m of each row.
    """
    return cosines * radians.cos() - root(1 - cosines.square()) * radians.sin()


def turned(cosines: Float[Tensor, " rows"], radians: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """cos(θ + m), continued as −2 − cos(θ + m) beyond θ + m = π, where it keeps falling and is smooth.

    Args:
        cosines: cos θ.
        radians: m of each row, in [0, π).
    """
    further = cosine_of_sum(cosines, radians)
    return torch.where(cosines < -radians.cos(), -2 - further, further)


class SphereFaceLoss(TemplateSoftmaxLoss):
    """SphereFace (Liu et al. 2017).

    cos θ_y is replaced by ψ(θ_y) = (−1)^j cos(m θ_y) − 2j, j = ⌊m θ_y / π⌋, which falls with θ_y.

    cos(m θ) is Chebyshev's polynomial of cos θ, so that the gradient is bounded at θ = 0 and π too.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.
        scale: s > 0, the factor on the cosines.
        margin: m ≥ 1, the whole factor on the angle to the own class.
    """

    def __init__(self, num_classes: int, dim: int, scale: float = 64.0, margin: int = 3) -> None:
        super().__init__(num_classes, dim, scale)
        Range(ge=1, le=64).check("margin", margin)
        self.margin = margin

    def _harder(self, similarities: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        before, multiple = torch.ones_like(similarities), similarities
        for _ in range(self.margin - 1):
            before, multiple = multiple, 2 * similarities * multiple - before
        angles = similarities.detach().clamp(-1, 1).acos()
        piece = (self.margin * angles / math.pi).floor().clamp(max=self.margin - 1)  # π belongs to the last piece
        return (1 - 2 * (piece % 2)) * multiple - 2 * piece


class CosFaceLoss(TemplateSoftmaxLoss):
    """CosFace (SEC, Eq. 19).

    cos θ_y is replaced by cos θ_y − m.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.
        scale: s > 0, the factor on the cosines.
        margin: m ≥ 0, subtracted from the cosine of the own class.
        sub_centres: K in [1, 64], the templates of a class, of which the one most similar to the row counts.
    """

    def __init__(
        self, num_classes: int, dim: int, scale: float = 64.0, margin: float = 0.35, sub_centres: int = 1
    ) -> None:
        super().__init__(num_classes, dim, scale, sub_centres)
        Range(ge=0).check("margin", margin)
        self.margin = margin

    def _harder(self, similarities: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        return similarities - self.margin


class ArcFaceLoss(TemplateSoftmaxLoss):
    """ArcFace (Deng et al. 2019).

    cos θ_y is replaced by cos(θ_y + m).

    Beyond θ_y + m = π it continues as −2 − cos(θ_y + m), which keeps falling and is smooth; the original would reward a
    larger angle there.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.
        scale: s > 0, the factor on the cosines.
        margin_radians: m in [0, π), added to the angle to the own class.
        sub_centres: K in [1, 64], the templates of a class, of which the one most similar to the row counts.
    """

    def __init__(
        self, num_classes: int, dim: int, scale: float = 64.0, margin_radians: float = 0.45, sub_centres: int = 1
    ) -> None:
        super().__init__(num_classes, dim, scale, sub_centres)
        check(0 <= margin_radians < math.pi, "margin_radians", margin_radians, "in [0, π)")
        self.margin_radians = margin_radians

    def _harder(self, similarities: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        return turned(similarities, torch.full_like(similarities, self.margin_radians))
