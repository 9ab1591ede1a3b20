"""The images in a folder and in all folders below it, and the links that may lead to them."""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ssl_sec.data.bands import NUMPY_EXTENSION
from ssl_sec.data.decode import EXTENSIONS, UNREAD_EXTENSIONS, advice_for
from ssl_sec.data.log import log_once
from ssl_sec.errors import DataError, MissingDataError, counted, first_line, printable

# Files in the folder of a run, or of all runs, and names of MLflow's folders of artifacts.
_OF_RUNS = frozenset(("metrics.jsonl", "mlflow.db"))
ARTIFACTS = frozenset(("mlruns", "mlartifacts"))
# Folders that file systems, storage devices and archives add: of recovered, deleted and earlier files, and of
# thumbnails. On a volume's root, those of recovered files can only be read by its administrator.
_OF_SYSTEMS = frozenset(
    ("lost+found", "$RECYCLE.BIN", "System Volume Information", "__MACOSX")
    + ("@eaDir", "#recycle", "#snapshot", "@Recycle", "@Recently-Snapshot")
)


def holds_images(folder: Path) -> bool:
    """Whether there are images in a folder or below it, other than plots of runs."""
    for _, folders, files in os.walk(folder):
        if not _OF_RUNS.isdisjoint(files):
            folders.clear()
        elif any(map(is_image, files)):
            return True
        folders[:] = [name for name in folders if not is_hidden(name)]
    return False


def has_images(folder: Path, least: int) -> bool:
    """Whether there may be as many images in a folder and below it; it is listed no further than needed.

    Files that a data set leaves out count, too, and so does a link to a folder, however many images are there.
    """
    num_found, waiting = 0, [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if is_hidden(entry.name):
                        continue
                    if entry.is_dir():
                        if entry.is_symlink():
                            return True
                        waiting.append(entry.path)
                    num_found += is_image(entry.name)
                    if num_found >= least:
                        return True
        except OSError:  # the opening of the set says what is wrong
            return False
    return False


def images_below(folders: Sequence[Path], root: Path, wanted: str) -> list[list[str]]:
    """Paths of the images in each folder and all folders below it, in no order; logs what is left out.

    Args:
        folders: the folders.
        root: the folder that no link may lead out of.
        wanted: what there must be, for the message.

    Raises:
        DataError: a folder has no images, or a link leads out of `root`.
    """
    every: list[_Found] = []
    for folder in folders:
        every.append(_find_images(folder, root))
        if not every[-1].images:
            raise DataError(f"{_no_images(folder, every[-1])}; {wanted}")
    _log_left_out(root, every)
    return [found.images for found in every]


@dataclass(kw_only=True)
class _LeftOut:
    """Files or folders that are left out: their number, and the first of their paths; all of them may be many."""

    count: int = 0
    first: str = ""

    def add(self, path: str) -> None:
        self.count += 1
        self.first = min(self.first or path, path)


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What is in a folder and below it.

    Attributes:
        images: paths of the images, in no order.
        unread: images whose format is not read.
        runs: folders of runs.
    """

    images: list[str] = field(default_factory=list)
    unread: _LeftOut = field(default_factory=_LeftOut)
    runs: _LeftOut = field(default_factory=_LeftOut)


def _no_images(folder: Path, found: _Found) -> str:
    """The error of a folder without images; names the format of those that are not read."""
    unread = found.unread
    others = (
        f" but {unread.count} of other formats, as {display(os.path.basename(unread.first))}" if unread.count else ""
    )
    advice = f"; {advice_for(unread.first)}" if unread.count else ""
    allowed = ", ".join(sorted(EXTENSIONS))
    return f"{printable(str(folder))}: no images in it or below it{others}; allowed: {allowed}{advice}"


def _log_left_out(root: Path, every: Sequence[_Found]) -> None:
    _log_first(logging.INFO, "%s: left out: %s of runs, first: %s", root, "folder", [found.runs for found in every])
    unread = [found.unread for found in every]
    advice = advice_for(min((left_out.first for left_out in unread if left_out.count), default=""))
    message = f"%s: left out: %s of formats that are not read, first: %s; {advice}"
    _log_first(logging.WARNING, message, root, "image", unread)


def _log_first(level: int, message: str, root: Path, noun: str, every: Sequence[_LeftOut]) -> None:
    count = sum(left_out.count for left_out in every)
    if count:
        first = min(left_out.first for left_out in every if left_out.count)
        log_once(level, message, display(str(root)), counted(count, noun), display(os.path.relpath(first, root)))


def _find_images(folder: Path, root: Path) -> _Found:
    """The images in a folder and all folders below it; not the plots of runs.

    Args:
        folder: the folder.
        root: the folder that no link may lead out of.
    """
    found = _Found()
    # Links may form cycles, and lead up to the folders of other classes.
    real_folders = {str(parent) for parent in Path(os.path.realpath(folder)).parents}
    waiting = [str(folder)]
    while waiting:
        current = waiting.pop()
        real = os.path.realpath(current)
        if real in real_folders:
            continue
        real_folders.add(real)
        names = names_inside(Path(current), root)
        if current != str(folder) and not _OF_RUNS.isdisjoint(names):
            found.runs.add(current)
            continue
        for name, is_folder in names.items():
            path = os.path.join(current, name)
            if is_folder:
                if name not in ARTIFACTS:
                    waiting.append(path)
            elif is_image(name):
                found.images.append(path)
            elif _extension(name) in UNREAD_EXTENSIONS:
                found.unread.add(path)
    found.images[:] = [path for path in found.images if not is_array(path)] or found.images
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
    try:
        require_folder(folder, "it must hold images, or folders of them")
        found = _find_images(folder, folder if root is None else root)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{printable(str(folder))}: cannot be read: {first_line(error)}") from error
    if not found.images:
        raise DataError(_no_images(folder, found))
    _log_left_out(folder, [found])
    paths = map(os.fsdecode, relative(found.images, folder))
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


def relative(paths: Iterable[str], folder: Path) -> list[bytes]:
    """Paths of files, which begin with that of a folder above them, from this folder on."""
    above = os.path.join(folder, "")
    return [os.fsencode(path.removeprefix(above)) for path in paths]


def names_inside(folder: Path, root: Path) -> dict[str, bool]:
    """Sorted names in `folder` -> whether it is a folder; refuses links that lead out of `root`.

    Without hidden ones and folders that systems add. Only links are looked up one by one.
    """
    real_root = os.path.realpath(root)
    if not _is_below(folder, real_root):
        raise DataError(f"{printable(str(folder))}: leads out of {printable(str(root))}; copy the files into it")
    names: dict[str, bool] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_hidden(entry.name):
                continue
            if entry.is_symlink() and not _is_below(entry.path, real_root):
                target = (
                    f"{display(os.readlink(entry.path))}{'' if os.path.exists(entry.path) else ', which is not there'}"
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


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is never read: hidden ones, and folders that systems add."""
    return name.startswith(".") or name in _OF_SYSTEMS


def is_image(name: str) -> bool:
    """Whether a file's name has the extension of an image that is read."""
    return _extension(name) in EXTENSIONS


def is_array(name: str) -> bool:
    """Whether a file is an array of NumPy's; beside images these are features, masks or labels."""
    return _extension(name) == NUMPY_EXTENSION


def _extension(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_below(path: str | Path, real_root: str) -> bool:
    return os.path.commonpath((os.path.realpath(path), real_root)) == real_root


def display(name: str) -> str:
    """A name as it can be printed and logged, also if it is not UTF-8."""
    return printable(os.fsencode(name).decode("utf-8", "backslashreplace"))
