import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from ssl_sec.errors import ConfigError, DataError, counted
from ssl_sec.evaluation.faces.components import fit_components
from ssl_sec.evaluation.faces.roc import equal_error_rate, tar_at_far
from ssl_sec.evaluation.faces.verification import (
    best_threshold,
    closeness,
    cosines,
    inner_products,
    kfold_accuracy,
    kfold_accuracy_of_scores,
    sum_of_directions,
    sum_of_embeddings,
)
from ssl_sec.evaluation.faces.videos import hik_svm_kfold_accuracy


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_pairs_of_one_person_may_be_given_as_0_and_1(dtype):
    first, second, same = faces(0)
    scores, numbers = cosines(first, second), same.to(dtype)
    histograms = torch.stack([1 + scores.double(), 1 - scores.double()], 1)
    for measure in (
        lambda same: kfold_accuracy(first, second, same),
        lambda same: kfold_accuracy(first, second, same, pca=3),
        lambda same: kfold_accuracy_of_scores(scores, same),
        lambda same: hik_svm_kfold_accuracy(histograms, same),
        lambda same: tar_at_far(scores, same, (0.1,)),
        lambda same: equal_error_rate(scores, same),
    ):
        assert measure(numbers) == measure(numbers.numpy()) == measure(same)
        with pytest.raises(DataError, match="found 2 in same, must be booleans, or 0 and 1"):
            measure(2 * numbers)


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def minus_square(a, b):
    return -math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def slow_threshold(scores, same):
    """Tries every gap; of the best thresholds the middle, the lower of two."""
    levels = sorted(set(scores))
    candidates = [-math.inf, *((a + b) / 2 for a, b in zip(levels, levels[1:], strict=False)), math.inf]
    if not levels:
        return -math.inf
    right = [sum((s > t) == y for s, y in zip(scores, same, strict=True)) for t in candidates]
    best = [t for t, count in zip(candidates, right, strict=True) if count == max(right)]
    return best[(len(best) - 1) // 2]


def slowly(scores, same, folds):
    accuracies = []
    for fold in sorted(set(folds)):
        finite = [i for i, score in enumerate(scores) if math.isfinite(score)]
        others = [i for i in finite if folds[i] != fold]
        threshold = slow_threshold([scores[i] for i in others], [same[i] for i in others])
        right = sum((scores[i] > threshold) == same[i] for i in finite if folds[i] == fold)
        accuracies.append(right / folds.count(fold))
    return accuracies


def faces(seed, num_pairs=120, dim=12, noise=1.0):
    """Pairs of two kinds in turn, so that folds have as many of each."""
    generator = torch.Generator().manual_seed(seed)
    same = torch.arange(num_pairs) % 2 == 0
    people = torch.randn(2, num_pairs, dim, generator=generator)
    people[1, same] = people[0, same]
    rows = people + noise * torch.randn(2, num_pairs, dim, generator=generator)
    first, second = rows * (0.1 + 10 * torch.rand(2, num_pairs, 1, generator=generator))
    return first, second, same


@st.composite
def scored(draw):
    count = draw(st.integers(2, 24))
    score = st.integers(-5, 5).map(float) | st.just(math.nan)
    scores = draw(st.lists(score, min_size=count, max_size=count))
    same = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    folds = draw(st.lists(st.integers(-1, 3), min_size=count, max_size=count).filter(lambda folds: len(set(folds)) > 1))
    return scores, same, folds


@settings(max_examples=150)
@given(scored())
def test_accuracies_are_those_of_the_slow_loop(case):
    scores, same, folds = case
    found = kfold_accuracy_of_scores(torch.tensor(scores), torch.tensor(same), torch.tensor(folds))
    assert list(found.per_fold) == slowly(scores, same, folds)
    assert found.mean == pytest.approx(statistics.fmean(found.per_fold))
    assert found.std == pytest.approx(statistics.pstdev(found.per_fold))


@settings(max_examples=60)
@given(scored(), st.randoms(use_true_random=False))
def test_the_order_of_the_pairs_changes_nothing(case, random):
    scores, same, folds = map(torch.tensor, case)
    order = random.sample(range(len(same)), len(same))
    mixed = kfold_accuracy_of_scores(scores[order], same[order], folds[order])
    assert mixed == kfold_accuracy_of_scores(scores, same, folds)


def test_the_threshold_is_halfway_and_of_several_the_middle_one():
    same = torch.tensor([False, True])
    assert best_threshold(torch.tensor([0.0, 1.0]), same) == 0.5
    assert best_threshold(torch.tensor([1.0, 0.0]), same) == -math.inf
    assert best_threshold(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([False, True, False, True])) == 0.5
    many = torch.tensor([False, True, False, True, False, True])
    assert best_threshold(torch.arange(6.0), many) == 2.5
    assert best_threshold(torch.arange(3.0), torch.tensor([True, True, True])) == -math.inf
    assert best_threshold(torch.arange(3.0), torch.tensor([False, False, False])) == math.inf
    assert best_threshold(torch.empty(0), torch.empty(0, dtype=torch.bool)) == -math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [0, 1])
def test_neighbouring_scores_are_separated(dtype, steps):
    """No score is between them, and half the way is rounded to the even one of the two."""
    values = [torch.tensor(0.5, dtype=dtype)]
    for _ in range(steps + 1):
        values.append(torch.nextafter(values[-1], torch.tensor(1.0, dtype=dtype)))
    scores = torch.stack(values[-2:]).repeat_interleave(2)
    same = torch.tensor([False, False, True, True])
    assert scores.unique().numel() == 2
    assert best_threshold(scores, same) < float(scores[-1])
    assert kfold_accuracy_of_scores(scores, same, torch.tensor([0, 1, 0, 1])).per_fold == (1.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embeddings_are_compared_by_their_cosines(dtype):
    first, second, same = (each.to(dtype) if each.is_floating_point() else each for each in faces(0))
    folds = torch.randint(5, (len(same),), generator=torch.Generator().manual_seed(0))
    cosines = torch.nn.functional.cosine_similarity(first.double(), second.double())
    found = kfold_accuracy(first, second, same, folds)
    assert list(found.per_fold) == slowly(cosines.tolist(), same.tolist(), folds.tolist())
    assert 0.6 < found.mean < 1
    assert kfold_accuracy(first.numpy(), second.numpy(), same.numpy(), folds.numpy()) == found
    assert kfold_accuracy(second, first, same, folds) == found


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(-40, 40))
def test_norms_change_nothing(seed, exponent):
    first, second, same = faces(seed, 40, 4)
    scales = torch.rand(2, 40, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    scaled = kfold_accuracy(first * scales[0] * 2.0**exponent, second * scales[1], same, 4)
    assert scaled == kfold_accuracy(first, second, same, 4)


def test_a_number_of_folds_cuts_the_pairs_in_their_order():
    first, second, same = faces(1)
    assert kfold_accuracy(first, second, same) == kfold_accuracy(first, second, same, torch.arange(120) // 12)
    assert len(kfold_accuracy(first[:25], second[:25], same[:25], 4).per_fold) == 4
    assert kfold_accuracy(first, second, same, np.int64(5)) == kfold_accuracy(first, second, same, 5)


@pytest.mark.parametrize("pca", [None, 1, 7])
@pytest.mark.parametrize("dim", [1, 16, 512])
def test_collapsed_embeddings_are_right_half_the_time(dim, pca):
    generator = torch.Generator().manual_seed(dim)
    same = torch.arange(60) % 2 == 0
    # Components see norms.
    scales = [torch.ones(2, 60, 1)] + [0.01 + 100 * torch.rand(2, 60, 1, generator=generator)] * (pca is None)
    for row in (torch.ones(dim), torch.randn(dim, generator=generator), torch.zeros(dim)):
        for norms in scales:
            first, second = row * norms
            found = kfold_accuracy(first, second, same, 6, min(pca, dim) if pca else None)
            assert found == (0.5, 0, (0.5,) * 6)


def test_pairs_that_are_not_finite_are_wrong():
    first, second = torch.eye(4).repeat(2, 2, 1)
    same = torch.ones(8, dtype=torch.bool)
    second[1::2] *= -1
    same[1::2] = False
    assert kfold_accuracy(first, second, same, 2).mean == 1
    first[0, 0], second[1, 3] = math.nan, math.inf
    for pca in (None, 3):
        found = kfold_accuracy(first, second, same, 2, pca)
        assert found.per_fold[0] == 0.5
        assert kfold_accuracy(torch.full_like(first, math.nan), second, same, 2, pca).mean == 0
    assert kfold_accuracy(first, second, same, 2).per_fold == (0.5, 1)
    first[4:], second[4:] = math.nan, math.nan
    assert kfold_accuracy(first, second, same, 2, 3).per_fold == (0, 0)  # there are no components for the first


@pytest.mark.parametrize("pca", [1, 5, 12])
def test_components_are_those_that_scikit_learn_finds_in_the_other_folds(pca):
    first, second, same = faces(2)
    folds = torch.arange(len(same)) % 5
    accuracies = []
    for fold in range(5):
        rows = [first.double(), second.double()]
        others = torch.cat([each[folds != fold] for each in rows])
        model = PCA(pca, svd_solver="full").fit(others.numpy())
        reduced = [torch.from_numpy(model.transform(each.numpy())) for each in rows]
        scores = torch.nn.functional.cosine_similarity(*reduced).float()
        accuracies.append(slowly(scores.tolist(), same.tolist(), folds.tolist())[fold])
    assert len(set(accuracies)) > 1
    assert list(kfold_accuracy(first, second, same, folds, pca).per_fold) == accuracies


def test_a_row_that_is_the_mean_up_to_rounding_has_no_direction_along_the_components():
    rows = 100 + torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    components = fit_components([rows], 3)
    assert components.reduce(components.mean.float().unsqueeze(0)).tolist() == [[0.0] * 3]
    expected = (rows.double() - components.mean) @ components.directions
    assert torch.equal(components.reduce(rows), expected) and expected.norm(dim=1).min() > 0.1


def test_components_are_those_of_the_embeddings_and_not_of_their_directions():
    """One coordinate varies most as the rows are, and another among their directions."""
    generator = torch.Generator().manual_seed(4)
    same = torch.arange(40) % 2 == 0
    people = torch.randn(2, 40, generator=generator)
    people[1, same] = people[0, same]
    rows = torch.stack([30 + 10 * people, torch.randn(2, 40, generator=generator)], 2)
    assert kfold_accuracy(*rows, same, 4, 1).mean > 0.7
    assert kfold_accuracy(*torch.nn.functional.normalize(rows, dim=2), same, 4, 1).mean < 0.65


@pytest.mark.parametrize(("score", "slow"), [(inner_products, dot), (closeness, minus_square)])
def test_raw_embeddings_rank_pairs_as_the_slow_loop(score, slow):
    first, second, same = faces(3, 60)
    expected = [slow(a, b) for a, b in zip(first.double().tolist(), second.double().tolist(), strict=True)]
    found = score(first, second)
    largest = max(dot(row, row) for row in torch.cat([first, second]).double().tolist())
    assert found.tolist() == pytest.approx([value / largest for value in expected], abs=1e-7)
    assert list(kfold_accuracy_of_scores(found, same, 5).per_fold) == slowly(
        expected, same.tolist(), [number // 12 for number in range(60)]
    )
    units = [torch.nn.functional.normalize(rows.double()) for rows in (first, second)]
    assert kfold_accuracy_of_scores(score(*units), same, 5) == kfold_accuracy(first, second, same, 5)
    assert kfold_accuracy_of_scores(found, same, 5) != kfold_accuracy(first, second, same, 5)
    second[0] = math.nan
    assert score(first, second)[0].isnan() and score(first, second)[1:].isfinite().all()
    assert score(0 * first, 0 * first).tolist() == [0] * 60


def test_flips_are_added_raw_or_normalised():
    a, b = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[0.0, 10.0], [2.0, 0.0]])
    assert torch.equal(sum_of_embeddings(a, b), torch.tensor([[3.0, 14.0], [2.0, 0.0]]))
    assert torch.allclose(sum_of_directions(a, b), torch.tensor([[0.6, 1.8], [1.0, 0.0]]))


def test_wrong_arguments_are_refused():
    first, second, same = faces(0, 10)
    with pytest.raises(DataError, match=r"\(10, 12\) and \(9, 12\) embeddings"):
        kfold_accuracy(first, second[:9], same)
    with pytest.raises(DataError, match="10 scores for 9 pairs"):
        kfold_accuracy(first, second, same[:9])
    with pytest.raises(DataError, match="folds of 9 pairs are given for 10"):
        kfold_accuracy(first, second, same, torch.arange(9))
    with pytest.raises(DataError, match="1 fold; 2 or more"):
        kfold_accuracy(first, second, same, torch.zeros(10, dtype=torch.int64))
    for folds in (1, 11):
        with pytest.raises(ConfigError, match=f"in {counted(folds, 'fold')}; allowed: 2 to the number of pairs, 10"):
            kfold_accuracy(first, second, same, folds)
    for pca in (0, 13):
        with pytest.raises(ConfigError, match=f"PCA to {pca} components; allowed: 1 to .* 12"):
            kfold_accuracy(first, second, same, 5, pca)


def test_orthogonal_pairs_tie_despite_rounding():
    """Of so small a cosine float32 holds what float64 leaves of 0: about 1e-17, and its sign."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randint(-9, 10, (60, 2), generator=generator).double()
    first, second = vectors, vectors.flip(1) * torch.tensor([1.0, -1.0])
    same = torch.arange(60) % 2 == 0
    assert kfold_accuracy(first / 3, second / 7, same, 6) == (0.5, 0, (0.5,) * 6)
