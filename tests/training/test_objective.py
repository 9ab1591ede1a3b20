import math

import pytest
import torch
from torch import nn

from ssl_sec.collectives import average_gradients, average_parameter_gradients, own_rows, rank
from ssl_sec.errors import ConfigError
from ssl_sec.losses import (
    BYOLLoss,
    CenterLoss,
    CombinedLoss,
    NTXentLoss,
    SoftmaxLoss,
    SphericalConstraint,
    SphericalFeatureTransform,
    TripletLoss,
)
from ssl_sec.losses.generators.memory import CrossBatchMemory
from ssl_sec.losses.geometry import norms, turn_tangents
from ssl_sec.networks.batch_norm import globalise_batch_norm
from ssl_sec.training.objective import Objective
from ssl_sec.training.schedules import Constant, LinearRamp
from tests.losses.cases import ALL_LOSSES, DIM, NUM_CLASSES, rows
from tests.workers import on_workers, two_and_four

NUM_IMAGES = 8
STEPS = 4


def constraints():
    return {
        "none": None,
        "sec": SphericalConstraint(),
        "sec_ema": SphericalConstraint(rho=0.3),
        "fixed": SphericalConstraint(radius=2.0),
    }


def test_the_total_is_the_loss_plus_eta_times_the_constraint():
    embeddings = torch.randn(8, 5, dtype=torch.float64)
    labels = torch.arange(4).repeat(2)
    terms = Objective(NTXentLoss(0.2), SphericalConstraint(), LinearRamp(0.5, 10))(embeddings, labels, step=4)
    assert terms.metric_loss.item() == NTXentLoss(0.2)(embeddings, labels).item()
    assert terms.constraint.item() == SphericalConstraint()(embeddings).item()
    assert terms.total.item() == pytest.approx(terms.metric_loss.item() + 0.2 * terms.constraint.item(), rel=1e-15)
    assert torch.equal(terms.norms, norms(embeddings))


@pytest.mark.usefixtures("unchecked_types")
def test_labels_that_are_no_whole_numbers_one_a_row_are_refused():
    labels = torch.arange(4).repeat(2)
    for wrong in (labels + 0.3, labels.tolist(), labels.unsqueeze(1), labels[:5]):
        with pytest.raises(TypeError, match=r"^Objective: found float32\[8, 5\] and .* one whole number a row"):
            Objective(NTXentLoss(), None, 0.0)(torch.randn(8, 5), wrong, step=0)


def test_a_loss_alone_is_an_objective():
    embeddings, labels = rows(8, 5), torch.arange(4).repeat(2)
    assert Objective(NTXentLoss())(embeddings, labels, step=0).total == NTXentLoss()(embeddings, labels)
    terms = Objective(NTXentLoss(), SphericalConstraint())(embeddings, labels, step=0)
    assert terms.total == terms.metric_loss + terms.constraint


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("wrong", "found"), [(NTXentLoss, "NTXentLoss"), (nn.CrossEntropyLoss(), "CrossEntropyLoss")])
def test_what_is_no_loss_of_the_package_is_refused(wrong, found):
    with pytest.raises(TypeError, match=rf"^Objective: loss: found {found}, must be a Loss of ssl_sec, such as NTXent"):
        Objective(wrong)


def test_a_generator_without_features_and_a_transform_beside_a_teacher_are_refused():
    embeddings, labels = torch.randn(8, 5), torch.arange(4).repeat(2)
    with pytest.raises(TypeError, match="^Objective: CrossBatchMemory needs the features and the head, too$"):
        Objective(TripletLoss(), transform=CrossBatchMemory(5, 8))(embeddings, labels, step=0)
    with pytest.raises(TypeError, match="^Objective: found SphericalFeatureTransform, which has no rows of a teacher"):
        Objective(BYOLLoss(), transform=SphericalFeatureTransform(4, 5))


def test_targets_belong_to_a_loss_with_a_teacher():
    embeddings, labels = torch.randn(8, 5), torch.arange(4).repeat(2)
    with pytest.raises(TypeError, match="^Objective: found no targets, but a teacher's rows are needed by BYOLLoss$"):
        Objective(BYOLLoss(), None, 0.0)(embeddings, labels, step=0)
    with pytest.raises(TypeError, match="^Objective: found targets, but no teacher in NTXentLoss$"):
        Objective(NTXentLoss(), None, 0.0)(embeddings, labels, step=0, targets=embeddings)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eta": -1.0}, "eta: found -1.0, must be ≥ 0"),
        ({"grad_scale": -1.0}, "grad_scale: found -1.0, must be ≥ 0"),
        ({"grad_scale_by": "norms"}, "grad_scale_by: found 'norms'; allowed: batch, rows"),
    ],
)
def test_a_value_outside_its_range_is_refused(values, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        Objective(NTXentLoss(), SphericalConstraint(), **{"eta": 1.0, **values})


def test_without_a_constraint_the_total_is_the_loss():
    embeddings = torch.randn(8, 5, requires_grad=True)
    labels = torch.arange(4).repeat(2)
    terms = Objective(NTXentLoss(), None, Constant(3.0))(embeddings, labels, step=0)
    assert terms.total.item() == terms.metric_loss.item() == NTXentLoss()(embeddings, labels).item()
    assert terms.constraint.item() == terms.generated_loss.item() == 0
    assert terms.total.requires_grad
    assert not any(
        part.requires_grad for part in (terms.metric_loss, terms.generated_loss, terms.constraint, terms.norms)
    )


@pytest.mark.parametrize("mode", ["rotate", "ftl"])
def test_generated_rows_do_not_move_the_centres_of_a_center_loss(mode):
    torch.manual_seed(0)
    embeddings, labels = torch.randn(8, 5), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    alone, beside = CenterLoss(4, 5), CenterLoss(4, 5)
    loss = CombinedLoss(SoftmaxLoss(4, 5), beside, 0.5)
    objective = Objective(loss, None, Constant(0.0), SphericalFeatureTransform(4, 5, mode=mode)).train()
    for step in range(5):
        alone(embeddings, labels)
        assert objective(embeddings, labels, step).generated_loss > 0
        torch.testing.assert_close(beside.centres, alone.centres, rtol=0, atol=0)
    assert beside.moves and alone.centres.any()


def test_generated_rows_have_their_own_loss_with_its_weight():
    """SFT, Eq. 10."""
    torch.manual_seed(0)
    embeddings, labels = torch.randn(8, 5, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    transform = SphericalFeatureTransform(4, 5, weight=0.3).double()
    transform.centres.normal_()
    generated, targets = transform.eval()(embeddings, labels, 4)
    loss = TripletLoss(0.5)
    terms = Objective(loss, SphericalConstraint(), 2.0, transform)(embeddings, labels, step=4)
    assert terms.generated_loss.item() == loss(generated, targets).item() > 0
    assert terms.metric_loss.item() == loss(embeddings, labels).item() != terms.generated_loss.item()
    expected = terms.metric_loss + 0.3 * terms.generated_loss + 2.0 * terms.constraint
    assert terms.total.item() == pytest.approx(expected.item(), rel=1e-15)


def test_a_batch_without_generated_rows_has_no_loss_of_them():
    transform = SphericalFeatureTransform(4, 5, tail_classes=torch.tensor([0, 1, 2]))
    objective = Objective(SoftmaxLoss(4, 5), None, Constant(0.0), transform)
    terms = objective(torch.randn(6, 5), torch.tensor([0, 0, 1, 1, 2, 2]), step=0)
    assert terms.generated_loss.item() == 0
    assert terms.total.item() == terms.metric_loss.item() > 0


@pytest.mark.parametrize("tail_classes", [None, torch.arange(8, 40)])
def test_generated_rows_without_two_of_one_class_have_no_loss_and_no_gradient(tail_classes):
    """Of 40 classes, two rows out of eight seldom become the same one."""
    transform = SphericalFeatureTransform(40, 5, tail_classes=tail_classes).double()
    transform.centres.normal_(generator=torch.Generator().manual_seed(0))
    objective = Objective(TripletLoss(0.5), None, Constant(0.0), transform.eval())
    labels, seen = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), set()
    for step in range(12):
        embeddings = rows(8, 5, seed=step).requires_grad_()
        generated, targets = transform(embeddings, labels, step)
        comparable = len(set(targets.tolist())) < len(targets)
        seen.add(comparable)
        terms = objective(embeddings, labels, step)
        alone = TripletLoss(0.5)(embeddings, labels)
        of_generated = TripletLoss(0.5)(generated, targets) if comparable else torch.zeros(())
        assert terms.generated_loss.item() == of_generated.item()
        found, expected = (
            torch.autograd.grad(total, embeddings, retain_graph=True)[0]
            for total in (terms.total, alone + 0.2 * of_generated)
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert seen == {True, False}


def test_half_precision_embeddings_are_gathered_and_summed_in_single_precision():
    embeddings = torch.randn(8, 5).bfloat16()
    terms = Objective(NTXentLoss(), SphericalConstraint(), Constant(0.1))(embeddings, torch.arange(4).repeat(2), 0)
    assert terms.total.dtype == terms.norms.dtype == torch.float32


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_gradients_are_multiplied_by_a_power_of_the_norm(power):
    plain, scaled = rows(8, 5).requires_grad_(), rows(8, 5).requires_grad_()
    labels = torch.arange(4).repeat(2)
    for embeddings, given in ((plain, 0.0), (scaled, power)):
        Objective(NTXentLoss(0.2), None, Constant(0.0), grad_scale=given)(embeddings, labels, 0).total.backward()
    for row, gradient, expected in zip(plain.tolist(), scaled.grad.tolist(), plain.grad.tolist(), strict=True):
        factor = math.sqrt(sum(value**2 for value in row)) ** power
        assert gradient == pytest.approx([factor * value for value in expected], rel=1e-12)


def test_gradients_are_multiplied_by_a_power_of_the_mean_norm():
    plain, scaled = rows(8, 5).requires_grad_(), rows(8, 5).requires_grad_()
    labels = torch.arange(4).repeat(2)
    for embeddings, given in ((plain, 0.0), (scaled, 1.5)):
        objective = Objective(NTXentLoss(0.2), None, Constant(0.0), grad_scale=given, grad_scale_by="batch")
        objective(embeddings, labels, 0).total.backward()
    mean_norm = sum(math.sqrt(sum(value**2 for value in row)) for row in plain.tolist()) / 8
    torch.testing.assert_close(scaled.grad, mean_norm**1.5 * plain.grad, rtol=1e-12, atol=0)


def test_the_gradient_of_the_constraint_is_not_multiplied():
    labels = torch.arange(4).repeat(2)

    def gradient(power: float, eta: float):
        embeddings = rows(8, 5).requires_grad_()
        objective = Objective(NTXentLoss(0.2), SphericalConstraint(), Constant(eta), grad_scale=power)
        terms = objective(embeddings, labels, 0)
        return torch.autograd.grad(terms.total, embeddings)[0]

    constraint = gradient(0.0, 0.7) - gradient(0.0, 0.0)
    torch.testing.assert_close(gradient(1.5, 0.7), gradient(1.5, 0.0) + constraint, rtol=1e-10, atol=1e-14)


def test_with_the_second_power_the_turn_of_a_row_is_the_same_at_any_norm():
    labels = torch.arange(4).repeat(2)
    turns = []
    for length in (0.1, 1.0, 10.0):
        embeddings = (length * rows(8, 5)).requires_grad_()
        objective = Objective(NTXentLoss(0.2), None, Constant(0.0), grad_scale=2.0)
        objective(embeddings, labels, 0).total.backward()
        turns.append(turn_tangents(embeddings.detach(), embeddings.grad))
    torch.testing.assert_close(turns[0], turns[1], rtol=1e-10, atol=0)
    torch.testing.assert_close(turns[2], turns[1], rtol=1e-10, atol=0)


def test_a_zero_row_has_no_gradient_where_it_is_scaled():
    embeddings = rows(8, 5)
    embeddings[3] = 0
    embeddings.requires_grad_()
    Objective(NTXentLoss(0.2), None, Constant(0.0), grad_scale=1.0)(
        embeddings, torch.arange(4).repeat(2), 0
    ).total.backward()
    assert embeddings.grad[3].tolist() == [0.0] * 5
    assert embeddings.grad.isfinite().all()


def test_the_running_radius_is_part_of_its_state():
    objective = Objective(NTXentLoss(), SphericalConstraint(rho=0.5), Constant(1.0))
    assert set(objective.state_dict()) == {"constraint.mean_norm", "constraint.started"}


def network():
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 2, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
    )
    head = nn.Sequential(nn.Flatten(), nn.Linear(54, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
    return nn.Sequential(encoder, head).double()


GRAD_SCALE, BY_BATCH = "gradients times the norm", "gradients times the mean norm"


def trained(constraint):
    """Values, averaged gradients and buffers of some steps; an image's views are on different workers."""
    plain = globalise_batch_norm(network())
    model = average_gradients(plain, torch.device("cpu"))
    power = 1.5 if constraint in (GRAD_SCALE, BY_BATCH) else 0.0
    by = "batch" if constraint == BY_BATCH else "rows"
    objective = Objective(
        NTXentLoss(0.2), constraints().get(constraint), Constant(0.7), grad_scale=power, grad_scale_by=by
    )
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    taken = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        views = torch.randn(2 * NUM_IMAGES, 3, 6, 6, generator=generator, dtype=torch.float64)
        # So ordered, the two views of an image are on different workers.
        labels = torch.arange(NUM_IMAGES).repeat(2)
        own = own_rows(2 * NUM_IMAGES)
        optimiser.zero_grad()
        terms = objective(model(views[own]), labels[own], step)
        terms.total.backward()
        gradients = [parameter.grad.clone() for parameter in plain.parameters()]
        optimiser.step()
        taken.append((terms.total.item(), terms.metric_loss.item(), terms.constraint.item(), terms.norms, gradients))
    return taken, dict(plain.state_dict()), dict(objective.state_dict())


@pytest.mark.distributed
@two_and_four
@pytest.mark.parametrize("constraint", ["none", "sec", "sec_ema", "fixed", GRAD_SCALE, BY_BATCH])
def test_workers_equal_one_in_values_gradients_statistics_and_radius(tmp_path, constraint, num_workers):
    whole = trained(constraint)
    totals = [step[0] for step in whole[0]]
    assert len(set(totals)) == STEPS
    assert all(gradient.abs().max() > 1e-6 for gradient in whole[0][0][4])
    for part in on_workers(num_workers, tmp_path, trained, constraint):
        torch.testing.assert_close(part, whole, rtol=1e-10, atol=1e-12)


# A class on one worker, classes on two, and, but for NT-Xent, one with a single row.
UNEVEN = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 5, 5])
PAIRED = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 5, 5, 5])
TRANSFORMS = {
    "rotate": {},
    "translate": {"mode": "translate"},
    "ftl": {"mode": "ftl"},
    "random": {"centres": "random"},
    "picked": {"centres": "picked"},
    "tails": {"tail_classes": torch.tensor([1, 4])},
}


def some_steps(loss, labels, transform=None):
    """Values, averaged gradients and state of some steps on this worker's rows."""
    torch.manual_seed(0)
    plain = nn.Linear(7, DIM).double()
    model = average_gradients(plain, torch.device("cpu"))
    objective = Objective(loss, SphericalConstraint(rho=0.4), Constant(0.7), transform).train()
    average_parameter_gradients(objective)
    parameters = [*plain.parameters(), *objective.parameters()]
    optimiser = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    own = own_rows(len(labels))
    taken = []
    for step in range(STEPS):
        optimiser.zero_grad()
        terms = objective(model(rows(len(labels), 7, seed=step)[own]), labels[own], step)
        terms.total.backward()
        taken.append((terms.total.item(), terms.generated_loss.item(), [p.grad.clone() for p in parameters]))
        optimiser.step()
    return taken, dict(objective.state_dict())


def every_loss():
    taken = {}
    for case in ALL_LOSSES:
        labels = PAIRED if case.of_positives else UNEVEN
        # Whole triplets that 4 workers can share.
        taken[case.name] = some_steps(case.build(), case.arrange(labels)[:12] if case.of_triplets else labels)
    return taken


def every_transform():
    taken = {}
    for name, options in TRANSFORMS.items():
        (case,) = [case for case in ALL_LOSSES if case.name == ("cosface" if name == "tails" else "triplet")]
        transform = SphericalFeatureTransform(NUM_CLASSES, DIM, seed=3, **options).double()
        taken[name] = some_steps(case.build(), UNEVEN, transform)
    return taken


@pytest.mark.distributed
@two_and_four
@pytest.mark.parametrize("of_one", [every_loss, every_transform])
def test_workers_equal_one_for_every_loss_and_transform(tmp_path, of_one, num_workers):
    whole = of_one()
    for name, (taken, _) in whole.items():
        assert all(gradient.abs().max() > 1e-6 for gradient in taken[0][2]), name
        assert of_one is every_loss or taken[-1][1] > 0, name
    for part in on_workers(num_workers, tmp_path, of_one):
        for name in whole:
            torch.testing.assert_close(
                part[name], whole[name], rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}"
            )


def errors_of(*counts_of_steps):
    objective = Objective(NTXentLoss(), None, 0.0)
    errors = []
    for step, counts in enumerate(counts_of_steps):
        try:
            objective(torch.randn(counts[rank()], 3), torch.arange(counts[rank()]) // 2, step)
            errors.append(None)
        except ValueError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("last", [(4, 6), (2, 3)])
def test_different_numbers_of_rows_on_the_workers_are_refused(tmp_path, last):
    """gloo would end one process, and the other would wait for it; also where one worker has as many as before."""
    errors = on_workers(2, tmp_path, errors_of, (4, 4), (2, 2), last)
    refused = f"Objective: found {list(last)} rows on the workers, must be the same number on each"
    assert errors == [[None, None, refused]] * 2
