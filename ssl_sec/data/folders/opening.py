"""Folders of images, a folder for each split and class."""

import logging
import os
from pathlib import Path

import torch

from ssl_sec.data.class_splits import require_disjoint
from ssl_sec.data.decode import AS_THEY_ARE, Decoding
from ssl_sec.data.folders.listing import (
    ARTIFACTS,
    display,
    holds_images,
    images_below,
    is_image,
    names_inside,
    relative,
    require_folder,
)
from ssl_sec.data.image_set import UNLABELLED, ImageSet, Split
from ssl_sec.data.stores import FileStore, from_store
from ssl_sec.errors import DataError, MissingDataError, check_option, first_line, printable

logger = logging.getLogger("ssl_sec.data")

TEST_FOLDERS = ("test", "val")  # names of the folder of test images; the first that exists is used
_LAYOUT = "data.root must hold images, or train/<class>/ and test/<class>/"


def open_folder(
    split: Split,
    root: str | Path,
    decoding: Decoding = AS_THEY_ARE,
    shared_classes: bool | None = True,
    labels: bool | None = None,
) -> ImageSet:
    """The images of a folder: a folder for each split and class, or any tree of images without labels.

    The training images are in root/train/, or in all of root if it has no folders of splits; the test images in
    root/test/, or root/val/ if there is no test. Folders directly below are the classes, in the order of their names.
    The classes are those of `train`, for both splits, or those of each split (`shared_classes`). All images below a
    class folder, or below the split without labels, are read, at any depth, except plots of runs. Files without an
    image's extension are ignored, and so are names that begin with a dot.

    Args:
        split: the training or test images.
        root: folder of the data set.
        decoding: how images become pixels.
        shared_classes: whether the splits have the same classes; if not, each has its own classes and labels. None if
            they may have either: they have their own if no class is in both.
        labels: whether folders are classes; None if root/train/ has folders, no images beside them, and images directly
            in one of them.

    Raises:
        MissingDataError: the folder or the split does not exist, or there are test images without root/train/.
        DataError: there are no images or no classes, a class without images, one that is unknown to `train` (or, of
            classes that are not shared, known to it), a link that leads out of `root`, or an image that cannot be read.
    """
    check_option("split", split, Split)
    root = Path(root)
    try:
        train, held_out = _find_splits(root)
        folder = train if split == "train" else held_out
        for path in (root, folder):
            require_folder(path, _LAYOUT)
        if split == "train":
            _warn_of_names(root, train)
        if labels is None:
            labels = train != root and _has_classes(train, root)
        if labels:
            paths, numbers, class_names = _list_classes(root, train, held_out, split, shared_classes)
        else:
            files = sorted(images_below([folder], root, _LAYOUT)[0], key=os.fsencode)
            paths = relative(files, root)
            numbers, class_names = [UNLABELLED] * len(paths), ()
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{printable(str(root))}: cannot be read: {first_line(error)}") from error
    of_classes = f"of {len(class_names)} classes" if class_names else "without labels"
    return from_store(
        FileStore.of(root, paths),
        torch.tensor(numbers),
        class_names,
        name=f"folder/{split}",
        description=f"{len(paths)} images {of_classes} in {root}, {split} split",
        decoding=decoding,
    )


def _find_splits(root: Path) -> tuple[Path, Path]:
    """The folders of the training and of the test images, which may be missing."""
    held_out = next((root / name for name in TEST_FOLDERS if (root / name).is_dir()), root / TEST_FOLDERS[0])
    # Without splits, training uses the whole folder.
    train = root / "train" if (root / "train").is_dir() else root
    if train == root and held_out.is_dir():
        raise MissingDataError(
            f"{printable(str(root))}: found {held_out.name}/ without train/; data.root must hold train/<class>/ and "
            "test/<class>/, or images in folders of other names"
        )
    return train, held_out


def _warn_of_names(root: Path, train: Path) -> None:
    """Warns of folders beside `train` that are not read, and of splits in capital letters, which are none."""
    with os.scandir(root) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    splits = ("train", *TEST_FOLDERS)
    if train == root:
        if capitals := [f"{display(name)}/" for name in folders if name.lower() in splits]:
            logger.warning(
                "%s: all images are trained on, those in %s too; splits are named train/ and test/",
                display(str(root)),
                ", ".join(capitals),
            )
        return
    others = [name for name in folders if name not in splits and name not in ARTIFACTS and not name.startswith(".")]
    if unread := [f"{display(name)}/" for name in others if holds_images(root / name)]:
        logger.warning(
            "%s: the images in %s%s are not read, as train/ is there; rename train/ if it is one of the classes",
            display(str(root)),
            ", ".join(unread[:5]),
            ", …" if len(unread) > 5 else "",
        )


def _list_classes(
    root: Path, train: Path, held_out: Path, split: Split, shared_classes: bool | None
) -> tuple[list[bytes], list[int], tuple[str, ...]]:
    """Paths relative to `root` as the file system's bytes, their labels, and the names of the classes."""
    folder = train if split == "train" else held_out
    if shared_classes is False:
        require_folder(held_out, _LAYOUT)
    of_train = _class_folders(train, root)
    found = of_train if split == "train" else _class_folders(folder, root)
    if shared_classes is None:
        shared_classes = not set(of_train).isdisjoint(found)
    elif not shared_classes:
        of_test = _class_folders(held_out, root) if split == "train" else found
        require_disjoint(map(display, of_train), map(display, of_test), printable(str(root)))
    classes = {name: label for label, name in enumerate(of_train if shared_classes else found)}
    if unknown := [name for name in found if name not in classes]:
        listed = ", ".join(map(display, unknown[:5]))
        raise DataError(f"{printable(str(folder))}: classes that {train.name} does not have: {listed}")
    beside = [name for name, is_folder in names_inside(folder, root).items() if is_image(name) and not is_folder]
    if beside:
        shown = display(str(folder)), len(beside), display(beside[0])
        logger.warning("%s: %d images beside the class folders are left out, first: %s", *shown)
    paths: list[bytes] = []
    labels: list[int] = []
    for name, files in zip(found, images_below([folder / name for name in found], root, _LAYOUT), strict=True):
        paths += relative(sorted(files), root)
        labels += [classes[name]] * len(files)
    return paths, labels, tuple(map(display, classes))


def _has_classes(folder: Path, root: Path) -> bool:
    """Whether a folder holds a folder of images for each class, and no images next to them."""
    names = names_inside(folder, root)
    has_folders = any(
        is_image(file) for name, is_folder in names.items() if is_folder for file in names_inside(folder / name, root)
    )
    beside = [name for name, is_folder in names.items() if is_image(name) and not is_folder]
    if has_folders and beside:
        shown = display(str(folder)), len(beside), display(beside[0])
        logger.warning(
            "%s: the folders are not taken as classes, since %d images are beside them, first: %s; "
            "data.labels=true takes them, data.labels=false says that they are none",
            *shown,
        )
    return has_folders and not beside


def _class_folders(folder: Path, root: Path) -> list[str]:
    names = [name for name, is_folder in names_inside(folder, root).items() if is_folder]
    if not names:
        raise DataError(f"{printable(str(folder))}: no class folders; it must hold one folder for each class")
    return names
