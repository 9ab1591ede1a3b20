import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.data.shards.order import BlockShuffledBatches
from ssl_sec.errors import ConfigError


def sampler(sizes, batch, window=12, seed=0):
    return BlockShuffledBatches(sizes=torch.tensor(sizes), global_batch_size=batch, window=window, seed=seed)


def epoch_of(one, epoch=0):
    steps = range(epoch * one.steps_per_epoch, (epoch + 1) * one.steps_per_epoch)
    return torch.stack([one.indices(step) for step in steps])


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(lambda sizes: sum(sizes) > 0),
    share=st.floats(0, 1),
    window=st.integers(1, 200),
    seed=st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=30)
def test_an_epoch_has_every_image_once_but_those_of_a_partial_batch(sizes, share, window, seed):
    num_images = sum(sizes)
    batch = max(1, round(share * num_images))
    one = sampler(sizes, batch, window, seed)
    for epoch in (0, 3):
        images = epoch_of(one, epoch).flatten()
        assert len(images) == num_images // batch * batch == len(images.unique())
        assert 0 <= int(images.min()) and int(images.max()) < num_images


def slow(one, step):
    """The images of a step by definition: the sequence of an epoch, cut into lanes, cut into windows."""
    from ssl_sec.data.samplers import permute
    from ssl_sec.seeding import derived_seed

    epoch, batch = divmod(step, one.steps_per_epoch)
    sizes = one.sizes.tolist()
    order = permute(torch.arange(len(sizes)), len(sizes), derived_seed(one.seed, "blocks"), epoch).tolist()
    turn = derived_seed(one.seed, "turn", epoch) % (1 << 40)
    ends = torch.tensor([sizes[block] for block in order]).cumsum(0).tolist()
    sequence = [
        sum(sizes[:block]) + (place - end + turn) % sizes[block]
        for block, end in zip(order, ends, strict=True)
        for place in range(end - sizes[block], end)
    ]
    rows = one.global_batch_size // one.num_lanes
    images = []
    for lane in range(one.num_lanes):
        part = sequence[lane * one.steps_per_epoch * rows :][: one.steps_per_epoch * rows]
        size = one.window_of_a_lane
        ends = [(window + 1) * size - lane * size // one.num_lanes for window in range(len(part) // size + 2)]
        shuffled, first = [], 0
        for window, end in enumerate(ends):
            some = part[first:end]
            key = derived_seed(one.seed, "window", lane, window)
            shuffled += [some[i] for i in permute(torch.arange(len(some)), len(some), key, epoch).tolist()]
            first = max(end, 0)
        images += shuffled[batch * rows :][:rows]
    return images


@pytest.mark.parametrize(("batch", "window"), [(8, 24), (6, 1), (40, 1000), (32, 50)])
def test_lanes_and_windows_are_those_of_the_slow_loop(batch, window):
    one = sampler([7, 11, 3, 20, 5, 9, 16, 4, 13, 12], batch, window, seed=5)
    for step in range(0, 3 * one.steps_per_epoch, 5):
        assert one.indices(step).tolist() == slow(one, step)


def test_epochs_and_seeds_have_other_orders():
    one, other = sampler([10] * 20, 20), sampler([10] * 20, 20, seed=1)
    first, second, third = epoch_of(one), epoch_of(one, 1), epoch_of(other)
    assert not torch.equal(first, second) and not torch.equal(first, third)
    assert torch.equal(first, epoch_of(sampler([10] * 20, 20)))


@pytest.mark.parametrize("sizes", [[100], [90, 10], [30, 30, 30, 10]])
def test_every_image_is_drawn_although_batches_leave_some_out(sizes):
    one = sampler(sizes, 32, window=40)
    drawn = torch.cat([epoch_of(one, epoch).flatten() for epoch in range(60)]).bincount(minlength=100)
    assert 40 < int(drawn.min())  # of 60, 57.6 in the mean


def test_a_lane_reads_its_blocks_in_turn():
    """With windows of 64 images of a lane, a step needs few blocks, and every block is needed for a short while."""
    one = sampler([32] * 256, 64, window=16 * 64)  # sixteen lanes, windows of two blocks
    assert (one.num_lanes, one.window_of_a_lane) == (16, 64)
    blocks = epoch_of(one) // 32
    for lane in range(16):
        of_lane = blocks[:, lane * 4 : (lane + 1) * 4]
        assert len(of_lane.unique()) <= 256 / 16 + 1
        for block in of_lane.unique():
            steps = (of_lane == block).any(dim=1).nonzero().flatten()
            assert int(steps[-1] - steps[0]) <= 2 * 64 / 4


def test_few_lanes_are_read_where_blocks_are_large():
    lanes = [sampler([size] * 8, 48, window=96).num_lanes for size in (6, 8, 12, 24, 40, 96, 200)]
    assert lanes == [16, 12, 8, 4, 2, 1, 1]


def test_batches_must_not_exceed_the_set():
    with pytest.raises(ConfigError, match="1 to 12, the number of images"):
        sampler([5, 7], 13)
