import math
import statistics

import pytest
import torch
from sklearn.neighbors import NearestCentroid
from torch.nn import functional

from ssl_sec.errors import DataError, counted
from ssl_sec.evaluation import feature_table
from ssl_sec.evaluation.classification import few_shot as module
from ssl_sec.evaluation.classification.few_shot import few_shot
from ssl_sec.evaluation.feature_table import FeatureTable


def draw(count, seed):
    centres = torch.randn(3, 5, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    features = centres[labels] + 1.5 * torch.randn(count, 5, generator=generator)
    return features * (0.1 + torch.rand(count, 1, generator=generator)), labels


TRAIN, TEST = FeatureTable(*draw(120, seed=1)), FeatureTable(*draw(80, seed=2))


def by_scikit_learn(labels_per_class, seed, number, per_class=False):
    _, numbers, counts = TRAIN.labels.unique(return_inverse=True, return_counts=True)
    chosen = module._drawn(numbers, counts, labels_per_class, seed, number)
    rows, labels = functional.normalize(TRAIN.features)[chosen.flatten()], TRAIN.labels[chosen.flatten()]
    assert labels.bincount().tolist() == [labels_per_class] * 3
    assert len(chosen.unique()) == 3 * labels_per_class
    predicted = NearestCentroid().fit(rows.numpy(), labels.numpy()).predict(functional.normalize(TEST.features).numpy())
    true = TEST.labels.tolist()
    hits = [p == t for p, t in zip(predicted.tolist(), true, strict=True)]
    if not per_class:
        return statistics.fmean(hits)
    of_class = [[hit for hit, label in zip(hits, true, strict=True) if label == each] for each in range(3)]
    return statistics.fmean(map(statistics.fmean, of_class))


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("labels_per_class", [1, 5])
def test_each_draw_scores_as_scikit_learns_nearest_centroid(labels_per_class, per_class):
    found = few_shot(TRAIN, TEST, labels_per_class, seed=3, num_draws=6, per_class=per_class)
    expected = [by_scikit_learn(labels_per_class, 3, number, per_class) for number in range(6)]
    assert found.draws == pytest.approx(expected)
    assert len(set(expected)) > 1
    assert found.top1 == pytest.approx(statistics.fmean(expected))
    assert found.interval == pytest.approx(1.96 * statistics.stdev(expected) / math.sqrt(6), rel=1e-4)


def test_images_that_are_not_finite_and_those_of_a_class_labelled_by_one_are_wrong():
    rows, labels = torch.eye(3).repeat(2, 1), torch.arange(3).repeat(2)
    train, test = (FeatureTable(rows.clone(), labels) for _ in range(2))
    assert few_shot(train, test, 2, seed=0, num_draws=1).draws == pytest.approx((1,))
    test.features[0] = math.nan
    assert few_shot(train, test, 2, seed=0, num_draws=1).draws == pytest.approx((5 / 6,))
    train.features[4] = math.inf
    assert few_shot(train, test, 2, seed=0, num_draws=1).draws == pytest.approx((3 / 6,))


def test_draws_do_not_depend_on_their_number_nor_on_the_memory(monkeypatch):
    many = few_shot(TRAIN, TEST, 5, seed=0)
    assert len(many.draws) == 100
    assert few_shot(TRAIN, TEST, 5, seed=1).draws != many.draws
    monkeypatch.setattr(feature_table, "VALUES_AT_ONCE", 1)
    assert few_shot(TRAIN, TEST, 5, seed=0, num_draws=7).draws == pytest.approx(many.draws[:7])


def test_one_draw_has_no_interval_and_may_label_all_images_of_a_class():
    labels = TRAIN.labels
    least = int(labels.bincount().min())
    found = few_shot(TRAIN, TEST, least, seed=0, num_draws=1)
    assert (found.interval, found.top1) == (0.0, found.draws[0])
    with pytest.raises(DataError, match=f"has {counted(least, 'training image')}, must have {least + 1} or more$"):
        few_shot(TRAIN, TEST, least + 1, seed=0)


def test_more_labels_score_more():
    one, ten = (few_shot(TRAIN, TEST, count, seed=0).top1 for count in (1, 10))
    assert ten > one + 0.05


def test_a_collapsed_encoder_scores_nothing():
    collapsed = [FeatureTable(torch.ones(len(rows), 4), rows.labels) for rows in (TRAIN, TEST)]
    assert few_shot(*collapsed, labels_per_class=5, seed=0).top1 == 0


def test_test_images_of_unseen_classes_are_wrong():
    labels = torch.cat([TEST.labels, torch.full((len(TEST),), 9)])
    twice = FeatureTable(torch.cat([TEST.features, TEST.features]), labels)
    found, alone = (few_shot(TRAIN, test, 5, seed=0, num_draws=2).top1 for test in (twice, TEST))
    assert found == pytest.approx(alone / 2)


def test_a_class_with_too_few_images_is_named():
    with pytest.raises(DataError, match=r"few-shot: class \d has \d+ training images, must have 100 or more$"):
        few_shot(TRAIN, TEST, 100, seed=0)
