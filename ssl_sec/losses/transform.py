"""The spherical feature transform: the variation of one class, transferred to another (Zhu, Bai and Wei 2020).

With the centre μ of a row's class and μ' of another, the row x becomes a row of that other class:

    rotate       A x, with the rotation A in the plane of μ and μ' that takes the direction of μ to that of μ'   (Eq. 4)
    translate    x + μ' − μ before normalisation, projected back onto the sphere: SFT-d                          (Eq. 2)
    ftl          μ' + P (x − μ), with P the projection onto the principal axes that hold 95 % of the energy of
                 the batch's x − μ: feature transfer learning, as Zhu et al. reproduce it      (Yin et al. 2019)

The loss becomes J(X) + λ J(X_gen)                                                                          (Eq. 10).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from jaxtyping import Bool, Float, Int64, Integer
from torch import Tensor, nn

from ssl_sec.losses.base import require_classes, require_labels
from ssl_sec.losses.centres import move_centres, pick_centres, snapshot
from ssl_sec.losses.geometry import directions, in_full_precision, norms
from ssl_sec.rules import Range, check
from ssl_sec.seeding import derived_seed, mix

Centres = Literal["mean", "random", "picked"]


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity; torch 2.11 hashes what a graph calls
class Rotation:
    """Rotations in planes, one for each row; the plane is spanned by the orthonormal `first` and `second`."""

    first: Float[Tensor, "*batch dim"]
    second: Float[Tensor, "*batch dim"]
    cosine: Float[Tensor, "*batch 1"]
    sine: Float[Tensor, "*batch 1"]

    def __call__(self, rows: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """A x of SFT's Eq. 4 for each row, in O(dim): the rows keep their norms."""
        along_first = (self.first * rows).sum(-1, keepdim=True)
        along_second = (self.second * rows).sum(-1, keepdim=True)
        turned_first = (self.cosine - 1) * along_first - self.sine * along_second
        turned_second = (self.cosine - 1) * along_second + self.sine * along_first
        return rows + turned_first * self.first + turned_second * self.second


def rotation(mean_from: Float[Tensor, "*batch dim"], mean_to: Float[Tensor, "*batch dim"]) -> Rotation:
    """The rotation in the plane of two means that takes the direction of one to that of the other (SFT, Eq. 4).

    Args:
        mean_from: μ_1, of any norm; if it or μ_2 is 0, nothing is rotated.
        mean_to: μ_2. If it is opposite to μ_1, the plane is not defined, and μ_1's axis is mirrored.
    """
    first, target = _unit(mean_from), _unit(mean_to)
    cosine = (first * target).sum(-1, keepdim=True)
    across = target - cosine * first
    # Projected once more for nearly parallel means, where the rounding error along μ_1 would be magnified.
    across = across - (across * first).sum(-1, keepdim=True) * first
    sine = _length(across)
    defined = (_length(first) > 0) & (_length(target) > 0)
    return Rotation(
        first=first,
        second=torch.where(defined, _unit(across), 0.0),
        cosine=torch.where(defined, cosine, 1.0),
        sine=torch.where(defined, sine, 0.0),
    )


def _length(rows: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch 1"]:
    return rows.square().sum(-1, keepdim=True).sqrt()


def _unit(rows: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    lengths = _length(rows)
    return rows / torch.where(lengths == 0, 1.0, lengths)


class SphericalFeatureTransform(nn.Module):
    """Generates rows of other classes from the rows of a batch, around centres that follow the batches (SFT, Eq. 9).

    *Balanced* scheme (no tail classes): every row becomes one of another class, drawn evenly among all other classes of
    the data set that have a centre, because an earlier batch had them. A row whose own class has none is unchanged. The
    draw costs one pass over the centres.

    *Unbalanced* scheme (tail classes given): every row of a head class becomes one of a tail class, drawn evenly
    among all tail classes; rows of tail classes, and those without a centre, generate nothing. How many rows are
    generated depends on the labels, so that each step waits for a GPU once, and no static graph can be captured.

    Table 6 of the paper compares the running means with two that are no estimates: "random" directions, which
    never move, and a row that is picked at random among those of the class in the newest batch that has it.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.
        mode: "rotate", "translate" (SFT-d) or "ftl".
        tail_classes: the classes that are short of samples; None for the balanced scheme.
        weight: weight λ ≥ 0 of the loss of the generated rows (Eq. 10).
        energy: share of the batch's variance that "ftl" transfers, in (0, 1].
        seed: seed of the draws, which depend on it, the step and the row alone.
        centres: "mean" (Eq. 9), "random" or "picked" (Table 6).
    """

    centres: Tensor
    tail_classes: Tensor | None

    def __init__(
        self,
        num_classes: int,
        dim: int,
        mode: Literal["rotate", "translate", "ftl"] = "rotate",
        tail_classes: Int64[Tensor, " tail"] | Sequence[int] | None = None,
        weight: float = 0.2,
        energy: float = 0.95,
        seed: int = 0,
        centres: Centres = "mean",
    ) -> None:
        super().__init__()
        check(num_classes >= 2, "num_classes", num_classes, "≥ 2")
        check(dim >= 1, "dim", dim, "≥ 1")
        check(mode in ("rotate", "translate", "ftl"), "mode", mode, "'rotate', 'translate' or 'ftl'")
        check(centres in get_args(Centres), "centres", centres, "'mean', 'random' or 'picked'")
        Range(ge=0).check("weight", weight)
        Range(gt=0, le=1).check("energy", energy)
        if tail_classes is not None:
            tail_classes = torch.as_tensor(tail_classes)
            allowed = f"one class or more in [0, {num_classes - 1}], not all"
            inside = bool(((tail_classes >= 0) & (tail_classes < num_classes)).all())
            listed = cast(list[int], tail_classes.tolist())  # pyright: ignore[reportUnknownMemberType]
            check(inside and 0 < len(set(listed)) < num_classes, "tail_classes", listed, allowed)
        self.mode = mode
        self.weight = weight
        self.energy = energy
        self.seed = seed
        self.kind_of_centres = centres
        initial = torch.zeros(num_classes, dim)
        if centres == "random":
            generator = torch.Generator().manual_seed(derived_seed(seed, "centres"))
            initial = directions(torch.randn(num_classes, dim, generator=generator))
        self.register_buffer("centres", initial)
        self.register_buffer("tail_classes", tail_classes, persistent=False)

    def extra_repr(self) -> str:
        """The values that define the transform."""
        num_classes, dim = self.centres.shape
        scheme = "balanced" if self.tail_classes is None else f"{len(self.tail_classes)} tail classes"
        centres = "" if self.kind_of_centres == "mean" else f", {self.kind_of_centres} centres"
        return f"num_classes={num_classes}, dim={dim}, mode={self.mode!r}, weight={self.weight}, {scheme}{centres}"

    def forward(
        self, embeddings: Float[Tensor, "batch dim"], labels: Integer[Tensor, " batch"], step: int
    ) -> tuple[Float[Tensor, "generated dim"], Int64[Tensor, " generated"]]:
        """Generated rows and their labels; in training mode the centres are updated afterwards.

        Args:
            embeddings: raw rows of the global batch.
            labels: 0 ≤ label < num_classes.
            step: 0-based global step.

        Raises:
            TypeError: `labels` are not one whole number for each row.
            ValueError: the rows have another dim, or a label is outside its range; on the CPU alone, where that check
                is free.
        """
        require_labels("SphericalFeatureTransform", embeddings, labels)
        labels = labels.long()
        require_classes("SphericalFeatureTransform", labels, len(self.centres))
        if embeddings.shape[1] != (dim := self.centres.shape[1]):
            raise ValueError(
                f"SphericalFeatureTransform needs rows of dim {dim}: the batch is {list(embeddings.shape)}"
            )
        with torch.autocast(embeddings.device.type, enabled=False):
            rows = in_full_precision(embeddings)
            if self.tail_classes is None:
                sources, targets, originals = labels, self._other_classes(labels, step), rows
            else:
                heads, targets = self._heads(labels, self.tail_classes, step)
                sources, originals = labels[heads], rows[heads]
            generated = self._transform_rows(originals, sources, targets, rows.detach(), labels)
            if self.training and self.kind_of_centres != "random":
                centred = self._as_centred(rows.detach())
                if self.kind_of_centres == "mean":
                    move_centres(self.centres, centred, labels)
                else:
                    pick_centres(self.centres, centred, labels, self._draws(labels, -1 - step))
            return generated, targets

    def _other_classes(self, labels: Int64[Tensor, " batch"], step: int) -> Int64[Tensor, " batch"]:
        """Another class for each row, drawn among all that have a centre; its own class if there is none to draw."""
        known = snapshot(self.centres.any(1))
        up_to = known.cumsum(0)
        count = up_to[-1]
        shift = 1 + self._draws(labels, step) % (count - 1).clamp(min=1)
        place = (up_to[labels] - 1 + shift) % count.clamp(min=1)
        return torch.where(known[labels] & (count > 1), torch.searchsorted(up_to, place + 1), labels)

    def _heads(
        self, labels: Int64[Tensor, " batch"], tail_classes: Int64[Tensor, " tail"], step: int
    ) -> tuple[Int64[Tensor, " generated"], Int64[Tensor, " generated"]]:
        """The rows of head classes from which rows can be generated, and the tail class drawn for each."""
        drawn = tail_classes[self._draws(labels, step) % len(tail_classes)]
        is_head = ~torch.isin(labels, tail_classes)
        (heads,) = torch.nonzero(is_head & self._has_centre(labels) & self._has_centre(drawn), as_tuple=True)
        return heads, drawn[heads]

    def _draws(self, labels: Int64[Tensor, " batch"], step: int) -> Int64[Tensor, " batch"]:
        """A number in [0, 2^63) for each row of the batch, a function of (seed, step, row) alone."""
        # The `^` keeps Inductor from adding the rows, 32 bits in Triton, to a constant of 64.
        rows = torch.arange(len(labels), device=labels.device) ^ 0
        return mix(mix(mix(torch.full_like(rows, self.seed)) + step) + rows) & 0x7FFFFFFFFFFFFFFF

    def _has_centre(self, labels: Int64[Tensor, " rows"]) -> Bool[Tensor, " rows"]:
        return self._centre_of(labels).any(1)

    def _centre_of(self, labels: Int64[Tensor, " rows"]) -> Float[Tensor, "rows dim"]:
        return snapshot(self.centres[labels])

    def _as_centred(self, rows: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
        """The rows in the space of the centres: raw if they are translated before normalisation, else unit."""
        return rows if self.mode == "translate" else directions(rows)

    def _transform_rows(
        self,
        originals: Float[Tensor, "generated dim"],
        sources: Int64[Tensor, " generated"],
        targets: Int64[Tensor, " generated"],
        rows: Float[Tensor, "batch dim"],
        labels: Int64[Tensor, " batch"],
    ) -> Float[Tensor, "generated dim"]:
        mean_from, mean_to = (self._centre_of(ends).to(rows.dtype) for ends in (sources, targets))
        if self.mode == "rotate":
            return rotation(mean_from, mean_to)(originals)
        if self.mode == "translate":
            return directions(originals + mean_to - mean_from) * norms(originals).unsqueeze(1)
        own = self._centre_of(labels).to(rows.dtype)
        residuals = (directions(rows) - own) * own.any(1, keepdim=True)
        axes = _principal_axes(residuals, self.energy)
        unit = directions(originals)
        translated = mean_to + (unit - mean_from) @ axes.T @ axes
        return torch.where((sources == targets).unsqueeze(1), unit, translated)


@torch.no_grad()
def _principal_axes(residuals: Float[Tensor, "batch dim"], energy: float) -> Float[Tensor, "axes dim"]:
    """The fewest principal axes that hold a share of the residuals' energy; the other axes are set to 0."""
    # The decomposition of numbers that are not finite is an error. The rows that have some show in the loss.
    residuals = torch.where(residuals.isfinite().all(1, keepdim=True), residuals, 0.0)
    # torch ships no type annotation for it.
    _, lengths, axes = cast(tuple[Tensor, Tensor, Tensor], torch.linalg.svd(residuals, full_matrices=False))  # pyright: ignore
    squares = lengths.square()
    before = squares.cumsum(0) - squares
    return axes * (before < energy * squares.sum()).unsqueeze(1)
