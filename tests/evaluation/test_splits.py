import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssl_sec.data.image_set import ResidentImages
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.splits import (
    labelled_share,
    labelled_subset,
    require_held_out,
    require_same_classes,
    stratified_sample,
    stratified_split,
    with_test_images,
)

LABELS = torch.tensor([2, 0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1, 1, 1])  # 4, 9 and 1 of the classes 0, 1 and 2


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(-5, 2**62),
)
def test_a_split_is_a_partition_with_every_class_on_both_sides(labels, fraction, seed):
    labels = torch.tensor(labels)
    rest, held_out = stratified_split(labels, fraction, seed)
    assert sorted([*rest.tolist(), *held_out.tolist()]) == list(range(len(labels)))
    assert rest.tolist() == sorted(rest.tolist())
    assert held_out.tolist() == sorted(held_out.tolist())
    for label, count in enumerate(labels.bincount().tolist()):
        num_held_out = int((labels[held_out] == label).sum())
        if count >= 2:
            assert 1 <= num_held_out <= count - 1
            assert abs(num_held_out - fraction * count) <= 1
        else:
            assert num_held_out == 0


def test_a_split_is_drawn_by_its_seed():
    labels = torch.arange(10).repeat(50)
    first = stratified_split(labels, 0.1, seed=3)
    assert all(map(torch.equal, first, stratified_split(labels, 0.1, seed=3)))
    assert not torch.equal(first[1], stratified_split(labels, 0.1, seed=4)[1])
    assert labels[first[1]].bincount().tolist() == [5] * 10


def test_test_images_are_a_share_of_each_class_that_is_not_trained_on():
    images = open_digits("train")
    train, test = with_test_images(images, 0.2, seed=3)
    assert sorted([*train.rows.tolist(), *test.rows.tolist()]) == list(range(len(images)))
    assert torch.equal(test.labels.bincount(), (images.labels.bincount() * 0.2).round().long())
    assert not torch.equal(test.rows, with_test_images(images, 0.2, seed=4)[1].rows)


def images_of(names: tuple[str, ...]) -> ResidentImages:
    """One image of each class."""
    pixels, labels = torch.zeros(len(names), 1, 1, 1, dtype=torch.uint8), torch.arange(len(names))
    return ResidentImages(images=pixels, labels=labels, class_names=names, name="".join(names), description="made up")


def test_one_image_of_each_class_leaves_none_for_the_test():
    with pytest.raises(DataError, match="^abc: found one image of each class, must be two or more of some: "):
        with_test_images(images_of(("a", "b", "c")), 0.2, seed=3)


@pytest.mark.parametrize(("names", "fits"), [("abc", True), ("ab", True), ("ac", False), ("abcd", False)])
def test_the_classes_of_test_images_are_the_first_of_the_training(names, fits):
    train, test = images_of(("a", "b", "c")), images_of(tuple(names))
    if fits:
        require_same_classes(train, test, "a probe")
        return
    message = (
        rf"^{names}: its classes \({len(names)}: a, .*\) are not the first classes of abc \(3: a, b, c\); a probe needs"
    )
    with pytest.raises(DataError, match=message):
        require_same_classes(train, test, "a probe")


def test_a_split_does_not_follow_the_order_of_the_images():
    _, held_out = stratified_split(torch.zeros(1000, dtype=torch.int64), 0.5, seed=0)
    assert held_out.double().mean().item() == pytest.approx(499.5, abs=50)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_fraction_that_leaves_no_images_is_refused(fraction):
    with pytest.raises(ConfigError, match=f"fraction = {fraction}"):
        stratified_split(LABELS, fraction, seed=0)


def test_classes_of_one_image_cannot_be_split():
    _, held_out = stratified_split(torch.arange(7), 0.1, seed=0)
    with pytest.raises(DataError, match="^photos/train: found one image of each class, must be two or more"):
        require_held_out(held_out, "photos/train")
    require_held_out(stratified_split(torch.tensor([0, 1, 1]), 0.1, seed=0)[1], "photos/train")


def test_a_labelled_subset_has_the_same_number_of_each_class():
    labels = torch.arange(7).repeat(20)
    chosen = labelled_subset(labels, 3, seed=1)
    assert labels[chosen].bincount().tolist() == [3] * 7
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert torch.equal(chosen, labelled_subset(labels, 3, seed=1))
    assert not torch.equal(chosen, labelled_subset(labels, 3, seed=2))


def test_labelled_subsets_of_one_seed_are_nested():
    labels = torch.arange(4).repeat(10)
    assert set(labelled_subset(labels, 2, seed=0).tolist()) < set(labelled_subset(labels, 5, seed=0).tolist())


def test_a_class_with_too_few_images_is_named():
    with pytest.raises(ConfigError, match="^probe.labels_per_class: found 2, must be 1 to 1, the images of class 2 "):
        labelled_subset(LABELS, 2, seed=0)
    with pytest.raises(ConfigError, match="found 10, must be 1 to 1, the images of class 2"):  # the smallest class
        labelled_subset(LABELS, 10, seed=0)
    with pytest.raises(ConfigError, match="^probe.labels_per_class: found 0, must be 1 to 1, "):
        labelled_subset(LABELS, 0, seed=0)


def test_a_sample_has_the_same_share_of_every_class():
    labels = torch.arange(4).repeat_interleave(torch.tensor([10, 20, 30, 40]))
    chosen = stratified_sample(labels, 50, seed=1)
    assert labels[chosen].bincount().tolist() == [5, 10, 15, 20]
    assert torch.equal(stratified_sample(labels, 50, seed=1), chosen)
    assert torch.equal(stratified_sample(labels, 100, seed=1), torch.arange(100))


def test_a_sample_has_no_more_images_than_asked_for_when_the_share_of_each_class_is_rounded_up():
    labels = torch.arange(100).repeat(5)
    chosen = stratified_sample(labels, 350, seed=1)
    assert len(chosen) == len(chosen.unique()) == 350 and labels[chosen].bincount().min() >= 1
    assert torch.equal(stratified_sample(labels, 350, seed=1), chosen) and chosen.tolist() == sorted(chosen.tolist())


def test_a_sample_has_no_fewer_images_than_asked_for_when_the_share_of_each_class_is_rounded_down():
    labels = torch.cat([torch.arange(100).repeat(5), torch.arange(100, 110)])
    chosen = stratified_sample(labels, 250, seed=1)
    assert len(chosen) == len(chosen.unique()) == 250 and labels[chosen].bincount()[:100].min() == 2


def test_a_sample_of_many_classes_has_several_images_of_each_that_it_takes():
    labels = torch.arange(8000).repeat(20)
    chosen = stratified_sample(labels, 10_000, seed=0)
    sizes = labels[chosen].bincount()
    assert len(chosen) == len(chosen.unique()) == 10_000 and sizes.unique().tolist() == [0, 10]
    bank, queries = stratified_split(labels[chosen], 0.1, seed=0)
    assert len(queries) == 1000 and set(labels[chosen][queries].tolist()) <= set(labels[chosen][bank].tolist())
    assert torch.equal(stratified_sample(labels, 10_000, seed=0), chosen)
    assert not torch.equal(stratified_sample(labels, 10_000, seed=1), chosen)


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any),
    share=st.floats(0.001, 1.0),
    seed=st.integers(0, 2**40),
)
def test_a_labelled_share_has_as_many_of_each_class_as_its_size_allows(sizes, share, seed):
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    chosen = labelled_share(labels, share, seed)
    assert chosen.equal(chosen.unique()) and chosen.equal(labelled_share(labels, share, seed))
    for label, size in enumerate(sizes):
        count = int((labels[chosen] == label).sum())
        assert count == (0 if size == 0 else min(max(1, round(share * size)), size))
    fewer = labelled_share(labels, share / 2, seed)
    assert set(fewer.tolist()) <= set(chosen.tolist())


def test_the_images_of_a_labelled_subset_are_among_those_of_a_larger_share():
    labels = torch.arange(4).repeat(50)
    subset, share = labelled_subset(labels, 2, seed=0), labelled_share(labels, 0.1, seed=0)
    assert set(subset.tolist()) < set(share.tolist())
    assert sorted(LABELS[labelled_subset(LABELS, 1, seed=0)].tolist()) == [0, 1, 2]


def test_a_labelled_share_of_more_images_than_there_are_takes_all():
    labels = torch.tensor([0] * 9 + [1] * 3)
    assert len(labelled_share(labels, 0.5, 0, of=torch.tensor([20, 4]))) == 9 + 2
    assert not labelled_share(labels, 0.5, 0).equal(labelled_share(labels, 0.5, 1))
    for share in (0.0, 1.5):
        with pytest.raises(ConfigError, match=f"^labels_share = {share}; allowed: above 0, at most 1$"):
            labelled_share(labels, share, 0)
