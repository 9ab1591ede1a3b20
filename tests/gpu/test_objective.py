"""The objective on a GPU: its values are the CPU's, and nothing of it waits."""

import pytest
import torch

from ssl_sec.losses import SphericalConstraint
from ssl_sec.training.objective import Objective
from ssl_sec.training.schedules import Constant
from tests.gpu.waiting import forbidden
from tests.losses.cases import ALL_LOSSES, rows

PAIRED = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 5, 5, 5])


def two_steps(case, device):
    """Totals and gradients; the radius has moved when the second step is taken."""
    objective = Objective(case.build(), SphericalConstraint(rho=0.4), Constant(0.7)).to(device).train()
    labels, taken = case.arrange(PAIRED).to(device), []
    batches = [rows(len(labels), seed=step).to(device).requires_grad_() for step in range(2)]
    for step, embeddings in enumerate(batches):
        if step == 0:  # a device is set up by what it is first asked for
            total = objective(embeddings, labels, step).total
            total.backward()
        else:
            with forbidden(device):
                total = objective(embeddings, labels, step).total
                total.backward()
        taken += [total.detach(), embeddings.grad]
    return [each.cpu() for each in taken]


@pytest.mark.parametrize("case", ALL_LOSSES, ids=str)
def test_every_loss_is_that_of_the_cpu_and_waits_for_nothing(case, device):
    on_cpu = two_steps(case, torch.device("cpu"))
    torch.testing.assert_close(two_steps(case, device), on_cpu, rtol=1e-9, atol=1e-11)
    assert all(each.abs().max() > 1e-6 for each in on_cpu)


@pytest.mark.gpu
def test_a_wait_is_noticed(gpu):
    one = torch.ones((), device=gpu)
    with forbidden(gpu), pytest.raises(RuntimeError, match="synchroniz"):
        one.item()
