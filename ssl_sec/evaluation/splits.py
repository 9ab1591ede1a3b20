"""Subsets of the training images: held-out ones, and labelled ones where there are few labels."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_sec.data.image_set import ImageSet, subset
from ssl_sec.errors import ConfigError, DataError, MissingDataError, some_names
from ssl_sec.rules import check
from ssl_sec.seeding import derived_seed

# Images of each sampled class if there are too many classes to sample all.
_PER_CLASS = 10


def stratified_split(
    labels: Int64[Tensor, " images"], fraction: float, seed: int
) -> tuple[Int64[Tensor, " rest"], Int64[Tensor, " held_out"]]:
    """Holds out the same share of every class, drawn by `seed`.

    Of a class with two or more images at least one is held out and at least one kept; a single image is kept.

    Args:
        labels: class of each image, ≥ 0.
        fraction: share of each class to hold out, in (0, 1), rounded to whole images.
        seed: seed of the draw.

    Returns:
        Indices of the rest and of the held-out images, each ascending, on the CPU.

    Raises:
        ConfigError: `fraction` is outside (0, 1).
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"held-out fraction = {fraction}; allowed: between 0 and 1, both excluded")
    is_held_out = torch.zeros(len(labels), dtype=torch.bool)
    for indices in _shuffled_by_class(labels, derived_seed(seed, "held out")).values():
        count = min(max(round(fraction * len(indices)), 1), len(indices) - 1)
        is_held_out[indices[:count]] = True
    return (~is_held_out).nonzero().squeeze(1), is_held_out.nonzero().squeeze(1)


def with_test_images(image_set: ImageSet, share: float, seed: int) -> tuple[ImageSet, ImageSet]:
    """Divides the training split of a set that has no test images.

    Args:
        image_set: the labelled images of the split.
        share: share of each class for the test, in (0, 1); see `stratified_split`.
        seed: seed of the draw.

    Returns:
        The images for training and those for the test.

    Raises:
        DataError: each class has one image.
    """
    rest, held_out = stratified_split(image_set.labels, share, derived_seed(seed, "test share"))
    require_held_out(held_out, image_set.name)
    return subset(image_set, rest, "for training"), subset(image_set, held_out, "held out for the test")


@contextmanager
def opening_test_images(key: str) -> Iterator[None]:
    """Adds to the error about missing test images that some can be held out.

    Args:
        key: key of the share that is held out.
    """
    try:
        yield
    except MissingDataError as error:
        raise MissingDataError(f"{error}; {key}=0.2 holds out test images of the training split") from error


def require_held_out(held_out: Int64[Tensor, " held_out"], name: str) -> None:
    """Raises a DataError with the name of the images if none is held out, since each class has one."""
    if not len(held_out):
        raise DataError(
            f"{name}: found one image of each class, must be two or more of some: a share of the images is held out"
        )


def stratified_sample(labels: Int64[Tensor, " images"], num_images: int, seed: int) -> Int64[Tensor, " chosen"]:
    """`num_images` images, about the same share of every class, drawn by `seed`; all if there are no more.

    If that is fewer than two images per class on average, up to ten images of each of some classes, or of all, are
    drawn.

    Returns:
        Indices, ascending, on the CPU.
    """
    if len(labels) <= num_images:
        return torch.arange(len(labels))
    if num_images < 2 * len(labels.unique()):
        by_class = list(_shuffled_by_class(labels, derived_seed(seed, "some classes")).values())
        order = torch.randperm(len(by_class), generator=torch.Generator().manual_seed(seed)).tolist()
        return torch.cat([by_class[number][:_PER_CLASS] for number in order])[:num_images].sort().values
    others, chosen = stratified_split(labels, num_images / len(labels), seed)
    # Each class's share is rounded, so that there may be more, or fewer.
    generator = torch.Generator().manual_seed(derived_seed(seed, "at most"))
    chosen = chosen[torch.randperm(len(chosen), generator=generator)[:num_images]]
    missing = num_images - len(chosen)
    return torch.cat([chosen, others[torch.randperm(len(others), generator=generator)[:missing]]]).sort().values


def labelled_subset(
    labels: Int64[Tensor, " images"], labels_per_class: int, seed: int, key: str = "probe.labels_per_class"
) -> Int64[Tensor, " chosen"]:
    """The images that keep their labels, the same number of each class.

    For one seed the subsets are nested: those of 10 labels per class contain those of 5.

    Args:
        labels: class of each image, ≥ 0.
        labels_per_class: number of images of each class to choose, ≥ 1.
        seed: seed of the draw.
        key: key of `labels_per_class`, for messages.

    Returns:
        Indices of the chosen images, ascending, on the CPU.

    Raises:
        ConfigError: `labels_per_class` is below 1 or above the number of images of the smallest class.
    """
    by_class = _shuffled_by_class(labels, derived_seed(seed, "labelled"))
    least, smallest = min((len(indices), label) for label, indices in by_class.items())
    allowed = f"1 to {least}, the images of class {smallest} that are not held out"
    check(1 <= labels_per_class <= least, key, labels_per_class, allowed)
    return torch.cat([indices[:labels_per_class] for indices in by_class.values()]).sort().values


def labelled_share(
    labels: Int64[Tensor, " images"], share: float, seed: int, of: Int64[Tensor, " classes"] | None = None
) -> Int64[Tensor, " chosen"]:
    """The images that keep their labels: the same share of every class, rounded, and at least one image of each.

    For one seed the subsets are nested, and those of `labelled_subset` are among them.

    Args:
        labels: class of each image, ≥ 0.
        share: share of each class to choose, in (0, 1].
        seed: seed of the draw.
        of: size of each class from which the share is computed; None for the sizes in `labels`. If a class has
            fewer images than that, all of them are chosen.

    Returns:
        Indices of the chosen images, ascending, on the CPU.

    Raises:
        ConfigError: `share` is outside (0, 1].
    """
    if not 0 < share <= 1:
        raise ConfigError(f"labels_share = {share}; allowed: above 0, at most 1")
    sizes = labels.cpu().bincount() if of is None else of
    drawn = _shuffled_by_class(labels, derived_seed(seed, "labelled"))
    return (
        torch.cat([of_one[: max(1, round(share * int(sizes[label])))] for label, of_one in drawn.items()]).sort().values
    )


def require_same_classes(train_set: ImageSet, test_set: ImageSet, what: str) -> None:
    """Refuses test images whose classes are not the first ones of the training images.

    Args:
        train_set: labelled images.
        test_set: labelled images; the last classes may have none.
        what: purpose that needs the same classes, for messages.

    Raises:
        DataError: the classes differ.
    """
    if test_set.class_names != train_set.class_names[: len(test_set.class_names)]:
        raise DataError(
            f"{test_set.name}: its classes ({some_names(test_set.class_names)}) are not the first classes of "
            f"{train_set.name} ({some_names(train_set.class_names)}); {what} needs the same classes in both"
        )


def _shuffled_by_class(labels: Int64[Tensor, " images"], seed: int) -> dict[int, Tensor]:
    """The indices of each class that occurs, in an order drawn by `seed`."""
    labels = labels.cpu()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = order[labels[order].argsort(stable=True)]
    classes, counts = labels.unique(return_counts=True)
    return dict(zip(classes.tolist(), by_class.split(counts.tolist()), strict=True))
