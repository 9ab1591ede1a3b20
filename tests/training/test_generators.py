"""Generators with parameters of their own, within the objective: what is added up, and on any number of workers."""

import pytest
import torch
from torch import nn

from ssl_sec.collectives import average_gradients, average_parameter_gradients, own_rows
from ssl_sec.losses import SphericalConstraint, TripletLoss
from ssl_sec.losses.generators import hdml
from ssl_sec.losses.generators.base import GlobalBatch
from ssl_sec.losses.generators.dvml import VariationalSynthesis
from ssl_sec.losses.generators.hdml import HardnessAwareSynthesis
from ssl_sec.losses.generators.memory import CrossBatchMemory
from ssl_sec.networks import Network
from ssl_sec.networks.batch_norm import globalise_batch_norm
from ssl_sec.networks.heads import BatchNormLinearHead
from ssl_sec.training.objective import Objective
from ssl_sec.training.schedules import Constant
from tests.losses.cases import DIM, NUM_CLASSES, rows
from tests.losses.generators.batches import CASES
from tests.workers import on_workers, two_and_four

FEATURES, INPUTS, STEPS = 7, 4, 5
# A class on one worker, classes on two, and one with a single row.
LABELS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 5, 5])


def generator(name):
    if name == "dvml":
        return VariationalSynthesis(FEATURES, DIM, draws=3, first_phase_steps=2, hidden_dim=6, seed=3).double()
    if name == "memory":
        return CrossBatchMemory(DIM, size=24, from_step=0).double()
    # Both halves of J_metric count from the third step on.
    return HardnessAwareSynthesis(
        NUM_CLASSES, FEATURES, DIM, steps_per_epoch=2, alpha=0.5, beta=5e3, hidden_dim=6, seed=3
    ).double()


def objective_of(name, loss=None, constraint=None):
    return Objective(loss or TripletLoss(), constraint, Constant(0.7), generator(name)).train()


def some_steps(name, case, rows_at_once=4096):
    """Values, averaged gradients and state of some steps on this worker's rows."""
    hdml.ROWS_AT_ONCE = rows_at_once
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, FEATURES, bias=False))
    plain = globalise_batch_norm(Network(encoder, BatchNormLinearHead(FEATURES, DIM)).double())
    model = average_gradients(plain, torch.device("cpu"))
    objective = objective_of(name, CASES[case].build(), SphericalConstraint(rho=0.4))
    average_parameter_gradients(objective)
    parameters = {**dict(plain.named_parameters()), **dict(objective.named_parameters())}
    optimiser = torch.optim.Adam(parameters.values(), lr=1e-2)
    own, taken = own_rows(len(LABELS)), []
    for step in range(STEPS):
        optimiser.zero_grad()
        features, embeddings = model(rows(len(LABELS), INPUTS, seed=step)[own, :, None, None])
        terms = objective(embeddings, LABELS[own], step, None, features, plain.head)
        terms.total.backward()
        values = [terms.total, terms.metric_loss, terms.generated_loss, terms.generator_loss, terms.constraint]
        taken.append(([value.item() for value in values], {n: p.grad.clone() for n, p in parameters.items()}))
        optimiser.step()
    return taken, {**plain.state_dict(), **objective.state_dict()}


@pytest.mark.distributed
@two_and_four
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("hdml", "triplet"),
        ("hdml", "npair_normalized"),
        ("dvml", "ranked_list"),
        ("dvml", "triplet"),
        ("memory", "triplet"),
        ("memory", "multi_similarity"),
    ],
)
def test_workers_equal_one_in_values_gradients_and_state(tmp_path, name, case, num_workers):
    whole = some_steps(name, case)
    values, gradients = whole[0][-1]
    assert [value > 0 for value in values] == [True, True, True, name != "memory", True]
    assert all(gradient.abs().max() > 1e-9 for gradient in gradients.values())
    for part in on_workers(num_workers, tmp_path, some_steps, name, case):
        torch.testing.assert_close(part, whole, rtol=1e-8, atol=1e-11)


@pytest.mark.distributed
def test_workers_equal_one_with_recomputed_generated_rows(tmp_path):
    whole = some_steps("hdml", "triplet")
    for part in on_workers(2, tmp_path, some_steps, "hdml", "triplet", 3 * len(LABELS)):
        torch.testing.assert_close(part, whole, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", ["hdml", "dvml"])
def test_the_total_is_the_weighted_sum_of_its_parts(name):
    head = nn.Linear(FEATURES, DIM).double()
    features, embeddings = rows(16, FEATURES), rows(16, DIM, seed=1)
    objective = objective_of(name, constraint=SphericalConstraint())
    if name == "hdml":
        objective.transform.averages.copy_(torch.tensor([0.5, 1e4]))
    given = GlobalBatch(features=features, embeddings=embeddings, labels=LABELS, step=1)
    shares = objective.transform(given, slice(0, 16), head, objective.loss)
    of_batch, of_generated = objective.transform.weights(1)
    terms = objective(embeddings, LABELS, 1, None, features, head)
    assert terms.metric_loss.item() == TripletLoss()(embeddings, LABELS).item()
    assert (terms.generated_loss.item(), terms.generator_loss.item()) == (shares[0].item(), shares[1].item())
    metric_loss = of_batch * terms.metric_loss + of_generated * terms.generated_loss
    expected = metric_loss + terms.generator_loss + shares.classifier_loss + 0.7 * terms.constraint
    assert 0 < of_generated < 1
    assert terms.total.item() == pytest.approx(expected.item(), rel=1e-14)


def test_features_are_reached_by_the_gradient_through_the_objective():
    head, found = nn.Linear(FEATURES, DIM).double(), {}
    for name in ("hdml", "dvml"):
        features = rows(16, FEATURES).requires_grad_()
        objective_of(name)(head(features.detach()), LABELS, 1, None, features, head).total.backward()
        found[name] = features.grad is not None and features.grad.abs().max() > 0
    assert found == {"hdml": False, "dvml": True}  # HDML's reach the backbone through the embeddings alone


def test_only_training_moves_the_averages():
    objective, head = objective_of("hdml"), nn.Linear(FEATURES, DIM).double()
    given = (rows(16, DIM, seed=1), LABELS, 1, None, rows(16, FEATURES), head)
    objective.eval()(*given)
    assert objective.transform.averages.isinf().all() and not objective.transform.sums.any()
    terms = objective.train()(*given)
    assert objective.transform.averages.tolist() == [terms.metric_loss.item() / 2, terms.generator_loss.item() / 2]


def test_half_precision_features_are_reconstructed_in_single_precision():
    head = nn.Linear(FEATURES, DIM)
    for name in ("hdml", "dvml"):
        features = rows(16, FEATURES, dtype=torch.float32).bfloat16().requires_grad_()
        terms = objective_of(name).float()(rows(16, DIM).bfloat16(), LABELS, 0, None, features, head)
        assert terms.total.dtype == torch.float32 and terms.total.isfinite()


def test_the_layers_of_hdml_have_their_own_rates_and_do_not_decay():
    from ssl_sec.training.optimisers.config import SteppedAdamConfig

    config = SteppedAdamConfig(learning_rate=1e-4, backbone_learning_rate=1e-5, weight_decay=0.1)
    backbone, head, objective = nn.Linear(2, 2), nn.Linear(2, 2), objective_of("hdml")
    groups = config.build(backbone, head, objective).param_groups
    found = {
        name: [
            (group["rate_factor"], group["weight_decay"]) for group in groups for p in group["params"] if p is weight
        ]
        for name, weight in {
            "backbone": backbone.weight,
            "head": head.weight,
            "generator": objective.transform.generator[0].weight,
            "classifier": objective.transform.classifier[0].weight,
        }.items()
    }
    for name, factor, decay in (
        ("backbone", 0.1, 0.1),
        ("head", 1.0, 0.1),
        ("generator", 100.0, 0.0),
        ("classifier", 10.0, 0.0),
    ):
        assert found[name] == [(pytest.approx(factor), decay)]
    assert sum(len(group["params"]) for group in groups) == 4 + len(list(objective.parameters()))
