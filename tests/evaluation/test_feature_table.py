import pytest
import torch

from ssl_sec.collectives import rank, world_size
from ssl_sec.evaluation import feature_table
from ssl_sec.evaluation.classification import knn
from ssl_sec.evaluation.classification.few_shot import few_shot
from ssl_sec.evaluation.classification.knn import knn_top1, shared_knn_top1
from ssl_sec.evaluation.classification.linear_probe import select_learning_rate, shuffled, train_linear_probes
from ssl_sec.evaluation.classification.logistic import fit_logistic, tuned_logistic
from ssl_sec.evaluation.classification.scores import hits_of, mean_per_class
from ssl_sec.evaluation.config import ProbeConfig
from ssl_sec.evaluation.feature_table import FeatureTable, rows_at_once
from tests.workers import on_workers

NUM_CLASSES, DIM = 6, 5
RATES = (0.1, 1.0, 3.0)


def draw(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    centres = torch.randn(NUM_CLASSES, DIM, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return centres[labels] + torch.randn(count, DIM, generator=generator, dtype=torch.float64), labels


def divided(features, labels, sizes):
    """The table of a worker that holds as many rows as `sizes` says at its rank; the last one has the rest."""
    if world_size() == 1:
        return FeatureTable(features, labels)
    first = sum(sizes[: rank()])
    stop = len(labels) if rank() == world_size() - 1 else first + sizes[rank()]
    return FeatureTable(features[first:stop], labels, first, is_divided=True)


def looked_up(sizes):
    table = divided(*draw(23, seed=0), sizes)
    found = [table.at(torch.tensor([22, 0, 7, 7, 11])), *table.parts(4), *table.between(5, 17).parts(5)]
    found.append(table.between(6, 20).at(torch.tensor([13, 0, 5])))
    found.append(table.between(3, 20).between(9, 12).at(torch.tensor([2, 0])))
    found.append(table.only(table.labels < 3).at(torch.tensor([1, 0, 4])))
    return [each for pair in found for each in pair], table.between(4, 21).share()


# A worker may hold nothing, as where unreadable images are left out.
@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [(12,), (0,), (23,), (22,), (8, 8), (0, 23), (5, 0)])
def test_each_worker_looks_up_the_rows_of_all(tmp_path, sizes):
    expected, whole = looked_up(())
    features, labels = draw(23, seed=0)
    torch.testing.assert_close(expected[:2], [features[[22, 0, 7, 7, 11]], labels[[22, 0, 7, 7, 11]]], rtol=0, atol=0)
    found = on_workers(len(sizes) + 1, tmp_path, looked_up, sizes)
    for rows, _ in found:
        torch.testing.assert_close(rows, expected, rtol=0, atol=0)
    shares = [torch.cat(each) for each in zip(*(share for _, share in found), strict=True)]
    torch.testing.assert_close(shares, list(whole), rtol=0, atol=0)


def measured(sizes):
    """Everything that a probe computes from its rows, with parts so small that there are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_table, "VALUES_AT_ONCE", 300)
        patch.setattr(knn, "BANK_ROWS", 32)
        rows, test = divided(*draw(203, seed=1), sizes), divided(*draw(61, seed=2), (20, 0))
        config = ProbeConfig(epochs=3, learning_rates=RATES)
        probes = train_linear_probes(
            *(shuffled(rows.between(0, 170), 16, seed=0), config, RATES),
            num_classes=NUM_CLASSES,
            dim=DIM,
            dtype=torch.float64,
        )
        fitted = fit_logistic(rows, NUM_CLASSES, 30.0, tolerance=1e-10)
        tuned = tuned_logistic(rows, 170, NUM_CLASSES, mean_per_class, (1e-3, 1.0, 300.0), tolerance=1e-10)
        return {
            "probe": probes.weight,
            "learning rate": select_learning_rate(probes, rows.between(170, 203)),
            "knn": shared_knn_top1(rows, test, NUM_CLASSES),
            "logistic": fitted.weight,
            "penalty": (tuned.penalty, tuned.validation_scores),
            "hits": hits_of(fitted.parts(test)),
            "few_shot": few_shot(rows, test, 5, seed=0, num_draws=9).draws,
            "few_shot_per_class": few_shot(rows, test, 1, seed=0, num_draws=9, per_class=True).draws,
        }


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [(101,), (0,), pytest.param((90, 30), marks=pytest.mark.slow)])
def test_measures_are_those_of_one_worker_that_holds_all_rows(tmp_path, sizes):
    expected = measured(())
    assert 0.5 < expected["knn"] < 1 and len(set(expected["penalty"][1].values())) > 1
    for found in on_workers(len(sizes) + 1, tmp_path, measured, sizes):
        # A loss is known to 1e-16, so the place of its minimum, around which it is a parabola, to some 1e-8.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


def test_a_shared_knn_is_that_of_the_library():
    bank, queries = draw(100, seed=3), draw(40, seed=4)
    found = shared_knn_top1(FeatureTable(*bank), FeatureTable(*queries), NUM_CLASSES)
    assert found == knn_top1(*bank, *queries, num_classes=NUM_CLASSES)


def test_views_take_no_memory():
    table = FeatureTable(*draw(50, seed=0))
    start = table.features.data_ptr()
    views = [table.between(0, 30).features, next(table.parts(20))[0], table.share()[0]]
    assert [view.data_ptr() for view in views] == [start] * 3


@pytest.mark.parametrize(("values", "expected"), [(1, 2**24), (2**23, 2), (2**24 + 1, 1)])
def test_as_many_rows_as_fit_are_handled_at_once(values, expected):
    assert rows_at_once(values) == expected
