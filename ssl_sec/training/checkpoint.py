"""Checkpoints that are either whole or absent.

A checkpoint is a folder `step-000001234` with the state and a manifest of its files' sizes and hashes. It is
written under a temporary name, synced, given its manifest last and then renamed, so that a crash at any moment
leaves either the old checkpoints alone or the new one beside them. A resume uses the newest whole one.

The newest ones are kept, and the one with the highest score if they have scores.

Tensors whose rows are sharded over the workers are in files of their own: before the state is saved, each worker writes
the rows that it holds, and a resume reads the rows that it needs, whatever the number of workers was.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ssl_sec.collectives import world_size
from ssl_sec.errors import StorageError, counted
from ssl_sec.files import rename_folder, replaced, sync_path
from ssl_sec.training.class_sharding import HeldRows
from ssl_sec.training.visibility import wait_until_visible

# Written last, so that it marks a whole checkpoint: the step, the score, the number of workers that saved it, and the
# files' sizes and hashes.
MANIFEST = "manifest.json"

_STATE = "state.pt"
_PARTS = "rows-*.safetensors"
# Key in a part's metadata for the index of its first row among all rows.
_FIRST = "first"
# Space for the contents of a checkpoint other than its tensors.
_ROOM_BYTES = 1 << 20


def save_checkpoint(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    keep_last: int,
    score: float | None = None,
    parts: Sequence[str] = (),
) -> Path:
    """Writes the state after `step` steps and removes all but the newest `keep_last` checkpoints and the best.

    Args:
        folder: folder of the run's checkpoints.
        step: steps taken so far, ≥ 0.
        state: nested mappings and lists of tensors, numbers and strings.
        keep_last: number of checkpoints to keep, ≥ 1.
        score: score of the state, higher is better; None if it has none.
        parts: names of the workers' parts that belong to the checkpoint.

    Raises:
        StorageError: if it cannot be written; the checkpoints before it are untouched.
    """
    final = folder / checkpoint_name(step)
    if defect_of(final) is None:  # the state after a step is always the same
        return final
    held = [_parts_folder(folder, step) / name for name in parts]
    for part in held:
        wait_until_visible(part.exists, lambda part=part: f"checkpoint of step {step}: {part} is missing")
    temporary = folder / f".{final.name}.{uuid.uuid4().hex}"  # processes of two containers can have one number
    try:
        folder.mkdir(exist_ok=True)
        temporary.mkdir()
        _check_space(folder, state)
        with (temporary / _STATE).open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        for part in held:
            part.rename(temporary / part.name)
        files = {
            file.name: {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
            for file in sorted(temporary.iterdir())
        }
        with (temporary / MANIFEST).open("w") as file:
            json.dump({"step": step, "score": score, "workers": world_size(), "files": files}, file)
            file.flush()
            os.fsync(file.fileno())
        sync_path(temporary)
        if final.exists():  # one that is not whole
            shutil.rmtree(final)
        rename_folder(temporary, final, last=MANIFEST)
        sync_path(folder)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # On a full disk torch raises its own RuntimeError while it handles the OSError.
        why = error.__context__ if isinstance(error.__context__, OSError) else error
        raise StorageError(f"checkpoint of step {step}: cannot be written to {folder}: {why}") from error
    # Later checkpoints are not whole and were skipped on resume: they must not count as kept ones.
    saved = sorted(path for path in folder.glob("step-*") if path.name <= final.name)
    best = _best(saved)
    # The parts of a later step may still be being written.
    ended = [path for path in folder.glob(".parts-*") if path.name < _parts_folder(folder, step + 1).name]
    for old in [*saved[:-keep_last], *folder.glob(".step-*"), *ended]:
        if old != best:
            shutil.rmtree(old, ignore_errors=True)
    return final


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint after `step` steps; names are sorted by step."""
    return f"step-{step:09d}"


def step_of(name: str) -> int:
    """The number of steps after which the checkpoint with this name was saved."""
    return int(name.removeprefix("step-"))


def without_held_rows(state: Any, path: tuple[str | int, ...] = ()) -> tuple[Any, dict[str, HeldRows]]:
    """The state that all workers share, and the rows that this worker holds, by their places in the state."""
    if not isinstance(state, Mapping):
        return state, {}
    common: dict[str | int, Any] = {}
    held: dict[str, HeldRows] = {}
    for key, value in state.items():  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, HeldRows):
            held[json.dumps([*path, key])] = value
        else:
            common[key], below = without_held_rows(value, (*path, key))
            held |= below
    return common, held


def save_part(folder: Path, step: int, held: Mapping[str, HeldRows]) -> Path:
    """Writes the rows that this worker holds, before one worker saves the state after `step` steps.

    Args:
        folder: folder of the run's checkpoints.
        step: steps taken so far, ≥ 0.
        held: the rows from `without_held_rows`; all begin at the same row.

    Returns:
        The path of the file.

    Raises:
        StorageError: if they cannot be written.
    """
    parts = _parts_folder(folder, step)
    (first,) = {rows.first for rows in held.values()}
    try:
        folder.mkdir(exist_ok=True)
        parts.mkdir(exist_ok=True)
        final = parts / _PARTS.replace("*", f"{first:012d}")
        tensors = {name: rows.rows.detach().cpu().contiguous() for name, rows in held.items()}
        _check_space(folder, tensors)
        with replaced(final) as temporary:
            save_file(tensors, temporary, {_FIRST: str(first)})
    except (OSError, RuntimeError, SafetensorError) as error:
        raise StorageError(f"checkpoint of step {step}: cannot be written to {folder}: {error}") from error
    return final


class CheckpointWriter:
    """Writes checkpoints in a thread: training waits until the state is copied, not until it is written.

    On a GPU the host does not wait for the copy either: the device's next operations do. One checkpoint is written at a
    time; the next call of `save`, `check` or `close` raises its error.

    Args:
        folder: folder of the run's checkpoints.
        keep_last: number of checkpoints to keep, ≥ 1.
        on_written: function that is called in the thread with the path of each checkpoint.
    """

    def __init__(
        self, folder: Path, keep_last: int, on_written: Callable[[Path], object] = lambda checkpoint: None
    ) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._on_written = on_written
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None

    def save(self, step: int, state: Mapping[str, Any], score: float | None = None, parts: Sequence[str] = ()) -> None:
        """Starts to write the state after `step` steps; see `save_checkpoint`.

        Raises:
            StorageError: if the previous one could not be written.
        """
        self.close()
        copied, wait = self._snapshot(state)
        self._thread = threading.Thread(target=self._write, args=(step, copied, wait, score, parts))
        self._thread.start()

    def check(self) -> None:
        """Raises the StorageError of a checkpoint that could not be written, without waiting for one."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Waits until the checkpoint is written.

        Raises:
            StorageError: if it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _snapshot(self, state: Mapping[str, Any]) -> tuple[Mapping[str, Any], Callable[[], None]]:
        """A copy of the state on the CPU, and a function that waits until it is complete."""
        device = next((tensor.device for tensor in _tensors(state) if tensor.is_cuda), None)
        if device is None:
            return _copy(state), lambda: None
        self._stream = self._stream or torch.cuda.Stream(device)
        training = torch.cuda.current_stream(device)
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            copied = _copy(state)
        training.wait_stream(self._stream)  # the next step changes the tensors that are being copied
        return copied, self._stream.record_event().synchronize

    def _write(
        self,
        step: int,
        state: Mapping[str, Any],
        wait: Callable[[], None],
        score: float | None,
        parts: Sequence[str],
    ) -> None:
        try:
            wait()
            self._on_written(save_checkpoint(self._folder, step, state, self._keep_last, score, parts))
        except BaseException as error:
            self._failure = error


def load_checkpoint(
    path: Path, device: torch.device, held: slice | None = None, *, is_whole: bool = False
) -> dict[str, Any]:
    """The state saved in a checkpoint, its tensors on `device`; never unpickles code.

    Args:
        path: the checkpoint's folder.
        device: device of the tensors.
        held: rows of the sharded tensors that this worker holds; None leaves these tensors out.
        is_whole: whether all files have just been found whole, so that they need not be read twice.

    Raises:
        StorageError: if a file is not whole, or rows are missing.
    """
    reason = None if is_whole else defect_of(path)
    if reason is not None:
        raise StorageError(f"checkpoint {path}: {reason}")
    state: dict[str, Any] = torch.load(path / _STATE, map_location=device, weights_only=True)
    if held is not None:
        if held.stop > (saved := state.get("num_classes", held.stop)):
            raise StorageError(
                f"checkpoint {path}: its run had {counted(saved, 'class')}, and this one has {held.stop} or more"
            )
        for name, rows in _held_rows(path, held).items():
            *above, key = json.loads(name)
            place = state
            for step in above:
                place = place[step]
            place[key] = rows.to(device)
    return state


def _held_rows(path: Path, held: slice) -> dict[str, Tensor]:
    """Rows of the sharded tensors, from the parts that hold them.

    Old checkpoints may also have parts left by another number of workers, whose rows overlap.
    """
    pieces: dict[str, list[Tensor]] = {}
    for part in sorted(path.glob(_PARTS)):
        with safe_open(part, framework="pt") as file:  # pyright: ignore[reportUnknownVariableType]
            first = int(file.metadata()[_FIRST])
            for name in file.keys():  # it is not a mapping
                rows = file.get_slice(name)
                last = first + rows.get_shape()[0]
                following = held.start + sum(map(len, pieces.get(name, [])))
                if first <= following < min(last, held.stop):
                    pieces.setdefault(name, []).append(rows[following - first : held.stop - first])
    whole = {name: torch.cat(rows) for name, rows in pieces.items()}
    if not whole or any(len(rows) != held.stop - held.start for rows in whole.values()):
        raise StorageError(f"checkpoint {path}: templates of classes {held.start} to {held.stop - 1} are missing")
    return whole


def defect_of(path: Path, hashed: slice = slice(None)) -> str | None:
    """The defect of the checkpoint in a folder; None if it is whole.

    Args:
        path: the checkpoint's folder.
        hashed: places of the files, in the order of their names, whose contents are compared; the sizes of all are.
    """
    try:
        listed = json.loads((path / MANIFEST).read_text())["files"]
        expected = {str(name): (about["bytes"], about["sha256"]) for name, about in {_STATE: None, **listed}.items()}
    except FileNotFoundError:
        return "no manifest"
    except (OSError, ValueError, KeyError, TypeError):
        return "unreadable manifest"
    for name, (num_bytes, _) in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != num_bytes:
            return f"{name} has {file.stat().st_size} bytes instead of {num_bytes}"
    for name in sorted(expected)[hashed]:
        if file_sha256(path / name) != expected[name][1]:
            return f"{name} does not match its hash"
    return None


def _parts_folder(folder: Path, step: int) -> Path:
    """The folder of a step's parts; it never contains parts left by another number of workers."""
    return folder / f".parts-{step:09d}-of-{world_size()}"


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(state: Any) -> Any:
    """The state with its tensors copied to the CPU; from a GPU without waiting."""
    if isinstance(state, torch.Tensor):
        # Pinned memory: the host would wait for a copy into other memory.
        copy = torch.empty_like(state, device="cpu", pin_memory=state.is_cuda, requires_grad=False)
        return copy.copy_(state.detach(), non_blocking=True)
    if isinstance(state, Mapping):
        return {key: _copy(value) for key, value in state.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(state, list):
        return [_copy(value) for value in state]  # pyright: ignore[reportUnknownVariableType]
    return state


def _tensors(state: Any) -> Iterator[Tensor]:
    """The state's tensors."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping | list):
        for value in state.values() if isinstance(state, Mapping) else state:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(value)


def _check_space(folder: Path, state: Mapping[str, Any]) -> None:
    needed, free = sum(tensor.nbytes for tensor in _tensors(state)) + _ROOM_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"it needs {needed >> 20} MiB, and {free >> 20} MiB are free")


def score_of(manifest: bytes) -> float | None:
    """The score in a manifest; None if there is none, or the manifest cannot be read."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        score = json.loads(manifest)["score"]
        return float(score) if isinstance(score, float | int) else None
    return None


def best_of(scores: Mapping[str, float | None]) -> str | None:
    """The checkpoint with the highest score, the newest if several have it; None if none has a finite one.

    Args:
        scores: name of a checkpoint -> its score.
    """
    scored = [(score, name) for name, score in scores.items() if score is not None and math.isfinite(score)]
    return max(scored)[1] if scored else None


def _best(paths: Sequence[Path]) -> Path | None:
    """The best checkpoint of a folder; see `best_of`."""
    scores: dict[str, float | None] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            scores[path.name] = score_of((path / MANIFEST).read_bytes())
    best = best_of(scores)
    return next((path for path in paths if path.name == best), None)
