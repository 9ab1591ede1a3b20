"""Face verification in folds: are the two images of a pair of the same person?

The protocol is LFW's *unrestricted with labelled outside data* (Huang and Learned-Miller 2014, "Labeled Faces in the
Wild: Updates and New Reporting Procedures"), which AgeDB-30, CFP and YouTube Faces follow: the threshold of each fold
is chosen on the others.

Cosines are computed in float64 and rounded to multiples of 2⁻²⁴, so equally similar pairs score the same, whatever the
norms of their rows: no threshold can separate pairs that only rounding separates.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ssl_sec.errors import ConfigError, DataError, counted
from ssl_sec.evaluation.arrays import (
    Labels,
    Rows,
    Same,
    Scores,
    as_rows,
    as_same,
    as_scores,
    as_tensor,
    rounded,
    unit_rows,
)
from ssl_sec.evaluation.faces.components import fit_components

Folds = int | np.integer[Any] | Labels


class FoldedAccuracy(NamedTuple):
    """Accuracies of the folds, in [0, 1].

    Attributes:
        mean: mean accuracy over the folds.
        std: population standard deviation over the folds, as in InsightFace; LFW's own tables give the standard error
            of the mean, std / √(folds - 1).
        per_fold: accuracy of each fold, in the order of their numbers.
    """

    mean: float
    std: float
    per_fold: tuple[float, ...]


@torch.no_grad()
def kfold_accuracy(first: Rows, second: Rows, same: Same, folds: Folds = 10, pca: int | None = None) -> FoldedAccuracy:
    """Accuracy of a threshold on the cosine, or equally on the distance of the directions: d² = 2 - 2 cos.

    Args:
        first: embedding of the first image of each pair, of any norm.
        second: embedding of the second image of each pair.
        same: whether both images of a pair show one person.
        folds: fold of each pair; or the number of folds, which are then consecutive and of equal size.
        pca: number of principal components to which the embeddings are reduced before their cosine is taken; the
            components and the mean are those of the other folds' images, each counted once for every pair that has it
            (NormFace, section 5.1). The embeddings are reduced as they are, so with `pca` their norms matter.

    Returns:
        The result of `kfold_accuracy_of_scores`; a pair with a row that is not finite is wrong.

    Raises:
        ConfigError: `folds` or `pca` is outside its range.
        DataError: the numbers of pairs differ, or there is one fold only.
    """
    first, second, same = as_rows(first), as_rows(second), as_same(same)
    if first.shape != second.shape:
        raise DataError(f"verification: {tuple(first.shape)} and {tuple(second.shape)} embeddings; as many of each")
    if pca is None:
        return kfold_accuracy_of_scores(cosines(first, second), same, folds)
    same = same.to(first.device)

    def accuracy(is_test: Bool[Tensor, " pairs"]) -> float:
        components = fit_components([first[~is_test], second[~is_test]], pca)
        scores = cosines(components.reduce(first), components.reduce(second))
        return accuracy_of_scores(scores, same, is_test)

    return over_folds(accuracy, folds, same)


def cosines(first: Float[Tensor, "pairs dim"], second: Float[Tensor, "pairs dim"]) -> Float[Tensor, " pairs"]:
    """Cosines of embeddings of any norm, rounded so that equally similar pairs score the same."""
    return rounded((unit_rows(first.double()) * unit_rows(second.double())).sum(1))


def inner_products(first: Float[Tensor, "pairs dim"], second: Float[Tensor, "pairs dim"]) -> Float[Tensor, " pairs"]:
    """Inner products of embeddings as they are, in units of the largest squared norm: in [-1, 1] (NormFace, Table 1).

    Rounded like cosines; the common factor does not change their order.
    """
    return _in_units((first.double() * second.double()).sum(1), first, second)


def closeness(first: Float[Tensor, "pairs dim"], second: Float[Tensor, "pairs dim"]) -> Float[Tensor, " pairs"]:
    """-‖x - x'‖² of embeddings as they are, in units of the largest squared norm: in [-4, 0] (NormFace, Table 1).

    Rounded like cosines; the order is that of the Euclidean distance, the nearest first.
    """
    return _in_units(-(first.double() - second.double()).square().sum(1), first, second)


@torch.no_grad()
def kfold_accuracy_of_scores(scores: Scores, same: Same, folds: Folds = 10) -> FoldedAccuracy:
    """Accuracy of a threshold on any score; the threshold of each fold is chosen on the others.

    A pair is classified as of the same person if its score is above the threshold. Thresholds are tried halfway
    between any two neighbouring scores of the other folds, and beyond both ends; of the most accurate ones the middle
    one is taken, the lower of two. With equal scores every pair thus gets the more frequent class of the other folds. A
    pair whose score is not finite is wrong, and does not affect the threshold.

    Args:
        scores: scores of the pairs; higher is more similar.
        same: whether both images of a pair show one person.
        folds: folds of the pairs, as for `kfold_accuracy`.

    Raises:
        ConfigError: `folds` is outside its range.
        DataError: the numbers of pairs differ, or there is one fold only.
    """
    scores, same = as_scores(scores, same)
    return over_folds(lambda is_test: accuracy_of_scores(scores, same, is_test), folds, same)


def accuracy_of_scores(
    scores: Float[Tensor, " pairs"], same: Bool[Tensor, " pairs"], is_test: Bool[Tensor, " pairs"]
) -> float:
    """The share of a fold's pairs that are classified correctly by the threshold chosen on the others.

    Args:
        scores: scores of all pairs.
        same: whether both images of a pair show one person.
        is_test: mask of the pairs of the fold, one or more.
    """
    is_finite = scores.isfinite()
    is_training = is_finite & ~is_test
    threshold = best_threshold(scores[is_training], same[is_training])
    # The threshold would be rounded to the scores' own type.
    is_right = ((scores.double() > threshold) == same) & is_finite
    return int(is_right[is_test].sum()) / int(is_test.sum())


def over_folds(
    accuracy: Callable[[Bool[Tensor, " pairs"]], float], folds: Folds, same: Bool[Tensor, " pairs"]
) -> FoldedAccuracy:
    """The mean and standard deviation of `accuracy`, called with the mask of the pairs of each fold.

    Raises:
        ConfigError: `folds` is a number outside 2 to the number of pairs.
        DataError: `folds` are not as many as the pairs, or there is one fold only.
    """
    return folded(map(accuracy, fold_masks(folds, same)))


def fold_masks(folds: Folds, same: Bool[Tensor, " pairs"]) -> list[Bool[Tensor, " pairs"]]:
    """The pairs of each fold; arguments and errors as for `over_folds`."""
    numbers = _fold_numbers(folds, len(same)).to(same.device)
    return [numbers == fold for fold in numbers.unique()]


def folded(accuracies: Iterable[float]) -> FoldedAccuracy:
    """The mean and standard deviation of the accuracies of the folds."""
    per_fold = tuple(accuracies)
    return FoldedAccuracy(statistics.fmean(per_fold), statistics.pstdev(per_fold), per_fold)


def best_threshold(scores: Float[Tensor, " pairs"], same: Bool[Tensor, " pairs"]) -> float:
    """The threshold above which "same" is most accurate, as `kfold_accuracy_of_scores` chooses it.

    Args:
        scores: finite scores of the pairs.
        same: whether both images of a pair show one person.
    """
    values, order = scores.double().sort()
    same = same[order]
    is_last_of_ties = torch.ones_like(same)
    is_last_of_ties[:-1] = values[1:] != values[:-1]
    num_right = same.sum() + ((~same).cumsum(0) - same.cumsum(0))[is_last_of_ties]
    values = values[is_last_of_ties]
    ends = values.new_tensor([-math.inf, math.inf])
    lower, upper = values[:-1], values[1:]
    halfway = lower + (upper - lower) / 2
    # Between neighbours of float64 there is no number: the middle may be rounded to the upper one.
    thresholds = torch.cat([ends[:1], torch.where(halfway < upper, halfway, lower), ends[1:]])
    num_right = torch.cat([same.sum().view(1), num_right])
    best = thresholds[num_right == num_right.max()] if len(values) else ends[:1]
    return best[(len(best) - 1) // 2].item()


def sum_of_directions(
    embeddings: Float[Tensor, "images dim"], flipped: Float[Tensor, "images dim"]
) -> Float[Tensor, "images dim"]:
    """Combines embeddings of images and of their mirror images, x / ‖x‖ + x' / ‖x'‖, with equal weight."""
    return unit_rows(embeddings) + unit_rows(flipped)


def sum_of_embeddings(
    embeddings: Float[Tensor, "images dim"], flipped: Float[Tensor, "images dim"]
) -> Float[Tensor, "images dim"]:
    """Combines embeddings of images and of their mirror images, x + x' (NormFace, section 5.1)."""
    return embeddings + flipped


def _in_units(
    values: Float[Tensor, " pairs"], first: Float[Tensor, "pairs dim"], second: Float[Tensor, "pairs dim"]
) -> Float[Tensor, " pairs"]:
    squares = torch.cat([first, second]).double().square().sum(1)
    largest = squares[squares.isfinite()]
    return rounded(values / largest.max() if len(largest) and largest.max() > 0 else values)


def _fold_numbers(folds: Folds, num_pairs: int) -> Int64[Tensor, " pairs"]:
    if isinstance(folds, int | np.integer):
        folds = int(folds)
        if not 2 <= folds <= num_pairs:
            raise ConfigError(
                f"verification in {counted(folds, 'fold')}; allowed: 2 to the number of pairs, {num_pairs}"
            )
        return torch.arange(num_pairs) * folds // num_pairs
    numbers = as_tensor(folds).long()
    if len(numbers) != num_pairs:
        raise DataError(f"verification: the folds of {counted(len(numbers), 'pair')} are given for {num_pairs}")
    if len(numbers.unique()) < 2:
        raise DataError(
            f"verification: {counted(len(numbers.unique()), 'fold')}; 2 or more, as the others choose a threshold"
        )
    return numbers
