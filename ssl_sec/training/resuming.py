"""The checkpoint that a run resumes from, the same on all workers."""

import socket
from dataclasses import dataclass
from pathlib import Path

from ssl_sec.collectives import gather_objects
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


def newest_checkpoint(folder: Path) -> Found:
    """The newest whole checkpoint in `folder`, and why newer ones were skipped."""
    skipped: list[str] = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        reason = defect_of(path)
        if reason is None:
            return Found(path=path, skipped=tuple(skipped))
        skipped.append(f"{path.name}: {reason}")
    return Found(path=None, skipped=tuple(skipped))


def agreed_checkpoint(folder: Path) -> Found:
    """The newest checkpoint that is whole for one of the workers; the others wait until they see it, too.

    Raises:
        StorageError: if a worker does not see it in time.
    """
    own = newest_checkpoint(folder)
    newest = max(gather_objects(own), key=lambda found: "" if found.path is None else found.path.name)
    if newest.path is not None and newest.path != own.path:
        path = newest.path
        wait_until_visible(
            lambda: defect_of(path) is None,
            lambda: f"checkpoint {path}: {defect_of(path)} on {socket.gethostname()}, but whole on another node",
        )
    return newest
