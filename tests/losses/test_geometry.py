import math

import pytest
import torch

from ssl_sec.errors import ConfigError
from ssl_sec.losses import ContrastiveLoss, NTXentLoss, TripletLoss
from ssl_sec.losses.geometry import (
    angles,
    directions,
    grad_scale,
    in_full_precision,
    inner_products,
    norms,
    root,
    squared_distances,
    turn_tangents,
)
from ssl_sec.losses.spherical import spherical_constraint
from tests.losses import cases


def rows(dtype=torch.float64):
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def test_norms_and_directions_make_up_the_rows():
    embeddings = rows()
    expected = [sum(x * x for x in row) ** 0.5 for row in embeddings.tolist()]
    assert norms(embeddings).tolist() == pytest.approx(expected, rel=1e-14)
    torch.testing.assert_close(directions(embeddings) * norms(embeddings)[:, None], embeddings, rtol=1e-14, atol=0)
    torch.testing.assert_close(norms(directions(embeddings)), torch.ones(5, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("angle", [0.0, 1e-12, 1e-4, 1.0, 3.0, torch.pi])
def test_an_angle_is_exact_also_where_its_cosine_rounds_to_one(angle):
    across = torch.tensor([[0.0, 2.0, 0.0]], dtype=torch.float64)
    first = torch.tensor([[3.0, 0.0, 0.0]], dtype=torch.float64)
    angle = torch.tensor(angle, dtype=torch.float64)
    second = first * angle.cos() + 1.5 * across * angle.sin()
    assert angles(first, second).item() == pytest.approx(angle.item(), rel=1e-12, abs=1e-15)


def test_a_zero_row_is_at_a_right_angle_to_others_and_not_turned_from_another():
    zero = torch.zeros(1, 7, dtype=torch.float64)
    assert angles(zero.expand(5, -1), rows()).tolist() == pytest.approx([math.pi / 2] * 5, rel=1e-12)
    assert angles(zero, zero).tolist() == [0]


@pytest.mark.parametrize("tiny", [1e-30, 1e-100, 1e-150])
def test_a_tiny_row_has_a_direction(tiny):
    torch.testing.assert_close(directions(tiny * rows()), directions(rows()), rtol=1e-12, atol=0)


def test_a_zero_row_stays_zero_with_the_gradient_of_the_identity():
    embeddings = rows()
    embeddings[2] = 0
    embeddings.requires_grad_()
    weights = torch.arange(35.0, dtype=torch.float64).view(5, 7)
    unit = directions(embeddings)
    (gradient,) = torch.autograd.grad((weights * unit).sum(), embeddings)
    assert unit[2].tolist() == [0] * 7
    assert gradient.isfinite().all()
    assert torch.equal(gradient[2], weights[2])


def test_a_row_whose_norm_overflows_has_no_direction_and_no_finite_loss():
    """As a zero row it would have a finite loss without a gradient: training would stop without an error."""
    embeddings = torch.randn(4, 3)
    embeddings[1] *= 1e20
    assert directions(embeddings).isnan().any(1).tolist() == [False, True, False, False]
    assert NTXentLoss()(embeddings, torch.tensor([0, 1, 0, 1])).isnan()


def test_the_norm_of_a_zero_row_has_a_zero_gradient():
    embeddings = torch.zeros(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(norms(embeddings).sum(), embeddings)
    assert torch.equal(gradient, torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2],
)
def test_half_precision_becomes_single_and_double_stays(given, wanted):
    embeddings = rows(given)
    assert in_full_precision(embeddings).dtype == norms(embeddings).dtype == directions(embeddings).dtype == wanted


def test_half_precision_rows_that_would_overflow_have_finite_norms():
    assert norms(torch.full((1, 4), 60_000.0, dtype=torch.float16)).item() == 120_000


def test_directions_are_the_gradients_of_norms():
    embeddings = rows().requires_grad_()
    (gradient,) = torch.autograd.grad(norms(embeddings).sum(), embeddings)
    torch.testing.assert_close(gradient, directions(embeddings.detach()), rtol=1e-14, atol=1e-16)
    assert torch.autograd.gradcheck(directions, embeddings)


@pytest.mark.parametrize("anchors", [slice(None), slice(0, 5), slice(0, 2), slice(2, 5), slice(3, 3)])
def test_inner_products_and_their_gradient_are_autograds(anchors):
    ours, theirs = rows().requires_grad_(), rows().requires_grad_()
    products, expected = inner_products(ours, anchors), theirs[anchors] @ theirs.T
    assert torch.equal(products, expected)
    weights = torch.randn_like(expected)
    (products * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-13, atol=1e-15)


def test_squared_distances_are_those_of_the_directions():
    unit = directions(rows())
    torch.testing.assert_close(squared_distances(unit, slice(1, 4)), torch.cdist(unit[1:4], unit).square())


def test_the_root_has_no_gradient_at_zero_and_below():
    squares = torch.tensor([[4.0, 0.0], [-1e-16, 9.0]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(root(squares).sum(), squares)
    assert root(squares).tolist() == [[2, 0], [0, 3]]
    assert gradient.tolist() == [[1 / 4, 0], [0, 1 / 6]]
    assert root(torch.tensor([float("nan")])).isnan()


LABELS = torch.tensor([0, 0, 1, 1, 1])


def stepped(embeddings, gradients, rate):
    """How far each row turns in a step of SGD, as a tangent."""
    cosines = (directions(embeddings) * directions(embeddings - rate * gradients)).sum(1)
    return cosines.acos().tan()


@pytest.mark.parametrize("loss", [TripletLoss(margin=1.0), ContrastiveLoss()])
@pytest.mark.parametrize("rate", [0.01, 3.0])
def test_a_turn_is_that_of_a_step_of_sgd_on_an_angular_loss(loss, rate):
    embeddings = rows().requires_grad_()
    (gradients,) = torch.autograd.grad(loss(embeddings, LABELS), embeddings)
    found = turn_tangents(embeddings.detach(), gradients)
    assert found.min() > 1e-4
    torch.testing.assert_close(rate * found, stepped(embeddings.detach(), gradients, rate), rtol=1e-6, atol=0)
    by_equation = [
        sum(g * g for g in gradient) ** 0.5 / sum(x * x for x in row) ** 0.5
        for gradient, row in zip(gradients.tolist(), embeddings.tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx(by_equation, rel=1e-12)


def test_a_row_of_twice_the_norm_turns_a_quarter_as_far():
    """SEC, Prop. 2: the norm is the only thing that differs."""
    embeddings = rows()
    found = []
    for scale in (1.0, 2.0):
        scaled = (embeddings * torch.tensor([[scale], [1], [1], [1], [1]])).requires_grad_()
        (gradients,) = torch.autograd.grad(TripletLoss(margin=1.0)(scaled, LABELS), scaled)
        found.append(turn_tangents(scaled.detach(), gradients)[0].item())
    assert found[0] == pytest.approx(4 * found[1], rel=1e-12)


def test_the_constraint_alone_turns_nothing():
    embeddings = rows().requires_grad_()
    lengths = norms(embeddings)
    (gradients,) = torch.autograd.grad(spherical_constraint(lengths, lengths.mean()), embeddings)
    assert norms(gradients).min() > 1e-3
    assert turn_tangents(embeddings.detach(), gradients).max() < 1e-15


def test_a_zero_row_does_not_turn():
    embeddings = rows()
    embeddings[2] = 0
    assert turn_tangents(embeddings, torch.ones_like(embeddings))[2] == 0


@pytest.mark.parametrize("case", cases.ALL_LOSSES, ids=str)
def test_a_second_derivative_is_right_or_refused(case):
    loss, labels = case.build(), case.arrange(torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]))
    embeddings, direction = cases.rows(seed=1).requires_grad_(), cases.rows(seed=2)
    case.fix_weights(loss, cases.rows(seed=1))
    if case.reads_norms:  # norms stay
        unit = cases.rows(seed=1) / cases.rows(seed=1).norm(dim=1, keepdim=True)
        direction -= unit * (unit * direction).sum(1, keepdim=True)

    def gradient(at, **options):
        return torch.autograd.grad(loss(at, labels), at, **options)[0]

    try:
        first = gradient(embeddings, create_graph=True)
    except RuntimeError as error:
        assert "has no second derivative" in str(error) and case.name in {"ntxent", "supcon", "dcl"}
        return
    (second,) = torch.autograd.grad((first * direction).sum(), embeddings)
    before, after = (gradient((embeddings.detach() + step * direction).requires_grad_()) for step in (-1e-6, 1e-6))
    torch.testing.assert_close(second, (after - before) / 2e-6, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("unchecked_types")
def test_values_of_grad_scale_that_are_not_allowed_are_refused():
    for power, by, message in (
        (1.0, "row", "by: found 'row'; did you mean 'rows'?"),
        (-1.0, "rows", "power: found -1"),
        (math.nan, "rows", "power: found nan"),
        (math.inf, "rows", "power: found inf"),
    ):
        with pytest.raises(ConfigError) as caught:
            grad_scale(torch.ones(2, 3), power, by)
        assert str(caught.value).startswith(message)
