import torch
from hypothesis import given
from hypothesis import strategies as st

from ssl_sec.seeding import derived_seed, normal, uniform

parts = st.lists(st.integers(-(2**63), 2**63) | st.sampled_from(["views", "weights", "probe"]), max_size=4)


def test_seeds_are_the_same_on_every_machine_and_version():
    assert derived_seed(0) == 4761921975702974394
    assert derived_seed(0, "views", 3, 1) == 2530358317088611979
    assert derived_seed(1, "weights") == 7170578802021019823


@given(seed=st.integers(0, 2**63), parts=parts)
def test_seeds_fit_torchs_generators(seed, parts):
    assert 0 <= derived_seed(seed, *parts) < 2**63


@given(seed=st.integers(0, 10), other=st.integers(0, 10), parts=parts, other_parts=parts)
def test_seeds_depend_on_every_part(seed, other, parts, other_parts):
    same = (seed, parts) == (other, other_parts)
    assert (derived_seed(seed, *parts) == derived_seed(other, *other_parts)) == same


def test_neighbouring_parts_give_different_seeds():
    assert derived_seed(1, 23) != derived_seed(12, 3)
    assert derived_seed(0, "a", 11) != derived_seed(0, "a", 1, 1)


def test_uniform_numbers_are_the_same_on_every_machine_and_version():
    assert uniform(0, 2) == [0.6524484863740322, 0.1663964394676608]
    assert uniform(-(2**63), 3)[:2] == uniform(-(2**63), 2)


def test_uniform_numbers_fill_the_unit_interval():
    numbers = torch.tensor([uniform(draw, 8) for draw in range(2000)], dtype=torch.float64)
    assert 0 <= numbers.min() and numbers.max() < 1
    counts = torch.histc(numbers.flatten(), 20, 0, 1)
    # Five standard deviations of a count.
    assert ((counts - 800).abs() < 5 * (800 * 0.95) ** 0.5).all()
    # Numbers of one draw and of neighbouring draws are uncorrelated, within five standard errors.
    correlations = torch.corrcoef(torch.cat([numbers[:-1], numbers[1:]], dim=1).T) - torch.eye(16)
    assert correlations.abs().max() < 5 / 2000**0.5


def test_normal_numbers_have_the_moments_and_the_shape_of_their_distribution():
    numbers = normal(torch.arange(400_000).view(-1, 4), torch.float64)
    assert numbers.shape == (100_000, 4)
    assert abs(numbers.mean()) < 0.01 and abs(numbers.var() - 1) < 0.01
    for bound, share in ((1.0, 0.6827), (2.0, 0.9545), (3.0, 0.9973)):
        assert abs((numbers.abs() < bound).double().mean() - share) < 0.003
    assert (torch.corrcoef(numbers.T) - torch.eye(4)).abs().max() < 0.02


def test_normal_numbers_are_functions_of_their_keys_in_both_precisions():
    keys = torch.tensor([[0, 1], [-(2**63), 2**63 - 1]])
    numbers = normal(keys, torch.float64)
    assert numbers.tolist() == normal(keys.flatten(), torch.float64).view(2, 2).tolist()
    assert torch.allclose(normal(keys, torch.float32).double(), numbers, atol=1e-5)
    assert normal(torch.arange(2**20), torch.float32).isfinite().all()
