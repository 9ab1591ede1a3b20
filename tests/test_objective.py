import pytest
import torch
from torch import nn

from ssl_sec.collectives import average_gradients, own_rows
from ssl_sec.global_batch_norm import globalise_batch_norm
from ssl_sec.losses import NTXentLoss, SphericalConstraint
from ssl_sec.losses.geometry import norms
from ssl_sec.objective import Objective
from ssl_sec.schedules import Constant, LinearRamp
from tests.workers import on_workers

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
    assert terms.eta == 0.2
    assert terms.metric_loss.item() == NTXentLoss(0.2)(embeddings, labels).item()
    assert terms.constraint.item() == SphericalConstraint()(embeddings).item()
    assert terms.total.item() == pytest.approx(terms.metric_loss.item() + 0.2 * terms.constraint.item(), rel=1e-15)
    assert torch.equal(terms.norms, norms(embeddings))


def test_without_a_constraint_the_total_is_the_loss():
    embeddings = torch.randn(8, 5, requires_grad=True)
    labels = torch.arange(4).repeat(2)
    terms = Objective(NTXentLoss(), None, Constant(3.0))(embeddings, labels, step=0)
    assert terms.total.item() == terms.metric_loss.item() == NTXentLoss()(embeddings, labels).item()
    assert terms.eta == terms.constraint.item() == 0
    assert terms.total.requires_grad
    assert not (terms.metric_loss.requires_grad or terms.constraint.requires_grad or terms.norms.requires_grad)


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


def trained(constraint):
    """Values, averaged gradients and buffers of some steps on this worker's rows, views of images in other hands."""
    plain = globalise_batch_norm(network())
    model = average_gradients(plain, torch.device("cpu"))
    objective = Objective(NTXentLoss(0.2), constraints()[constraint], Constant(0.7))
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
@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("constraint", ["none", "sec", "sec_ema", "fixed"])
def test_workers_equal_one_in_values_gradients_statistics_and_radius(tmp_path, constraint, num_workers):
    whole = trained(constraint)
    totals = [step[0] for step in whole[0]]
    assert len(set(totals)) == STEPS
    assert all(gradient.abs().max() > 1e-6 for gradient in whole[0][0][4])
    for part in on_workers(num_workers, tmp_path, trained, constraint):
        torch.testing.assert_close(part, whole, rtol=1e-10, atol=1e-12)
