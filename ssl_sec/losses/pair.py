"""Losses over pairs, triplets and lists of a labelled batch.

With s_ij = ⟨f̂_i, f̂_j⟩, d²_ij = ‖f̂_i − f̂_j‖², an anchor a, its positives p and its negatives n:

    triplet              max(0, d²_ap − d²_an + m) over all triplets                                     (SEC, Eq. 2)
    semihard triplet     the same, n the nearest negative beyond p, or the farthest      (Schroff et al. 2015, FaceNet)
    normalised N-pair    log(1 + Σ_n exp(s (s_an − s_ap))), one anchor and one positive a class          (SEC, Eq. 3)
    N-pair               log(1 + Σ_n exp(⟨f_a, f_n⟩ − ⟨f_a, f_p⟩)), on raw rows                  (angular loss, Eq. 10)
    multi-similarity     1/α log(1 + Σ_p exp(−α (s_ap − λ))) + 1/β log(1 + Σ_n exp(β (s_an − λ)))  (Wang et al. 2019)
    circle               log(1 + Σ_n exp(s w_n (s_an − m)) Σ_p exp(−s w_p (s_ap − 1 + m)))          (Sun et al. 2020)
    lifted structure     max(0, log(Σ exp(m − d) over the negatives of a and of p) + d_ap)² / 2   (Oh Song et al. 2016)
    ranked list          positives within α − m, negatives beyond α, the nearer ones first         (Wang et al. 2019b)
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from ssl_sec.errors import counted
from ssl_sec.losses.base import Embeddings, Labels, Loss, Scalar, log_one_plus_sum_exp, require_triplets
from ssl_sec.losses.classes import Classes, classes_of, may_read_values, negative_pairs, positive_pairs
from ssl_sec.losses.geometry import directions, inner_products, root, squared_distances
from ssl_sec.rules import Range

# With more rows in a class, one sort is faster than a pass for each positive (measured on CPUs at 512 rows).
FEW_POSITIVES = 16
_NO_TARGET = -100


class TripletLoss(Loss):
    """All triplets of the batch (SEC, Eq. 2).

    max(0, d²_ap − d²_an + m); the mean over all valid triplets, including those that are 0.

    Args:
        margin: m ≥ 0, how much farther negatives must be than positives, in squared distances.
    """

    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()
        Range(ge=0).check("margin", margin)
        self.margin = margin

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        classes = classes_of(labels)
        require_triplets(type(self).__name__, classes)
        squares = squared_distances(directions(embeddings), anchors)
        # A sum of hinges is linear between its kinks: Σ_p c_ap (d²_ap + m) − Σ_n e_an d²_an, where c counts the
        # negatives that violate the positive and e the positives that the negative violates.
        if may_read_values(labels) and classes.size.max() <= FEW_POSITIVES:
            counts = _violations_one_by_one(squares.detach(), labels, classes, anchors, self.margin)
        else:
            counts = _violations(squares.detach(), labels, anchors, self.margin)
        hinges = (counts * squares).sum() + self.margin * counts.clamp(min=0).sum()
        return hinges / self.num_terms(classes).sum()

    def num_terms(self, classes: Classes) -> Int64[Tensor, " batch"]:
        """The triplets of each row."""
        return classes.num_positives * classes.num_negatives


@torch.no_grad()
def _violations(
    squares: Float[Tensor, "anchors batch"], labels: Int64[Tensor, " batch"], anchors: slice, margin: float
) -> Float[Tensor, "anchors batch"]:
    """Counts: c at the positives, −e at the negatives, from one sort of each row of d²_ap + m and d²_an."""
    positive, negative = positive_pairs(labels, anchors)
    keys = torch.where(positive, squares + margin, torch.where(negative, squares, torch.inf))
    order = keys.argsort(1)
    is_positive = positive.gather(1, order)
    positives_so_far = is_positive.cumsum(1, dtype=squares.dtype)
    num_positives = positives_so_far[:, -1:]
    rank = torch.arange(1, squares.shape[1] + 1, dtype=squares.dtype, device=squares.device)
    counts = torch.where(is_positive, rank - positives_so_far, positives_so_far - num_positives)
    return torch.empty_like(squares).scatter_(1, order, counts)


@torch.no_grad()
def _violations_one_by_one(
    squares: Float[Tensor, "anchors batch"],
    labels: Int64[Tensor, " batch"],
    classes: Classes,
    anchors: slice,
    margin: float,
) -> Float[Tensor, "anchors batch"]:
    """The same counts, from one pass over a row for each of its positives, which should be few."""
    at_negatives = squares.masked_fill(~negative_pairs(labels, anchors), torch.inf)
    counts = torch.zeros_like(squares)
    for steps in range(1, int(classes.size.max())):
        positive = classes.next(steps)[anchors].unsqueeze(1)
        # For a class with fewer rows the steps have come full circle.
        bound = (squares.gather(1, positive) + margin).masked_fill(
            classes.size[anchors].unsqueeze(1) <= steps, -torch.inf
        )
        violating = at_negatives < bound
        counts -= violating.to(counts.dtype)
        counts.scatter_add_(1, positive, violating.sum(1, keepdim=True, dtype=counts.dtype))
    return counts


class SemihardTripletLoss(Loss):
    """Semihard triplets (FaceNet; SEC, Eq. 2).

    Triplets of each positive pair and its semihard negative; the mean over ordered positive pairs.

    The negative is that with the smallest d²_an > d²_ap or, if there is none, with the largest d²_an; the term is
    max(0, d²_ap − d²_an + m) (SEC, Eq. 2).

    Args:
        margin: m ≥ 0, how much farther negatives must be than positives, in squared distances.
    """

    def __init__(self, margin: float = 0.2) -> None:
        super().__init__()
        Range(ge=0).check("margin", margin)
        self.margin = margin

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        classes = classes_of(labels)
        require_triplets(type(self).__name__, classes)
        squares = squared_distances(directions(embeddings), anchors)
        positive, negative = positive_pairs(labels, anchors)
        with torch.no_grad():
            sorted_negatives, order = squares.masked_fill(~negative, torch.inf).sort(1)
            beyond = torch.searchsorted(sorted_negatives, squares.contiguous(), right=True)
            farthest = classes.num_negatives[anchors].unsqueeze(1) - 1
            chosen = order.gather(1, torch.minimum(beyond, farthest).clamp(min=0))
        hinges = (squares - squares.gather(1, chosen) + self.margin).clamp(min=0)
        # A row whose class is the whole batch has no negative; such a batch is refused. A NaN is kept, of any row.
        return torch.where(positive | squares.isnan(), hinges, 0.0).sum() / self.num_terms(classes).sum()

    def num_terms(self, classes: Classes) -> Int64[Tensor, " batch"]:
        """The positives of each row."""
        return classes.num_positives


class NormalizedNPairLoss(Loss):
    """Normalised N-pair (SEC, Eq. 3).

    log(1 + Σ_n exp(s (s_an − s_ap))); the mean over classes.

    The first row of a class is the anchor, the second the positive; the negatives are the other classes' positives.
    A class with a single row takes no part.

    Args:
        scale: s > 0, the factor on the cosines.
    """

    def __init__(self, scale: float = 25.0) -> None:
        super().__init__()
        Range(gt=0).check("scale", scale)
        self.scale = scale

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        classes = classes_of(labels)
        is_anchor = (classes.occurrence == 0) & (classes.size > 1)
        num_pairs = is_anchor.sum()
        if may_read_values(labels) and num_pairs < 2:
            missing = "negative" if num_pairs else "positive"
            raise ValueError(
                f"NormalizedNPairLoss needs a {missing}: "
                f"{int(num_pairs)} of the batch's classes have two rows, must be ≥ 2"
            )
        # The pairs, and those of this range, padded to the largest possible number, which the shapes determine.
        pairs = (~is_anchor).to(torch.uint8).argsort(stable=True)[: len(labels) // 2]
        start, stop = (own := range(len(labels))[anchors]).start, own.stop
        is_own = is_anchor[pairs] & (pairs >= start) & (pairs < stop)
        own = (~is_own).to(torch.uint8).argsort(stable=True)[: stop - start]
        unit = directions(embeddings)
        similarities = unit.index_select(0, pairs[own]) @ unit.index_select(0, classes.positive[pairs]).T
        # log(1 + Σ_n exp(z_n − z_p)) is the cross-entropy at p of z_p and the z_n.
        logits = torch.where(is_anchor[pairs], self.scale * similarities, -torch.inf)
        targets = torch.where(is_own[own], own, _NO_TARGET)
        terms = functional.cross_entropy(logits, targets, ignore_index=_NO_TARGET, reduction="sum")
        return terms / num_pairs + 0 * unit.sum()  # a NaN is kept, of a row that takes no part, too

    def compares(self, labels: Labels) -> Bool[Tensor, ""]:
        """Whether two classes have two rows."""
        classes = classes_of(labels)
        return ((classes.occurrence == 0) & (classes.size > 1)).sum() > 1


class NPairLoss(Loss):
    """N-pair on raw rows (angular loss, Eq. 10).

    log(1 + Σ_n exp(⟨f_a, f_n⟩ − ⟨f_a, f_p⟩)) on raw rows; the mean over rows.

    Each row is an anchor once, the first other row of its class its positive, every row of another class a
    negative. A row without a positive contributes 0.
    """

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        classes = classes_of(labels)
        require_triplets(type(self).__name__, classes)
        positive = classes.positive[anchors]
        # Computed as a cross-entropy here, too.
        counted = negative_pairs(labels, anchors).scatter(1, positive.unsqueeze(1), True)
        logits = torch.where(counted, inner_products(embeddings, anchors), -torch.inf)
        targets = torch.where(classes.size[anchors] > 1, positive, _NO_TARGET)
        return functional.cross_entropy(logits, targets, ignore_index=_NO_TARGET, reduction="sum") / len(labels)


class MultiSimilarityLoss(Loss):
    """Multi-similarity (Wang et al. 2019).

    Pairs mined and weighted by self- and relative similarity.

    The negatives with s_an + ε > min_p s_ap and the positives with s_ap − ε < max_n s_an are kept. An anchor without
    any on either side contributes 0; the sum over anchors is divided by the number of rows.

    Args:
        epsilon: ε ≥ 0, the slack with which pairs are mined.
        threshold: λ in [-1, 1], the similarity from which both weights are measured.
        alpha: α > 0, how steeply the weight of positives grows.
        beta: β > 0, how steeply the weight of negatives grows.
    """

    def __init__(self, epsilon: float = 0.1, threshold: float = 0.5, alpha: float = 2.0, beta: float = 40.0) -> None:
        super().__init__()
        Range(ge=0).check("epsilon", epsilon)
        Range(ge=-1, le=1).check("threshold", threshold)
        Range(gt=0).check("alpha", alpha)
        Range(gt=0).check("beta", beta)
        self.epsilon = epsilon
        self.threshold = threshold
        self.alpha = alpha
        self.beta = beta

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        require_triplets(type(self).__name__, classes_of(labels))
        similarities = inner_products(directions(embeddings), anchors)
        positive, negative = positive_pairs(labels, anchors)
        with torch.no_grad():
            farthest_positive = similarities.masked_fill(~positive, torch.inf).amin(1, keepdim=True)
            nearest_negative = similarities.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
            # Written so that a NaN is kept and shows in the loss.
            positive &= ~(similarities - self.epsilon >= nearest_negative)
            negative &= ~(similarities + self.epsilon <= farthest_positive)
            has_both = positive.any(1) & negative.any(1)
        above = similarities - self.threshold
        at_positives = log_one_plus_sum_exp(-self.alpha * above, positive) / self.alpha
        at_negatives = log_one_plus_sum_exp(self.beta * above, negative) / self.beta
        return torch.where(has_both, at_positives + at_negatives, 0.0).sum() / len(labels)


class CircleLoss(Loss):
    """Circle loss (Sun et al. 2020).

    log(1 + Σ_n exp(s w_n (s_an − m)) Σ_p exp(−s w_p (s_ap − 1 + m))); the mean over the rows that have a positive.

    A similarity has the more weight, the farther it is from its optimum: w_n = max(0, s_an + m) and
    w_p = max(0, 1 + m − s_ap). No gradient passes through the weights.

    Args:
        scale: s > 0, the factor on the exponents (the paper's γ).
        margin: m in [0, 1]; a pair of rows costs little where s_an < m and s_ap > 1 − m.
    """

    def __init__(self, scale: float = 80.0, margin: float = 0.4) -> None:
        super().__init__()
        Range(gt=0).check("scale", scale)
        Range(ge=0, le=1).check("margin", margin)
        self.scale = scale
        self.margin = margin

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        classes = classes_of(labels)
        require_triplets(type(self).__name__, classes)
        similarities = inner_products(directions(embeddings), anchors)
        positive, negative = positive_pairs(labels, anchors)
        weights_of_negatives, weights_of_positives = self._weights(similarities.detach())
        at_negatives = weights_of_negatives * (similarities - self.margin)
        at_positives = weights_of_positives * (1 - self.margin - similarities)
        excess = _log_sum_exp(self.scale * at_negatives, negative) + _log_sum_exp(self.scale * at_positives, positive)
        terms = torch.logaddexp(excess, torch.zeros_like(excess))
        has_positive = classes.size > 1
        return torch.where(has_positive[anchors], terms, 0.0).sum() / self.num_terms(classes).sum()

    def num_terms(self, classes: Classes) -> Int64[Tensor, " batch"]:
        """One of each row that has a positive."""
        return (classes.size > 1).long()

    def _weights(
        self, similarities: Float[Tensor, "anchors batch"]
    ) -> tuple[Float[Tensor, "anchors batch"], Float[Tensor, "anchors batch"]]:
        """The weight of each pair as a negative, and as a positive."""
        return (similarities + self.margin).clamp(min=0), (1 + self.margin - similarities).clamp(min=0)


def _log_sum_exp(
    exponents: Float[Tensor, "anchors batch"], counted: Bool[Tensor, "anchors batch"]
) -> Float[Tensor, " anchors"]:
    """Log Σ e^x over the counted exponents x of each row."""
    # Not −∞: a row that counts nothing would have no gradient.
    return exponents.masked_fill(~counted, torch.finfo(exponents.dtype).min / 2).logsumexp(1)


class LiftedStructureLoss(Loss):
    """Lifted structure (Oh Song et al. 2016).

    max(0, log Σ exp(m − d) + d_ap)² / 2, the sum over the negatives of a and of p.

    d is the Euclidean distance, not squared; the mean over ordered positive pairs. A pair needs the negatives of both
    of its rows, so that a share of the anchors still needs the distances of the whole batch.

    Args:
        margin: m ≥ 0, the distance beyond which negatives are left alone.
    """

    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()
        Range(ge=0).check("margin", margin)
        self.margin = margin

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        classes = classes_of(labels)
        require_triplets(type(self).__name__, classes)
        distances = root(squared_distances(directions(embeddings)))
        positive, negative = positive_pairs(labels)
        repulsion = (self.margin - distances).masked_fill(~negative, -torch.inf).logsumexp(1)
        pairs = torch.logaddexp(repulsion[anchors].unsqueeze(1), repulsion) + distances[anchors]
        terms = pairs.clamp(min=0).square() / 2
        return torch.where(positive[anchors], terms, 0.0).sum() / classes.num_positives.sum()


class RankedListLoss(Loss):
    """Ranked list (Wang et al. 2019b).

    Positives are drawn within α − m, negatives are pushed beyond α; the mean over rows.

    On Euclidean distances d, with weights w = exp(T_p (d − (α − m))) of the positives with d > α − m, and
    w = exp(T_n (α − d)) of the negatives with d < α,

        ℓ_a = (1 − λ) Σ_p w_ap (d_ap − (α − m)) / Σ_p w_ap + λ Σ_n w_an (α − d_an) / Σ_n w_an .

    A side without such pairs contributes 0. The weights are differentiated too.

    Args:
        margin: m in [0, alpha]; positives are drawn to within alpha - m.
        alpha: α > 0, the distance beyond which negatives are left alone.
        negative_temperature: T_n ≥ 0; larger values give near negatives more weight, 0 gives all the same.
        positive_temperature: T_p ≥ 0; larger values give far positives more weight, 0 gives all the same.
        imbalance: λ in [0, 1], the weight of the negatives; that of the positives is 1 − λ.
    """

    def __init__(
        self,
        margin: float = 0.4,
        alpha: float = 1.2,
        negative_temperature: float = 10.0,
        positive_temperature: float = 0.0,
        imbalance: float = 0.5,
    ) -> None:
        super().__init__()
        Range(gt=0).check("alpha", alpha)
        Range(ge=0, le=alpha).check("margin", margin)
        Range(ge=0).check("negative_temperature", negative_temperature)
        Range(ge=0).check("positive_temperature", positive_temperature)
        Range(ge=0, le=1).check("imbalance", imbalance)
        self.margin = margin
        self.alpha = alpha
        self.negative_temperature = negative_temperature
        self.positive_temperature = positive_temperature
        self.imbalance = imbalance

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        if len(labels) < 2:
            raise ValueError(f"RankedListLoss needs a pair: the batch has {counted(len(labels), 'row')}")
        distances = root(squared_distances(directions(embeddings), anchors))
        positive, negative = positive_pairs(labels, anchors)
        too_far = distances - (self.alpha - self.margin)
        too_near = self.alpha - distances
        # Written so that a NaN is kept and shows in the loss.
        pulled = _weighted_mean(too_far, positive & ~(too_far <= 0), self.positive_temperature)
        pushed = _weighted_mean(too_near, negative & ~(too_near <= 0), self.negative_temperature)
        return ((1 - self.imbalance) * pulled + self.imbalance * pushed).sum() / len(labels)

    def compares(self, labels: Labels) -> Bool[Tensor, ""]:
        """Whether there are two rows."""
        return labels.new_full((), len(labels) > 1, dtype=torch.bool)


def _weighted_mean(
    values: Float[Tensor, "anchors batch"], counted: Bool[Tensor, "anchors batch"], temperature: float
) -> Float[Tensor, " anchors"]:
    """Σ e^{T v} v / Σ e^{T v} over the counted values v of each row; 0 where none is."""
    # A finite number, not −∞: a row that counts nothing must have no NaN in its gradient.
    smallest = torch.finfo(values.dtype).min
    weights = (temperature * values).masked_fill(~counted, smallest).softmax(1)
    return torch.where(counted, weights * values, 0.0).sum(1)
