import math

import pytest
import torch
from torch import nn

from ssl_sec.losses import TripletLoss
from ssl_sec.losses.generators import hdml
from ssl_sec.losses.generators.base import GlobalBatch
from ssl_sec.losses.generators.hdml import HardnessAwareSynthesis
from ssl_sec.losses.geometry import directions
from ssl_sec.networks.heads import BatchNormLinearHead
from tests.losses.cases import DIM, rows
from tests.losses.generators.batches import CASES, CLASSES, FEATURES, LABELS, batch, head, moved, under_autocast

ALL = slice(0, len(LABELS))


def synthesis(average=0.5, average_gen=2e4, **options):
    """A generator in the middle of a run, with J_avg and J_gen of its last epoch."""
    found = HardnessAwareSynthesis(
        CLASSES, FEATURES, DIM, steps_per_epoch=3, hidden_dim=6, alpha=0.3, seed=1, **options
    )
    found.averages.copy_(torch.tensor([average, average_gen]))
    with torch.no_grad():
        for place in (0, 2):
            found.generator[place].weight *= 5  # so that its rows differ
    return found.double()


def slowly_moved(z, labels, anchor, lam):
    """The anchor's batch, row by row from the paper's definition."""
    positive = next((i for i in range(len(z)) if labels[i] == labels[anchor] and i != anchor), None)
    found = []
    for i, row in enumerate(z):
        to_negative = (row - z[anchor]).norm()
        if positive is not None and labels[i] != labels[anchor]:
            to_positive = (z[positive] - z[anchor]).norm()
            if to_negative > to_positive:
                reach = lam * to_negative + (1 - lam) * to_positive
                row = z[anchor] + reach * (row - z[anchor]) / to_negative
        found.append(row)
    return torch.stack(found)


@pytest.mark.parametrize("name", CASES)
def test_the_shares_are_the_papers_term_by_term(name):
    found, given, case, embed = synthesis(), batch(), CASES[name], head()
    loss = case.build()
    shares = found(given, ALL, embed, loss)
    z = given.embeddings / given.embeddings.norm(dim=1, keepdim=True)
    labels, lam = LABELS.tolist(), math.exp(-0.3 / 0.5)
    generated, softmax, reconstruction, classified = 0.0, 0.0, 0.0, 0.0
    for anchor in range(len(labels)):
        features = found.generator(slowly_moved(z, labels, anchor, lam))
        generated += case.slow_terms(loss, embed(features), LABELS)[anchor]
        softmax -= sum(found.classifier(features).log_softmax(1)[i, labels[i]].item() for i in range(len(labels)))
        reconstruction += (given.features[anchor] - found.generator(z[anchor])).square().sum().item()
        classified -= found.classifier(given.features).log_softmax(1)[anchor, labels[anchor]].item()
    assert shares.generated_loss.item() == pytest.approx(generated, rel=1e-10)
    expected = 0.5 * reconstruction + 5000 * softmax / len(labels) ** 2
    assert shares.generator_loss.item() == pytest.approx(expected, rel=1e-10)
    assert shares.classifier_loss.item() == pytest.approx(classified / len(labels), rel=1e-10)
    unmoved = sum(case.slow_terms(loss, embed(found.generator(z)), LABELS))
    assert abs(generated - unmoved) > 1e-3  # negatives were moved


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("unchecked_types")  # hundreds of calls; the other tests check the types
def test_the_gradient_of_the_generated_rows_loss_is_right(name):
    found, embed, loss = synthesis(), head(), CASES[name].build()

    def of(embeddings, weight):
        embed.weight.data.copy_(weight.detach())
        given = GlobalBatch(features=rows(len(LABELS), FEATURES), embeddings=embeddings, labels=LABELS, step=0)
        return found(given, ALL, GivenHead(weight, embed.bias), loss).generated_loss

    assert torch.autograd.gradcheck(of, (batch().embeddings, head().weight.detach().requires_grad_()))


class GivenHead(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.of = lambda features: features @ weight.T + bias

    def forward(self, features):
        return self.of(features)


def test_each_loss_trains_its_own_parameters():
    found, given, embed = synthesis(), batch(), head()
    shares = found(given, ALL, embed, TripletLoss())
    named = {
        "features": given.features,
        "embeddings": given.embeddings,
        **{f"head.{name}": parameter for name, parameter in embed.named_parameters()},
        **dict(found.named_parameters()),
    }
    # The bias of a linear head moves all rows, and with them their directions.
    assert moved(shares.generated_loss, named) == {"embeddings", "head.weight", "head.bias"}
    generator = {f"generator.{place}.{kind}" for place in (0, 2) for kind in ("weight", "bias")}
    assert moved(shares.generator_loss, named) == generator
    assert moved(shares.classifier_loss, named) == {"classifier.0.weight", "classifier.0.bias"}


def test_the_shares_of_a_partition_add_up():
    found, given, embed = synthesis(), batch(), head()
    whole = found(given, ALL, embed, TripletLoss())
    parts = [found(given, part, embed, TripletLoss()) for part in (slice(0, 3), slice(3, 4), slice(4, 10))]
    torch.testing.assert_close(torch.stack(whole), torch.stack([torch.stack(part) for part in parts]).sum(0))


@pytest.mark.parametrize(("anchors", "same"), [(slice(None), ALL), (slice(-3, None), slice(7, 10))])
def test_the_anchors_are_any_range_as_for_a_loss(anchors, same):
    found, given, embed = synthesis(), batch(), head()
    shares = [torch.stack(found(given, part, embed, TripletLoss())) for part in (anchors, same)]
    torch.testing.assert_close(*shares, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows_at_once", [3 * len(LABELS), len(LABELS) - 1])
def test_recomputed_parts_give_the_same(monkeypatch, rows_at_once):
    """Memory is bounded: many rows are generated in parts, of one anchor at least."""

    def computed():
        found, given, embed = synthesis(), batch(), head()
        shares = found(given, ALL, embed, TripletLoss())
        sum(shares).backward()
        tensors = (given.embeddings, *embed.parameters(), *found.parameters())
        return torch.stack(shares), [tensor.grad for tensor in tensors]

    whole = computed()
    monkeypatch.setattr(hdml, "ROWS_AT_ONCE", rows_at_once)
    torch.testing.assert_close(computed(), whole, rtol=1e-10, atol=1e-12)
    assert len(whole[1]) == 9 and all(gradient.abs().max() > 0 for gradient in whole[1])


def test_parts_keep_little_for_the_backward_pass(monkeypatch):
    kept = []
    for rows_at_once in (hdml.ROWS_AT_ONCE, len(LABELS)):
        monkeypatch.setattr(hdml, "ROWS_AT_ONCE", rows_at_once)
        found, given, embed, sizes = synthesis(), batch(), head(), []
        keep = torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()), lambda _: None)
        with keep:
            found(given, ALL, embed, TripletLoss())
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize(("average", "expected"), [(math.inf, 0), (1e-9, 1)])
def test_negatives_come_from_where_they_are_to_the_positives_distance(average, expected):
    """From λ = 1, before a loss is known, to λ = 0."""
    pulls = synthesis(average)._pulls(z := rows(10, DIM) / rows(10, DIM).norm(dim=1, keepdim=True), LABELS, ALL)
    distances = (z.unsqueeze(1) - z).norm(dim=2)
    for anchor in range(10):
        others = [i for i in range(10) if LABELS[i] == LABELS[anchor] and i != anchor]
        to_positive = distances[anchor, others[0]]
        for i in range(10):
            row = z[i] + pulls[anchor, i] * (z[anchor] - z[i])
            is_moved = expected and LABELS[i] != LABELS[anchor] and distances[anchor, i] > to_positive
            wanted = to_positive if is_moved else distances[anchor, i]
            torch.testing.assert_close((row - z[anchor]).norm(), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("average", [-4.0, 0.0])
@pytest.mark.parametrize(("alpha", "other"), [(90.0, 1e-9), (0.0, math.inf)])
def test_a_loss_that_is_not_positive_moves_negatives_as_one_that_comes_near_zero(average, alpha, other):
    """DCL's falls below 0; without α no negative moves."""
    z, pulls = directions(rows(10, DIM)), []
    for each in (average, other):
        found = synthesis(each)
        found.alpha = alpha
        pulls.append(found._pulls(z, LABELS, ALL))
    assert pulls[0].any() == (alpha > 0)
    torch.testing.assert_close(*pulls, rtol=1e-12, atol=1e-14)


def test_without_a_loss_of_the_generator_and_without_beta_the_batch_alone_counts():
    found = synthesis(average_gen=0.0)
    assert [float(weight) for weight in found.weights(3)] == [0, 1]
    found.beta = 0.0
    assert [float(weight) for weight in found.weights(3)] == [1, 0]


def test_it_computes_in_single_precision_under_autocast():
    without, under = under_autocast(synthesis(), TripletLoss())
    assert torch.equal(without, under)


def test_the_norms_of_the_rows_do_not_matter():
    found, given, embed = synthesis(), batch(), head()
    longer = GlobalBatch(features=given.features, embeddings=given.embeddings * 7, labels=given.labels, step=given.step)
    shares = [torch.stack(found(each, ALL, embed, TripletLoss())) for each in (given, longer)]
    torch.testing.assert_close(*shares, rtol=1e-12, atol=1e-12)


def test_the_order_of_classes_does_not_matter():
    found, given, embed = synthesis(), batch(), head()
    order = torch.tensor([6, 7, 8, 2, 3, 0, 1, 9, 4, 5])  # within a class, the order stays
    other = GlobalBatch(
        features=given.features[order], embeddings=given.embeddings[order], labels=LABELS[order], step=given.step
    )
    shares = [torch.stack(found(each, ALL, embed, TripletLoss())) for each in (given, other)]
    torch.testing.assert_close(*shares, rtol=1e-10, atol=1e-12)


def test_equal_rows_and_rows_without_a_positive_or_a_direction_have_finite_gradients():
    labels = torch.tensor([0, 0, 1, 1, 2, 3])
    given = batch(labels)
    with torch.no_grad():
        given.embeddings[1] = given.embeddings[0]
        given.embeddings[2] = given.embeddings[0]
        given.embeddings[5] = 0
    pulls = synthesis()._pulls(directions(given.embeddings), labels, slice(0, 6))
    assert pulls[:4].any() and not pulls[4:].any()
    shares = synthesis()(given, slice(0, 6), head(), TripletLoss())
    (gradient,) = torch.autograd.grad(shares.generated_loss, given.embeddings)
    assert gradient.isfinite().all() and gradient.abs().max() > 0


def test_the_averages_are_those_of_the_last_whole_epoch():
    found = HardnessAwareSynthesis(CLASSES, FEATURES, DIM, steps_per_epoch=3)
    assert [float(weight) for weight in found.weights(0)] == [1, 0]  # until one is over, the batch alone counts
    for step in range(7):
        found.observe(step, torch.tensor(float(step)), torch.tensor(1e4 * (step + 1)))
        if step == 2:
            assert found.averages.tolist() == [1, 2e4]
            assert found.weights(3)[0].item() == pytest.approx(math.exp(-0.5))
    assert found.averages.tolist() == [4, 5e4]
    assert found.sums.tolist() == [6, 7e4]
    assert set(found.state_dict()) >= {"averages", "sums", "generator.0.weight", "classifier.0.weight"}


def test_the_averages_have_no_gradient_and_each_part_its_own_learning_rate():
    found = HardnessAwareSynthesis(
        CLASSES, FEATURES, DIM, steps_per_epoch=1, generator_learning_rate=0.3, classifier_learning_rate=0.2
    )
    found.observe(0, torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True))
    assert found.averages.tolist() == [1, 2] and not (found.averages.requires_grad or found.sums.requires_grad)
    assert (found.generator.learning_rate, found.classifier.learning_rate) == (0.3, 0.2)


def test_losses_that_overflowed_are_left_out_of_the_averages():
    found = HardnessAwareSynthesis(CLASSES, FEATURES, DIM, steps_per_epoch=2)
    for metric_loss in (math.nan, 3.0):
        found.observe(0 if math.isnan(metric_loss) else 1, torch.tensor(metric_loss), torch.tensor(4.0))
    assert found.averages.tolist() == [1.5, 4]


def test_the_head_embeds_generated_rows_as_in_evaluation():
    """No row depends on another, and the running statistics are those of images."""
    embed = BatchNormLinearHead(FEATURES, DIM, dropout=0.5).double().train()
    embed.bn.running_mean.normal_()
    before = embed.bn.running_mean.clone()
    shares = synthesis()(batch(), ALL, embed, TripletLoss())
    assert embed.training and embed.bn.training and torch.equal(embed.bn.running_mean, before)
    assert shares.generated_loss.item() == synthesis()(batch(), ALL, embed.eval(), TripletLoss()).generated_loss.item()


def test_the_initial_weights_are_a_function_of_the_seed_and_leave_other_draws_alone():
    torch.manual_seed(0)
    one = synthesis().generator[0].weight
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3))
    torch.testing.assert_close(synthesis().generator[0].weight, one, rtol=0, atol=0)
    other = HardnessAwareSynthesis(CLASSES, FEATURES, DIM, steps_per_epoch=3, hidden_dim=6, seed=2)
    assert not torch.isin(other.generator[0].weight.double() * 5, one).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1.0}, r"alpha: found -1.0, must be ≥ 0"),
        ({"beta": -1.0}, r"beta: found -1.0, must be ≥ 0"),
        ({"softmax_weight": math.nan}, r"softmax_weight: found nan"),
        ({"reconstruction_weight": -0.1}, r"reconstruction_weight: found -0.1, must be ≥ 0"),
        ({"generator_learning_rate": 0.0}, r"generator_learning_rate: found 0.0, must be > 0"),
        ({"classifier_learning_rate": 0.0}, r"classifier_learning_rate: found 0.0, must be > 0"),
        ({"hidden_dim": 0}, r"hidden_dim: found 0"),
        ({"hidden_dim": 2**20 + 1}, r"hidden_dim: found 1048577, must be in \[1, 1048576\]"),
        ({"steps_per_epoch": 0}, r"steps_per_epoch: found 0, must be ≥ 1"),
    ],
)
def test_a_value_outside_its_range_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HardnessAwareSynthesis(**{"num_classes": 2, "num_features": 3, "dim": 4, "steps_per_epoch": 5, **options})
