"""Face verification in folds: are the two images of a pair of the same person?

The protocol is LFW's *unrestricted with labelled outside data* (Huang and Learned-Miller 2014, "Labeled Faces in the
Wild: Updates and New Reporting Procedures"), which AgeDB-30, CFP and YouTube Faces follow: the threshold of each fold
is chosen on the others.

Cosines are computed in float64 and rounded to multiples of 2⁻²⁴, so equally similar pairs score the same, whatever the
norms of their rows: no threshold can separate pairs that only rounding separates.
"""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.arrays import Labels, Rows, Same, Scores, as_tensor, rounded, unit_rows

Folds = int | Labels


class FoldedAccuracy(NamedTuple):
    """Accuracies of the folds, in [0, 1].

    Attributes:
        mean: over the folds.
        std: population standard deviation over the folds, as in InsightFace; LFW's own tables give the standard error
            of the mean, std / √(folds - 1).
        per_fold: in the order of the folds' numbers.
    """

    mean: float
    std: float
    per_fold: tuple[float, ...]


@torch.no_grad()
def kfold_accuracy(first: Rows, second: Rows, same: Same, folds: Folds = 10, pca: int | None = None) -> FoldedAccuracy:
    """Accuracy of a threshold on the cosine, or equally on the distance of the directions: d² = 2 - 2 cos.

    Args:
        first: embedding of the first image of each pair, of any norm.
        second: embedding of the second.
        same: whether the two are of one person.
        folds: the fold of each pair; or the number of folds, consecutive and of equal size.
        pca: the number of principal components to which the directions are reduced, and normalised again; the
            components and the mean are those of the other folds' images (NormFace, section 5.1). A direction within
            1e-6 of the mean becomes 0.

    Returns:
        As `kfold_accuracy_of_scores`; a pair with a row that is not finite is wrong.

    Raises:
        ConfigError: `folds` or `pca` is outside its range.
        DataError: the numbers of pairs differ, or there is one fold only.
    """
    first, second, same = as_tensor(first), as_tensor(second), as_tensor(same)
    if first.shape != second.shape:
        raise DataError(f"verification: {tuple(first.shape)} and {tuple(second.shape)} embeddings; as many of each")
    first, second = unit_rows(first.double()), unit_rows(second.double())
    scores = _cosines(first, second)
    if pca is None:
        return kfold_accuracy_of_scores(scores, same, folds)
    if not 1 <= pca <= first.shape[1]:
        raise ConfigError(f"PCA to {pca} components; allowed: 1 to the dimension of the embeddings, {first.shape[1]}")

    def accuracy(is_test: Bool[Tensor, " pairs"]) -> float:
        images = torch.cat([first[~is_test], second[~is_test]])
        mean, components = _principal_components(images[images.isfinite().all(1)], pca)
        projected = _cosines(*(_reduce(rows, mean, components) for rows in (first, second)))
        return _accuracy(projected, same.to(scores.device), is_test)

    return over_folds(accuracy, folds, same)


@torch.no_grad()
def kfold_accuracy_of_scores(scores: Scores, same: Same, folds: Folds = 10) -> FoldedAccuracy:
    """Accuracy of a threshold on any score, chosen for each fold on the others.

    A pair is classified as of the same person if it scores more than the threshold. Thresholds are tried halfway
    between any two neighbouring scores of the other folds, and beyond both ends; of the most accurate ones the middle
    one is taken, the lower of two. With equal scores every pair thus gets the more frequent class of the other folds. A
    pair whose score is not finite is wrong, and does not affect the threshold.

    Args:
        scores: of the pairs; higher is more similar.
        same: whether the two of a pair are of one person.
        folds: as for `kfold_accuracy`.

    Raises:
        ConfigError: `folds` is outside its range.
        DataError: the numbers of pairs differ, or there is one fold only.
    """
    scores, same = as_tensor(scores), as_tensor(same)
    if len(scores) != len(same):
        raise DataError(f"verification: {len(scores)} scores for {len(same)} pairs")
    same = same.to(scores.device)
    return over_folds(lambda is_test: _accuracy(scores, same, is_test), folds, same)


def over_folds(
    accuracy: Callable[[Bool[Tensor, " pairs"]], float], folds: Folds, same: Bool[Tensor, " pairs"]
) -> FoldedAccuracy:
    """The mean and standard deviation of `accuracy`, called with the mask of the pairs of each fold.

    Raises:
        ConfigError: `folds` is a number outside 2 to the number of pairs.
        DataError: `folds` are not as many as the pairs, or there is one fold only.
    """
    numbers = _fold_numbers(folds, len(same)).to(same.device)
    per_fold = tuple(accuracy(numbers == fold) for fold in numbers.unique())
    return FoldedAccuracy(statistics.fmean(per_fold), statistics.pstdev(per_fold), per_fold)


def best_threshold(scores: Float[Tensor, " pairs"], same: Bool[Tensor, " pairs"]) -> float:
    """The threshold above which "same" is most accurate, as `kfold_accuracy_of_scores` chooses it.

    Args:
        scores: finite.
        same: whether the two of a pair are of one person.
    """
    values, order = scores.double().sort()
    same = same[order]
    is_last_of_ties = torch.ones_like(same)
    is_last_of_ties[:-1] = values[1:] != values[:-1]
    num_right = same.sum() + ((~same).cumsum(0) - same.cumsum(0))[is_last_of_ties]
    values = values[is_last_of_ties]
    ends = values.new_tensor([-math.inf, math.inf])
    thresholds = torch.cat([ends[:1], values[:-1] + (values[1:] - values[:-1]) / 2, ends[1:]])
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


def _cosines(first: Float[Tensor, "pairs dim"], second: Float[Tensor, "pairs dim"]) -> Float[Tensor, " pairs"]:
    """Cosines of rows of length 1 in float64."""
    return rounded((first * second).sum(1))


def _accuracy(scores: Float[Tensor, " pairs"], same: Bool[Tensor, " pairs"], is_test: Bool[Tensor, " pairs"]) -> float:
    is_finite = scores.isfinite()
    is_training = is_finite & ~is_test
    threshold = best_threshold(scores[is_training], same[is_training])
    is_right = ((scores > threshold) == same) & is_finite
    return int(is_right[is_test].sum()) / int(is_test.sum())


def _fold_numbers(folds: Folds, num_pairs: int) -> Int64[Tensor, " pairs"]:
    if isinstance(folds, int):
        if not 2 <= folds <= num_pairs:
            raise ConfigError(f"verification in {folds} folds; allowed: 2 to the number of pairs, {num_pairs}")
        return torch.arange(num_pairs) * folds // num_pairs
    numbers = as_tensor(folds).long()
    if len(numbers) != num_pairs:
        raise DataError(f"verification: the folds of {len(numbers)} pairs are given for {num_pairs}")
    if len(numbers.unique()) < 2:
        raise DataError(f"verification: {len(numbers.unique())} folds; 2 or more, as the others choose a threshold")
    return numbers


def _principal_components(
    rows: Float[Tensor, "images dim"], count: int
) -> tuple[Float[Tensor, " dim"], Float[Tensor, "dim components"]]:
    """The mean, and the directions of largest variance."""
    mean = rows.mean(0)
    centred = rows - mean
    # eigh sorts ascending.
    return mean, torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -count:]


def _reduce(
    rows: Float[Tensor, "images dim"], mean: Float[Tensor, " dim"], components: Float[Tensor, "dim components"]
) -> Float[Tensor, "images components"]:
    projected = (rows - mean) @ components
    # Rows that should equal the mean differ from it by the rounding of float32, in arbitrary directions.
    return unit_rows(projected.masked_fill(projected.norm(dim=1, keepdim=True) < 1e-6, 0))
