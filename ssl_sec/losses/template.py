"""Losses against one template a class: softmax and its margins, and the losses against class agents.

With the template w_k of class k, cos θ_k = <f̂, ŵ_k>, the row's class y, d²_k = ‖f̂ − ŵ_k‖² = 2 − 2 cos θ_k:

softmax          −log softmax of <f, w_k> at y
L2-softmax       −log softmax of s <f̂, w_k> at y                                       (Ranjan et al. 2017)
modified softmax −log softmax of <f, ŵ_k> at y                                            (Liu et al. 2017)
NormFace         −log softmax of s cos θ_k at y                                           (NormFace, Eq. 6)
SphereFace       the same, cos θ_y replaced by (−1)^j cos(m θ_y) − 2j, j = ⌊m θ_y / π⌋   (Liu et al. 2017)
CosFace          the same, cos θ_y replaced by cos θ_y − m                                   (SEC, Eq. 19)
ArcFace          the same, cos θ_y replaced by cos(θ_y + m)                              (Deng et al. 2019)
C-contrastive    d²_y + Σ_{k ≠ y} max(0, m − d²_k)                                       (NormFace, Eq. 10)
C-triplet        Σ_{k ≠ y} max(0, m + d²_y − d²_k)                                       (NormFace, Eq. 11)
center           ½ ‖f − μ_y‖², on raw rows, the centres μ moved by SFT's Eq. 9           (Wen et al. 2016)

All are means over the rows. The templates may be shared out among workers: each then has the similarities of all
rows to its own classes, and what they put together is a few numbers a row.
"""

import math
from abc import abstractmethod
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ssl_sec.losses.base import Loss, require
from ssl_sec.losses.centres import move_centres, snapshot
from ssl_sec.losses.class_tiles import over_tiles, without_own
from ssl_sec.losses.classes import can_look
from ssl_sec.losses.geometry import directions, in_full_precision, root
from ssl_sec.settings import Range

# Of the templates at the start.
TEMPLATE_STD = 0.01


def normalized_softmax_lower_bound(num_classes: int, squared_norm: float) -> float:
    """The least softmax loss of features and templates of one norm ℓ (NormFace, Proposition 2).

    log(1 + (n − 1) exp(−ℓ² n / (n − 1))), reached when every feature is its class's template and the templates
    are spread evenly.

    Args:
        num_classes: n ≥ 2.
        squared_norm: ℓ², the scale s of normalised features and templates.
    """
    require(num_classes >= 2, "num_classes", num_classes, "≥ 2")
    return math.log1p((num_classes - 1) * math.exp(-squared_norm * num_classes / (num_classes - 1)))


class _ClassLoss(Loss):
    """A mean over rows of terms that compare a row with what stands for the classes."""

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__()
        require(num_classes >= 2, "num_classes", num_classes, "≥ 2")
        require(dim >= 1, "dim", dim, "≥ 1")
        self.num_classes = num_classes
        self.dim = dim

    def _share(
        self, embeddings: Float[Tensor, "batch dim"], labels: Int64[Tensor, " batch"], anchors: slice
    ) -> Float[Tensor, ""]:
        if embeddings.shape[1] != self.dim or len(labels) == 0:
            raise ValueError(
                f"{type(self).__name__} needs rows of dim {self.dim}: the batch is {list(embeddings.shape)}"
            )
        if can_look(labels) and ((outside := (labels < 0) | (labels >= self.num_classes)).any()):
            raise ValueError(
                f"{type(self).__name__} has {self.num_classes} classes: "
                f"found label {int(labels[outside][0])}, must be in [0, {self.num_classes - 1}]"
            )
        return self._terms_of(embeddings, labels, anchors).sum() / len(labels)

    @abstractmethod
    def _terms_of(
        self, embeddings: Float[Tensor, "batch dim"], labels: Int64[Tensor, " batch"], anchors: slice
    ) -> Float[Tensor, " anchors"]:
        """The term of each anchor."""


@runtime_checkable
class ClassParts(Protocol):
    """What workers that hold the templates of different classes put together."""

    def sum(self, values: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """The elementwise sum over the workers, with gradients."""
        ...

    def highest(self, values: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """The elementwise maximum over the workers, without gradients."""
        ...


class Compared(NamedTuple):
    """Rows and the templates held here.

    Attributes:
        rows: what stands for the rows in a similarity.
        templates: those held here, as they are.
        places: where among these a row's own template would be; it is not here if that is out of their range.
        own: similarity of each row to its own template, wherever that is.
    """

    rows: Float[Tensor, "rows dim"]
    templates: Float[Tensor, "held dim"]
    places: Int64[Tensor, " rows"]
    own: Float[Tensor, " rows"]


class TemplateLoss(_ClassLoss):
    """A loss with learned templates: of all classes, or of some while other workers hold the rest.

    Attributes:
        weight: the templates, [held classes, dim].
        first_class: the class of the first of them.
    """

    weight: nn.Parameter

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__(num_classes, dim)
        self.weight = nn.Parameter(torch.empty(num_classes, dim).normal_(std=TEMPLATE_STD))
        self.first_class = 0
        self._parts: ClassParts | None = None

    def hold(self, first_class: int, templates: Float[Tensor, "held dim"], parts: ClassParts | None) -> None:
        """Replaces the templates, by those of some classes if there are `parts`.

        Args:
            first_class: of those held here; the workers' ranges follow each other.
            templates: of the classes from there on, at least one.
            parts: puts the workers' parts together; None where all classes are here.
        """
        self.first_class = first_class
        self.weight = nn.Parameter(templates)
        self._parts = parts

    @property
    def holds_all(self) -> bool:
        """Whether the templates of all classes are here."""
        return self._parts is None

    def _terms_of(
        self, embeddings: Float[Tensor, "batch dim"], labels: Int64[Tensor, " batch"], anchors: slice
    ) -> Float[Tensor, " anchors"]:
        if self._parts is None:
            return self._terms(embeddings[anchors], labels[anchors])
        # A worker has every row's part of its own classes, whichever rows are its anchors.
        return self._terms(embeddings, labels)[anchors]

    def _terms(self, embeddings: Float[Tensor, "rows dim"], labels: Int64[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        rows, templates = self._of_rows(embeddings), in_full_precision(self.weight).to(embeddings.dtype)
        places = labels - self.first_class
        held = (places >= 0) & (places < len(templates))
        own_templates = self._of_templates(templates[places.clamp(0, len(templates) - 1)])
        own = torch.where(held, (rows * own_templates).sum(1), 0.0)
        if self._parts is not None:
            own = self._parts.sum(own)
        return self._term(Compared(rows, templates, places, own))

    def _of_rows(self, embeddings: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """What stands for the rows in a similarity."""
        return directions(embeddings)

    def _of_templates(self, templates: Float[Tensor, "some dim"]) -> Float[Tensor, "some dim"]:
        """What stands for the templates in a similarity."""
        return directions(templates)

    @abstractmethod
    def _term(self, compared: Compared) -> Float[Tensor, " rows"]:
        """The term of each row."""


class _SoftmaxLoss(TemplateLoss):
    """−log softmax of logits at the own class, log(1 + Σ_{k ≠ y} exp(z_k − z_y)), with z = s · similarity."""

    scale: float | nn.Parameter

    def __init__(self, num_classes: int, dim: int, scale: float = 1.0) -> None:
        super().__init__(num_classes, dim)
        Range(gt=0).check("scale", scale)
        self.scale = scale

    def _term(self, compared: Compared) -> Float[Tensor, " rows"]:
        scaled = compared._replace(rows=self.scale * compared.rows)
        others = over_tiles(self._log_sum_exp, *scaled).logsumexp(1)
        if self._parts is not None:
            highest = self._parts.highest(others)
            others = self._parts.sum((others - highest).exp()).log() + highest
        excess = others - self.scale * self._harder(compared.own)
        return torch.logaddexp(excess, torch.zeros_like(excess))

    def _harder(self, similarities: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """What stands for the similarity to the own template."""
        return similarities

    def _log_sum_exp(
        self,
        rows: Float[Tensor, "rows dim"],
        templates: Float[Tensor, "some dim"],
        places: Int64[Tensor, " rows"],
        own: Float[Tensor, " rows"],
    ) -> Float[Tensor, " rows"]:
        logits = rows @ self._of_templates(templates).T
        # Not −∞: a tile that holds the own class alone would have no gradient.
        return without_own(logits, places, torch.finfo(logits.dtype).min / 2).logsumexp(1)


class SoftmaxLoss(_SoftmaxLoss):
    """Softmax on raw rows.

    Cross-entropy of the inner products with the templates, no bias.

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
    """

    _shown = ("num_classes", "dim")

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__(num_classes, dim)

    def _of_rows(self, embeddings: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        return embeddings

    def _of_templates(self, templates: Float[Tensor, "some dim"]) -> Float[Tensor, "some dim"]:
        return templates


class L2SoftmaxLoss(_SoftmaxLoss):
    """L2-softmax (Ranjan et al. 2017).

    Cross-entropy of s <f̂, w_k>: features on a sphere of radius s, free templates (Ranjan et al. 2017).

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
        scale: s > 0, the radius that the features are scaled to.
    """

    _shown = ("num_classes", "dim", "scale")

    def __init__(self, num_classes: int, dim: int, scale: float) -> None:
        super().__init__(num_classes, dim, scale)

    def _of_templates(self, templates: Float[Tensor, "some dim"]) -> Float[Tensor, "some dim"]:
        return templates


class ModifiedSoftmaxLoss(_SoftmaxLoss):
    """Modified softmax (Liu et al. 2017).

    Cross-entropy of <f, ŵ_k>: templates of length 1, free features (SphereFace's modified softmax; Liu et al. 2017).

    A row's own norm is its scale.

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
    """

    _shown = ("num_classes", "dim")

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__(num_classes, dim)

    def _of_rows(self, embeddings: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        return embeddings


class NormFaceLoss(_SoftmaxLoss):
    """NormFace (Eq. 6).

    Cross-entropy of s cos θ_k (NormFace, Eq. 6).

    A learned scale starts at the least s for which Proposition 2's bound is no more than `reachable_loss`, so that
    the loss is not trapped above it.

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
        scale: s > 0, which multiplies the cosines; None learns it.
        reachable_loss: a learned s starts where the bound of Prop. 2 is this, > 0.
    """

    _shown = ("num_classes", "dim", "scale")

    def __init__(self, num_classes: int, dim: int, scale: float | None = None, reachable_loss: float = 1e-3) -> None:
        require(scale is None or scale > 0, "scale", scale, "> 0, or None to learn it")
        super().__init__(num_classes, dim, 1.0 if scale is None else scale)
        largest = math.log(num_classes)
        require(0 < reachable_loss < largest, "reachable_loss", reachable_loss, f"in (0, {largest:.4g})")
        if scale is None:
            # The bound, solved for s.
            start = (num_classes - 1) / num_classes * math.log((num_classes - 1) / math.expm1(reachable_loss))
            self.scale = nn.Parameter(torch.tensor(start, device="cpu"))

    def lower_bound(self) -> float:
        """The least that the loss can be at its scale (Proposition 2)."""
        return normalized_softmax_lower_bound(self.num_classes, self.current_scale)

    @property
    def current_scale(self) -> float:
        """s, learned or not; a GPU is waited for."""
        return self.scale.detach().item() if isinstance(self.scale, Tensor) else self.scale

    def extra_repr(self) -> str:
        """The values that define the loss."""
        scale = self.scale if isinstance(self.scale, float | int) else "learned"
        return f"num_classes={self.num_classes}, dim={self.dim}, scale={scale}"


class _MarginLoss(_SoftmaxLoss):
    """Cross-entropy of s cos θ_k, with the own class's cosine made harder."""

    _shown = ("num_classes", "dim", "scale", "margin")

    @abstractmethod
    def _harder(self, similarities: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """What stands for cos θ_y."""


class SphereFaceLoss(_MarginLoss):
    """SphereFace (Liu et al. 2017).

    cos θ_y is replaced by ψ(θ_y) = (−1)^j cos(m θ_y) − 2j, j = ⌊m θ_y / π⌋, which falls with θ_y.

    cos(m θ) is Chebyshev's polynomial of cos θ, so that the gradient is bounded at θ = 0 and π too.

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
        scale: s > 0, which multiplies the cosines.
        margin: m ≥ 1, a whole number that multiplies the angle to the own class.
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
        piece = (self.margin * angles / math.pi).floor()
        return (1 - 2 * (piece % 2)) * multiple - 2 * piece


class CosFaceLoss(_MarginLoss):
    """CosFace (SEC, Eq. 19).

    cos θ_y is replaced by cos θ_y − m (SEC, Eq. 19).

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
        scale: s > 0, which multiplies the cosines.
        margin: m ≥ 0, taken from the cosine of the own class.
    """

    def __init__(self, num_classes: int, dim: int, scale: float = 64.0, margin: float = 0.35) -> None:
        super().__init__(num_classes, dim, scale)
        Range(ge=0).check("margin", margin)
        self.margin = margin

    def _harder(self, similarities: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        return similarities - self.margin


class ArcFaceLoss(_MarginLoss):
    """ArcFace (Deng et al. 2019).

    cos θ_y is replaced by cos(θ_y + m) (Deng et al. 2019).

    Past θ_y + m = π it goes on as −2 − cos(θ_y + m), which falls on, with neither a jump nor a kink; there the
    original would reward a larger angle.

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
        scale: s > 0, which multiplies the cosines.
        margin_radians: m in [0, π), added to the angle to the own class.
    """

    _shown = ("num_classes", "dim", "scale", "margin_radians")

    def __init__(self, num_classes: int, dim: int, scale: float = 64.0, margin_radians: float = 0.45) -> None:
        super().__init__(num_classes, dim, scale)
        require(0 <= margin_radians < math.pi, "margin_radians", margin_radians, "in [0, π)")
        self.margin_radians = margin_radians

    def _harder(self, similarities: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        sines = root(1 - similarities.square())
        shifted = similarities * math.cos(self.margin_radians) - sines * math.sin(self.margin_radians)
        past = similarities < -math.cos(self.margin_radians)
        return torch.where(past, -2 - shifted, shifted)


class _AgentLoss(TemplateLoss):
    """A hinge for each other class, of squared distances."""

    _shown = ("num_classes", "dim", "margin")

    def __init__(self, num_classes: int, dim: int, margin: float) -> None:
        super().__init__(num_classes, dim)
        Range(ge=0).check("margin", margin)
        self.margin = margin

    def _term(self, compared: Compared) -> Float[Tensor, " rows"]:
        hinges = over_tiles(self._sum_of_hinges, *compared).sum(1)
        if self._parts is not None:
            hinges = self._parts.sum(hinges)
        return hinges + self._pull(compared.own)

    def _pull(self, own: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """What the own class costs beside the hinges."""
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
        """The squared distance from which on another class costs nothing."""


class CContrastiveLoss(_AgentLoss):
    """C-contrastive (NormFace, Eq. 10).

    d²_y + Σ_{k ≠ y} max(0, m − d²_k) against the class agents (NormFace, Eq. 10).

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
        margin: m ≥ 0, a squared distance beyond which other classes are left alone.
    """

    def __init__(self, num_classes: int, dim: int, margin: float = 1.0) -> None:
        super().__init__(num_classes, dim, margin)

    def _pull(self, own: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        return 2 - 2 * own

    def _bound(self, own: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        return torch.full_like(own, self.margin)


class CTripletLoss(_AgentLoss):
    """C-triplet (NormFace, Eq. 11).

    Σ_{k ≠ y} max(0, m + d²_y − d²_k) against the class agents (NormFace, Eq. 11).

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
        margin: m ≥ 0, by which other classes must be farther than the own one, in squared distances.
    """

    def __init__(self, num_classes: int, dim: int, margin: float = 0.8) -> None:
        super().__init__(num_classes, dim, margin)

    def _bound(self, own: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        return self.margin + 2 - 2 * own


class CenterLoss(_ClassLoss):
    """Center loss (Wen et al. 2016), the centres moved by SFT's Eq. 9.

    ½ ‖f − μ_y‖² on raw rows (Wen et al. 2016); the centres move by SFT's Eq. 9, after they were used.

    In training mode a call moves the centres, from the whole batch whatever the anchors are.

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
    """

    _shown = ("num_classes", "dim")
    centres: Tensor

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__(num_classes, dim)
        self.register_buffer("centres", torch.zeros(num_classes, dim))

    def _share(
        self, embeddings: Float[Tensor, "batch dim"], labels: Int64[Tensor, " batch"], anchors: slice
    ) -> Float[Tensor, ""]:
        share = super()._share(embeddings, labels, anchors)
        if self.training:
            move_centres(self.centres, embeddings, labels)
        return share

    def _terms_of(
        self, embeddings: Float[Tensor, "batch dim"], labels: Int64[Tensor, " batch"], anchors: slice
    ) -> Float[Tensor, " anchors"]:
        return (embeddings[anchors] - snapshot(self.centres[labels[anchors]])).square().sum(1) / 2
