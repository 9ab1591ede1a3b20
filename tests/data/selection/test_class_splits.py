import logging

import pytest
import torch

from ssl_sec.data.image_set import ResidentImages
from ssl_sec.data.selection.class_splits import (
    head_and_tail,
    hold_out_classes,
    own_classes,
    require_disjoint,
    split_by_class,
    take_classes,
    without_people,
)
from ssl_sec.errors import ConfigError, DataError
from tests.data.test_image_set import encoded, values


def resident(labels, num_classes) -> ResidentImages:
    """Images whose pixels are their number, of classes called a, b, …"""
    count = len(labels)
    return ResidentImages(
        images=torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2).contiguous(),
        labels=torch.tensor(labels),
        class_names=tuple("abcdefghijklmnopqrstuvwxyz"[:num_classes]),
        name="made/train",
        description="made up",
    )


def test_classes_are_taken_in_the_requested_order():
    view = take_classes(resident([0, 1, 2, 3, 1, 0], 4), torch.tensor([3, 1]), "of two classes")
    assert values(view.read(torch.arange(3))) == [1, 3, 4]
    assert view.labels.tolist() == [1, 0, 1] and view.class_names == ("d", "b")
    assert view.description == "made up; 3 of 6 images, of two classes"


def test_bad_images_are_replaced_within_the_classes(tmp_path):
    view = take_classes(encoded(tmp_path, 6, bad=(2,)), torch.tensor([2, 5]), "two")
    batch = view.read(torch.tensor([0]))
    assert values(batch) == [5] and batch.labels.tolist() == [1] and view.num_bad_images == 1


def test_the_first_classes_train_and_the_others_test():
    image_set = resident([3, 0, 1, 2, 0, 3], 4)
    train, test = (split_by_class(image_set, 2, split) for split in ("train", "test"))
    assert values(train.read(torch.arange(3))) == [1, 2, 4] and train.labels.tolist() == [0, 1, 0]
    assert values(test.read(torch.arange(3))) == [0, 3, 5] and test.labels.tolist() == [1, 0, 1]
    assert (train.class_names, test.class_names) == (("a", "b"), ("c", "d"))
    assert "classes 0 to 1" in train.description and "classes 2 to 3" in test.description


def test_classes_without_images_are_left_out_but_counted():
    image_set = resident([5, 0, 2], 7)
    train, test = (split_by_class(image_set, 3, split) for split in ("train", "test"))
    assert (train.class_names, test.class_names) == (("a", "c"), ("f",))
    assert own_classes(image_set).class_names == ("a", "c", "f")
    assert own_classes(image_set).labels.tolist() == [2, 0, 1]
    with pytest.raises(DataError, match="^made/train: no images of the classes 6 to 6$"):
        split_by_class(image_set, 6, "test")


@pytest.mark.parametrize("number", [0, -1, 4, 100])
def test_a_number_of_training_classes_must_leave_test_classes(number):
    message = f"^data.num_train_classes: found {number}, must be 1 to 3: made/train has 4 classes$"
    with pytest.raises(ConfigError, match=message):
        split_by_class(resident([0, 1, 2, 3], 4), number, "train")


def test_one_class_is_not_split():
    with pytest.raises(DataError, match="^made/train: found one class, .; training by classes needs two or more$"):
        split_by_class(resident([0, 0], 1), 1, "train")
    with pytest.raises(
        DataError, match="^made/train: 3 classes found; at least 4 needed to hold some out; held_out_share=0 "
    ):
        hold_out_classes(resident([0, 1, 2], 3), 0.5, 0)


@pytest.mark.parametrize(
    ("num_classes", "share", "held_out"), [(20, 0.1, 2), (20, 0.25, 5), (20, 0.01, 2), (20, 0.99, 18), (4, 0.5, 2)]
)
def test_a_share_of_the_classes_is_held_out(num_classes, share, held_out):
    image_set = resident([label % num_classes for label in range(60)], num_classes)
    train, watched = hold_out_classes(image_set, share, 7)
    assert (len(train.class_names), len(watched.class_names)) == (num_classes - held_out, held_out)
    assert sorted(train.class_names + watched.class_names) == sorted(image_set.class_names)
    assert list(watched.class_names) == sorted(watched.class_names)
    images = values(train.read(torch.arange(len(train)))) + values(watched.read(torch.arange(len(watched))))
    assert sorted(images) == list(range(60))
    for part in (train, watched):
        names = [image_set.class_names[value % num_classes] for value in values(part.read(torch.arange(len(part))))]
        assert [part.class_names[label] for label in part.labels.tolist()] == names


def test_the_held_out_classes_depend_on_the_seed():
    image_set = resident(list(range(26)), 26)
    held_out = [hold_out_classes(image_set, 0.3, seed)[1].class_names for seed in (0, 0, 1)]
    assert held_out[0] == held_out[1] != held_out[2]
    often = torch.zeros(26)
    for seed in range(200):
        chosen = hold_out_classes(image_set, 0.5, seed)[1].class_names
        often += torch.tensor([name in chosen for name in image_set.class_names])
    # Each class is held out in half of the seeds: 0.5 ± 5 standard deviations.
    assert ((often / 200 - 0.5).abs() < 5 * (0.25 / 200) ** 0.5).all()


def test_common_classes_are_named():
    require_disjoint(["a", "b"], ["c"], "made")
    with pytest.raises(DataError) as caught:
        require_disjoint(map(str, range(9)), map(str, range(2, 12)), "made")
    assert str(caught.value).startswith("made: classes in both splits: 2, 3, 4, 5, 6 and 2 more; ")


def test_people_of_the_test_pairs_are_left_out(caplog):
    image_set = resident([0, 1, 2, 3, 1, 0], 4)
    with caplog.at_level(logging.INFO, "ssl_sec.data"):
        train = without_people(image_set, {"b", "c", "z"})
    assert values(train.read(torch.arange(3))) == [0, 3, 5]
    assert train.labels.tolist() == [0, 1, 0] and train.class_names == ("a", "d")
    assert train.description == "made up; 3 of 6 images, without 2 people of the test pairs"
    assert caplog.messages == ["made/train: 2 of 4 people, with 3 of 6 images, are in the test pairs and were left out"]
    assert without_people(image_set, set()).labels.tolist() == image_set.labels.tolist()
    with pytest.raises(DataError, match="^made/train: 4 people, all in the test pairs; nobody is left$"):
        without_people(image_set, set("abcd"))


SIZES = (3, 9, 7, 12, 6, 8, 20)  # of the classes a to g; those with more than 6 are drawn from
DIVISION = {"more_than": 6, "num_head": 2, "num_tail": 2, "head_images": 5, "tail_images": 2}


def divided(seed=0, **changes):
    image_set = resident(torch.arange(7).repeat_interleave(torch.tensor(SIZES)).roll(11).tolist(), 7)
    return image_set, head_and_tail(image_set, seed=seed, **{**DIVISION, **changes})


@pytest.mark.parametrize(("num_tail", "tails"), [(2, 2), (None, 3)])
def test_heads_have_many_training_images_and_tails_few_and_the_others_test(num_tail, tails):
    image_set, parts = divided(num_tail=num_tail)
    assert parts.tail.sum() == tails and len(parts.tail) == 2 + tails
    assert parts.train.class_names == parts.test.class_names
    assert set(parts.train.class_names) <= set("bcdfg")
    trained, tested = (part.labels.bincount() for part in (parts.train, parts.test))
    assert trained.tolist() == [2 if tail else 5 for tail in parts.tail]
    assert (trained + tested).tolist() == [SIZES["abcdefg".index(name)] for name in parts.train.class_names]
    seen = []
    for part in (parts.train, parts.test):
        batch = part.read(torch.arange(len(part)))
        seen += values(batch)
        true = [image_set.class_names[image_set.labels[image]] for image in values(batch)]
        assert [part.class_names[label] for label in batch.labels.tolist()] == true
    assert len(seen) == len(set(seen))
    assert "5 of each head and 2 of each tail class, seed 0" in parts.train.description


def test_the_seed_decides_the_head_classes_and_their_training_images():
    def drawn(seed):
        parts = divided(seed)[1]
        names = [(name, bool(tail)) for name, tail in zip(parts.train.class_names, parts.tail, strict=True)]
        return names, values(parts.train.read(torch.arange(len(parts.train))))

    assert drawn(3) == drawn(3)
    assert len({str(drawn(seed)[0]) for seed in range(20)}) > 5
    heads, images = torch.zeros(7), torch.zeros(sum(SIZES))
    for seed in range(300):
        names, trained = drawn(seed)
        heads += torch.tensor([(name, False) in names for name in "abcdefg"])
        images[trained] += 1
    assert heads[[0, 4]].sum() == 0
    # Each large class is a head in 2/5 of the seeds, within five standard deviations.
    assert ((heads[[1, 2, 3, 5, 6]] / 300 - 0.4).abs() < 5 * (0.24 / 300) ** 0.5).all()
    large = torch.tensor([size > 6 for size in SIZES]).repeat_interleave(torch.tensor(SIZES)).roll(11)
    assert ((images > 0) == large).all()  # every image of a large class is trained on with some seed


def test_too_few_large_classes():
    with pytest.raises(
        DataError, match="^made/train: 5 classes found; at least 6 needed with more than 6 images, 4 of"
    ):
        divided(num_head=4)
    with pytest.raises(
        DataError, match="^made/train: 5 classes found; at least 6 needed with more than 6 images, 5 of"
    ):
        divided(num_head=5, num_tail=None)
