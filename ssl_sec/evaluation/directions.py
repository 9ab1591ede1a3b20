"""Directions of embeddings: cosines of pairs, changes between steps, spread of classes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ssl_sec.errors import DataError
from ssl_sec.losses.geometry import directions, norms
from ssl_sec.seeding import derived_seed


def class_divergences(
    embeddings: Float[Tensor, "batch dim"], labels: Int64[Tensor, " batch"]
) -> tuple[Int64[Tensor, " classes"], Float[Tensor, " classes"]]:
    """The spread of each class: the trace of its scatter matrix, the mean of ‖x − μ_k‖² (SFT, Eq. 11).

    Args:
        embeddings: rows of any norm; SFT uses unit rows.
        labels: class of each row.

    Returns:
        The labels that occur, ascending, and the divergence of each, ≥ 0.
    """
    classes, means, numbers, sizes = class_means(embeddings, labels)
    squares = (embeddings - means[numbers]).square().sum(1)
    return classes, squares.new_zeros(len(classes)).index_add(0, numbers, squares) / sizes


def within_class_energy(
    embeddings: Float[Tensor, "batch dim"], labels: Int64[Tensor, " batch"], energy: float = 0.99
) -> float:
    """r_w: the share of the spread within classes that lies in the span of the class means (SFT, Eqs. 7 and 8).

    trace(Uᵀ S_w U) / trace(S_w), with S_w the mean of the classes' scatter matrices and U the fewest leading
    eigenvectors of S_c, the mean of μ_k μ_kᵀ, that hold a share of its trace. Near 0, rotating and translating
    between classes are the same.

    Args:
        embeddings: rows of any norm; SFT uses unit rows.
        labels: class of each row.
        energy: share of the means' energy that U holds, in (0, 1].

    Returns:
        r_w in [0, 1]; 0 if no class has any spread.
    """
    if not 0 < energy <= 1:
        raise ValueError(f"energy: found {energy}, must be in (0, 1]")
    _, means, numbers, sizes = class_means(embeddings, labels)
    values, vectors = torch.linalg.eigh(means.T @ means)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    # Rounding must not add an axis.
    before = values.cumsum(0) - values
    axes = vectors[:, before < energy * values.sum() * (1 - 1e-6)]
    # S_w is a sum over rows, each with the weight 1 / (C N_k).
    residuals = (embeddings - means[numbers]) / sizes[numbers].sqrt().unsqueeze(1)
    total = residuals.square().sum().item()
    return (residuals @ axes).square().sum().item() / total if total else 0.0


def class_means(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The classes that occur, their means, the index of each row's class, and the sizes of the classes as floats."""
    classes, numbers, counts = labels.unique(return_inverse=True, return_counts=True)
    sums = embeddings.new_zeros(len(classes), embeddings.shape[1]).index_add(0, numbers, embeddings)
    sizes = counts.to(embeddings.dtype)
    return classes, sums / sizes.unsqueeze(1), numbers, sizes


# Pairs whose embeddings are gathered at once: few enough for the processor's cache.
_PAIRS_AT_ONCE = 1024


@dataclass(frozen=True)
class Distribution:
    """The distribution of a quantity, in plain lists and numbers for JSON.

    Attributes:
        edges: bounds of the bins, ascending; one more than there are bins.
        counts: number of values in each bin.
        mean: mean of the values themselves, not of the bins; None without values.
        variance: mean squared distance from the mean; None without values.
    """

    edges: list[float]
    counts: list[int]
    mean: float | None
    variance: float | None

    def __post_init__(self) -> None:
        assert len(self.edges) == len(self.counts) + 1, "a histogram has one edge more than bins"


@dataclass(frozen=True)
class PairCosines:
    """Cosines between images of the same class, and between images of different classes (SEC, Fig. 5b and c).

    Attributes:
        positives: cos θ_ap of pairs of the same class, in equal bins over [-1, 1].
        negatives: cos θ_an of pairs of different classes, in the same bins.
    """

    positives: Distribution
    negatives: Distribution


@dataclass(frozen=True)
class CosineDistributions(PairCosines):
    """Cosines of pairs, and their differences over triplets (SEC, Fig. 5b-d).

    Attributes:
        differences: cos θ_ap − cos θ_an of triplets, in equal bins over [-2, 2].
        violations: share of those triplets with cos θ_ap ≤ cos θ_an, in [0, 1]; None without a triplet.
    """

    differences: Distribution
    violations: float | None


@dataclass(frozen=True)
class DirectionChanges:
    """Changes of the embeddings' directions between two steps (SEC, Fig. 7).

    Attributes:
        first_step: global step of the earlier embeddings.
        last_step: global step of the later embeddings.
        changes: 1 − cos between the two directions of each image.
    """

    first_step: int
    last_step: int
    changes: Distribution


@dataclass(frozen=True)
class ClassSpread:
    """The spread of the directions of each class, and r_w (SFT, Section 4.2).

    Attributes:
        classes: labels of two rows or more, ascending.
        divergences: divergence of each of these classes, in [0, 1] (SFT, Eq. 11).
        within_class_energy: r_w, in [0, 1] (SFT, Eq. 8).
    """

    classes: list[int]
    divergences: list[float]
    within_class_energy: float

    def __post_init__(self) -> None:
        assert len(self.classes) == len(self.divergences), "each class has one divergence"


def cosine_distributions(
    embeddings: Float[Tensor, "images dim"], labels: Int64[Tensor, " images"], seed: int, max_pairs: int = 200_000
) -> CosineDistributions:
    """Cosines of pairs of images of the same class and of different ones, and their differences over triplets.

    If there are more than `max_pairs` positive pairs, that many are drawn uniformly with replacement; the negative
    pairs and the triplets likewise. Memory grows with the images and with `max_pairs`, not with the number of pairs.

    Args:
        embeddings: one row for each image, of any norm.
        labels: class of each image.
        seed: seed of the draw of pairs and triplets.
        max_pairs: largest number of each kind, ≥ 1.

    Raises:
        DataError: for a row without a direction.
    """
    order = labels.cpu().argsort(stable=True)
    # The rows of a class are consecutive, from `firsts` to `ends`, so that a partner is found by counting.
    unit = checked_directions(embeddings)[order]
    _, numbers, sizes = labels.cpu()[order].unique_consecutive(return_inverse=True, return_counts=True)
    ends = sizes.cumsum(0)[numbers]
    sizes = sizes[numbers]
    firsts, num_others = ends - sizes, len(unit) - sizes
    generator = torch.Generator().manual_seed(derived_seed(seed, "cosines"))

    positives, negatives = _pair_cosines(unit, ends, max_pairs, generator)
    anchors, ranks = _combinations((sizes - 1) * num_others, max_pairs, generator)
    positive, negative = firsts[anchors] + ranks // num_others[anchors], ranks % num_others[anchors]
    positive += positive >= anchors
    negative += sizes[anchors] * (negative >= firsts[anchors])
    differences = _cosines(unit, anchors, positive) - _cosines(unit, anchors, negative)
    pairs = pair_cosines(positives, negatives)
    return CosineDistributions(
        pairs.positives,
        pairs.negatives,
        distribution(differences, -2.0, 2.0, 200),
        (differences <= 0).double().mean().item() if len(differences) else None,
    )


def pair_cosines(positives: Float[Tensor, " pairs"], negatives: Float[Tensor, " others"]) -> PairCosines:
    """The distributions of cosines that were computed elsewhere, all in [-1, 1]."""
    return PairCosines(*(distribution(cosines, -1.0, 1.0, 100) for cosines in (positives, negatives)))


def pooled(distributions: Sequence[Distribution]) -> Distribution:
    """The distribution of the values of several distributions together, for example of runs with different seeds.

    Mean and variance are exact. Bins that differ are replaced by as many common ones, as if each were evenly filled.

    Args:
        distributions: one or more distributions.
    """
    first = distributions[0]
    held = [(sum(each.counts), each) for each in distributions if each.mean is not None]
    if not held:
        return first
    edges = np.array(first.edges)
    if any(each.edges != first.edges for _, each in held):
        bounds = [each.edges for _, each in held]
        edges = np.linspace(min(each[0] for each in bounds), max(each[-1] for each in bounds), len(first.edges))
    below = sum(np.interp(edges, each.edges, np.cumsum([0, *each.counts])) for _, each in held)
    total = sum(count for count, _ in held)
    mean = sum(count * (each.mean or 0.0) for count, each in held) / total
    square = sum(count * ((each.variance or 0.0) + ((each.mean or 0.0) - mean) ** 2) for count, each in held) / total
    return Distribution(edges.tolist(), np.diff(np.rint(below)).astype(int).tolist(), mean, square)


@dataclass(frozen=True)
class DistanceDistributions:
    """Distances between the directions of pairs of images (SFT, Fig. 4b).

    Attributes:
        positives: ‖f̂_a − f̂_p‖ of pairs of the same class, in equal bins over [0, 2].
        negatives: ‖f̂_a − f̂_n‖ of pairs of different classes, in the same bins.
    """

    positives: Distribution
    negatives: Distribution

    @property
    def overlap(self) -> float:
        """The share of the two distributions that lies over each other, by their bins, in [0, 1]; 0 if one is empty."""
        shares = [np.array(one.counts) / max(sum(one.counts), 1) for one in (self.positives, self.negatives)]
        return float(np.minimum(*shares).sum())


def distance_distributions(
    embeddings: Float[Tensor, "images dim"], labels: Int64[Tensor, " images"], seed: int, max_pairs: int = 200_000
) -> DistanceDistributions:
    """Euclidean distances √(2 − 2 cos θ) between directions of images of the same class and of different ones.

    Args:
        embeddings: one row for each image, of any norm.
        labels: class of each image.
        seed: seed of the draw of pairs, which are those of `cosine_distributions`.
        max_pairs: largest number of each kind, ≥ 1.

    Raises:
        DataError: for a row without a direction.
    """
    order = labels.cpu().argsort(stable=True)
    _, numbers, sizes = labels.cpu()[order].unique_consecutive(return_inverse=True, return_counts=True)
    generator = torch.Generator().manual_seed(derived_seed(seed, "cosines"))
    cosines = _pair_cosines(checked_directions(embeddings)[order], sizes.cumsum(0)[numbers], max_pairs, generator)
    return DistanceDistributions(*(distribution((2 - 2 * each).sqrt(), 0.0, 2.0, 100) for each in cosines))


def direction_changes(
    before: Float[Tensor, "images dim"],
    after: Float[Tensor, "images dim"],
    first_step: int,
    last_step: int,
    num_bins: int = 400,
) -> DirectionChanges:
    """The change of each image's direction: 1 − cos θ = ½ ‖f̂_after − f̂_before‖², in [0, 2] (SEC, appendix C.2).

    The paper names no measure of its "direction variation"; this one is bounded and grows with the angle.

    Args:
        before: embeddings at the earlier step, of any norm.
        after: embeddings of the same images at the later step.
        first_step: earlier global step.
        last_step: later global step.
        num_bins: number of equal bins from the smallest to the largest change, ≥ 1.

    Raises:
        DataError: for a row without a direction.
    """
    # Rounding would lose small changes in 1 − cos.
    changes = (checked_directions(after) - checked_directions(before)).square().sum(1) / 2
    low, high = (changes.min().item(), changes.max().item()) if len(changes) else (0.0, 1.0)
    # Bins need a width even if all changes are equal.
    return DirectionChanges(first_step, last_step, distribution(changes, low, max(high, low + 1e-6), num_bins))


def class_spread(embeddings: Float[Tensor, "images dim"], labels: Int64[Tensor, " images"]) -> ClassSpread:
    """The divergence of each class and r_w, of the directions of the embeddings.

    A class of one image has no divergence: its 0 would lower the mean over the classes.

    Args:
        embeddings: one row for each image, of any norm.
        labels: class of each image.

    Raises:
        DataError: for a row without a direction.
    """
    unit, labels = checked_directions(embeddings), labels.cpu()
    classes, divergences = class_divergences(unit, labels)
    has_two = labels.unique(return_counts=True)[1] > 1
    return ClassSpread(classes[has_two].tolist(), divergences[has_two].tolist(), within_class_energy(unit, labels))


def checked_directions(embeddings: Float[Tensor, "images dim"]) -> Float[Tensor, "images dim"]:
    """The directions of embeddings, on the CPU.

    Raises:
        DataError: for a row without a direction.
    """
    embeddings = embeddings.detach().cpu()
    lengths = norms(embeddings)
    num_without = int((~(lengths.isfinite() & (lengths > 0))).sum())
    if num_without:
        raise DataError(
            f"embeddings: found {num_without} of {len(embeddings)} rows that are zero or not finite; allowed: rows "
            "with a direction"
        )
    return directions(embeddings)


def _pair_cosines(unit: Tensor, ends: Tensor, max_pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cosines of pairs of one class and of two; rows are sorted by class, and the class of each ends at `ends`."""
    # Each pair counts once, in ascending order.
    anchors, ranks = _combinations(ends - 1 - torch.arange(len(unit)), max_pairs, generator)
    positives = _cosines(unit, anchors, anchors + 1 + ranks)
    anchors, ranks = _combinations(len(unit) - ends, max_pairs, generator)
    return positives, _cosines(unit, anchors, ends[anchors] + ranks)


def _combinations(numbers: Tensor, most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Anchors, and the indices of their combinations, below `numbers`: all, or `most` drawn ones."""
    ends = numbers.cumsum(0)
    total = int(numbers.sum())
    drawn = torch.arange(total) if total <= most else torch.randint(total, (most,), generator=generator)
    anchors = torch.searchsorted(ends, drawn, right=True)
    return anchors, drawn - (ends - numbers)[anchors]


def _cosines(unit: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    chunks = zip(rows.split(_PAIRS_AT_ONCE), others.split(_PAIRS_AT_ONCE), strict=True)
    # Rounding could otherwise leave the range of the bins.
    return torch.cat([torch.linalg.vecdot(unit[row], unit[other]) for row, other in chunks]).clamp(-1, 1)


def distribution(values: Float[Tensor, " values"], low: float, high: float, num_bins: int) -> Distribution:
    """The distribution of values in equal bins from `low` to `high`."""
    values = values.double()
    counts, edges = np.histogram(values.numpy(), bins=num_bins, range=(low, high))
    if not len(values):
        return Distribution(edges.tolist(), counts.tolist(), None, None)
    return Distribution(edges.tolist(), counts.tolist(), values.mean().item(), values.var(correction=0).item())
