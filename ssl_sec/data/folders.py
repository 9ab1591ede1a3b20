"""Folders of images, a folder for each split and class."""

import logging
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch

from ssl_sec.collectives import rank
from ssl_sec.data.class_splits import require_disjoint
from ssl_sec.data.decode import AS_THEY_ARE, EXTENSIONS, UNREAD_EXTENSIONS, Decoding
from ssl_sec.data.image_set import UNLABELLED, ImageSet, Split
from ssl_sec.data.stores import FileStore, from_store
from ssl_sec.errors import DataError, MissingDataError, check_option, counted, first_line, printable

logger = logging.getLogger("ssl_sec.data")

# Files in the folder of a run, or of all runs, and names of MLflow's folders of artifacts.
_OF_RUNS = frozenset(("metrics.jsonl", "mlflow.db"))
_ARTIFACTS = frozenset(("mlruns", "mlartifacts"))
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
            files = sorted(_images_below([folder], root)[0], key=os.fsencode)
            paths = _relative(files, root)
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
        if capitals := [f"{_display(name)}/" for name in folders if name.lower() in splits]:
            logger.warning(
                "%s: all images are trained on, those in %s too; splits are named train/ and test/",
                _display(str(root)),
                ", ".join(capitals),
            )
        return
    others = [name for name in folders if name not in splits and name not in _ARTIFACTS and not name.startswith(".")]
    if unread := [f"{_display(name)}/" for name in others if _holds_images(root / name)]:
        logger.warning(
            "%s: the images in %s%s are not read, as train/ is there; rename train/ if it is one of the classes",
            _display(str(root)),
            ", ".join(unread[:5]),
            ", …" if len(unread) > 5 else "",
        )


def _holds_images(folder: Path) -> bool:
    """Whether there are images in a folder or below it, other than plots of runs."""
    for _, folders, files in os.walk(folder):
        if not _OF_RUNS.isdisjoint(files):
            folders.clear()
        elif any(map(_is_image, files)):
            return True
    return False


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
        require_disjoint(map(_display, of_train), map(_display, of_test), printable(str(root)))
    classes = {name: label for label, name in enumerate(of_train if shared_classes else found)}
    if unknown := [name for name in found if name not in classes]:
        listed = ", ".join(map(_display, unknown[:5]))
        raise DataError(f"{printable(str(folder))}: classes that {train.name} does not have: {listed}")
    beside = [name for name, is_folder in _inside(folder, root).items() if _is_image(name) and not is_folder]
    if beside:
        shown = _display(str(folder)), len(beside), _display(beside[0])
        logger.warning("%s: %d images beside the class folders are left out, first: %s", *shown)
    paths: list[bytes] = []
    labels: list[int] = []
    for name, files in zip(found, _images_below([folder / name for name in found], root), strict=True):
        paths += _relative(sorted(files), root)
        labels += [classes[name]] * len(files)
    return paths, labels, tuple(map(_display, classes))


def _has_classes(folder: Path, root: Path) -> bool:
    """Whether a folder holds a folder of images for each class, and no images next to them."""
    names = _inside(folder, root)
    has_folders = any(
        _is_image(file) for name, is_folder in names.items() if is_folder for file in _inside(folder / name, root)
    )
    beside = [name for name, is_folder in names.items() if _is_image(name) and not is_folder]
    if has_folders and beside:
        shown = _display(str(folder)), len(beside), _display(beside[0])
        logger.warning(
            "%s: the folders are not taken as classes, since %d images are beside them, first: %s; "
            "data.labels=true takes them, data.labels=false says that they are none",
            *shown,
        )
    return has_folders and not beside


def _class_folders(folder: Path, root: Path) -> list[str]:
    names = [name for name, is_folder in _inside(folder, root).items() if is_folder]
    if not names:
        raise DataError(f"{printable(str(folder))}: no class folders; it must hold one folder for each class")
    return names


def _images_below(folders: Sequence[Path], root: Path) -> list[list[str]]:
    """Paths of the images in each folder and all folders below it, in no order."""
    unread: list[str] = []
    runs: list[str] = []
    every: list[list[str]] = []
    for folder in folders:
        every.append(_find_images(folder, root, unread, runs))
        if not every[-1]:
            raise DataError(f"{_no_images(folder, unread)}; {_LAYOUT}")
    _log_left_out(root, unread, runs)
    return every


def _no_images(folder: Path, unread: Sequence[str]) -> str:
    """The error of a folder without images; names the format of those that are not read."""
    others = f" but {len(unread)} of other formats, as {_display(os.path.basename(min(unread)))}" if unread else ""
    allowed = ", ".join(sorted(EXTENSIONS))
    return f"{printable(str(folder))}: no images in it or below it{others}; allowed: {allowed}"


def _log_left_out(root: Path, unread: Sequence[str], runs: Sequence[str]) -> None:
    if rank() > 0:
        return
    if runs:
        shown = _display(str(root)), counted(len(runs), "folder"), _display(os.path.relpath(min(runs), root))
        _log_once(logging.INFO, "%s: left out: %s of runs, first: %s", *shown)
    if unread:
        shown = _display(str(root)), counted(len(unread), "image"), _display(os.path.relpath(min(unread), root))
        left_out = "%s: left out: %s of formats that are not read, first: %s; convert them to JPEG, PNG or WebP"
        _log_once(logging.WARNING, left_out, *shown)


@cache
def _log_once(level: int, message: str, *shown: str) -> None:
    """Logs a message once in a process; a job opens its images several times."""
    logger.log(level, message, *shown)


def _find_images(folder: Path, root: Path, unread: list[str], runs: list[str]) -> list[str]:
    """Paths of the images in a folder and all folders below it, in no order; not the plots of runs.

    Args:
        folder: the folder.
        root: the folder that no link may lead out of.
        unread: list to which the images are added whose format is not read.
        runs: list to which the folders of runs are added.
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
            runs.append(current)
            continue
        for name, is_folder in names.items():
            path = os.path.join(current, name)
            if is_folder:
                if name not in _ARTIFACTS:
                    waiting.append(path)
            elif _is_image(name):
                found.append(path)
            elif _extension(name) in UNREAD_EXTENSIONS:
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
    runs: list[str] = []
    try:
        require_folder(folder, "it must hold images, or folders of them")
        found = _find_images(folder, folder if root is None else root, unread, runs)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{printable(str(folder))}: cannot be read: {first_line(error)}") from error
    if not found:
        raise DataError(_no_images(folder, unread))
    _log_left_out(folder, unread, runs)
    paths = map(os.fsdecode, _relative(found, folder))
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


def _relative(paths: Iterable[str], folder: Path) -> list[bytes]:
    """Paths of files, which begin with that of a folder above them, from this folder on."""
    above = os.path.join(folder, "")
    return [os.fsencode(path.removeprefix(above)) for path in paths]


def _inside(folder: Path, root: Path) -> dict[str, bool]:
    """Sorted names in `folder` -> whether it is a folder, without hidden ones; refuses links that lead out of `root`.

    Only links are looked up one by one.
    """
    real_root = os.path.realpath(root)
    if not _is_below(folder, real_root):
        raise DataError(f"{printable(str(folder))}: leads out of {printable(str(root))}; copy the files into it")
    names: dict[str, bool] = {}
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
            is_folder = os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()
            if is_folder or entry.is_symlink() or entry.is_file():
                names[entry.name] = is_folder
    return dict(sorted(names.items()))


def _is_image(name: str) -> bool:
    return _extension(name) in EXTENSIONS


def _extension(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_below(path: str | Path, real_root: str) -> bool:
    return os.path.commonpath((os.path.realpath(path), real_root)) == real_root


def _display(name: str) -> str:
    # Names that are not UTF-8 could be neither printed nor logged.
    return printable(os.fsencode(name).decode("utf-8", "backslashreplace"))
