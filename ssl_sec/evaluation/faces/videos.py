"""Pairs of videos as the matrix of their frames' cosines (YouTube Faces, Wolf et al. 2011; NormFace, section 5.3).

C_ij is the cosine of the i-th frame of one video and the j-th of the other. A pair's score is their mean or maximum, or
an SVM classifies their histogram.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ssl_sec.errors import DataError
from ssl_sec.evaluation.arrays import Rows, Same, as_tensor, rounded, unit_rows
from ssl_sec.evaluation.faces.verification import FoldedAccuracy, Folds, over_folds


def video_score_mean(first: Rows, second: Rows) -> float:
    """The mean of C, in [-1, 1]; NaN if a frame is not finite.

    Args:
        first: embeddings of the frames of one video, of any norm; 1 or more.
        second: those of the other.

    Raises:
        DataError: a video has no frames.
    """
    return _cosines(first, second).double().mean().item()


def video_score_max(first: Rows, second: Rows) -> float:
    """The maximum of C, in [-1, 1]; arguments and errors as for `video_score_mean`."""
    return _cosines(first, second).amax().item()


def score_histogram(first: Rows, second: Rows, num_bins: int = 100) -> Float[Tensor, " bins"]:
    """The shares of C's entries in bins of equal width from -1 to 1, in float64 (NormFace, Fig. 9).

    NormFace has 100 bins, but does not state their range, or whether they hold counts. Here they hold shares, so that
    long and short videos are comparable; 1 belongs to the last bin. NaN if a frame is not finite.

    Other arguments and errors as for `video_score_mean`.
    """
    cosines = _cosines(first, second).flatten().double()
    if not cosines.isfinite().all():
        return cosines.new_full((num_bins,), torch.nan)
    bins = ((cosines + 1) / 2 * num_bins).long().clamp(0, num_bins - 1)
    return bins.bincount(minlength=num_bins).double() / len(cosines)


def hik_svm_kfold_accuracy(histograms: Float[Tensor, "pairs bins"], same: Same, folds: Folds = 10) -> FoldedAccuracy:
    """Accuracy of an SVM with the histogram intersection kernel, Σ_b min(h_b, g_b), on the CPU (NormFace, Table 5).

    Each fold is classified by an SVM trained on the others. C = 1, LIBSVM's default, as the paper names none. It takes
    16 bytes · pairs².

    Args:
        histograms: of the pairs, ≥ 0; a pair whose histogram is not finite is wrong, and not trained on.
        same: whether the two videos of a pair are of one person.
        folds: as for `kfold_accuracy`.

    Raises:
        ConfigError: `folds` is outside its range.
        DataError: the numbers of pairs differ, or the other folds of some fold have pairs of one kind or none.
    """
    # Imported late: it loads an OpenMP runtime of its own beside torch's.
    from sklearn.svm import SVC

    histograms, same = histograms.cpu().double(), as_tensor(same).cpu()
    if len(histograms) != len(same):
        raise DataError(f"verification: {len(histograms)} histograms for {len(same)} pairs")
    is_finite = histograms.isfinite().all(1)
    histograms = histograms.masked_fill(~is_finite.unsqueeze(1), 0)
    sums = histograms.sum(1)
    # min(a, b) = (a + b - |a - b|) / 2.
    kernel = (sums.unsqueeze(1) + sums - torch.cdist(histograms, histograms, p=1)) / 2

    def accuracy(is_test: Bool[Tensor, " pairs"]) -> float:
        is_training, tested = is_finite & ~is_test, is_finite & is_test
        if len(same[is_training].unique()) < 2:
            raise DataError("verification: the other folds of one have pairs of one kind only; an SVM needs both")
        if not tested.any():
            return 0.0
        svm = SVC(kernel="precomputed").fit(kernel[is_training][:, is_training].numpy(), same[is_training].numpy())
        predicted = torch.from_numpy(svm.predict(kernel[tested][:, is_training].numpy()))
        return int((predicted == same[tested]).sum()) / int(is_test.sum())

    return over_folds(accuracy, folds, same)


@torch.no_grad()
def _cosines(first: Rows, second: Rows) -> Float[Tensor, "frames others"]:
    """C, computed in float64 and rounded to multiples of 2⁻²⁴, so that equal directions have equal cosines."""
    first, second = as_tensor(first), as_tensor(second)
    if len(first) == 0 or len(second) == 0:
        raise DataError(f"videos of {len(first)} and {len(second)} frames; 1 or more each")
    return rounded(unit_rows(first.double()) @ unit_rows(second.double()).T)
