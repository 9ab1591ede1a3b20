"""Image files that a list names, or that are in and below one folder for each person or video.

Opening a set checks that all of them exist, so that missing ones are errors before the training.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_sec.data.decode import AS_THEY_ARE, Decoding
from ssl_sec.data.folders.listing import check_paths, image_paths, require_folder
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.stores import FileStore, from_store
from ssl_sec.errors import DataError, printable


def open_listed(
    paths: Sequence[str],
    labels: Int64[Tensor, " images"],
    class_names: tuple[str, ...],
    root: Path,
    where: str,
    name: str,
    decoding: Decoding = AS_THEY_ARE,
) -> ImageSet:
    """Images by their paths below a folder.

    Args:
        paths: paths of the images, in the order of the list.
        labels: class of each image, on the CPU.
        class_names: name of each class.
        root: folder that the paths are relative to.
        where: prefix of an image's number in errors: the list, and "line" or "image".
        name: name of the set.
        decoding: how images become pixels.

    Raises:
        MissingDataError: there is no such folder.
        DataError: an image is missing, not below the folder, or cannot be read.
    """
    require_folder(root)
    check_paths(((path, f"{where} {number}") for number, path in enumerate(paths, start=1)), root, printable(str(root)))
    return from_store(
        FileStore.of(root, paths),
        labels,
        class_names,
        name=name,
        description=f"{len(paths)} images of {where.rpartition(' ')[0]} in {root}",
        decoding=decoding,
    )


def paths_by_stem(names: Sequence[str], root: Path, where: str) -> list[str]:
    """The paths of images that a list names without their folders, with any ending.

    Args:
        names: names of the images in the list.
        root: folder of the images, at any depth.
        where: prefix of an image's number in errors, as for `open_listed`.

    Raises:
        MissingDataError: there is no such folder.
        DataError: an image is missing, or several images have its name.
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
    """Paths of the frames of videos, each in and below its own folder, and the video of each frame.

    Args:
        videos: folders of the videos, relative to `root`.
        root: folder of all videos.
        where: list that names the videos, for errors.

    Raises:
        MissingDataError: there is no such folder.
        DataError: a video is missing, not below the folder, or has no frames.
    """
    require_folder(root)
    check_paths(((video, where) for video in videos), root, printable(str(root)))
    frames = [image_paths(root / video, root) for video in videos]
    paths = [f"{video}/{frame}" for video, names in zip(videos, frames, strict=True) for frame in names]
    return paths, torch.arange(len(videos)).repeat_interleave(torch.tensor([len(names) for names in frames]))


def _stem(path: str) -> str:
    return os.path.splitext(path.rpartition("/")[2])[0]
