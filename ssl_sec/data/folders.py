"""Folders of images, a folder for each split and class; reading of files that list images."""

import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ssl_sec.data.class_splits import require_disjoint
from ssl_sec.data.decode import AS_THEY_ARE, Decoding
from ssl_sec.data.image_set import UNLABELLED, ImageSet, Split
from ssl_sec.data.stores import FileStore, from_store
from ssl_sec.errors import DataError, MissingDataError, first_line, printable

logger = logging.getLogger("ssl_sec.data")

# Files in the folder of a run, or of all runs, and names of MLflow's folders of artifacts.
_OF_RUNS = frozenset(("metrics.jsonl", "mlflow.db"))
_ARTIFACTS = frozenset(("mlruns", "mlartifacts"))
TEST_FOLDERS = ("test", "val")  # names of the folder of test images; the first that exists is used
_LAYOUT = "data.root must hold images, or train/<class>/ and test/<class>/"

# Words that name folders and files of any data set.
_GENERIC_WORDS = frozenset(("", "data", "dataset", "images", "img", "train", "training", "test", "val", "validation"))

EXTENSIONS = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))

# Formats of photos that are not read.
_UNREAD = frozenset(
    (".arw", ".avif", ".cr2", ".cr3", ".dng", ".heic", ".heif", ".jp2", ".jxl", ".nef", ".orf", ".raf", ".rw2")
)


def open_folder(
    split: Split,
    root: str | Path,
    decoding: Decoding = AS_THEY_ARE,
    shared_classes: bool = True,
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
        shared_classes: whether the splits have the same classes; if not, each has its own classes and labels.
        labels: whether folders are classes; None if root/train/ has folders, no images beside them, and images directly
            in one of them.

    Raises:
        MissingDataError: the folder or the split does not exist, or there are test images without root/train/.
        DataError: there are no images or no classes, a class without images, one that is unknown to `train` (or, of
            classes that are not shared, known to it), a link that leads out of `root`, or an image that cannot be read.
    """
    root = Path(root)
    try:
        train, held_out = _find_splits(root)
        folder = train if split == "train" else held_out
        for path in (root, folder):
            require_folder(path, _LAYOUT)
        if labels is None:
            labels = train != root and _has_classes(train, root)
        if labels:
            paths, numbers, class_names = _list_classes(root, train, held_out, split, shared_classes)
        else:
            files = sorted(_images_below([folder], root)[0], key=os.fsencode)
            paths = [os.fsencode(os.path.relpath(path, root)) for path in files]
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


def _list_classes(
    root: Path, train: Path, held_out: Path, split: Split, shared_classes: bool
) -> tuple[list[bytes], list[int], tuple[str, ...]]:
    """Paths relative to `root` as the file system's bytes, their labels, and the names of the classes."""
    folder = train if split == "train" else held_out
    if not shared_classes:
        require_folder(held_out, _LAYOUT)
    of_train = _class_folders(train, root)
    found = of_train if split == "train" else _class_folders(folder, root)
    if not shared_classes:
        of_test = _class_folders(held_out, root) if split == "train" else found
        require_disjoint(map(_display, of_train), map(_display, of_test), printable(str(root)))
    classes = {name: label for label, name in enumerate(of_train if shared_classes else found)}
    if unknown := [name for name in found if name not in classes]:
        listed = ", ".join(map(_display, unknown[:5]))
        raise DataError(f"{printable(str(folder))}: classes that {train.name} does not have: {listed}")
    beside = [name for name in _inside(folder, root) if _is_image(name) and not (folder / name).is_dir()]
    if beside:
        shown = _display(str(folder)), len(beside), _display(beside[0])
        logger.warning("%s: %d images beside the class folders are left out, first: %s", *shown)
    paths: list[bytes] = []
    labels: list[int] = []
    for name, files in zip(found, _images_below([folder / name for name in found], root), strict=True):
        paths += [os.fsencode(os.path.relpath(file, root)) for file in sorted(files)]
        labels += [classes[name]] * len(files)
    return paths, labels, tuple(map(_display, classes))


def _has_classes(folder: Path, root: Path) -> bool:
    """Whether a folder holds a folder of images for each class, and no images next to them."""
    names = _inside(folder, root)
    has_folders = any(
        _is_image(file) for name in names if (folder / name).is_dir() for file in _inside(folder / name, root)
    )
    beside = [name for name in names if _is_image(name)]
    if has_folders and beside:
        shown = _display(str(folder)), len(beside), _display(beside[0])
        logger.warning(
            "%s: the folders are not taken as classes, since %d images are beside them, first: %s; "
            "data.labels=true takes them, data.labels=false says that they are none",
            *shown,
        )
    return has_folders and not beside


def _class_folders(folder: Path, root: Path) -> list[str]:
    names = _inside(folder, root)
    names = [name for name in names if (folder / name).is_dir()]
    if not names:
        raise DataError(f"{printable(str(folder))}: no class folders; it must hold one folder for each class")
    return names


def _images_below(folders: Sequence[Path], root: Path) -> list[list[str]]:
    """Paths of the images in each folder and all folders below it, in no order."""
    unread: list[str] = []
    every: list[list[str]] = []
    for folder in folders:
        every.append(_find_images(folder, root, unread))
        if not every[-1]:
            raise DataError(f"{_no_images(folder, unread)}; {_LAYOUT}")
    _warn_of_unread(root, unread)
    return every


def _no_images(folder: Path, unread: Sequence[str]) -> str:
    """The error of a folder without images; names the format of those that are not read."""
    others = f" but {len(unread)} of other formats, as {_display(os.path.basename(min(unread)))}" if unread else ""
    allowed = ", ".join(sorted(EXTENSIONS))
    return f"{printable(str(folder))}: no images in it or below it{others}; allowed: {allowed}"


def _warn_of_unread(root: Path, unread: Sequence[str]) -> None:
    if unread:
        shown = _display(str(root)), len(unread), _display(os.path.relpath(min(unread), root))
        logger.warning(
            "%s: %d images of formats that are not read are left out, first: %s; convert them to JPEG, PNG or WebP",
            *shown,
        )


def _find_images(folder: Path, root: Path, unread: list[str]) -> list[str]:
    """Paths of the images in a folder and all folders below it, in no order; not the plots of runs.

    Args:
        folder: the folder.
        root: the folder that no link may lead out of.
        unread: list to which the images are added whose format is not read.
    """
    found: list[str] = []
    # Links may form cycles, and lead up to the folders of other classes.
    real_folders = {str(parent) for parent in Path(os.path.realpath(folder)).parents}
    waiting = [str(folder)]
    while waiting:
        current = waiting.pop()
        real = os.path.realpath(current)
        if real in real_folders:
            continue
        real_folders.add(real)
        names = _inside(Path(current), root)
        if current != str(folder) and not _OF_RUNS.isdisjoint(names):
            continue
        for name in names:
            path = os.path.join(current, name)
            if os.path.isdir(path):
                if name not in _ARTIFACTS:
                    waiting.append(path)
            elif _is_image(name):
                found.append(path)
            elif _extension(name) in _UNREAD:
                unread.append(path)
    return found


def image_paths(folder: Path, root: Path | None = None) -> list[str]:
    """Paths, relative to a folder, of the images in it and in all folders below it: its own first, then by names.

    Args:
        folder: the folder.
        root: the folder that no link may lead out of; None for `folder`.

    Raises:
        MissingDataError: there is no such folder.
        DataError: there are no images, a folder cannot be read, or a link leads out of `root`.
    """
    unread: list[str] = []
    try:
        require_folder(folder, "it must hold images, or folders of them")
        found = _find_images(folder, folder if root is None else root, unread)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{printable(str(folder))}: cannot be read: {first_line(error)}") from error
    if not found:
        raise DataError(_no_images(folder, unread))
    _warn_of_unread(folder, unread)
    paths = [os.path.relpath(path, folder) for path in found]
    return sorted(paths, key=lambda path: ("/" in path, path.split("/")))


def top_folder(path: str) -> str:
    """The first folder of a relative path, which is the person on the image; empty if the path has none."""
    return path.partition("/")[0] if "/" in path else ""


def check_paths(listed: Iterable[tuple[str, str]], root: Path, called: str) -> None:
    """Refuses files and folders that are not below a folder, or missing; each folder is read once.

    Args:
        listed: paths, each with the place where it is listed.
        root: folder that the paths must be below.
        called: name of the folder in errors.

    Raises:
        DataError: for the first such path.
    """
    real_root = os.path.realpath(root)
    folders: dict[str, dict[str, bool]] = {}
    for path, where in listed:
        printed = printable(path)
        if path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise DataError(f"{where}: {printed} leads out of {called}; allowed: paths below it")
        folder, _, file = path.rpartition("/")
        if folder not in folders:
            if not _is_below(os.path.join(root, folder), real_root):
                raise DataError(f"{where}: {printed} leads out of {called}; copy the files into it")
            folders[folder] = _links(os.path.join(root, folder), where)
        is_link = folders[folder].get(file)
        if is_link is None:
            raise DataError(f"{where}: {printed} is not there")
        if is_link and not _is_below(os.path.join(root, path), real_root):
            raise DataError(f"{where}: {printed} leads out of {called}; copy the file into it")


def require_folder(folder: Path, wanted: str = "") -> None:
    """Refuses a missing folder.

    Args:
        folder: the folder.
        wanted: what it must hold, for the message.

    Raises:
        MissingDataError: there is no such folder.
    """
    if not folder.is_dir():
        found = "is a file, must be a folder" if folder.exists() else "no such folder"
        raise MissingDataError("; ".join(part for part in (f"{printable(str(folder))}: {found}", wanted) if part))


def _links(folder: str, where: str) -> dict[str, bool]:
    """Name -> whether it is a link, from the listing of a folder, without access to each file."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.is_symlink() for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: {printable(folder)} cannot be read: {first_line(error)}") from error


def read_text(path: Path) -> str:
    """A list as text; file names in it need not be UTF-8.

    Raises:
        MissingDataError: there is no such file.
        DataError: it cannot be read.
    """
    try:
        return os.fsdecode(path.read_bytes()).removeprefix("\ufeff")
    except FileNotFoundError:
        raise MissingDataError(f"{printable(str(path))}: not there") from None
    except OSError as error:
        raise DataError(f"{printable(str(path))}: cannot be read: {first_line(error)}") from error


def read_matlab(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Some variables of a MATLAB file; missing ones are left out.

    Raises:
        MissingDataError: there is no such file.
        DataError: it cannot be read.
    """
    from scipy.io import loadmat

    try:
        with path.open("rb") as file:
            return loadmat(file, variable_names=names, squeeze_me=True)
    except FileNotFoundError:
        raise MissingDataError(f"{printable(str(path))}: not there") from None
    # For a damaged file scipy raises errors of any kind: ValueError, TypeError, KeyError, MatReadError, OSError, …
    except Exception as error:
        raise DataError(f"{printable(str(path))}: cannot be read: {first_line(error)}") from error


def is_number(text: str) -> bool:
    """Whether a field of a list is a whole number of at most 9 digits: Python refuses to convert thousands."""
    return text.isascii() and text.isdigit() and len(text) <= 9


def _inside(folder: Path, root: Path) -> list[str]:
    """Sorted names in `folder`, without hidden ones; refuses links that lead out of `root`."""
    real_root = os.path.realpath(root)
    if not _is_below(folder, real_root):
        raise DataError(f"{printable(str(folder))}: leads out of {printable(str(root))}; copy the files into it")
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and not _is_below(entry.path, real_root):
                target = (
                    f"{_display(os.readlink(entry.path))}{'' if os.path.exists(entry.path) else ', which is not there'}"
                )
                raise DataError(
                    f"{printable(entry.path)}: is a link to {target} and leads out of {printable(str(root))}; "
                    "copy the file into it"
                )
            # A pipe or a device would block its reader; a dangling link is kept and reported as unreadable. Links are
            # asked for first: whether a link to itself is a file is an error.
            if entry.is_symlink() or entry.is_file() or entry.is_dir():
                names.append(entry.name)
    return sorted(names)


def _is_image(name: str) -> bool:
    return _extension(name) in EXTENSIONS


def _extension(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_below(path: str | Path, real_root: str) -> bool:
    return os.path.commonpath((os.path.realpath(path), real_root)) == real_root


def _display(name: str) -> str:
    # Names that are not UTF-8 could be neither printed nor logged.
    return printable(os.fsencode(name).decode("utf-8", "backslashreplace"))


def title_of_place(location: str) -> str:
    """The last meaningful part of a path or URL, as a name; empty if there is none."""
    is_url = "://" in location
    # A URL may contain a password before its host, and a signature in its query.
    address = re.sub(r"^[^/]*@|[?#].*", "", location.partition("://")[2])
    path = address if is_url else str(Path(location).expanduser().absolute())
    for part in reversed(path.split("/")):
        bare = re.sub(r"\.(parquet|pq)$|-?\d{5}-of-\d{5}", "", part)
        name = re.sub(r"[^\w.-]+", "-", bare).strip("-._")
        name = re.sub(r"^train[-._]|[-._]train$", "", name)
        if any(not word.isdigit() and word.lower() not in _GENERIC_WORDS for word in re.split(r"[-._]", name)):
            return name
    return ""
