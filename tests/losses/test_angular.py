"""The losses over disjoint triplets; what holds of every loss is in test_every_loss.py."""

import math

import pytest
import torch

from ssl_sec.losses import AngularHingeLoss, DisjointTripletLoss, angular, base
from tests.losses.cases import rows

TRIPLETS = torch.tensor([0, 0, 1, 1, 1, 0, 2, 2, 0, 0, 0, 2])
BOTH = pytest.mark.parametrize("loss", [DisjointTripletLoss(), AngularHingeLoss(20.0)], ids=repr)


@BOTH
def test_a_triplet_does_not_see_the_others(loss):
    """Section 3.3, Fig. 4a: the loss is the mean of that of each triplet alone."""
    alone = [loss(rows()[i : i + 3], TRIPLETS[i : i + 3]).item() for i in range(0, 12, 3)]
    assert loss(rows(), TRIPLETS).item() == pytest.approx(sum(alone) / 4, rel=1e-12)
    assert min(alone) >= 0 < max(alone)


@pytest.mark.parametrize("alpha_degrees", [10.0, 20.0, 36.0, 45.0])
def test_the_gradient_of_the_hinge_is_that_of_equation_7(alpha_degrees):
    embeddings = rows().requires_grad_()
    (gradient,) = torch.autograd.grad(AngularHingeLoss(alpha_degrees)(embeddings, TRIPLETS), embeddings)
    a, p, n = rows().view(4, 3, -1).unbind(1)
    tangent = (a - p).norm(dim=1) / (2 * n - a - p).norm(dim=1)  # Eq. 5
    active = (tangent > math.tan(math.radians(alpha_degrees)))[:, None]
    squared = math.tan(math.radians(alpha_degrees)) ** 2
    outwards = a + p - 2 * n
    expected = torch.stack(
        [2 * (a - p) - 2 * squared * outwards, 2 * (p - a) - 2 * squared * outwards, 4 * squared * outwards], 1
    )
    expected = torch.where(active[:, None], expected, 0.0) / 4
    torch.testing.assert_close(gradient.view(4, 3, -1), expected, rtol=1e-12, atol=1e-14)


def test_the_hinge_is_zero_up_to_the_angle():
    """A right-angled triangle m, c, n whose angle at n is 30 degrees (Fig. 3b)."""
    points = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, math.sqrt(3.0)]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 1])
    assert AngularHingeLoss(30.001)(points, labels).item() == 0
    assert AngularHingeLoss(29.999)(7 * points, labels).item() > 0


@BOTH
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 0, 1, 2], "a multiple of 3 rows: the batch has 4"),
        ([], "a multiple of 3 rows: the batch has 0"),
        ([0, 0, 1, 1, 2, 0], r"a positive: rows 3 to 5 have the labels 1, 2, 0"),
        ([0, 0, 1, 2, 2, 2], r"a negative: rows 3 to 5 have the labels 2, 2, 2"),
        ([0, 1, 2, 3, 4, 5], r"a positive: rows 0 to 2 have the labels 0, 1, 2"),
    ],
)
def test_labels_that_are_no_triplets_are_refused(loss, labels, message):
    needed = "; rows 3i, 3i [+] 1 and 3i [+] 2 must be an anchor, a positive and a negative, as of sampler=triplets$"
    with pytest.raises(ValueError, match=f"^{type(loss).__name__} needs {message}{needed}"):
        loss(rows(len(labels)), torch.tensor(labels, dtype=torch.int64))


@BOTH
@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, 0], [0, 0, 1, 2, 2, 2]])
def test_the_loss_is_nan_if_labels_may_not_be_read(loss, labels, monkeypatch):
    for module in (angular, base):
        monkeypatch.setattr(module, "may_read_values", lambda labels: False)
    assert loss(rows(6), torch.tensor(labels)).isnan()
    assert loss(rows(6), torch.tensor([0, 0, 1, 1, 1, 0])).isfinite()
