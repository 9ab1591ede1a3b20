"""Pairs of videos as the matrix of their frames' cosines (YouTube Faces, Wolf et al. 2011; NormFace, section 5.3).

C_ij is the cosine of the i-th frame of one video and the j-th of the other. A pair's score is their mean or maximum, or
an SVM classifies their histogram.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ssl_sec.errors import DataError, counted
from ssl_sec.evaluation.arrays import Rows, Same, as_same, as_tensor, rounded, unit_rows
from ssl_sec.evaluation.faces.components import fit_components
from ssl_sec.evaluation.faces.verification import FoldedAccuracy, Folds, accuracy_of_scores, fold_masks, folded

_NUM_BINS = 100


class VideoScores(NamedTuple):
    """How similar the two videos of each pair are.

    Attributes:
        means: the mean of C of each pair, in [-1, 1]; NaN if a frame is not finite.
        greatest: the maximum of C, likewise.
        histograms: the shares of C's entries in 100 bins of equal width from -1 to 1, in float64 (NormFace, Fig. 9); 1
            belongs to the last bin. NormFace has 100 bins, but does not state their range, or whether they hold counts.
            Here they hold shares, so that long and short videos are comparable. NaN if a frame is not finite.
    """

    means: Float[Tensor, " pairs"]
    greatest: Float[Tensor, " pairs"]
    histograms: Float[Tensor, "pairs bins"]


class VideoAccuracies(NamedTuple):
    """Accuracies of the folds.

    Attributes:
        mean: accuracies of a threshold on the mean of C.
        greatest: accuracies of a threshold on the maximum of C.
        hik: accuracies of an SVM on the histogram of C.
    """

    mean: FoldedAccuracy
    greatest: FoldedAccuracy
    hik: FoldedAccuracy


def compare_videos(
    videos: Sequence[Rows], first: Int64[Tensor, " pairs"], second: Int64[Tensor, " pairs"]
) -> VideoScores:
    """Compares pairs of videos.

    Args:
        videos: embeddings of the frames of each video, of any norm.
        first: number of the first video of each pair.
        second: number of the second video of each pair.

    Raises:
        DataError: a video has no frames.
    """
    means: list[float] = []
    greatest: list[float] = []
    histograms: list[Tensor] = []
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        cosines = _cosines(videos[one], videos[other])
        means.append(cosines.double().mean().item())
        greatest.append(cosines.amax().item())
        histograms.append(_histogram(cosines).cpu())
    return VideoScores(torch.tensor(means, dtype=torch.float64), torch.tensor(greatest), torch.stack(histograms))


@torch.no_grad()
def videos_kfold_accuracy(
    videos: Sequence[Float[Tensor, "_ dim"]],
    first: Int64[Tensor, " pairs"],
    second: Int64[Tensor, " pairs"],
    same: Same,
    folds: Folds,
    pca: int | None = None,
) -> VideoAccuracies:
    """Accuracies by the mean of C, by its maximum and by its histogram, each fold classified by the other folds.

    Args:
        videos: embeddings of the frames of each video.
        first: number of the first video of each pair.
        second: number of the second video of each pair.
        same: whether both videos show one person.
        folds: folds of the pairs, as for `kfold_accuracy`.
        pca: number of principal components to which embeddings are reduced before their cosines are taken; the
            components are those of the frames of all videos in the other folds' pairs, each counted once (NormFace,
            section 5.1, which specifies neither). All pairs are then compared anew for each fold.

    Raises:
        ConfigError: `folds` or `pca` is outside its range.
        DataError: as for `hik_svm_kfold_accuracy`, or a video has no frames.
    """
    same = as_same(same)
    masks = fold_masks(folds, same)
    if pca is None:
        scores = compare_videos(videos, first, second)
        return VideoAccuracies(
            folded(accuracy_of_scores(scores.means, same, is_test) for is_test in masks),
            folded(accuracy_of_scores(scores.greatest, same, is_test) for is_test in masks),
            hik_svm_kfold_accuracy(scores.histograms, same, folds),
        )
    per_fold: list[tuple[float, float, float]] = []
    for is_test in masks:
        shown = torch.cat([first[~is_test], second[~is_test]]).unique().tolist()
        components = fit_components([videos[number] for number in shown], pca)
        scores = compare_videos([components.reduce(frames) for frames in videos], first, second)
        per_fold.append(
            (
                accuracy_of_scores(scores.means, same, is_test),
                accuracy_of_scores(scores.greatest, same, is_test),
                _svm_accuracy(*_intersections(scores.histograms), same, is_test),
            )
        )
    return VideoAccuracies(*map(folded, zip(*per_fold, strict=True)))


def _histogram(cosines: Float[Tensor, "frames others"]) -> Float[Tensor, " bins"]:
    cosines = cosines.flatten().double()
    if not cosines.isfinite().all():
        return cosines.new_full((_NUM_BINS,), torch.nan)
    bins = ((cosines + 1) / 2 * _NUM_BINS).long().clamp(0, _NUM_BINS - 1)
    return bins.bincount(minlength=_NUM_BINS).double() / len(cosines)


def hik_svm_kfold_accuracy(histograms: Float[Tensor, "pairs bins"], same: Same, folds: Folds = 10) -> FoldedAccuracy:
    """Accuracy of an SVM with the histogram intersection kernel, Σ_b min(h_b, g_b), on the CPU (NormFace, Table 5).

    Each fold is classified by an SVM trained on the others. C = 1, LIBSVM's default, as the paper names none. It needs
    16 bytes · pairs².

    Args:
        histograms: histograms of the pairs, ≥ 0; a pair whose histogram is not finite is wrong, and not trained on.
        same: whether both videos of a pair show one person.
        folds: folds of the pairs, as for `kfold_accuracy`.

    Raises:
        ConfigError: `folds` is outside its range.
        DataError: the numbers of pairs differ, or the other folds of some fold have pairs of one kind or none.
    """
    histograms, same = histograms.cpu().double(), as_same(same).cpu()
    if len(histograms) != len(same):
        raise DataError(f"verification: {counted(len(histograms), 'histogram')} for {counted(len(same), 'pair')}")
    kernel, is_finite = _intersections(histograms)
    return folded(_svm_accuracy(kernel, is_finite, same, is_test) for is_test in fold_masks(folds, same))


def _intersections(
    histograms: Float[Tensor, "pairs bins"],
) -> tuple[Float[Tensor, "pairs pairs"], Bool[Tensor, " pairs"]]:
    """The kernel of all pairs, 0 where a histogram is not finite, and which histograms are finite."""
    is_finite = histograms.isfinite().all(1)
    histograms = histograms.masked_fill(~is_finite.unsqueeze(1), 0)
    sums = histograms.sum(1)
    # min(a, b) = (a + b - |a - b|) / 2.
    return (sums.unsqueeze(1) + sums - torch.cdist(histograms, histograms, p=1)) / 2, is_finite


def _svm_accuracy(
    kernel: Float[Tensor, "pairs pairs"],
    is_finite: Bool[Tensor, " pairs"],
    same: Bool[Tensor, " pairs"],
    is_test: Bool[Tensor, " pairs"],
) -> float:
    """The share of a fold's pairs that an SVM trained on the others classifies correctly."""
    # Imported late: it loads an OpenMP runtime of its own in addition to torch's.
    from sklearn.svm import SVC

    is_training, tested = is_finite & ~is_test, is_finite & is_test
    if len(same[is_training].unique()) < 2:
        raise DataError("verification: the other folds of one have pairs of one kind only; an SVM needs both")
    if not tested.any():
        return 0.0
    svm = SVC(kernel="precomputed").fit(kernel[is_training][:, is_training].numpy(), same[is_training].numpy())
    predicted = torch.from_numpy(svm.predict(kernel[tested][:, is_training].numpy()))
    return int((predicted == same[tested]).sum()) / int(is_test.sum())


@torch.no_grad()
def _cosines(first: Rows, second: Rows) -> Float[Tensor, "frames others"]:
    """C, computed in float64 and rounded to multiples of 2⁻²⁴, so that equal directions have equal cosines."""
    first, second = as_tensor(first), as_tensor(second)
    if len(first) == 0 or len(second) == 0:
        raise DataError(f"videos of {len(first)} and {counted(len(second), 'frame')}; 1 or more each")
    return rounded(unit_rows(first.double()) @ unit_rows(second.double()).T)
