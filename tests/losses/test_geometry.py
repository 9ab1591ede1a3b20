import pytest
import torch

from ssl_sec.losses.geometry import directions, in_full_precision, inner_products, norms, root, squared_distances


def rows(dtype=torch.float64):
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def test_norms_and_directions_make_up_the_rows():
    embeddings = rows()
    expected = [sum(x * x for x in row) ** 0.5 for row in embeddings.tolist()]
    assert norms(embeddings).tolist() == pytest.approx(expected, rel=1e-14)
    torch.testing.assert_close(directions(embeddings) * norms(embeddings)[:, None], embeddings, rtol=1e-14, atol=0)
    torch.testing.assert_close(norms(directions(embeddings)), torch.ones(5, dtype=torch.float64), rtol=1e-14, atol=0)


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
