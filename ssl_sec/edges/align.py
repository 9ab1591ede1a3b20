"""Aligns the faces of a folder in several processes."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from ssl_sec.data.faces.alignment import ALIGNED_SIZE_PX, Landmarks, align_file, aligned_path, read_landmarks
from ssl_sec.data.folders.listing import image_paths
from ssl_sec.data.loading import START_METHOD
from ssl_sec.edges.config import AlignConfig
from ssl_sec.edges.environment import allowed_cpus
from ssl_sec.edges.progress_bar import progress_shown
from ssl_sec.errors import ConfigError, DataError, StorageError, counted, printable

logger = logging.getLogger("ssl_sec.align")


@dataclass(frozen=True, kw_only=True, slots=True)
class Aligned:
    """The result of an alignment.

    Attributes:
        folder: the folder of the aligned images.
        num_aligned: images that were written.
        num_kept: images that already existed.
        num_unreadable: images that could not be read, or whose landmarks cannot be those of a face.
        num_without_landmarks: images without landmarks.
    """

    folder: Path
    num_aligned: int
    num_kept: int
    num_unreadable: int
    num_without_landmarks: int

    def __str__(self) -> str:
        return (
            f"aligned: {counted(self.num_aligned, 'image')}, {ALIGNED_SIZE_PX} x {ALIGNED_SIZE_PX} pixels; "
            f"{self.num_kept} already existed\n"
            f"left out: {self.num_unreadable} unreadable, {self.num_without_landmarks} without landmarks\n"
            f"folder: {self.folder}"
        )


def run_align(config: AlignConfig) -> Aligned:
    """Aligns every image that has landmarks and is not aligned yet; images without landmarks are logged.

    Raises:
        ConfigError: if the output is among the images.
        DataError: if the landmarks cannot be read, no image can be aligned, or two would be one file.
        StorageError: if an image cannot be written.
    """
    images, output = (Path(folder).expanduser().resolve() for folder in (config.images, config.output))
    if output == images or images in output.parents:
        raise ConfigError(f"output: found {config.output!r}, must be outside of images, {config.images!r}")
    landmarks = read_landmarks(Path(config.landmarks).expanduser())
    found = image_paths(images)
    paths = [path for path in found if path in landmarks.rows]
    if not paths:
        raise DataError(
            f"landmarks: {config.landmarks} has none of {counted(len(found), 'image')} in {config.images}, the first "
            f"being {printable(found[0])}; paths must be relative to that folder"
        )
    _require_apart(paths)
    for path in found:
        if path not in landmarks.rows:
            logger.warning("%s: no landmarks, left out", printable(path))
    for path in sorted(landmarks.rows.keys() - set(found)):
        logger.warning("%s: has landmarks, but the image is missing", printable(path))
    waiting = [path for path in paths if not (output / aligned_path(path)).exists()]
    num_unreadable = _align_all(_Alignments(images, output, landmarks, waiting), config.num_workers)
    if num_unreadable == len(paths):
        raise DataError(
            f"images: {counted(len(paths), 'image')} in {config.images} with landmarks, and none can be read"
        )
    return Aligned(
        folder=output,
        num_aligned=len(waiting) - num_unreadable,
        num_kept=len(paths) - len(waiting),
        num_unreadable=num_unreadable,
        num_without_landmarks=len(found) - len(paths),
    )


def _require_apart(paths: list[str]) -> None:
    """Refuses two images that are aligned to one file, such as a.bmp and a.bmp.png."""
    sources: dict[str, str] = {}
    for path in paths:
        other = sources.setdefault(aligned_path(path), path)
        if other != path:
            found = f"{printable(other)} and {printable(path)}"
            raise DataError(f"images: found {found}, both aligned to {printable(aligned_path(path))}; rename one")


class _Alignments(Dataset[DataError | StorageError | None]):
    """Aligns an image in a worker; returns its error, if there is one."""

    def __init__(self, images: Path, output: Path, landmarks: Landmarks, paths: list[str]) -> None:
        self.images, self.output, self.landmarks, self.paths = images, output, landmarks, paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> DataError | StorageError | None:
        path = self.paths[index]
        points = self.landmarks.points[self.landmarks.rows[path]]
        # Returned, since the data loader would turn a raised error into a long traceback.
        try:
            align_file(self.images / path, self.output / aligned_path(path), points)
        except (DataError, StorageError) as error:
            return error


def _align_all(alignments: _Alignments, num_workers: int | None) -> int:
    """Returns how many images could not be read; each is logged."""
    if num_workers is None:
        num_workers = allowed_cpus()
    num_workers = min(num_workers, len(alignments))
    loader = DataLoader(
        alignments,
        batch_size=None,
        num_workers=num_workers,
        multiprocessing_context=START_METHOD if num_workers > 0 else None,
        generator=torch.Generator(),
    )
    num_unreadable = 0
    with progress_shown("align", len(alignments)) as update:
        for error in loader:
            update(1)
            if isinstance(error, StorageError):
                raise error
            if error is not None:
                num_unreadable += 1
                logger.warning("%s; left out", error)
    return num_unreadable
