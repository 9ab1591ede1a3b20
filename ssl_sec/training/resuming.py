"""The checkpoint that a run resumes from, the same on all workers."""

import socket
from dataclasses import dataclass
from pathlib import Path

from ssl_sec.collectives import gather_objects, rank, world_size
from ssl_sec.training.checkpoint import defect_of
from ssl_sec.training.visibility import wait_until_visible


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The newest whole checkpoint of a folder.

    Attributes:
        path: folder of the checkpoint; None if there is none.
        skipped: newer checkpoints that are not whole, each with the reason.
    """

    path: Path | None
    skipped: tuple[str, ...]


def agreed_checkpoint(folder: Path) -> Found:
    """The newest whole checkpoint of a folder that all workers see, the same on all of them.

    Each worker compares the contents of its share of the files, so that together they read a checkpoint once.

    Raises:
        StorageError: if a worker does not see in time what another one sees.
    """
    seen = {name for names in gather_objects([path.name for path in folder.glob("step-*")]) for name in names}
    skipped: list[str] = []
    for name in sorted(seen, reverse=True):
        reasons = gather_objects(_defect_seen(folder / name))
        if None in reasons:
            _wait_for(folder / name)
            reasons = [each for each in gather_objects(_defect_of_share(folder / name)) if each is not None]
        if not reasons:
            return Found(path=folder / name, skipped=tuple(skipped))
        skipped.append(f"{name}: {reasons[0]}")
    return Found(path=None, skipped=tuple(skipped))


def _defect_seen(path: Path) -> str | None:
    """What is missing of a checkpoint, as far as this worker sees it now."""
    return defect_of(path, hashed=slice(0))


def _defect_of_share(path: Path) -> str | None:
    return defect_of(path, hashed=slice(rank(), None, world_size()))


def _wait_for(path: Path) -> None:
    """Waits until this worker sees all files of a checkpoint that another worker sees."""
    wait_until_visible(
        lambda: _defect_seen(path) is None,
        lambda: f"checkpoint {path}: {_defect_seen(path)} on {socket.gethostname()}, but whole on another node",
    )
