"""What losses with something for each class share: templates of the classes, also sharded over workers.

A worker that holds the templates of some classes has the similarities of all rows to its own classes, and the workers
combine a few numbers for each row.
"""

from abc import abstractmethod
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from ssl_sec.losses.base import Embeddings, Labels, Loss, Scalar, require_classes
from ssl_sec.losses.classes import take_rows
from ssl_sec.losses.geometry import directions, in_full_precision
from ssl_sec.losses.tiles import Places, Rows, RowValues, Templates, over_tiles, without_own
from ssl_sec.rules import Range, check

# Standard deviation of the initial templates.
TEMPLATE_STD = 0.01


class ClassLoss(Loss):
    """A loss that compares rows with the representatives of the classes."""

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__()
        check(num_classes >= 2, "num_classes", num_classes, "≥ 2")
        check(dim >= 1, "dim", dim, "≥ 1")
        self.num_classes = num_classes
        self.dim = dim

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        if embeddings.shape[1] != self.dim or len(labels) == 0:
            needed = f"one row or more of dim {self.dim}"
            raise ValueError(f"{type(self).__name__} needs {needed}: the batch is {list(embeddings.shape)}")
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
    templates: Float[Tensor, "held columns"]
    places: Int64[Tensor, " rows"]
    own: Float[Tensor, " rows"]


def similarities(
    rows: Float[Tensor, "rows dim"], templates: Float[Tensor, "some columns"]
) -> Float[Tensor, "rows some"]:
    """The inner product of each row with each template; of a template with several sub-centres, the highest.

    Args:
        rows: the rows, as similarities use them.
        templates: the templates, likewise: dim columns for each sub-centre.
    """
    products = rows @ templates.reshape(-1, rows.shape[1]).T
    sub_centres = templates.shape[1] // rows.shape[1]
    return products if sub_centres == 1 else products.reshape(-1, len(templates), sub_centres).amax(2)


class TemplateLoss(ClassLoss):
    """A loss with learned templates of all classes, or of some classes while other workers hold the rest.

    Attributes:
        weight: the templates, [held classes, sub-centres · dim].
        first_class: class of the first template.
        initial_std: standard deviation of the initial templates.
        sub_centres: K in [1, 64], the parts of a template, of which a row is compared with the most similar one.
    """

    weight: nn.Parameter

    def __init__(self, num_classes: int, dim: int, initial_std: float = TEMPLATE_STD, sub_centres: int = 1) -> None:
        super().__init__(num_classes, dim)
        Range(ge=1, le=64).check("sub_centres", sub_centres)
        self.initial_std = initial_std
        self.sub_centres = sub_centres
        self.weight = nn.Parameter(torch.empty(num_classes, sub_centres * dim).normal_(std=initial_std))
        self.first_class = 0
        self._parts: ClassParts | None = None

    def hold(self, first_class: int, templates: Float[Tensor, "held columns"], parts: ClassParts | None) -> None:
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

    def _highest_other(self, rows: Rows, templates: Templates, places: Places, own: RowValues) -> RowValues:
        return without_own(similarities(rows, self._of_templates(templates)), places, -torch.inf).amax(1)

    def _compare(self, embeddings: Float[Tensor, "rows dim"], labels: Int64[Tensor, " rows"]) -> Compared:
        rows, templates = self._of_rows(embeddings), self.weight.to(embeddings.dtype)
        places, held = self._places(labels)
        own_templates = self._of_templates(take_rows(templates, places.clamp(0, len(templates) - 1)))
        own = (rows.unsqueeze(1) * own_templates.reshape(-1, self.sub_centres, rows.shape[1])).sum(2).amax(1)
        own = torch.where(held, own, 0.0)
        if self._parts is not None:
            own = self._parts.sum(own)
        return Compared(rows, templates, places, own)

    @torch.no_grad()
    def templates_of(self, labels: Labels) -> Float[Tensor, "batch columns"]:
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

    def _of_templates(self, templates: Float[Tensor, "some columns"]) -> Float[Tensor, "some columns"]:
        """The templates, as similarities use them."""
        return directions(templates.reshape(-1, self.dim)).reshape(templates.shape)


class RowTemplateLoss(TemplateLoss):
    """A mean over the rows of terms that compare a row with the templates."""

    def _share_of(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        if self._parts is None:
            terms = self._terms(embeddings, labels, anchors)
        else:
            # A worker computes the part of its own classes for every row, not only for its anchors.
            terms = self._terms(embeddings, labels, slice(None))[anchors]
        return terms.sum() / len(labels)

    @abstractmethod
    def _terms(self, embeddings: Embeddings, labels: Labels, chosen: slice) -> Float[Tensor, " rows"]:
        """The terms of the chosen rows of a batch."""
