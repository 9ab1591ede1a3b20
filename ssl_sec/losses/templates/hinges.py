"""Hinges on the squared distances between rows and the agents of the classes.

With the template (agent) w_k of class k, the row's class y, d²_k = ‖f̂ − ŵ_k‖² = 2 − 2 cos θ_k:

    C-contrastive    d²_y + Σ_{k ≠ y} max(0, m − d²_k)                                       (NormFace, Eq. 10)
    C-triplet        Σ_{k ≠ y} max(0, m + d²_y − d²_k)                                       (NormFace, Eq. 11)
        with the center loss, d²_y of the rows that no hinge acts on is added         (NormFace, section 5.2)

Both are means over the rows.
"""

from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_sec.losses.base import Embeddings, Labels
from ssl_sec.losses.templates.base import RowTemplateLoss
from ssl_sec.losses.tiles import Places, Rows, RowValues, Templates, over_tiles, without_own
from ssl_sec.rules import Range


class AgentLoss(RowTemplateLoss):
    """A hinge on squared distances for each other class."""

    def __init__(self, num_classes: int, dim: int, margin: float) -> None:
        super().__init__(num_classes, dim)
        Range(ge=0).check("margin", margin)
        self.margin = margin

    def _terms(self, embeddings: Embeddings, labels: Labels, chosen: slice) -> Float[Tensor, " rows"]:
        compared = self._compare(embeddings[chosen], labels[chosen])
        hinges = over_tiles(self._sum_of_hinges, *compared).sum(1)
        if self._parts is not None:
            hinges = self._parts.sum(hinges)
        return hinges + self._pull(compared.own, hinges)

    def _pull(self, own: Float[Tensor, " rows"], hinges: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """The term of the own class, added to the sums of hinges."""
        return torch.zeros_like(own)

    def _sum_of_hinges(self, rows: Rows, templates: Templates, places: Places, own: RowValues) -> RowValues:
        squares = 2 - 2 * rows @ self._of_templates(templates).T
        return without_own((self._bound(own).unsqueeze(1) - squares).clamp(min=0), places, 0.0).sum(1)

    @abstractmethod
    def _bound(self, own: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """The squared distance beyond which another class contributes nothing."""


class CContrastiveLoss(AgentLoss):
    """C-contrastive (NormFace, Eq. 10).

    d²_y + Σ_{k ≠ y} max(0, m − d²_k) against the class agents.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.
        margin: m ≥ 0, the squared distance beyond which other classes are left alone.
    """

    def __init__(self, num_classes: int, dim: int, margin: float = 1.0) -> None:
        super().__init__(num_classes, dim, margin)

    def _pull(self, own: Float[Tensor, " rows"], hinges: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        return 2 - 2 * own

    def _bound(self, own: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        return torch.full_like(own, self.margin)


class CTripletLoss(AgentLoss):
    """C-triplet (NormFace, Eq. 11).

    Σ_{k ≠ y} max(0, m + d²_y − d²_k) against the class agents.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.
        margin: m ≥ 0, how much farther other classes must be than the own one, in squared distances.
        add_center: whether d²_y is the term of a row whose hinges are all 0, so that its agent always pulls it: the
            paper's C-triplet with center loss, whose centres are the agents (section 5.2).
    """

    def __init__(self, num_classes: int, dim: int, margin: float = 0.8, add_center: bool = False) -> None:
        super().__init__(num_classes, dim, margin)
        self.add_center = add_center

    def _pull(self, own: Float[Tensor, " rows"], hinges: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        return torch.where(hinges > 0, 0.0, 2 - 2 * own) if self.add_center else super()._pull(own, hinges)

    def _bound(self, own: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        return self.margin + 2 - 2 * own
