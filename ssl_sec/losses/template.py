"""Losses against a representative of each class: learned templates or agents, or centres that follow the batches.

With the template w_k of class k, cos θ_k = ⟨f̂, ŵ_k⟩, the row's class y, d²_k = ‖f̂ − ŵ_k‖² = 2 − 2 cos θ_k:

    C-contrastive    d²_y + Σ_{k ≠ y} max(0, m − d²_k)                                       (NormFace, Eq. 10)
    C-triplet        Σ_{k ≠ y} max(0, m + d²_y − d²_k)                                       (NormFace, Eq. 11)
        with the center loss, d²_y of the rows that no hinge acts on is added         (NormFace, section 5.2)
    center           ½ ‖f − μ_y‖², on raw rows, the centres μ updated by SFT's Eq. 9         (Wen et al. 2016)

All are means over the rows, but for one that compares each template, a proxy, with the rows of the batch:

    Proxy-Anchor     the mean over the classes of the batch of log(1 + Σ_{i: y_i = k} exp(−α (cos θ_ik − δ))), plus that
                     over all classes of log(1 + Σ_{i: y_i ≠ k} exp(α (cos θ_ik + δ)))        (Kim et al. 2020, Eq. 4)

The templates may be sharded over workers: each then has the similarities of all rows to
its own classes, and the workers combine a few numbers for each row.
"""

import math
from abc import abstractmethod
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from ssl_sec.losses.base import Embeddings, Labels, Loss, Scalar, log_one_plus_sum_exp, require_classes
from ssl_sec.losses.centres import move_centres, snapshot
from ssl_sec.losses.classes import Classes, classes_of, sum_rows, take_rows
from ssl_sec.losses.geometry import directions, in_full_precision
from ssl_sec.losses.tiles import over_tiles, without_own
from ssl_sec.settings import Range, check

# Standard deviation of the initial templates.
TEMPLATE_STD = 0.01


class _ClassLoss(Loss):
    """A loss that compares rows with the representatives of the classes."""

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__()
        check(num_classes >= 2, "num_classes", num_classes, "≥ 2")
        check(dim >= 1, "dim", dim, "≥ 1")
        self.num_classes = num_classes
        self.dim = dim

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        if embeddings.shape[1] != self.dim or len(labels) == 0:
            raise ValueError(
                f"{type(self).__name__} needs rows of dim {self.dim}: the batch is {list(embeddings.shape)}"
            )
        require_classes(type(self).__name__, labels, self.num_classes)
        return self._share_of(embeddings, labels, anchors)

    def compares(self, labels: Labels) -> Bool[Tensor, ""]:
        """Whether there is a row: every class has something to compare it with."""
        return labels.new_full((), len(labels) > 0, dtype=torch.bool)

    @abstractmethod
    def _share_of(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        """The share of the anchors, whose dimensions and labels are right."""


@runtime_checkable
class ClassParts(Protocol):
    """Combines the values of workers that hold the templates of different classes."""

    def sum(self, values: Float[Tensor, "batch *more"]) -> Float[Tensor, "batch *more"]:
        """The elementwise sum over the workers, with gradients."""
        ...

    def highest(self, values: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """The elementwise maximum over the workers, without gradients."""
        ...


class Compared(NamedTuple):
    """Rows and the templates held by this worker.

    Attributes:
        rows: the rows, as similarities use them.
        templates: templates held by this worker, as stored.
        places: index of each row's own template among these; out of range if another worker holds it.
        own: similarity of each row to its own template, whichever worker holds it.
    """

    rows: Float[Tensor, "rows dim"]
    templates: Float[Tensor, "held dim"]
    places: Int64[Tensor, " rows"]
    own: Float[Tensor, " rows"]


class TemplateLoss(_ClassLoss):
    """A loss with learned templates of all classes, or of some classes while other workers hold the rest.

    Attributes:
        weight: the templates, [held classes, dim].
        first_class: class of the first template.
        initial_std: standard deviation of the initial templates.
    """

    weight: nn.Parameter

    def __init__(self, num_classes: int, dim: int, initial_std: float = TEMPLATE_STD) -> None:
        super().__init__(num_classes, dim)
        self.initial_std = initial_std
        self.weight = nn.Parameter(torch.empty(num_classes, dim).normal_(std=initial_std))
        self.first_class = 0
        self._parts: ClassParts | None = None

    def hold(self, first_class: int, templates: Float[Tensor, "held dim"], parts: ClassParts | None) -> None:
        """Replaces the templates; with `parts`, by those of a range of classes.

        Args:
            first_class: class of the first template held here; the workers' ranges are consecutive.
            templates: templates of the classes from `first_class` on, at least one.
            parts: combines the workers' parts; None if all classes are here.
        """
        self.first_class = first_class
        self.weight = nn.Parameter(templates)
        self._parts = parts

    @property
    def holds_all(self) -> bool:
        """Whether the templates of all classes are here."""
        return self._parts is None

    @torch.no_grad()
    def recognised(self, embeddings: Embeddings, labels: Labels) -> Bool[Tensor, " batch"]:
        """Whether a row is more similar to its own class's template than to any other; a tie does not count.

        Args:
            embeddings: raw rows, the same on every worker.
            labels: 0 ≤ label < num_classes.
        """
        compared = self._compare(in_full_precision(embeddings), labels)
        others = over_tiles(self._highest_other, *compared).amax(1)
        return compared.own > (others if self._parts is None else self._parts.highest(others))

    def _highest_other(
        self,
        rows: Float[Tensor, "rows dim"],
        templates: Float[Tensor, "some dim"],
        places: Int64[Tensor, " rows"],
        own: Float[Tensor, " rows"],
    ) -> Float[Tensor, " rows"]:
        return without_own(rows @ self._of_templates(templates).T, places, -torch.inf).amax(1)

    def _compare(self, embeddings: Float[Tensor, "rows dim"], labels: Int64[Tensor, " rows"]) -> Compared:
        rows, templates = self._of_rows(embeddings), in_full_precision(self.weight).to(embeddings.dtype)
        places, held = self._places(labels)
        own_templates = self._of_templates(take_rows(templates, places.clamp(0, len(templates) - 1)))
        own = torch.where(held, (rows * own_templates).sum(1), 0.0)
        if self._parts is not None:
            own = self._parts.sum(own)
        return Compared(rows, templates, places, own)

    @torch.no_grad()
    def templates_of(self, labels: Labels) -> Float[Tensor, "batch dim"]:
        """The template of each row's class, whichever worker holds it; every worker must ask for the same labels."""
        places, held = self._places(labels)
        templates = self.weight[places.clamp(0, len(self.weight) - 1)]
        templates = templates.masked_fill(~held.unsqueeze(1), 0.0)
        return templates if self._parts is None else self._parts.sum(templates)

    def _places(self, labels: Int64[Tensor, " rows"]) -> tuple[Int64[Tensor, " rows"], Bool[Tensor, " rows"]]:
        """Index of each row's template among those held here, and whether it is held here."""
        places = labels - self.first_class
        return places, (places >= 0) & (places < len(self.weight))

    def _of_rows(self, embeddings: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """The rows, as similarities use them."""
        return directions(embeddings)

    def _of_templates(self, templates: Float[Tensor, "some dim"]) -> Float[Tensor, "some dim"]:
        """The templates, as similarities use them."""
        return directions(templates)


class RowTemplateLoss(TemplateLoss):
    """A mean over the rows of terms that compare a row with the templates."""

    def _share_of(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        if self._parts is None:
            terms = self._term(self._compare(embeddings[anchors], labels[anchors]))
        else:
            # A worker computes the part of its own classes for every row, not only for its anchors.
            terms = self._term(self._compare(embeddings, labels))[anchors]
        return terms.sum() / len(labels)

    @abstractmethod
    def _term(self, compared: Compared) -> Float[Tensor, " rows"]:
        """The term of each row."""


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

    def _sum_of_pushes(
        self,
        rows: Float[Tensor, "rows dim"],
        templates: Float[Tensor, "some dim"],
        places: Int64[Tensor, " rows"],
        own: Float[Tensor, " rows"],
    ) -> Scalar:
        exponents = self.scale * (rows @ self._of_templates(templates).T + self.margin)
        is_other = places.unsqueeze(1) != torch.arange(len(templates), device=places.device)
        return log_one_plus_sum_exp(exponents.T, is_other.T).sum()


class AgentLoss(RowTemplateLoss):
    """A hinge on squared distances for each other class."""

    def __init__(self, num_classes: int, dim: int, margin: float) -> None:
        super().__init__(num_classes, dim)
        Range(ge=0).check("margin", margin)
        self.margin = margin

    def _term(self, compared: Compared) -> Float[Tensor, " rows"]:
        hinges = over_tiles(self._sum_of_hinges, *compared).sum(1)
        if self._parts is not None:
            hinges = self._parts.sum(hinges)
        return hinges + self._pull(compared.own, hinges)

    def _pull(self, own: Float[Tensor, " rows"], hinges: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """The term of the own class, added to the sums of hinges."""
        return torch.zeros_like(own)

    def _sum_of_hinges(
        self,
        rows: Float[Tensor, "rows dim"],
        templates: Float[Tensor, "some dim"],
        places: Int64[Tensor, " rows"],
        own: Float[Tensor, " rows"],
    ) -> Float[Tensor, " rows"]:
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


class CenterLoss(_ClassLoss):
    """Center loss (Wen et al. 2016), moved by SFT's Eq. 9.

    ½ ‖f − μ_y‖² on raw rows; the centres move by SFT's Eq. 9, after their use.

    In training mode a call updates the centres, from the whole batch, whatever the anchors.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.

    Attributes:
        moves: whether a call in training mode moves the centres; False for rows that are not a batch's own.
    """

    centres: Tensor

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__(num_classes, dim)
        self.register_buffer("centres", torch.zeros(num_classes, dim))
        self.moves = True

    def _share_of(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        terms = (embeddings[anchors] - snapshot(self.centres[labels[anchors]])).square().sum(1) / 2
        if self.training and self.moves:
            move_centres(self.centres, embeddings, labels)
        return terms.sum() / len(labels)
