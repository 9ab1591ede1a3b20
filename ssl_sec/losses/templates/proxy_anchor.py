"""Proxy-Anchor compares each template, a proxy, with the rows of the batch (Kim et al. 2020)."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_sec.losses.base import Embeddings, Labels, Scalar, log_one_plus_sum_exp
from ssl_sec.losses.classes import Classes, classes_of, sum_rows
from ssl_sec.losses.templates.base import TemplateLoss
from ssl_sec.losses.tiles import Places, Rows, RowValues, Templates, over_tiles
from ssl_sec.rules import Range


class ProxyAnchorLoss(TemplateLoss):
    """Proxy-Anchor (Kim et al. 2020, Eq. 4).

    The mean over the classes of the batch of log(1 + Σ_{i: y_i = k} exp(−α (cos θ_ik − δ))), plus that over all classes
    of log(1 + Σ_{i: y_i ≠ k} exp(α (cos θ_ik + δ))).

    The paper trains the proxies at 100 times the learning rate of the network.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.
        scale: α > 0, the factor of the cosines.
        margin: δ ≥ 0; cosines are pulled above δ for the own class, and pushed below −δ for the others.
    """

    def __init__(self, num_classes: int, dim: int, scale: float = 32.0, margin: float = 0.1) -> None:
        # As the authors' code draws them, by He's rule for as many outputs as there are classes.
        super().__init__(num_classes, dim, initial_std=math.sqrt(2 / max(1, num_classes)))
        Range(gt=0).check("scale", scale)
        Range(ge=0).check("margin", margin)
        self.scale = scale
        self.margin = margin

    def _share_of(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        compared = self._compare(embeddings, labels)
        if self._parts is None:  # the anchors' share of the classes
            own = range(len(labels))[anchors]
            first, end = (place * self.num_classes // len(labels) for place in (own.start, own.stop))
            compared = compared._replace(templates=compared.templates[first:end], places=compared.places - first)
        pushes = over_tiles(self._sum_of_pushes, *compared).sum() / self.num_classes
        return self._pulls(compared.own, classes_of(labels))[anchors].sum() + pushes

    def _pulls(self, own: Float[Tensor, " batch"], classes: Classes) -> Float[Tensor, " batch"]:
        """The terms of the batch's classes over their number, each in the place of its first row, 0 in the others."""
        exponents, number = self.scale * (self.margin - own), classes.number
        highest = torch.zeros_like(own).scatter_reduce(0, number, exponents.detach(), "amax")
        sums = sum_rows((exponents - highest[number]).exp().unsqueeze(1), number, len(own)).squeeze(1)
        is_first = classes.occurrence == 0
        terms = torch.where(is_first, ((-highest).exp() + sums).log()[number] + highest[number], 0.0)
        return terms / is_first.sum()

    def _sum_of_pushes(self, rows: Rows, templates: Templates, places: Places, own: RowValues) -> Scalar:
        exponents = self.scale * (rows @ self._of_templates(templates).T + self.margin)
        is_other = places.unsqueeze(1) != torch.arange(len(templates), device=places.device)
        return log_one_plus_sum_exp(exponents.T, is_other.T).sum()
