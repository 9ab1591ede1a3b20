"""Losses against one template a class: softmax and its margins, and the losses against class agents.

With the template w_k of class k, cos θ_k = <f̂, ŵ_k>, the row's class y, d²_k = ‖f̂ − ŵ_k‖² = 2 − 2 cos θ_k:

softmax          −log softmax of <f, w_k> at y
L2-softmax       −log softmax of s <f̂, w_k> at y                                       (Ranjan et al. 2017)
NormFace         −log softmax of s cos θ_k at y                                           (NormFace, Eq. 6)
SphereFace       the same, cos θ_y replaced by (−1)^j cos(m θ_y) − 2j, j = ⌊m θ_y / π⌋   (Liu et al. 2017)
CosFace          the same, cos θ_y replaced by cos θ_y − m                                   (SEC, Eq. 19)
ArcFace          the same, cos θ_y replaced by cos(θ_y + m)                              (Deng et al. 2019)
C-contrastive    d²_y + Σ_{k ≠ y} max(0, m − d²_k)                                       (NormFace, Eq. 10)
C-triplet        Σ_{k ≠ y} max(0, m + d²_y − d²_k)                                       (NormFace, Eq. 11)
center           ½ ‖f − μ_y‖², on raw rows, the centres μ moved by SFT's Eq. 9           (Wen et al. 2016)

All are means over the rows.
"""

import math
from abc import abstractmethod

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from ssl_sec.losses.base import Loss, require
from ssl_sec.losses.centres import move_centres, snapshot
from ssl_sec.losses.classes import can_look
from ssl_sec.losses.geometry import directions, in_full_precision, root


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
        return self._terms(embeddings[anchors], labels[anchors]).sum() / len(labels)

    @abstractmethod
    def _terms(
        self, rows: Float[Tensor, "anchors dim"], labels: Int64[Tensor, " anchors"]
    ) -> Float[Tensor, " anchors"]:
        """The term of each anchor."""


class _TemplateLoss(_ClassLoss):
    """A loss with learned templates, the rows of `weight`."""

    weight: nn.Parameter

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__(num_classes, dim)
        self.weight = nn.Parameter(torch.empty(num_classes, dim).normal_(std=0.01))

    def _templates(self, like: Tensor) -> Float[Tensor, "classes dim"]:
        return in_full_precision(self.weight).to(like.dtype)


class SoftmaxLoss(_TemplateLoss):
    """Cross-entropy of the inner products with the templates, no bias.

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
    """

    _shown = ("num_classes", "dim")

    def _terms(
        self, rows: Float[Tensor, "anchors dim"], labels: Int64[Tensor, " anchors"]
    ) -> Float[Tensor, " anchors"]:
        return functional.cross_entropy(rows @ self._templates(rows).T, labels, reduction="none")


class L2SoftmaxLoss(_TemplateLoss):
    """Cross-entropy of s <f̂, w_k>: features on a sphere of radius s, free templates (Ranjan et al. 2017).

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
        scale: s > 0.
    """

    _shown = ("num_classes", "dim", "scale")

    def __init__(self, num_classes: int, dim: int, scale: float) -> None:
        super().__init__(num_classes, dim)
        require(scale > 0, "scale", scale, "> 0")
        self.scale = scale

    def _terms(
        self, rows: Float[Tensor, "anchors dim"], labels: Int64[Tensor, " anchors"]
    ) -> Float[Tensor, " anchors"]:
        logits = (self.scale * directions(rows)) @ self._templates(rows).T
        return functional.cross_entropy(logits, labels, reduction="none")


class NormFaceLoss(_TemplateLoss):
    """Cross-entropy of s cos θ_k (NormFace, Eq. 6).

    A learned scale starts at the least s for which Proposition 2's bound is no more than `reachable_loss`, so that
    the loss is not trapped above it.

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
        scale: s > 0; None learns it.
        reachable_loss: > 0, and below log n, the bound at s = 0; used where s is learned.
    """

    _shown = ("num_classes", "dim", "scale")

    def __init__(self, num_classes: int, dim: int, scale: float | None = None, reachable_loss: float = 1e-3) -> None:
        super().__init__(num_classes, dim)
        require(scale is None or scale > 0, "scale", scale, "> 0, or None to learn it")
        largest = math.log(num_classes)
        require(0 < reachable_loss < largest, "reachable_loss", reachable_loss, f"in (0, {largest:.4g})")
        self.scale: float | nn.Parameter
        if scale is None:
            # The bound, solved for s.
            start = (num_classes - 1) / num_classes * math.log((num_classes - 1) / math.expm1(reachable_loss))
            self.scale = nn.Parameter(torch.tensor(start))
        else:
            self.scale = scale

    def extra_repr(self) -> str:
        """The values that define the loss."""
        scale = self.scale if isinstance(self.scale, float | int) else "learned"
        return f"num_classes={self.num_classes}, dim={self.dim}, scale={scale}"

    def _terms(
        self, rows: Float[Tensor, "anchors dim"], labels: Int64[Tensor, " anchors"]
    ) -> Float[Tensor, " anchors"]:
        logits = self.scale * (directions(rows) @ directions(self._templates(rows)).T)
        return functional.cross_entropy(logits, labels, reduction="none")


class _MarginLoss(_TemplateLoss):
    """Cross-entropy of s cos θ_k, with the own class's cosine made harder."""

    _shown = ("num_classes", "dim", "scale", "margin")

    def __init__(self, num_classes: int, dim: int, scale: float) -> None:
        super().__init__(num_classes, dim)
        require(scale > 0, "scale", scale, "> 0")
        self.scale = scale

    def _terms(
        self, rows: Float[Tensor, "anchors dim"], labels: Int64[Tensor, " anchors"]
    ) -> Float[Tensor, " anchors"]:
        cosines = directions(rows) @ directions(self._templates(rows)).T
        own = labels.unsqueeze(1)
        logits = (self.scale * cosines).scatter(1, own, self.scale * self._harder(cosines.gather(1, own)))
        return functional.cross_entropy(logits, labels, reduction="none")

    @abstractmethod
    def _harder(self, cosines: Float[Tensor, "anchors 1"]) -> Float[Tensor, "anchors 1"]:
        """What stands for cos θ_y."""


class SphereFaceLoss(_MarginLoss):
    """cos θ_y is replaced by ψ(θ_y) = (−1)^j cos(m θ_y) − 2j, j = ⌊m θ_y / π⌋, which falls with θ_y.

    cos(m θ) is Chebyshev's polynomial of cos θ, so that the gradient is bounded at θ = 0 and π too.

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
        scale: s > 0.
        margin: m, a whole number ≥ 1.
    """

    def __init__(self, num_classes: int, dim: int, scale: float = 64.0, margin: int = 3) -> None:
        super().__init__(num_classes, dim, scale)
        require(margin >= 1, "margin", margin, "≥ 1")
        self.margin = margin

    def _harder(self, cosines: Float[Tensor, "anchors 1"]) -> Float[Tensor, "anchors 1"]:
        before, multiple = torch.ones_like(cosines), cosines
        for _ in range(self.margin - 1):
            before, multiple = multiple, 2 * cosines * multiple - before
        angles = cosines.detach().clamp(-1, 1).acos()
        piece = (self.margin * angles / math.pi).floor()
        return (1 - 2 * (piece % 2)) * multiple - 2 * piece


class CosFaceLoss(_MarginLoss):
    """cos θ_y is replaced by cos θ_y − m (SEC, Eq. 19).

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
        scale: s > 0.
        margin: m ≥ 0, in cosines.
    """

    def __init__(self, num_classes: int, dim: int, scale: float = 64.0, margin: float = 0.35) -> None:
        super().__init__(num_classes, dim, scale)
        require(margin >= 0, "margin", margin, "≥ 0")
        self.margin = margin

    def _harder(self, cosines: Float[Tensor, "anchors 1"]) -> Float[Tensor, "anchors 1"]:
        return cosines - self.margin


class ArcFaceLoss(_MarginLoss):
    """cos θ_y is replaced by cos(θ_y + m) (Deng et al. 2019).

    Past θ_y + m = π it goes on as −2 − cos(θ_y + m), which falls on, with neither a jump nor a kink; there the
    original would reward a larger angle.

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
        scale: s > 0.
        margin_radians: m, in [0, π).
    """

    _shown = ("num_classes", "dim", "scale", "margin_radians")

    def __init__(self, num_classes: int, dim: int, scale: float = 64.0, margin_radians: float = 0.45) -> None:
        super().__init__(num_classes, dim, scale)
        require(0 <= margin_radians < math.pi, "margin_radians", margin_radians, "in [0, π)")
        self.margin_radians = margin_radians

    def _harder(self, cosines: Float[Tensor, "anchors 1"]) -> Float[Tensor, "anchors 1"]:
        sines = root(1 - cosines.square())
        shifted = cosines * math.cos(self.margin_radians) - sines * math.sin(self.margin_radians)
        past = cosines < -math.cos(self.margin_radians)
        return torch.where(past, -2 - shifted, shifted)


class CContrastiveLoss(_TemplateLoss):
    """d²_y + Σ_{k ≠ y} max(0, m − d²_k) against the class agents (NormFace, Eq. 10).

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
        margin: m ≥ 0, of squared distances.
    """

    _shown = ("num_classes", "dim", "margin")

    def __init__(self, num_classes: int, dim: int, margin: float = 1.0) -> None:
        super().__init__(num_classes, dim)
        require(margin >= 0, "margin", margin, "≥ 0")
        self.margin = margin

    def _terms(
        self, rows: Float[Tensor, "anchors dim"], labels: Int64[Tensor, " anchors"]
    ) -> Float[Tensor, " anchors"]:
        squares = 2 - 2 * directions(rows) @ directions(self._templates(rows)).T
        own = labels.unsqueeze(1)
        hinges = (self.margin - squares).clamp(min=0).scatter(1, own, 0.0)
        return squares.gather(1, own).squeeze(1) + hinges.sum(1)


class CTripletLoss(_TemplateLoss):
    """Σ_{k ≠ y} max(0, m + d²_y − d²_k) against the class agents (NormFace, Eq. 11).

    Args:
        num_classes: n ≥ 2.
        dim: of the embeddings.
        margin: m ≥ 0, of squared distances.
    """

    _shown = ("num_classes", "dim", "margin")

    def __init__(self, num_classes: int, dim: int, margin: float = 0.8) -> None:
        super().__init__(num_classes, dim)
        require(margin >= 0, "margin", margin, "≥ 0")
        self.margin = margin

    def _terms(
        self, rows: Float[Tensor, "anchors dim"], labels: Int64[Tensor, " anchors"]
    ) -> Float[Tensor, " anchors"]:
        squares = 2 - 2 * directions(rows) @ directions(self._templates(rows)).T
        own = labels.unsqueeze(1)
        return (self.margin + squares.gather(1, own) - squares).clamp(min=0).scatter(1, own, 0.0).sum(1)


class CenterLoss(_ClassLoss):
    """½ ‖f − μ_y‖² on raw rows (Wen et al. 2016); the centres move by SFT's Eq. 9, after they were used.

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

    def _terms(
        self, rows: Float[Tensor, "anchors dim"], labels: Int64[Tensor, " anchors"]
    ) -> Float[Tensor, " anchors"]:
        return (rows - snapshot(self.centres[labels])).square().sum(1) / 2
