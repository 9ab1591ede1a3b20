import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.classification.linear_probe import (
    LinearProbes,
    divided_rows,
    evaluate_probe,
    linear_probe,
    select_learning_rate,
    shuffled,
    train_linear_probes,
)
from ssl_sec.evaluation.classification.scores import top_k_accuracy
from ssl_sec.evaluation.config import ProbeConfig
from ssl_sec.evaluation.feature_table import FeatureTable

NUM_CLASSES, DIM, RATES = 4, 6, (1.0, 2.0, 5.0, 10.0)


def draw(count, seed=0, spread=1.0):
    """Features in float64 around one centre for each class, and labels."""
    centres = torch.randn(NUM_CLASSES, DIM, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    noise = torch.randn(count, DIM, generator=generator, dtype=torch.float64)
    return centres[labels] + spread * noise, labels


def train(feature_batches, learning_rates=RATES, **settings):
    how = {"dtype": settings.pop("dtype", torch.float64), "on_epoch": settings.pop("on_epoch", None)}
    config = ProbeConfig(**{"epochs": 8, "decay_at": (3 / 8, 6 / 8), **settings})
    return train_linear_probes(feature_batches, config, learning_rates, num_classes=NUM_CLASSES, dim=DIM, **how)


def by_torch(feature_batches, learning_rate, epochs=8, decay_epochs=(3, 6), momentum=0.9):
    """The same classifier by autograd, torch's SGD and its scheduler; and its mean loss in each epoch."""
    classifier = nn.Linear(DIM, NUM_CLASSES, dtype=torch.float64)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    optimiser = torch.optim.SGD(classifier.parameters(), learning_rate, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimiser, list(decay_epochs), gamma=1 / 5)
    losses = []
    for epoch in range(epochs):
        total, count = 0.0, 0
        for features, labels in feature_batches(epoch):
            loss = functional.cross_entropy(classifier(features), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total, count = total + loss.item() * len(labels), count + len(labels)
        scheduler.step()
        losses.append(total / count)
    return classifier, losses


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_each_rate_follows_torchs_sgd(momentum):
    feature_batches = shuffled(FeatureTable(*draw(150)), batch_size=32, seed=1)
    losses = []
    probes = train(feature_batches, momentum=momentum, on_epoch=lambda _, loss: losses.append(loss.tolist()))
    for row, learning_rate in enumerate(RATES):
        classifier, expected_losses = by_torch(feature_batches, learning_rate, momentum=momentum)
        torch.testing.assert_close(probes.weight[row], classifier.weight.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(probes.bias[row], classifier.bias.detach(), rtol=0, atol=1e-10)
        assert [loss[row] for loss in losses] == pytest.approx(expected_losses, abs=1e-10)


def test_a_rate_is_trained_the_same_beside_one_that_diverges():
    feature_batches = shuffled(FeatureTable(*draw(100)), batch_size=25, seed=0)
    probes = train(feature_batches, learning_rates=(1e308, 1.0))
    assert not probes.weight[0].isfinite().all()
    alone = train(feature_batches, learning_rates=(1.0,))
    torch.testing.assert_close(probes.weight[1], alone.weight[0], rtol=0, atol=1e-12)


def test_the_decays_of_a_short_probe_are_reached():
    feature_batches = shuffled(FeatureTable(*draw(60)), batch_size=20, seed=0)
    short = train(feature_batches, epochs=5, decay_at=(0.6, 0.75, 0.9))
    classifier, _ = by_torch(feature_batches, RATES[-1], epochs=5, decay_epochs=(3, 4, 4))
    torch.testing.assert_close(short.weight[-1], classifier.weight.detach(), rtol=0, atol=1e-10)


def test_float32_and_half_precision_features_are_converted():
    features, labels = draw(200, spread=0.2)
    feature_batches = shuffled(FeatureTable(features.bfloat16(), labels), batch_size=50, seed=0)
    probes = train(feature_batches, dtype=torch.float32)
    assert probes.weight.dtype == torch.float32
    rounded = shuffled(FeatureTable(features.bfloat16().double(), labels), batch_size=50, seed=0)
    torch.testing.assert_close(probes.weight.double(), train(rounded).weight, rtol=1e-3, atol=1e-3)


def test_training_leaves_no_graph_and_no_gradient():
    features, labels = draw(40)
    features.requires_grad_()
    probes = train(shuffled(FeatureTable(features, labels), batch_size=40, seed=0))
    assert not probes.weight.requires_grad
    assert features.grad is None


def test_an_epoch_without_images_is_refused():
    with pytest.raises(DataError, match="no training images"):
        train(lambda epoch: [])


def test_shuffled_depends_on_seed_and_epoch_alone():
    features = torch.arange(10.0).unsqueeze(1)
    labels = torch.arange(10)
    batches = shuffled(FeatureTable(features, labels), batch_size=4, seed=5)

    def order(batches):
        return [row for _, labels in batches for row in labels.tolist()]

    assert [len(labels) for _, labels in batches(0)] == [4, 4, 2]
    assert all(torch.equal(rows[:, 0].long(), labels) for rows, labels in batches(3))
    later = order(batches(7))
    assert sorted(later) == list(range(10))
    assert later == order(shuffled(FeatureTable(features, labels), batch_size=3, seed=5)(7))
    assert later != order(batches(8))
    assert later != order(shuffled(FeatureTable(features, labels), batch_size=4, seed=6)(7))


def test_logits_are_those_of_the_linear_layers():
    probes = train(shuffled(FeatureTable(*draw(80)), batch_size=40, seed=0))
    features, _ = draw(9, seed=3)
    logits = probes.logits(features)
    for row, rate in enumerate(RATES):
        expected = functional.linear(features, probes.weight[row], probes.bias[row])
        torch.testing.assert_close(logits[row], expected)
        torch.testing.assert_close(probes.only(rate).logits(features)[0], expected)


def constant_probes(*answers, rates=RATES):
    """Classifiers that always answer the given class; None for one that diverged."""
    bias = torch.zeros(len(answers), NUM_CLASSES)
    for row, answer in enumerate(answers):
        bias[row, 0 if answer is None else answer] = torch.nan if answer is None else 1.0
    return LinearProbes(torch.zeros(len(answers), NUM_CLASSES, DIM), bias, rates[: len(answers)])


@pytest.mark.parametrize(
    ("answers", "rates", "chosen", "accuracies"),
    [
        ((0, 1, 2), (1.0, 2.0, 5.0), 2.0, [0.2, 0.5, 0.3]),
        ((1, 1, 2), (5.0, 2.0, 1.0), 2.0, [0.5, 0.5, 0.3]),
        ((None, 0, None), (1.0, 2.0, 5.0), 2.0, [0, 0.2, 0]),
        ((None, 3), (1.0, 2.0), 2.0, [0, 0]),
    ],
)
def test_the_best_finite_rate_is_chosen_and_the_smallest_of_equals(answers, rates, chosen, accuracies):
    labels = torch.tensor([0] * 2 + [1] * 5 + [2] * 3)
    selection = select_learning_rate(constant_probes(*answers, rates=rates), FeatureTable(torch.zeros(10, DIM), labels))
    assert selection == (chosen, pytest.approx(dict(zip(rates, accuracies, strict=True))))


def test_a_selection_without_a_finite_probe_is_refused():
    with pytest.raises(DataError, match=r"every learning rate \(1, 2\)"):
        select_learning_rate(
            constant_probes(None, None), FeatureTable(torch.zeros(3, DIM), torch.zeros(3, dtype=torch.int64))
        )


def test_top_k_accuracy_by_hand():
    logits = torch.tensor([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    labels = torch.tensor([0, 2, 0, 2])
    assert [top_k_accuracy(logits, labels, k) for k in (1, 2, 3)] == [0.5, 0.75, 1.0]


@given(rows=st.lists(st.permutations(range(6)), min_size=1, max_size=20), k=st.integers(1, 6), seed=st.integers())
def test_top_k_accuracy_of_distinct_logits_is_topks(rows, k, seed):
    logits = torch.tensor(rows).double()
    labels = torch.randint(6, (len(rows),), generator=torch.Generator().manual_seed(seed % 2**32))
    expected = (logits.topk(k).indices == labels.unsqueeze(1)).any(1).double().mean().item()
    assert top_k_accuracy(logits, labels, k) == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.0, 2.5, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("k", [1, 3])
def test_equal_or_non_finite_logits_score_0(value, k):
    labels = torch.zeros(8, dtype=torch.int64)
    assert top_k_accuracy(torch.full((8, 4), value), labels, k) == 0


def test_one_logit_that_is_not_finite_makes_its_row_wrong():
    logits = torch.tensor([[9.0, 0.0, torch.nan], [9.0, 0.0, 1.0], [torch.inf, 0.0, 1.0]])
    assert top_k_accuracy(logits, torch.tensor([0, 0, 0]), 1) == pytest.approx(1 / 3)
    assert top_k_accuracy(logits, torch.tensor([0, 0, 0]), 3) == pytest.approx(1 / 3)


@pytest.mark.parametrize("k", [0, 5])
def test_a_k_out_of_range_is_an_assertion_error(k):
    with pytest.raises(AssertionError, match="4 classes"):
        top_k_accuracy(torch.zeros(2, 4), torch.tensor([0, 1]), k)


def test_a_probe_learns_clusters_and_reports_the_chosen_rate():
    probes = train(shuffled(FeatureTable(*draw(400, spread=0.3)), batch_size=64, seed=0))
    rate, held_out_top1 = select_learning_rate(probes, FeatureTable(*draw(100, seed=1, spread=0.3)))
    features, labels = draw(300, seed=2, spread=0.3)
    result = evaluate_probe(probes, rate, held_out_top1, FeatureTable(features, labels))
    predicted = probes.logits(features)[RATES.index(rate)].argmax(1)
    assert result.learning_rate == rate
    assert result.held_out_top1 == held_out_top1
    assert set(held_out_top1) == set(RATES)
    assert result.top1 == pytest.approx((predicted == labels).double().mean().item())
    assert result.top1 > 0.9
    expected = torch.zeros(NUM_CLASSES, NUM_CLASSES, dtype=torch.int64)
    for true, guess in zip(labels.tolist(), predicted.tolist(), strict=True):
        expected[true, guess] += 1
    assert torch.equal(result.confusion, expected)


def test_top5_is_left_out_where_every_image_would_be_a_hit():
    for num_classes, expected in ((4, None), (5, None), (6, 5 / 6)):
        probes = LinearProbes(torch.eye(num_classes).unsqueeze(0), torch.zeros(1, num_classes), (1.0,))
        features = torch.arange(float(num_classes)).repeat(num_classes, 1)
        assert (
            evaluate_probe(probes, 1.0, {1.0: 0.0}, FeatureTable(features, torch.arange(num_classes))).top5 == expected
        )


def test_top5_of_many_classes_is_not_top1():
    weight = torch.eye(8).unsqueeze(0)
    probes = LinearProbes(weight, torch.zeros(1, 8), (1.0,))
    features = torch.arange(8.0).repeat(8, 1)
    result = evaluate_probe(probes, 1.0, {1.0: 0.0}, FeatureTable(features, torch.arange(8)))
    assert (result.top1, result.top5) == (1 / 8, 5 / 8)


@pytest.mark.parametrize("value", [0.0, torch.nan, -torch.inf])
def test_a_collapsed_probe_scores_0_and_its_confusion_says_the_same(value):
    probes = LinearProbes(torch.full((1, 8, DIM), value), torch.zeros(1, 8), (1.0,))
    labels = torch.arange(8).repeat(3)
    result = evaluate_probe(probes, 1.0, {1.0: 0.0}, FeatureTable(torch.ones(24, DIM), labels))
    assert (result.top1, result.top5) == (0, 0)
    assert result.confusion.diagonal().sum() == 0
    assert result.confusion.sum(1).tolist() == [3] * 8


SHORT = ProbeConfig(epochs=2, learning_rates=(0.1,))


def test_a_probe_takes_arrays_of_numpy_and_labels_of_any_integers():
    (rows, labels), test = draw(80), draw(40, seed=1)
    expected = linear_probe((rows, labels), test, SHORT).top1
    arrays = [(features.numpy(), classes.numpy()) for features, classes in ((rows, labels), test)]
    assert linear_probe(*arrays, SHORT).top1 == expected
    assert set(linear_probe(*arrays).held_out_top1) == set(ProbeConfig().learning_rates)
    assert linear_probe((rows, labels.int()), (test[0], test[1].to(torch.uint8)), SHORT).top1 == expected


def test_a_probe_of_rows_and_labels_that_do_not_fit_is_refused():
    (rows, labels), test = draw(80), draw(40, seed=1)
    with pytest.raises(DataError, match=r"linear probe, train: found features of shape \[80, 6\] and .* \[79\], must"):
        linear_probe((rows, labels[1:]), test, SHORT)
    with pytest.raises(DataError, match=r"linear probe, test: found features of shape \[0, 6\] .* one image or more"):
        linear_probe((rows, labels), draw(0), SHORT)
    with pytest.raises(DataError, match="linear probe, train: found label -1, must be ≥ 0"):
        linear_probe((rows, labels - 1), test, SHORT)
    with pytest.raises(DataError, match="linear probe, train: found one class, 2; it needs two or more"):
        linear_probe((rows, torch.full_like(labels, 2)), test, SHORT)


def test_test_images_of_a_class_beyond_those_of_the_training_images_are_wrong():
    train, (features, labels) = draw(200, spread=0.1), draw(40, seed=1, spread=0.1)
    config = ProbeConfig(epochs=8, learning_rates=(1.0,))
    assert linear_probe(train, (features, labels), config).top1 == 1
    beyond = torch.where(labels == 0, NUM_CLASSES, labels)
    result = linear_probe(train, (features, beyond), config)
    assert result.top1 == pytest.approx((labels > 0).double().mean().item())
    assert result.confusion[NUM_CLASSES].tolist() == [int((labels == 0).sum()), *[0] * NUM_CLASSES]


def test_a_probe_of_few_labels_learns_from_these_alone():
    (features, labels), test = draw(120), draw(60, seed=1)
    config = ProbeConfig(epochs=4, learning_rates=(1.0,), labels_per_class=3)
    kept, held_out = divided_rows(labels, config, "")
    assert len(kept) == 3 * NUM_CLASSES
    expected = linear_probe((features, labels), test, config)
    others = torch.ones(len(labels), dtype=torch.bool)
    others[torch.cat([kept, held_out])] = False
    features[others] = torch.nan
    found = linear_probe((features, labels), test, config)
    assert (found.top1, found.held_out_top1) == (expected.top1, expected.held_out_top1)
    assert found.top1 > 0.3
    with pytest.raises(ConfigError, match="^probe.labels_per_class: found 99, must be 1 to "):
        linear_probe((features, labels), test, ProbeConfig(labels_per_class=99))


def test_labels_that_only_damage_can_explain_are_refused():
    features, labels = torch.randn(20, 4), torch.arange(20) % 2
    with pytest.raises(DataError, match="^linear probe: classes up to 1000000000 in 20 images; allowed: 0 to 1048575$"):
        linear_probe((features, labels * 10**9), (features, labels))
