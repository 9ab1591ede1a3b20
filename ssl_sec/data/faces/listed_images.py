"""Image files that a list names, or that lie in a folder for each person or video.

All of them are looked for when the set is opened: what is missing is told before anything is trained.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_sec.data.folders import image_files, image_paths
from ssl_sec.data.image_set import FileStore, ImageSet, PackedBytes
from ssl_sec.data.stores import from_store
from ssl_sec.errors import DataError, MissingDataError, first_line, printable


def open_listed(
    paths: Sequence[str],
    labels: Int64[Tensor, " images"],
    class_names: tuple[str, ...],
    root: Path,
    where: str,
    name: str,
    image_size_px: int | None = None,
    num_channels: int = 3,
    resident_limit_mib: int = 2048,
) -> ImageSet:
    """Images by their paths below a folder.

    Args:
        paths: as the list has them, in its order.
        labels: class of each, on the CPU.
        class_names: name of each class.
        root: the folder.
        where: what errors call an image, before its number: the list, and "line" or "image".
        name: what the set is called.
        image_size_px: as in `open_folder`.
        num_channels: as in `open_folder`.
        resident_limit_mib: as in `open_folder`.

    Raises:
        MissingDataError: there is no such folder.
        DataError: an image is not there, not below the folder, or cannot be read.
    """
    require_folder(root)
    check_paths(((path, f"{where} {number}") for number, path in enumerate(paths, start=1)), root, printable(str(root)))
    return from_store(
        FileStore(root=root, paths=PackedBytes.of(map(os.fsencode, paths))),
        labels,
        class_names,
        name=name,
        description=f"{len(paths)} images of {where.rpartition(' ')[0]} in {root}",
        image_size_px=image_size_px,
        num_channels=num_channels,
        resident_limit_mib=resident_limit_mib,
    )


def paths_by_stem(names: Sequence[str], root: Path, where: str) -> list[str]:
    """Where images lie that a list names without their folder, whatever their ending.

    Args:
        names: as the list has them.
        root: folder of the images and of folders of them.
        where: as for `open_listed`.

    Raises:
        MissingDataError: there is no such folder.
        DataError: an image is not there, or there are several of its name.
    """
    by_stem: defaultdict[str, list[str]] = defaultdict(list)
    for path in image_paths(root):
        by_stem[_stem(path)].append(path)
    paths: list[str] = []
    for number, name in enumerate(names, start=1):
        found = by_stem[_stem(name)]
        if len(found) != 1:
            count = "several images" if found else "no image"
            raise DataError(f"{where} {number}: {count} {printable(name)!r} in {printable(str(root))}")
        paths += found
    return paths


def frames_of_videos(videos: Sequence[str], root: Path, where: str) -> tuple[list[str], Int64[Tensor, " frames"]]:
    """Paths below a folder of the frames of videos, each a folder of its own there, and the video of each.

    Args:
        videos: their folders.
        root: the folder of them all.
        where: the list that names them, for errors.

    Raises:
        MissingDataError: there is no such folder.
        DataError: a video is not there, not below the folder, or has no frames.
    """
    require_folder(root)
    check_paths(((video, where) for video in videos), root, printable(str(root)))
    try:
        frames = [image_files(root / video, root) for video in videos]
    except OSError as error:
        raise DataError(f"{where}: a video cannot be read: {first_line(error)}") from error
    paths = [f"{video}/{frame}" for video, names in zip(videos, frames, strict=True) for frame in names]
    return paths, torch.arange(len(videos)).repeat_interleave(torch.tensor([len(names) for names in frames]))


def check_paths(listed: Iterable[tuple[str, str]], root: Path, called: str) -> None:
    """Refuses files and folders that are not below a folder, or not there; each folder is read once.

    Args:
        listed: paths, and where they are listed.
        root: the folder.
        called: what errors call it.

    Raises:
        DataError: the first of them.
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


def require_folder(root: Path) -> None:
    """Refuses a folder that is not there.

    Raises:
        MissingDataError: it is not.
    """
    if not root.is_dir():
        raise MissingDataError(f"{printable(str(root))}: no such folder")


def _links(folder: str, where: str) -> dict[str, bool]:
    """Which names of a folder are links; a listing says so without a look at each file."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.is_symlink() for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: {printable(folder)} cannot be read: {first_line(error)}") from error


def _is_below(path: str, real_root: str) -> bool:
    real_path = os.path.realpath(path)
    return os.path.commonpath((real_path, real_root)) == real_root


def _stem(path: str) -> str:
    return os.path.splitext(path.rpartition("/")[2])[0]
