"""Folders of images, a folder for each split and class."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ssl_sec.data.decode import AS_THEY_ARE, Decoding
from ssl_sec.data.folders.listing import (
    ARTIFACTS,
    display,
    holds_images,
    images_below,
    is_array,
    is_hidden,
    is_image,
    names_inside,
    relative,
    require_folder,
)
from ssl_sec.data.image_set import UNLABELLED, ImageSet, Split
from ssl_sec.data.log import log_once
from ssl_sec.data.selection.class_splits import require_disjoint
from ssl_sec.data.stores import FileStore, from_store
from ssl_sec.errors import DataError, MissingDataError, check_option, counted, first_line, printable

TEST_FOLDERS = ("test", "val")  # names of the folder of test images; the first that exists is used
QUERY_AND_GALLERY = ("query", "gallery")  # in place of it
_LAYOUT = "data.root must hold images, or train/<class>/ and test/<class>/ (or query/<class>/ and gallery/<class>/)"


def open_folder(
    split: Split,
    root: str | Path,
    decoding: Decoding = AS_THEY_ARE,
    shared_classes: bool | None = True,
    labels: bool | None = None,
) -> ImageSet:
    """The images of a folder: a folder for each split and class, or any tree of images without labels.

    The training images are in root/train/, or in all of root if it has no folders of splits; the test images in
    root/test/, or root/val/ if there is no test, or, if these are queries and a gallery, in root/query/ and
    root/gallery/. Folders directly below are the classes, in the order of their names. The classes are those of
    `train`, for both splits, or those of each split (`shared_classes`). All images below a class folder, or below the
    split without labels, are read, at any depth, except plots of runs. Files without an image's extension are ignored,
    and so are names that begin with a dot.

    Args:
        split: the training or test images.
        root: folder of the data set.
        decoding: how images become pixels.
        shared_classes: whether the splits have the same classes; if not, each has its own classes and labels. None if
            they may have either: they have their own if no class is in both.
        labels: whether folders are classes; None if root/train/ has folders, no images beside them, and images directly
            in one of them.

    Raises:
        MissingDataError: the folder or the split does not exist, there are test images without root/train/, or queries
            without a gallery or the reverse.
        DataError: there are no images or no classes, a class without images, one that is unknown to `train` (or, of
            classes that are not shared, known to it), a link that leads out of `root`, or an image that cannot be read.
    """
    check_option("split", split, Split)
    root = Path(root)
    try:
        train = find_train_folder(root)
        folders = (train,) if split == "train" else _find_test(root)
        if split == "train":
            _warn_of_names(root, train, needs_gallery=shared_classes is False)
        if labels is None:
            labels = train != root and _has_classes(train, root)
        if labels:
            paths, numbers, class_names = _list_classes(root, train, split, folders, shared_classes)
        else:
            of_folders = images_below(folders, root, _LAYOUT)
            paths = [path for files in of_folders for path in relative(sorted(files, key=os.fsencode), root)]
            numbers, class_names = [UNLABELLED] * len(paths), ()
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{printable(str(root))}: cannot be read: {first_line(error)}") from error
    queries = None if len(folders) == 1 else torch.tensor([path.startswith(b"query/") for path in paths])
    of_classes = f"of {len(class_names)} classes" if class_names else "without labels"
    return from_store(
        FileStore.of(root, paths),
        torch.tensor(numbers),
        class_names,
        name=f"folder/{split}",
        description=f"{len(paths)} images {of_classes} in {root}, {split} split",
        decoding=decoding,
        queries=queries,
    )


def find_test_folders(root: Path) -> tuple[Path, ...]:
    """The folders of test images that are there: test/ or val/, or query/ and gallery/, or none.

    Raises:
        DataError: there are query/ and gallery/ beside the other one.
    """
    whole = [root / name for name in TEST_FOLDERS if (root / name).is_dir()]
    parts = [root / name for name in QUERY_AND_GALLERY if (root / name).is_dir()]
    if len(parts) < 2:
        return tuple(whole[:1])
    if whole:
        raise DataError(
            f"{printable(str(root))}: found {whole[0].name}/ beside query/ and gallery/; allowed: one or the others"
        )
    return tuple(parts)


def find_train_folder(root: Path) -> Path:
    """The folder of the training images: without splits, the whole folder.

    Raises:
        MissingDataError: the folder does not exist, or there are test images without root/train/.
    """
    require_folder(root, _LAYOUT)
    if (root / "train").is_dir():
        return root / "train"
    if found := find_test_folders(root):
        raise MissingDataError(
            f"{printable(str(root))}: found {' and '.join(f'{folder.name}/' for folder in found)} without train/; "
            "data.root must hold train/<class>/ and test/<class>/, or images in folders of other names"
        )
    return root


def _find_test(root: Path) -> tuple[Path, ...]:
    """The folders of the test images; two, if these are queries and a gallery."""
    folders = find_test_folders(root)
    if not folders and (root / "train").is_dir():
        for name, other in (QUERY_AND_GALLERY, QUERY_AND_GALLERY[::-1]):
            if (root / name).is_dir():
                raise MissingDataError(f"{printable(str(root))}: found {name}/ without {other}/; {_LAYOUT}")
    folders = folders or (root / TEST_FOLDERS[0],)
    for folder in folders:
        require_folder(folder, _LAYOUT)
    return folders


def _warn_of_names(root: Path, train: Path, *, needs_gallery: bool) -> None:
    """Warns of folders beside `train` that are not read, val/ beside test/ too, and of splits in capital letters.

    Of query/ without gallery/, or the reverse, only if that is no error (`needs_gallery`).
    """
    with os.scandir(root) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    has_both = all((root / name).is_dir() for name in QUERY_AND_GALLERY)
    is_error = needs_gallery and not any((root / name).is_dir() for name in TEST_FOLDERS)
    splits = ("train", *TEST_FOLDERS, *(QUERY_AND_GALLERY if has_both or is_error else ()))
    if train == root:
        if capitals := [f"{display(name)}/" for name in folders if name.lower() in splits]:
            log_once(
                logging.WARNING,
                "%s: all images are trained on, those in %s too; splits are named train/ and test/",
                display(str(root)),
                ", ".join(capitals),
            )
        return
    others = [name for name in folders if name not in splits and name not in ARTIFACTS and not is_hidden(name)]
    if unread := [f"{display(name)}/" for name in others if holds_images(root / name)]:
        log_once(
            logging.WARNING,
            "%s: the images in %s%s are not read, as train/ is there; rename train/ if it is one of the classes",
            display(str(root)),
            ", ".join(unread[:5]),
            ", …" if len(unread) > 5 else "",
        )
    test, other = TEST_FOLDERS
    if (root / test).is_dir() and holds_images(root / other):
        log_once(
            logging.WARNING, "%s: the images in %s/ are not read, as %s/ is there", display(str(root)), other, test
        )


def _list_classes(
    root: Path, train: Path, split: Split, folders: Sequence[Path], shared_classes: bool | None
) -> tuple[list[bytes], list[int], tuple[str, ...]]:
    """Paths relative to `root` as the file system's bytes, their labels, and the names of the classes."""
    tested = _find_test(root) if shared_classes is False else ()
    of_train = _class_folders([train], root)
    found = of_train if split == "train" else _class_folders(folders, root)
    present = sorted({name for name, _ in found})
    if shared_classes is None:
        shared_classes = not {name for name, _ in of_train}.isdisjoint(present)
    elif not shared_classes:
        of_test = _class_folders(tested, root) if split == "train" else found
        of_both = [{display(name) for name, _ in each} for each in (of_train, of_test)]
        require_disjoint(of_both[0], of_both[1], printable(str(root)))
    known = sorted(name for name, _ in of_train) if shared_classes else present
    classes = {name: label for label, name in enumerate(known)}
    for folder in folders:
        if unknown := [name for name, place in found if place.parent == folder and name not in classes]:
            listed = ", ".join(map(display, unknown[:5]))
            only_own = all(name not in classes for name in present)
            hint = "; metric learning takes splits of different classes (in Python, shared_classes=False)" * only_own
            raise DataError(f"{printable(str(folder))}: classes that {train.name} does not have: {listed}{hint}")
        beside = [name for name, is_folder in names_inside(folder, root).items() if is_image(name) and not is_folder]
        if beside:
            shown = display(str(folder)), counted(len(beside), "image"), display(beside[0])
            log_once(logging.WARNING, "%s: left out: %s beside the class folders, first: %s", *shown)
    paths: list[bytes] = []
    labels: list[int] = []
    every = images_below([place for _, place in found], root, _LAYOUT)
    for (name, _), files in zip(found, every, strict=True):
        paths += relative(sorted(files), root)
        labels += [classes[name]] * len(files)
    return paths, labels, tuple(map(display, classes))


def _has_classes(folder: Path, root: Path) -> bool:
    """Whether a folder holds a folder of images for each class, and no images next to them."""
    names = names_inside(folder, root)
    has_folders = any(
        is_image(file) for name, is_folder in names.items() if is_folder for file in names_inside(folder / name, root)
    )
    beside = [name for name, is_folder in names.items() if is_image(name) and not is_array(name) and not is_folder]
    if has_folders and beside:
        shown = display(str(folder)), counted(len(beside), "image"), display(beside[0])
        log_once(
            logging.WARNING,
            "%s: the folders are not taken as classes, because of %s beside them, first: %s; "
            "data.labels=true takes them, data.labels=false says that they are none",
            *shown,
        )
    return has_folders and not beside


def _class_folders(folders: Sequence[Path], root: Path) -> list[tuple[str, Path]]:
    """The classes in each of some folders, with their own folders."""
    found: list[tuple[str, Path]] = []
    for folder in folders:
        names = [name for name, is_folder in names_inside(folder, root).items() if is_folder]
        if not names:
            raise DataError(f"{printable(str(folder))}: no class folders; it must hold one folder for each class")
        found += [(name, folder / name) for name in names]
    return found
