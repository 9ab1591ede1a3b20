import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.data.samplers import ShuffledBatches, permute, worker_rows
from ssl_sec.errors import ConfigError


@given(num_images=st.integers(1, 3000), seed=st.integers(-(2**63), 2**63 - 1), epoch=st.integers(0, 10**6))
@settings(max_examples=100)
def test_an_epoch_is_a_permutation(num_images, seed, epoch):
    images = permute(torch.arange(num_images), num_images, seed, epoch)
    assert torch.equal(images.sort().values, torch.arange(num_images))


@pytest.mark.parametrize("num_images", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097])
def test_permutations_at_powers_of_two(num_images):
    images = permute(torch.arange(num_images), num_images, 0, 0)
    assert torch.equal(images.sort().values, torch.arange(num_images))


@given(num_images=st.integers(1, 100), global_batch_size=st.integers(1, 100), epoch=st.integers(0, 5))
@settings(max_examples=30)
def test_batches_of_an_epoch_are_disjoint(num_images, global_batch_size, epoch):
    global_batch_size = min(global_batch_size, num_images)
    batches = ShuffledBatches(num_images=num_images, global_batch_size=global_batch_size, seed=3)
    first = epoch * batches.steps_per_epoch
    images = torch.cat([batches.indices(first + step) for step in range(batches.steps_per_epoch)])
    assert batches.steps_per_epoch == num_images // global_batch_size
    assert len(images.unique()) == len(images) == batches.steps_per_epoch * global_batch_size
    assert 0 <= images.min() and images.max() < num_images


def test_a_batch_depends_on_seed_and_step_alone():
    def make(seed):
        return ShuffledBatches(num_images=1000, global_batch_size=32, seed=seed)

    expected = [make(5).indices(step) for step in range(70)]
    torch.manual_seed(123)
    for step in reversed(range(70)):
        assert torch.equal(make(5).indices(step), expected[step])
    assert not torch.equal(make(6).indices(0), expected[0])


def test_a_batch_that_is_changed_is_drawn_again_as_before():
    sampler = ShuffledBatches(num_images=100, global_batch_size=10, seed=0)
    batch = sampler.indices(3)
    expected = batch.tolist()
    batch.zero_()
    assert sampler.indices(3).tolist() == expected


def test_the_order_of_images_never_changes_between_versions():
    # A change of these numbers breaks the resume of runs that are under way.
    batches = ShuffledBatches(num_images=50_000, global_batch_size=5, seed=0)
    assert batches.indices(0).tolist() == [8543, 20674, 41619, 41287, 29179]
    assert batches.indices(123_456).tolist() == [19184, 25975, 21284, 42717, 4146]


def test_epochs_differ():
    batches = ShuffledBatches(num_images=512, global_batch_size=512, seed=0)
    epochs = torch.stack([batches.indices(step) for step in range(50)])
    assert len(epochs.unique(dim=0)) == 50
    # Two random permutations agree in one place on average.
    agreements = (epochs[:, None] == epochs[None]).sum(-1).float()
    assert abs((agreements.sum() - 50 * 512) / (50 * 49) - 1) < 0.2


@pytest.mark.parametrize("num_images", [3, 10, 40])
def test_positions_are_uniform(num_images):
    epochs = 200
    orders = torch.stack([permute(torch.arange(num_images), num_images, 1, epoch) for epoch in range(epochs)])
    counts = torch.stack([(orders == image).sum(0) for image in range(num_images)]).double()
    expected = epochs / num_images
    # Rows and columns of the counts sum to the number of epochs: (N - 1)² degrees of freedom, and the
    # statistic of such a table is N / (N - 1) of chi-square, with at most five standard deviations.
    freedom = (num_images - 1) ** 2
    statistic = float(((counts - expected) ** 2 / expected).sum()) * (num_images - 1) / num_images
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_neighbours_are_independent():
    num_images = 10_000
    order = permute(torch.arange(num_images), num_images, 2, 0).double()
    pairs = torch.stack((order[:-1], order[1:]))
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.05
    assert abs(float(torch.corrcoef(torch.stack((order, torch.arange(num_images).double())))[0, 1])) < 0.05


def test_a_billion_images_need_no_memory():
    batches = ShuffledBatches(num_images=10**9, global_batch_size=4096, seed=0)
    started = time.perf_counter()
    images = torch.cat([batches.indices(step) for step in range(20)])
    assert (time.perf_counter() - started) / 20 < 0.25
    assert len(images.unique()) == 20 * 4096 and images.max() < 10**9
    assert abs(float(images.double().mean()) / 5e8 - 1) < 0.02


@pytest.mark.parametrize(("global_batch_size", "hint"), [(0, ""), (11, "; set global_batch_size=8")])
def test_too_few_images(global_batch_size, hint):
    said = f"^global_batch_size: found {global_batch_size}, must be 1 to 10, the number of images{hint}$"
    with pytest.raises(ConfigError, match=said):
        ShuffledBatches(num_images=10, global_batch_size=global_batch_size, seed=0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_workers_rows_make_up_the_batch(world_size):
    batch = torch.arange(12)
    rows = [batch[worker_rows(12, rank, world_size)] for rank in range(world_size)]
    assert {len(row) for row in rows} == {12 // world_size}
    assert torch.equal(torch.cat(rows), batch)


@pytest.mark.parametrize("world_size", [5, 24])
def test_a_batch_must_be_divisible_by_the_workers(world_size):
    with pytest.raises(ConfigError, match=f"{world_size} workers.*12.*allowed: 1, 2, 3, 4, 6, 12 workers"):
        worker_rows(12, 0, world_size)
