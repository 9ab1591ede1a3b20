import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from ssl_sec.losses import SphericalConstraint, spherical_constraint
from ssl_sec.losses.geometry import directions, norms


def rows(seed=0, count=6, dim=4, scale=3.0):
    return scale * torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lengths(embeddings) -> list[float]:
    return [math.hypot(*row) for row in embeddings.tolist()]


def mean(values) -> float:
    return sum(values) / len(values)


def mean_square_from(embeddings, radius) -> float:
    return mean([(length - radius) ** 2 for length in lengths(embeddings)])


def gradient_of(constraint, embeddings):
    embeddings = embeddings.clone().requires_grad_()
    return torch.autograd.grad(constraint(embeddings), embeddings)[0]


def test_sec_is_the_variance_of_the_norms():
    value = SphericalConstraint()(rows()).item()
    assert value == pytest.approx(mean_square_from(rows(), mean(lengths(rows()))), rel=1e-14)
    assert value == pytest.approx(norms(rows()).var(correction=0).item(), rel=1e-13)


@pytest.mark.parametrize("radius", [0.0, 1.0, 8.7])
def test_a_fixed_radius_is_the_mean_square_distance_from_it(radius):
    constraint = SphericalConstraint(radius=radius)
    for seed in range(3):
        assert constraint(rows(seed)).item() == pytest.approx(mean_square_from(rows(seed), radius), rel=1e-14)


def test_l2reg_is_the_mean_square_of_the_rows():
    assert SphericalConstraint(radius=0.0)(rows()).item() == pytest.approx(rows().square().sum().item() / 6, rel=1e-14)


@pytest.mark.parametrize("rho", [0.01, 0.3, 0.999])
def test_sec_ema_moves_its_radius_before_it_is_used(rho):
    constraint = SphericalConstraint(rho=rho)
    radius = None
    for seed in range(4):
        batch = rows(seed, scale=1.0 + seed)
        batch_mean = mean(lengths(batch))
        radius = batch_mean if radius is None else (1 - rho) * radius + rho * batch_mean
        assert constraint(batch).item() == pytest.approx(mean_square_from(batch, radius), rel=1e-13)
        assert constraint.mean_norm.item() == pytest.approx(radius, rel=1e-14)


def test_sec_ema_uses_but_does_not_move_its_radius_in_evaluation():
    constraint = SphericalConstraint(rho=0.5)
    constraint(rows(0))
    before = constraint.mean_norm.clone()
    constraint.eval()
    assert constraint(rows(1)).item() == pytest.approx(mean_square_from(rows(1), before.item()), rel=1e-14)
    assert torch.equal(constraint.mean_norm, before)


def test_sec_takes_the_mean_of_its_own_batch_in_evaluation_too():
    constraint = SphericalConstraint()
    constraint(rows(0))
    constraint.eval()
    expected = mean_square_from(rows(1), mean(lengths(rows(1))))
    assert constraint(rows(1)).item() == pytest.approx(expected, rel=1e-14)


def test_sec_ema_that_never_trained_takes_the_batchs_mean_in_evaluation():
    constraint = SphericalConstraint(rho=0.5).eval()
    assert constraint(rows()).item() == pytest.approx(mean_square_from(rows(), mean(lengths(rows()))), rel=1e-14)
    assert constraint.mean_norm.item() == 0
    assert not constraint.started.item()


def with_radius(rho, radius):
    constraint = SphericalConstraint(rho=rho)
    constraint.mean_norm.fill_(radius)
    constraint.started.fill_(True)
    return constraint


@pytest.mark.parametrize(
    ("constraint", "radius"),
    [
        (SphericalConstraint(), mean(lengths(rows()))),
        (SphericalConstraint(radius=2.0), 2.0),
        (SphericalConstraint(radius=0.0), 0.0),
        (with_radius(0.25, 10.0), 0.75 * 10 + 0.25 * mean(lengths(rows()))),
    ],
    ids=["sec", "fixed", "l2reg", "ema"],
)
def test_the_gradient_is_twice_the_distance_along_the_direction(constraint, radius):
    """SEC, Eq. 18."""
    expected = 2 / 6 * (norms(rows()) - radius)[:, None] * directions(rows())
    torch.testing.assert_close(gradient_of(constraint, rows()), expected, rtol=1e-12, atol=1e-15)


def test_without_detaching_sec_would_be_the_same_and_sec_ema_would_not():
    def attached(rho, running):
        embeddings = rows().requires_grad_()
        radius = (1 - rho) * running + rho * norms(embeddings).mean()
        return torch.autograd.grad((norms(embeddings) - radius).square().mean(), embeddings)[0]

    torch.testing.assert_close(gradient_of(SphericalConstraint(), rows()), attached(1.0, 0.0), rtol=1e-12, atol=1e-15)
    difference = gradient_of(with_radius(0.5, 10.0), rows()) - attached(0.5, 10.0)
    assert difference.norm(dim=1).min() > 0.1


def test_the_function_does_not_pull_the_radius():
    radius = torch.tensor(2.0, requires_grad=True)
    embeddings = rows().float().requires_grad_()
    spherical_constraint(norms(embeddings), radius).backward()
    assert radius.grad is None
    assert embeddings.grad is not None


def test_a_descent_step_brings_norms_together_and_keeps_directions():
    batch = rows()
    moved = batch - 0.5 * gradient_of(SphericalConstraint(), batch)
    assert norms(moved).std() < 0.9 * norms(batch).std()
    torch.testing.assert_close(directions(moved), directions(batch), rtol=1e-12, atol=0)


def test_a_zero_row_gives_a_finite_gradient():
    batch = rows().float()
    batch[1] = 0
    assert gradient_of(SphericalConstraint(), batch).isfinite().all()
    assert gradient_of(SphericalConstraint(radius=2.0), torch.zeros(3, 2)).isfinite().all()


def test_the_running_radius_is_saved_and_restored():
    constraint, other = SphericalConstraint(rho=0.1), SphericalConstraint(rho=0.1)
    for seed in range(3):
        constraint(rows(seed))
    assert set(constraint.state_dict()) == {"mean_norm", "started"}
    other.load_state_dict(constraint.state_dict())
    assert other(rows(9)).item() == constraint(rows(9)).item()
    assert torch.equal(other.mean_norm, constraint.mean_norm)


def test_the_running_radius_is_kept_in_double_precision():
    constraint = SphericalConstraint(rho=1e-9)
    constraint(rows(0).float())
    before = constraint.mean_norm.item()
    value = constraint(rows(1, scale=9.0).float())
    assert value.dtype == torch.float32
    assert constraint.mean_norm.dtype == torch.float64
    assert 0 < abs(constraint.mean_norm.item() - before) < 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_running_radius_of_a_model_in_low_precision_moves_on(dtype):
    constraint, model = SphericalConstraint(rho=0.001), nn.ModuleList([SphericalConstraint(rho=0.001)])
    for each in (constraint, model[0]):
        each(rows(0))
    model.to(dtype)
    for each in (constraint, model[0]):
        for seed in range(1, 5):
            each(rows(seed, scale=9.0))
    assert torch.equal(model[0].mean_norm, constraint.mean_norm)
    assert model.to("meta").to_empty(device="cpu")[0].mean_norm.dtype == torch.float64


def test_it_computes_in_single_precision_under_autocast():
    batch = rows().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = SphericalConstraint()(batch)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(SphericalConstraint()(batch.double()).item(), rel=1e-6)


@pytest.mark.parametrize("rho", [0.0, -0.1, 1.1, math.nan])
def test_a_weight_outside_its_range_is_refused(rho):
    with pytest.raises(ValueError, match=r"rho: found .*, must be in \(0, 1\]"):
        SphericalConstraint(rho=rho)


@pytest.mark.parametrize("radius", [-1.0, math.nan])
def test_a_negative_radius_is_refused(radius):
    with pytest.raises(ValueError, match="radius: found .*, must be ≥ 0"):
        SphericalConstraint(radius=radius)


def test_the_repr_shows_the_settings():
    assert repr(SphericalConstraint(rho=0.1)) == "SphericalConstraint(rho=0.1)"
    assert repr(SphericalConstraint(radius=0.0)) == "SphericalConstraint(radius=0.0)"


@pytest.mark.parametrize("first", [False, True])
def test_a_batch_that_overflowed_does_not_move_the_running_radius(first):
    constraint, other = SphericalConstraint(rho=0.3), SphericalConstraint(rho=0.3)
    broken = rows()
    broken[0, 0] = math.inf
    for each in [broken, rows(1)] if first else [rows(1), broken]:
        constraint(each)
    other(rows(1))
    assert constraint(rows(2)).item() == other(rows(2)).item()
    assert constraint.mean_norm.item() == other.mean_norm.item()


def test_the_radius_may_be_a_number():
    lengths = norms(rows(4))
    assert spherical_constraint(lengths, 2.0) == spherical_constraint(lengths, torch.tensor(2.0))


@pytest.mark.usefixtures("unchecked_types")
def test_embeddings_in_place_of_their_norms_are_refused():
    with pytest.raises(
        ValueError, match=r"^spherical_constraint: found float64\[\d, \d\], must be norms of shape \[batch\]"
    ):
        spherical_constraint(rows(4), 2.0)


@pytest.mark.usefixtures("unchecked_types")
def test_an_array_of_numpy_is_refused():
    with pytest.raises(ValueError, match=r"^SphericalConstraint: found ndarray, must be embeddings of shape \[batch"):
        SphericalConstraint()(torch.ones(4, 3).numpy())


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_whole_and_complex_numbers_are_refused(dtype):
    with pytest.raises(
        ValueError, match=r"^SphericalConstraint: found .*\[4, 3\], must be .*, floats, one row or more$"
    ):
        SphericalConstraint()(torch.ones(4, 3, dtype=dtype))


def test_a_batch_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"SphericalConstraint: found float64\[0, 4\], must be embeddings of shape"):
        SphericalConstraint()(rows(count=0))


def test_rows_of_several_views_are_refused_unless_they_are_one_batch():
    """In a program of its own: the checks of shapes in the tests' process come first."""
    code = "import torch, ssl_sec; ssl_sec.SphericalConstraint()(torch.randn(2, 8, 16))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "ValueError: SphericalConstraint: found float32[2, 8, 16], must be embeddings of shape [batch, dim], floats, "
        "one row or more"
    )
