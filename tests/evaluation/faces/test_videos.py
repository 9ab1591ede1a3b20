import math

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.svm import SVC

from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.faces.verification import kfold_accuracy_of_scores
from ssl_sec.evaluation.faces.videos import VideoScores, compare_videos, hik_svm_kfold_accuracy, videos_kfold_accuracy


def videos(seed, num_pairs=60, dim=8, noise=1.2):
    """Pairs of both kinds in turn, of videos of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for number in range(num_pairs):
        people = torch.randn(2, dim, generator=generator)
        people[1] = people[0] if number % 2 == 0 else people[1]
        lengths = torch.randint(3, 9, (2,), generator=generator).tolist()
        pairs.append(
            [who + noise * torch.randn(n, dim, generator=generator) for who, n in zip(people, lengths, strict=True)]
        )
    return pairs, torch.arange(num_pairs) % 2 == 0


def cosines(first, second):
    return [
        math.fsum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)
        for a in first.double().tolist()
        for b in second.double().tolist()
    ]


def scores_of(pairs) -> VideoScores:
    """The scores of pairs, each of two videos of its own."""
    first, second = torch.arange(2 * len(pairs)).view(-1, 2).unbind(1)
    return compare_videos([video for pair in pairs for video in pair], first, second)


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_the_slow_loop(seed):
    for first, second in videos(seed, 5)[0]:
        expected = cosines(first, second)
        scaled = (7 * first).numpy(), (0.1 * second).double().numpy()
        found = scores_of([(first, second), (second, first), scaled])
        assert found.means.tolist() == pytest.approx([sum(expected) / len(expected)] * 3, abs=1e-6)
        assert found.greatest.tolist() == pytest.approx([max(expected)] * 3, abs=1e-6)
        histogram = found.histograms[0]
        assert len(histogram) == 100 and histogram.sum().item() == pytest.approx(1)
        counts = np.histogram(np.rint(np.array(expected) * 2**24) / 2**24, bins=100, range=(-1, 1))[0]
        assert histogram.tolist() == pytest.approx((counts / len(expected)).tolist())


def test_the_ends_belong_to_the_first_bin_and_the_last():
    rows = torch.tensor([[1.0, 2.0, 3.0]])
    histograms = scores_of([(rows, 3 * rows), (rows, -rows), (rows, torch.zeros(2, 3))]).histograms
    assert histograms.nonzero().tolist() == [[0, 99], [1, 0], [2, 50]]
    assert histograms.sum(1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("most_frames", [1, 9])
def test_an_svm_is_scikit_learns_with_the_kernel_of_the_slow_loop(most_frames):
    pairs, same = videos(0)
    sums = torch.randint(1, most_frames + 1, (60, 1), generator=torch.Generator().manual_seed(0))
    histograms = scores_of(pairs).histograms * sums
    folds = torch.arange(60) // 12

    def intersection(a, b):
        return np.array([[sum(map(min, x, y)) for y in b] for x in a])

    accuracies = []
    for fold in range(5):
        trains, tested = (folds != fold).numpy(), (folds == fold).numpy()
        svm = SVC(kernel=intersection).fit(histograms.numpy()[trains], same.numpy()[trains])
        accuracies.append(svm.score(histograms.numpy()[tested], same.numpy()[tested]))
    found = hik_svm_kfold_accuracy(histograms, same, folds)
    assert list(found.per_fold) == pytest.approx(accuracies)
    assert 0.7 < found.mean < 1
    assert hik_svm_kfold_accuracy(histograms, same, 5) == found


def numbered(pairs):
    """The videos of some pairs in a row, and the numbers of both of each; the last pair shares one of the first."""
    first, second = torch.arange(2 * len(pairs)).view(-1, 2).unbind(1)
    second = torch.where(torch.arange(len(pairs)) == len(pairs) - 1, second[0], second)
    return [video for pair in pairs for video in pair], first, second


@pytest.mark.parametrize("pca", [None, 3, 8])
def test_components_are_those_that_scikit_learn_finds_in_the_videos_of_the_other_folds(pca):
    pairs, same = videos(3, num_pairs=24)
    frames, first, second = numbered(pairs)
    folds = torch.arange(24) % 3
    accuracies = {"mean": [], "greatest": [], "hik": []}
    for fold in range(3):
        seen = {number for each in (first, second) for number in each[folds != fold].tolist()}
        reduce = (
            PCA(pca, svd_solver="full")
            .fit(np.concatenate([frames[number].double() for number in sorted(seen)]))
            .transform
            if pca
            else np.asarray
        )
        reduced = [torch.from_numpy(reduce(video.double().numpy())) for video in frames]
        compared = [(reduced[one], reduced[other]) for one, other in zip(first, second, strict=True)]
        scores = scores_of(compared)
        for name, values in (("mean", scores.means), ("greatest", scores.greatest)):
            accuracies[name].append(kfold_accuracy_of_scores(values, same, folds).per_fold[fold])
        accuracies["hik"].append(hik_svm_kfold_accuracy(scores.histograms, same, folds).per_fold[fold])
    found = videos_kfold_accuracy(frames, first, second, same, folds, pca)
    assert {name: list(one.per_fold) for name, one in found._asdict().items()} == accuracies
    assert found != videos_kfold_accuracy(frames, first, second, same, folds, pca=2)


def test_collapsed_embeddings_are_right_half_the_time():
    generator = torch.Generator().manual_seed(0)
    row, same = torch.randn(64, generator=generator), torch.arange(40) % 2 == 0
    pairs = [
        [row * (0.1 + torch.rand(n, 1, generator=generator)) for n in torch.randint(1, 6, (2,), generator=generator)]
        for _ in same
    ]
    scores = scores_of(pairs)
    for values in (scores.means, scores.greatest):
        assert kfold_accuracy_of_scores(values, same, 4) == (0.5, 0, (0.5,) * 4)
    assert hik_svm_kfold_accuracy(scores.histograms, same, 4) == (0.5, 0, (0.5,) * 4)


def test_pairs_that_are_not_finite_are_wrong():
    pairs, same = videos(1, noise=0.2)
    good = scores_of(pairs).histograms
    assert hik_svm_kfold_accuracy(good, same, 5).mean == 1
    pairs[0][1][2] = math.nan
    means, greatest, histograms = scores_of(pairs)
    assert means.isnan().nonzero().tolist() == greatest.isnan().nonzero().tolist() == [[0]]
    assert histograms[0].isnan().all() and torch.equal(histograms[1:], good[1:])
    assert hik_svm_kfold_accuracy(histograms, same, 5).per_fold == (11 / 12, 1, 1, 1, 1)
    histograms[:12] = math.nan
    assert hik_svm_kfold_accuracy(histograms, same, 5).per_fold == (0, 1, 1, 1, 1)


def test_wrong_arguments_are_refused():
    rows = torch.eye(3)
    with pytest.raises(DataError, match="videos of 0 and 3 frames; 1 or more each"):
        scores_of([(rows[:0], rows)])
    with pytest.raises(DataError, match="videos of 3 and 0 frames; 1 or more each"):
        scores_of([(rows, rows[:0])])
    with pytest.raises(DataError, match="3 histograms for 2 pairs"):
        hik_svm_kfold_accuracy(rows, torch.tensor([True, False]))
    with pytest.raises(ConfigError, match="PCA to 9 components; allowed: 1 to the dimension of the embeddings, 8"):
        pairs, same = videos(0, 4)
        videos_kfold_accuracy(*numbered(pairs), same, 2, pca=9)
    with pytest.raises(DataError, match="pairs of one kind only"):
        hik_svm_kfold_accuracy(rows, torch.tensor([True, False, False]), 3)
