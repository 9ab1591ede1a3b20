import pytest
import torch
from sklearn.linear_model import LogisticRegression as Peer
from torch.nn import functional

from ssl_sec.collectives import own_rows, rank
from ssl_sec.errors import DataError
from ssl_sec.evaluation.classification.logistic import (
    PENALTIES,
    _Objective,
    fit_logistic,
    tuned_logistic,
)
from ssl_sec.evaluation.classification.scores import hits_of, mean_per_class, top1
from ssl_sec.evaluation.feature_table import FeatureTable
from tests.workers import on_workers

NUM_CLASSES = 4


def draw(count, seed=0, spread=1.5):
    centres = torch.randn(NUM_CLASSES, 6, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    return centres[labels] + spread * torch.randn(count, 6, generator=generator, dtype=torch.float64), labels


def table(*sets):
    """The rows of several sets, one after the other."""
    return FeatureTable(*map(torch.cat, zip(*sets, strict=True)))


def tune(train, validation, *args, **options):
    return tuned_logistic(table(train, validation), len(train[1]), NUM_CLASSES, *args, **options)


@pytest.mark.parametrize("penalty", [1e-2, 1.0, 100.0])
def test_the_classifier_is_scikit_learns(penalty):
    rows = draw(200)
    ours = fit_logistic(table(rows), NUM_CLASSES, penalty, tolerance=1e-10)
    peer = Peer(C=1 / penalty, tol=1e-12, max_iter=10_000).fit(rows[0].numpy(), rows[1].numpy())
    torch.testing.assert_close(ours.weight, torch.from_numpy(peer.coef_), rtol=0, atol=1e-6)
    # A constant added to every bias changes nothing.
    torch.testing.assert_close(
        ours.bias - ours.bias.mean(), torch.from_numpy(peer.intercept_ - peer.intercept_.mean()), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(("scale", "mean"), [(1e-4, 0), (1e4, 0), (1.0, 1e3), (1e-4, 1)])
def test_the_minimum_is_found_at_any_scale_and_mean_of_the_features(scale, mean):
    features, labels = draw(200)
    features = (features * scale + mean).float()
    ours = fit_logistic(table((features, labels)), NUM_CLASSES, 10 * scale**2)
    centred = (features.double() - features.double().mean(0)) / scale
    peer = Peer(C=1 / 10, tol=1e-10, max_iter=10_000).fit(centred.numpy(), labels.numpy())
    torch.testing.assert_close(scale * ours.weight, torch.from_numpy(peer.coef_), rtol=0, atol=1e-3)
    found = ours.logits(features.double()).softmax(1)
    torch.testing.assert_close(found, torch.from_numpy(peer.predict_proba(centred.numpy())), rtol=0, atol=1e-3)


def test_the_minimum_is_found_beside_a_feature_that_is_far_larger():
    features, labels = draw(200)
    features[:, 2] *= 1e5
    ours = fit_logistic(table((features.float(), labels)), NUM_CLASSES, 1.0)
    peer = Peer(C=1.0, tol=1e-10, solver="newton-cg", max_iter=1000).fit(features.numpy(), labels.numpy())
    found = ours.logits(features).softmax(1)
    torch.testing.assert_close(found, torch.from_numpy(peer.predict_proba(features.numpy())), rtol=0, atol=1e-3)


def test_equal_features_and_a_penalty_that_leaves_no_weights_give_the_frequencies_of_the_classes():
    labels = torch.tensor([0, 0, 0, 1, 2, 3])
    for features, penalty in ((torch.full((6, 2), 7.3), 1.0), (torch.randn(6, 2) * 1e-6, 1e5)):
        probabilities = fit_logistic(table((features, labels)), NUM_CLASSES, penalty).logits(features).softmax(1)
        torch.testing.assert_close(probabilities[0], torch.tensor([3, 1, 1, 1], dtype=torch.float64) / 6)


def test_the_gradient_is_autograds_whatever_the_chunks():
    features, labels = draw(50)
    centre = torch.arange(6, dtype=torch.float64)
    flat = torch.randn(NUM_CLASSES * 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaf = flat.clone().requires_grad_()
    scale = torch.arange(1, 7, dtype=torch.float64)
    weight = leaf[:-4].view(4, 6)
    logits = functional.linear((features - centre) / scale, weight, leaf[-4:])
    expected = functional.cross_entropy(logits, labels) + 0.7 / 50 / 2 * (weight / scale).square().sum()
    expected.backward()
    for chunk_size in (7, 50, 1000):
        loss, gradient = _Objective(features, labels, 50, NUM_CLASSES, chunk_size, centre, scale)(flat, 0.7)
        assert loss == pytest.approx(expected.item(), abs=1e-12)
        torch.testing.assert_close(gradient, leaf.grad, rtol=0, atol=1e-12)


def fit_on_this_worker():
    features, labels = draw(101)
    fitted = fit_logistic(table((features, labels)), NUM_CLASSES, 30.0, tolerance=1e-10)
    own = own_rows(len(labels))
    flat = torch.randn(NUM_CLASSES * 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    objective = _Objective(features[own], labels[own], len(labels), NUM_CLASSES, 20, features.mean(0), features.std(0))
    loss, gradient = objective(flat, 0.3)
    return fitted.weight, fitted.bias, torch.tensor(loss, dtype=torch.float64), gradient


@pytest.mark.distributed
def test_two_workers_equal_one(tmp_path):
    alone = fit_on_this_worker()
    # A loss is known to 1e-16, so the place of its minimum, around which it is a parabola, to some 1e-8.
    limits = 1e-7, 1e-7, 1e-13, 1e-13
    for shared in on_workers(2, tmp_path, fit_on_this_worker):
        for ours, expected, limit in zip(shared, alone, limits, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=limit)


def tune_with_other_rounding():
    """A tuned classifier; worker 1 rounds what the search sees in another way, as another kind of processor does."""
    exact = _Objective.__call__

    def rounded(self, flat, penalty):
        loss, gradient = exact(self, flat, penalty)
        return loss * (1 + 1e-6 * rank()), gradient * (1 + 1e-6 * rank())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Objective, "__call__", rounded)
        train, validation = draw(101), draw(60, seed=2)
        tuned = tuned_logistic(
            table(train, validation), len(train[1]), NUM_CLASSES, penalties=(1e-3, 1.0, 100.0), tolerance=1e-10
        )
    return tuned.penalty, tuned.validation_scores, tuned.classifier.weight, tuned.classifier.bias


@pytest.mark.distributed
def test_workers_of_several_kinds_follow_the_search_of_the_first(tmp_path):
    (*chosen, weight, bias), (*also_chosen, other_weight, other_bias) = on_workers(
        2, tmp_path, tune_with_other_rounding
    )
    assert chosen == also_chosen
    assert torch.equal(weight, other_weight)
    assert torch.equal(bias, other_bias)
    expected = tune_with_other_rounding()
    assert chosen == list(expected[:2])
    torch.testing.assert_close(weight, expected[2], rtol=0, atol=1e-6)


def test_float32_features_give_nearly_the_same_classifier():
    features, labels = draw(300)
    exact = fit_logistic(table((features, labels)), NUM_CLASSES, 1.0)
    single = fit_logistic(table((features.float(), labels)), NUM_CLASSES, 1.0)
    torch.testing.assert_close(single.weight, exact.weight, rtol=0, atol=1e-3)


def test_a_search_that_starts_at_the_minimum_stays_there():
    rows = draw(150)
    found = fit_logistic(table(rows), NUM_CLASSES, 1.0, tolerance=1e-6)
    again = fit_logistic(table(rows), NUM_CLASSES, 1.0, found, tolerance=1e-5, max_iterations=1)
    torch.testing.assert_close(again.weight, found.weight, rtol=1e-14, atol=0)


def test_the_grid_is_simclrs():
    assert len(PENALTIES) == 45
    assert PENALTIES[0] == pytest.approx(1e-6)
    assert PENALTIES[-1] == pytest.approx(1e5)
    ratios = {round(after / before, 9) for before, after in zip(PENALTIES, PENALTIES[1:], strict=False)}
    assert len(ratios) == 1


def test_the_penalty_is_chosen_on_validation_images_and_all_images_are_trained_on():
    train, validation = draw(40, seed=1), draw(60, seed=2)
    counts: list[int] = []
    penalties = (1e-2, 1.0, 30.0, 1e4)
    tuned = tuned_logistic(
        table(train, validation), len(train[1]), NUM_CLASSES, penalties=penalties, on_fit=counts.append
    )
    assert counts == [1, 2, 3, 4]
    cold = {
        penalty: top1(*hits_of(fit_logistic(table(train), NUM_CLASSES, penalty).parts(table(validation))))
        for penalty in (1e-2, 1.0, 30.0, 1e4)
    }
    assert tuned.validation_scores == cold
    assert len(set(cold.values())) > 1
    assert tuned.penalty == max(penalty for penalty, score in cold.items() if score == max(cold.values()))
    whole = fit_logistic(table(train, validation), NUM_CLASSES, tuned.penalty)
    torch.testing.assert_close(tuned.classifier.weight, whole.weight, rtol=0, atol=1e-3)
    fewer = tune(train, validation, penalties=penalties, refit=False)
    assert fewer.penalty == tuned.penalty
    alone = fit_logistic(table(train), NUM_CLASSES, fewer.penalty)
    torch.testing.assert_close(fewer.classifier.weight, alone.weight, rtol=0, atol=1e-3)


def test_of_penalties_with_one_score_the_largest_is_chosen():
    train, validation = draw(40, seed=1), draw(60, seed=2)
    tuned = tuned_logistic(
        table(train, validation), len(train[1]), NUM_CLASSES, lambda *_: 0.5, (1.0, 30.0, 10.0), refit=False
    )
    assert tuned.penalty == 30


def test_the_last_training_ends_at_the_minimum_even_where_the_searches_before_were_cut_short():
    train, validation = draw(40, seed=1), draw(60, seed=2)
    cut = tuned_logistic(
        table(train, validation), len(train[1]), NUM_CLASSES, penalties=(1.0,), iterations_per_penalty=1
    )
    whole = tune(train, validation, penalties=(1.0,))
    assert cut.validation_scores != whole.validation_scores
    torch.testing.assert_close(cut.classifier.weight, whole.classifier.weight, rtol=0, atol=1e-3)


def test_mean_per_class_weighs_classes_alike():
    labels = torch.tensor([0, 0, 0, 2])
    logits = functional.one_hot(torch.tensor([0, 0, 1, 1]), 3).double()
    hits = hits_of([(logits[:3], labels[:3]), (logits[3:], labels[3:])])
    assert top1(*hits) == 0.5
    assert mean_per_class(*hits) == pytest.approx((2 / 3 + 0) / 2)


def test_features_that_are_not_finite_are_refused():
    features, labels = draw(10)
    features[3, 1] = torch.nan
    with pytest.raises(DataError, match="logistic regression: 1 of 10 images"):
        fit_logistic(table((features, labels)), NUM_CLASSES, 1.0)
    with pytest.raises(DataError, match="no validation images"):
        tuned_logistic(table(draw(10)), 10, NUM_CLASSES)
