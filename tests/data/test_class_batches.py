import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.data import class_batches as class_batches_module
from ssl_sec.data.class_batches import ClassBatches, TripletBatches
from ssl_sec.data.samplers import worker_rows
from ssl_sec.errors import ConfigError, DataError

LABELS = torch.tensor([label for label in range(10) for _ in range(12)])[
    torch.randperm(120, generator=torch.Generator().manual_seed(0))
]


def class_batches(labels=LABELS, global_batch_size=24, images_per_class=4, seed=3) -> ClassBatches:
    return ClassBatches(
        labels=labels, global_batch_size=global_batch_size, images_per_class=images_per_class, seed=seed
    )


def triplets(labels=LABELS, global_batch_size=24, seed=3) -> TripletBatches:
    return TripletBatches(labels=labels, global_batch_size=global_batch_size, seed=seed)


def chi_square(counts) -> tuple[float, int]:
    """The statistic of counts that should be equal, and its degrees of freedom."""
    counts = counts.double().flatten()
    return float(((counts - counts.mean()) ** 2 / counts.mean()).sum()), len(counts) - 1


def assert_uniform(counts, variance_share=1.0) -> None:
    """Chi-square within five standard deviations; `variance_share` is what drawing without replacement leaves."""
    statistic, freedom = chi_square(counts)
    assert abs(statistic / variance_share - freedom) < 5 * (2 * freedom) ** 0.5


@given(sizes=st.lists(st.integers(0, 6), min_size=2, max_size=12), data=st.data())
@settings(max_examples=150)
def test_a_batch_has_its_classes_and_repeats_only_where_it_must(sizes, data):
    labels = torch.tensor([label for label, size in enumerate(sizes) for _ in range(size)], dtype=torch.int64)
    num_classes = sum(size > 0 for size in sizes)
    shapes = [(c, k) for c in range(2, num_classes + 1) for k in range(1, 9) if c * k <= len(labels)]
    if not shapes:
        return
    classes, images = data.draw(st.sampled_from(shapes))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    batches = class_batches(labels[order], classes * images, images, data.draw(st.integers(0, 2**62)))
    batch = batches.indices(data.draw(st.integers(0, 10**9)))
    assert batch.shape == (classes * images,) and batch.dtype == torch.int64
    groups = batch.reshape(classes, images)
    drawn = labels[order][groups]
    assert (drawn == drawn[:, :1]).all() and len(drawn[:, 0].unique()) == classes
    for label, group in zip(drawn[:, 0].tolist(), groups, strict=True):
        times = group.unique(return_counts=True)[1]
        assert len(times) == min(images, sizes[label])
        assert times.max() - times.min() <= 1
    assert batches.steps_per_epoch == len(labels) // (classes * images)


@given(sizes=st.lists(st.integers(1, 7), min_size=2, max_size=10), data=st.data())
@settings(max_examples=150)
def test_triplets_are_disjoint_to_the_largest_batch(sizes, data):
    labels = torch.tensor([label for label, size in enumerate(sizes) for _ in range(size)])
    largest = (len(labels) - max(len(sizes), *sizes) + 2) // 3 * 3
    if largest == 0:
        return
    size = data.draw(st.sampled_from(range(3, largest + 1, 3)))
    batch = triplets(labels, size, data.draw(st.integers(0, 2**62))).indices(data.draw(st.integers(0, 10**9)))
    assert batch.shape == (size,) and len(batch.unique()) == size
    anchors, positives, negatives = labels[batch].reshape(-1, 3).T
    assert torch.equal(anchors, positives) and (anchors != negatives).all()


@pytest.mark.parametrize("make", [class_batches, triplets])
def test_a_batch_depends_on_seed_and_step_alone(make):
    expected = [make(seed=5).indices(step) for step in range(30)]
    torch.manual_seed(123)
    for step in reversed(range(30)):
        assert torch.equal(make(seed=5).indices(step), expected[step])
    assert len({tuple(batch.tolist()) for batch in expected}) == 30
    assert not torch.equal(make(seed=6).indices(0), expected[0])


def test_the_order_of_images_never_changes_between_versions():
    # A change of these numbers breaks the resume of runs that are under way.
    labels = torch.arange(50_000) % 100
    batches = ClassBatches(labels=labels, global_batch_size=6, images_per_class=3, seed=0)
    assert batches.indices(0).tolist() == [49652, 3352, 23052, 19204, 8404, 8704]
    assert batches.indices(123_456).tolist() == [35441, 27541, 9641, 29002, 18002, 20402]
    assert triplets(labels, 6, 0).indices(0).tolist() == [48210, 9410, 44375, 30259, 49359, 24910]
    assert triplets(labels, 6, 0).indices(123_456).tolist() == [28411, 4911, 15101, 6901, 7501, 40828]


@pytest.mark.parametrize("make", [class_batches, triplets])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_workers_rows_make_up_the_batch(make, world_size):
    # Each worker has its own sampler.
    rows = [make().indices(9)[worker_rows(24, rank, world_size)] for rank in range(world_size)]
    assert torch.equal(torch.cat(rows), make().indices(9))


def test_classes_and_images_are_uniform():
    batches = class_batches()
    indices = torch.stack([batches.indices(step) for step in range(1200)])
    labels = LABELS[indices][:, ::4]
    # 6 of 10 classes without replacement: the variance of their counts is (1 - 6/10) · 10/9 of independent draws'.
    assert_uniform(labels.flatten().bincount(), variance_share=0.4 * 10 / 9)
    for position in range(6):
        assert_uniform(labels[:, position].bincount(minlength=10))
    # Place in the class × place in the batch: the roles of anchor and positive go to all images alike.
    place = torch.empty(120, dtype=torch.int64)
    place[LABELS.argsort(stable=True)] = torch.arange(120) % 12
    for position in range(4):
        assert_uniform(place[indices[:, position::4]].flatten().bincount(minlength=12))


def test_pairs_of_images_are_uniform():
    labels = torch.tensor([0] * 4 + [1] * 4)
    batches = class_batches(labels, 4, 2)
    pairs = torch.stack([batches.indices(step)[:2] for step in range(1200)])
    counts = (pairs[:, 0] * 8 + pairs[:, 1]).bincount(minlength=64).reshape(8, 8)
    assert_uniform(torch.stack([counts[a, b] for a, b in itertools.permutations(range(4), 2)]))
    assert counts.diagonal().sum() == 0 and counts[:4, 4:].sum() == 0


def test_the_repeated_image_is_uniform():
    labels = torch.tensor([0] * 3 + [1] * 30)
    batches = class_batches(labels, 8, 4)
    more = torch.stack([batches.indices(step).bincount(minlength=33)[:3] - 1 for step in range(1500)])
    assert (more.sum(1) == 1).all()
    assert_uniform(more.sum(0))


def test_triplets_are_uniform():
    batches = triplets(global_batch_size=3)
    anchors, positives, negatives = torch.stack([batches.indices(step) for step in range(3000)]).T
    for images in (anchors, positives, negatives):
        assert_uniform(images.bincount(minlength=120))
    assert_uniform(torch.stack([
        ((LABELS[anchors] == a) & (LABELS[negatives] == b)).sum() for a, b in itertools.permutations(range(10), 2)
    ]))  # fmt: skip


def test_a_class_of_one_image_is_never_an_anchor():
    labels = torch.tensor([0, 1, 1, 1, 1, 2, 2, 2])
    batches = triplets(labels, 3)
    roles = labels[torch.stack([batches.indices(step) for step in range(200)])]
    assert 0 not in roles[:, 0] and 0 in roles[:, 2]


def test_many_classes_of_one_image_take_no_more_draws(monkeypatch):
    drawn = []
    numbers = class_batches_module._random_numbers
    monkeypatch.setattr(
        class_batches_module, "_random_numbers", lambda seed: (drawn.append(n) or n for n in numbers(seed))
    )
    triplets(torch.cat([torch.arange(2).repeat(50), torch.arange(2, 50_000)]), 30).indices(0)
    assert len(drawn) < 60


@pytest.mark.parametrize(
    ("global_batch_size", "images_per_class", "message"),
    [
        (24, 7, "images_per_class = 7 with global_batch_size = 24 and 10 classes; .* allowed: 3, 4, 6, 8, 12$"),
        (24, 2, "allowed: 3, 4, 6, 8, 12$"),
        (24, 24, "allowed: 3, 4, 6, 8, 12$"),
        (24, 0, "allowed: 3, 4, 6, 8, 12$"),
        (23, 1, "allowed: none; change global_batch_size$"),
        (121, 11, "global_batch_size: found 121, must be 1 to 120, the number of images$"),
        (0, 1, "found 0, must be 1 to 120, the number of images$"),
    ],
)
def test_impossible_batches_of_classes_are_refused(global_batch_size, images_per_class, message):
    with pytest.raises(ConfigError, match=message):
        class_batches(LABELS, global_batch_size, images_per_class)


@pytest.mark.parametrize(
    ("sizes", "global_batch_size", "allowed"),
    [([12] * 10, 25, 108), ([12] * 10, 111, 108), ([50, 2], 6, 3), ([1, 1, 1], 3, 0)],
)
def test_impossible_triplets_are_refused(sizes, global_batch_size, allowed):
    labels = torch.tensor([label for label, size in enumerate(sizes) for _ in range(size)])
    message = f"^global_batch_size = {global_batch_size} for disjoint triplets of {len(labels)} images in {len(sizes)} "
    with pytest.raises(ConfigError, match=f"{message}classes; allowed: multiples of 3 up to {allowed}$"):
        triplets(labels, global_batch_size)


@pytest.mark.parametrize("make", [class_batches, triplets])
def test_one_class_makes_no_batch(make):
    with pytest.raises(DataError, match="^1 class found in the labels; batches by class need two or more$"):
        make(torch.full((30,), 4))
