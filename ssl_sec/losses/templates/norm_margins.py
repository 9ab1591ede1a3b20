"""Softmax over the classes with a margin that depends on the row's norm, taken for the quality of the image.

Cross-entropies of s cos θ_k, as NormFace's, with cos θ_y replaced by

    MagFace          cos(θ_y + m(a)), a the norm clipped to [l_a, u_a], m(a) linear from l_m to u_m;
                     λ (1 / a + a / u_a²) is added                                           (Meng et al. 2021)
    AdaFace          cos(θ_y − m q) − (m + m q), q = h (‖f‖ − μ) / σ clipped to [−1, 1]        (Kim et al. 2022)

All are means over the rows. A spherical constraint has the opposite aim: it takes from norms what these losses read.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_sec.losses.averages import Averages
from ssl_sec.losses.base import Embeddings, Labels
from ssl_sec.losses.geometry import norms
from ssl_sec.losses.templates.margins import cosine_of_sum, turned
from ssl_sec.losses.templates.softmax import TemplateSoftmaxLoss
from ssl_sec.rules import Range, check

# Added to the deviation of the norms, as in the authors' code.
_LEAST_DEVIATION = 1e-3


class MagFaceLoss(TemplateSoftmaxLoss):
    """MagFace (Meng et al. 2021).

    cos θ_y is replaced by cos(θ_y + m(a)), where a is the row's norm, clipped, and m(a) rises with it in a line; the
    term λ (1 / a + a / u_a²) rewards longer rows. A row gets longer where its angle bears a larger margin.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.
        scale: s > 0, the factor on the cosines.
        least_norm: l_a > 0; shorter rows count as this long.
        greatest_norm: u_a > l_a; longer rows count as this long.
        least_margin_radians: l_m, the margin of the shortest rows, in [0, π).
        greatest_margin_radians: u_m, the margin of the longest rows, in [l_m, π).
        norm_weight: λ ≥ 0, the weight of the reward for longer rows.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        least_norm: float = 10.0,
        greatest_norm: float = 110.0,
        least_margin_radians: float = 0.45,
        greatest_margin_radians: float = 0.8,
        norm_weight: float = 35.0,
    ) -> None:
        super().__init__(num_classes, dim, scale)
        Range(gt=0).check("least_norm", least_norm)
        check(greatest_norm > least_norm, "greatest_norm", greatest_norm, f"> {least_norm:g}, the least norm")
        check(0 <= least_margin_radians < math.pi, "least_margin_radians", least_margin_radians, "in [0, π)")
        allowed = f"in [{least_margin_radians:g}, π), the least margin or more"
        in_range = least_margin_radians <= greatest_margin_radians < math.pi
        check(in_range, "greatest_margin_radians", greatest_margin_radians, allowed)
        Range(ge=0).check("norm_weight", norm_weight)
        self.least_norm = least_norm
        self.greatest_norm = greatest_norm
        self.least_margin_radians = least_margin_radians
        self.greatest_margin_radians = greatest_margin_radians
        self.norm_weight = norm_weight

    def _terms(self, embeddings: Embeddings, labels: Labels, chosen: slice) -> Float[Tensor, " rows"]:
        compared = self._compare(embeddings[chosen], labels[chosen])
        lengths = norms(embeddings[chosen]).clamp(self.least_norm, self.greatest_norm)
        place = (lengths - self.least_norm) / (self.greatest_norm - self.least_norm)
        radians = self.least_margin_radians + place * (self.greatest_margin_radians - self.least_margin_radians)
        of_norms = 1 / lengths + lengths / self.greatest_norm**2
        return self._cross_entropy(compared, turned(compared.own, radians), labels) + self.norm_weight * of_norms


class AdaFaceLoss(TemplateSoftmaxLoss):
    """AdaFace (Kim, Jain and Liu 2022).

    cos θ_y is replaced by cos(θ_y − m q) − (m + m q), with the quality q = h (‖f‖ − μ) / σ clipped to [−1, 1]. A row of
    mean norm has the margin of CosFace, one with q = −1 that of ArcFace, and one with q = 1 twice CosFace's with an
    angle that is reduced by m. No gradient passes through q.

    μ and σ are moving averages of the mean and the standard deviation of the norms of the global batch. They start with
    the first batch; in the authors' code they start at 20 and 100, and norms above 100 count as 100. In training mode a
    call moves them, by the whole batch, whatever the anchors.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.
        scale: s > 0, the factor on the cosines.
        margin: m in [0, π/2], the margin of rows of mean norm.
        concentration: h > 0; q is within ±h for two thirds of the rows if norms are normally distributed.
        rho: weight of a batch in μ and σ, in (0, 1].
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        margin: float = 0.4,
        concentration: float = 0.333,
        rho: float = 0.01,
    ) -> None:
        super().__init__(num_classes, dim, scale)
        check(0 <= margin <= math.pi / 2, "margin", margin, "in [0, π/2]")
        Range(gt=0).check("concentration", concentration)
        self.margin = margin
        self.concentration = concentration
        self.rho = rho
        self.averages = Averages(rho, "mean", "deviation")

    def _terms(self, embeddings: Embeddings, labels: Labels, chosen: slice) -> Float[Tensor, " rows"]:
        lengths = norms(embeddings.detach())
        found = lengths.double()
        deviation = found.std() if len(found) > 1 else torch.zeros_like(found[0])
        mean, deviation = (value.to(lengths.dtype) for value in self.averages.average(found.mean(), deviation))
        quality = (self.concentration * (lengths - mean) / (deviation + _LEAST_DEVIATION)).clamp(-1, 1)[chosen]
        compared = self._compare(embeddings[chosen], labels[chosen])
        shifted = _shifted(compared.own, -self.margin * quality)
        return self._cross_entropy(compared, shifted - self.margin * (1 + quality), labels)


def _shifted(cosines: Float[Tensor, " rows"], radians: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """cos(θ + g), with θ + g clipped to [0, π].

    Args:
        cosines: cos θ.
        radians: g of each row, in [−π/2, π/2].
    """
    further = cosine_of_sum(cosines, radians)
    further = torch.where((radians < 0) & (cosines > radians.cos()), 1.0, further)
    return torch.where((radians > 0) & (cosines < -radians.cos()), -1.0, further)
