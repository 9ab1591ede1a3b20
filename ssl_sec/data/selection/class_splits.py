"""Splits by class: training and retrieval have no class in common.

The published protocol of deep metric learning (Song et al., 2016; SEC, Table 1) trains on the first classes of a
set and retrieves among the images of the others, whose classes were never seen.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.image_set import ImageSet, ResidentImages, require_labels, subset
from ssl_sec.errors import ConfigError, DataError, counted
from ssl_sec.seeding import derived_seed

logger = logging.getLogger("ssl_sec.data")


def take_classes(image_set: ImageSet, classes: Int64[Tensor, " classes"], which: str) -> ImageSet:
    """A view of the images of some classes, which become the classes 0, 1, … of the view.

    Args:
        image_set: resident or encoded images.
        classes: different labels of `image_set`, on the CPU; their order becomes that of the view's classes.
        which: the choice in words, for the description.
    """
    numbers = torch.full((len(image_set.class_names),), -1)
    numbers[classes] = torch.arange(len(classes))
    labels = numbers[image_set.labels]
    view = subset(image_set, (labels >= 0).nonzero().flatten(), which)
    assert isinstance(view, ResidentImages | EncodedImages)
    class_names = tuple(image_set.class_names[label] for label in classes.tolist())
    return replace(view, labels=labels[labels >= 0], class_names=class_names)


def own_classes(image_set: ImageSet) -> ImageSet:
    """The same images with only the classes that have images, numbered from 0.

    Raises:
        DataError: the images have no labels or only one class.
    """
    require_labels(image_set, "training by classes")
    present = image_set.labels.unique()
    return take_classes(image_set, present, f"those of their own {len(present)} classes")


def split_by_class(image_set: ImageSet, num_train_classes: int, split: Literal["train", "test"]) -> ImageSet:
    """The images of the first classes, or of all other classes; classes without images are left out.

    Args:
        image_set: the images of all classes.
        num_train_classes: number of training classes, which have the labels 0 to num_train_classes - 1.
        split: the training or test classes.

    Raises:
        DataError: the images have no labels or only one class, or a part has no images.
        ConfigError: one of the parts would have no classes.
    """
    require_labels(image_set, "training by classes")
    num_classes = len(image_set.class_names)
    if not 1 <= num_train_classes < num_classes:
        raise ConfigError(
            f"data.num_train_classes: found {num_train_classes}, must be 1 to {num_classes - 1}: "
            f"{image_set.name} has {counted(num_classes, 'class')}"
        )
    present = image_set.labels.unique()
    of_train = present < num_train_classes
    chosen = present[of_train if split == "train" else ~of_train]
    bounds = (0, num_train_classes - 1) if split == "train" else (num_train_classes, num_classes - 1)
    if len(chosen) == 0:
        raise DataError(f"{image_set.name}: no images of the classes {bounds[0]} to {bounds[1]}")
    return take_classes(image_set, chosen, f"those of the classes {bounds[0]} to {bounds[1]}")


def hold_out_classes(image_set: ImageSet, share: float, seed: int) -> tuple[ImageSet, ImageSet]:
    """Some classes to train on and the others to monitor the run with, in place of the test classes.

    Args:
        image_set: the images of all training classes.
        share: share of the classes that is held out, in (0, 1); at least two are held out and two kept, since among the
            images of one class every retrieval is correct.
        seed: seed of the choice of the held-out classes.

    Returns:
        The images to train on and the held-out ones, each with their own labels, in the order of the classes.

    Raises:
        DataError: there are fewer than four classes.
    """
    assert 0 < share < 1
    present = image_set.labels.unique()
    _require_classes(image_set, len(present), 4, "to hold some out; held_out_share=0 holds out none")
    num_held_out = min(max(round(share * len(present)), 2), len(present) - 2)
    generator = torch.Generator().manual_seed(derived_seed(seed, "held-out classes"))
    order = present[torch.randperm(len(present), generator=generator)]
    held_out, rest = order[:num_held_out].sort().values, order[num_held_out:].sort().values
    return (
        take_classes(image_set, rest, f"those of {len(rest)} of {len(present)} classes, seed {seed}"),
        take_classes(image_set, held_out, f"those of {num_held_out} held-out classes, seed {seed}"),
    )


@dataclass(frozen=True, kw_only=True)
class HeadAndTail:
    """Training images of head classes (many) and tail classes (few); the other images test them (SFT, Section 4.2).

    Attributes:
        train: the training images.
        test: the other images of the same classes, with the same labels.
        tail: whether each class is a tail class.
    """

    train: ImageSet
    test: ImageSet
    tail: Bool[Tensor, " classes"]


def head_and_tail(
    image_set: ImageSet,
    *,
    more_than: int,
    num_head: int,
    num_tail: int | None,
    head_images: int,
    tail_images: int,
    seed: int,
) -> HeadAndTail:
    """Draws head and tail classes among the large ones of a set, and the training images of each.

    Args:
        image_set: resident or encoded images.
        more_than: number of images above which a class is large.
        num_head: number of head classes, ≥ 1.
        num_tail: number of tail classes, ≥ 1; None for all large classes that are not drawn as heads.
        head_images: training images of each head class, 1 to `more_than`.
        tail_images: training images of each tail class, 1 to `more_than`.
        seed: seed of the draw of the classes and their images.

    Raises:
        DataError: there are fewer large classes than asked for.
    """
    large = (image_set.labels.bincount(minlength=len(image_set.class_names)) > more_than).nonzero().flatten()
    needed = num_head + (1 if num_tail is None else num_tail)
    _require_classes(image_set, len(large), needed, f"with more than {more_than} images, {num_head} of them as heads")
    generator = torch.Generator().manual_seed(derived_seed(seed, "head and tail"))
    drawn = large[torch.randperm(len(large), generator=generator)]
    tail_classes = drawn[num_head:] if num_tail is None else drawn[num_head : num_head + num_tail]
    classes = torch.cat([drawn[:num_head], tail_classes]).sort().values
    chosen = take_classes(image_set, classes, f"those of {num_head} head and {len(tail_classes)} tail classes")
    tail = torch.isin(classes, tail_classes)
    order = torch.randperm(len(chosen), generator=generator)
    order = order[chosen.labels[order].argsort(stable=True)]
    labels, sizes = chosen.labels[order], chosen.labels.bincount()
    place_in_class = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[labels]
    trains = place_in_class < torch.where(tail, tail_images, head_images)[labels]
    which = f"{head_images} of each head and {tail_images} of each tail class, seed {seed}"
    return HeadAndTail(
        train=subset(chosen, order[trains].sort().values, which),
        test=subset(chosen, order[~trains].sort().values, f"all but {which}"),
        tail=tail,
    )


def without_people(image_set: ImageSet, people: Collection[str]) -> ImageSet:
    """The images of all but some people: nobody in the test pairs may be trained on.

    Args:
        image_set: resident or encoded images.
        people: names of the people's classes, which need not all be in the set.

    Returns:
        The others' images, with their own labels, in the order of the classes; logs how many people and images were
        left out.

    Raises:
        DataError: nobody is left.
    """
    kept = torch.tensor([name not in people for name in image_set.class_names])
    others = take_classes(image_set, kept.nonzero().flatten(), f"without {int((~kept).sum())} people of the test pairs")
    if len(others) == 0:
        raise DataError(f"{image_set.name}: {counted(len(kept), 'person')}, all in the test pairs; nobody is left")
    logger.info(
        "%s: %d of %d people, with %d of %d images, are in the test pairs and were left out",
        image_set.name,
        int((~kept).sum()),
        len(kept),
        len(image_set) - len(others),
        len(image_set),
    )
    return others


def require_disjoint(train: Iterable[str], test: Iterable[str], name: str) -> None:
    """Refuses splits whose classes are not disjoint.

    Args:
        train: names of the training classes.
        test: names of the test classes.
        name: name of the data set, for messages.

    Raises:
        DataError: some classes are in both.
    """
    common = sorted(set(train).intersection(test))
    if common:
        more = f" and {len(common) - 5} more" if len(common) > 5 else ""
        raise DataError(
            f"{name}: classes in both splits: {', '.join(common[:5])}{more}; training and test "
            "classes must be disjoint, or set data.num_train_classes"
        )


def _require_classes(image_set: ImageSet, found: int, needed: int, purpose: str) -> None:
    if found < needed:
        classes = "class" if found == 1 else "classes"
        raise DataError(f"{image_set.name}: {found} {classes} found; at least {needed} needed {purpose}")
