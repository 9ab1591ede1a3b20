"""Finds the run that a user names by its id, its name, a prefix of one, or its folder."""

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored import StoredFolder
from ssl_sec.edges.folder.unfinished import require_finished
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.copies import new_copy
from ssl_sec.edges.storage.places import is_remote, is_url_of_run, local_folder, split_url
from ssl_sec.errors import ConfigError, nearest
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.recipes.tracking import Checkpoint

logger = logging.getLogger(__name__)

# The files that identify the run in a folder.
_NAMING = ("mlflow.json", "mlflow_run_id")
# URL of a run -> its copy in this process, and the versions of the stored files that the copy has.
_copies: dict[str, tuple[StoredFolder, Mapping[str, str]]] = {}


@runtime_checkable
class Named(Protocol):
    """A run with a name, and an id if MLflow knows it."""

    @property
    def run_id(self) -> str | None:
        """The id of the run in MLflow."""
        ...

    @property
    def name(self) -> str:
        """The name of the run."""
        ...


N = TypeVar("N", bound=Named)


def match_run(key: str, word: str, runs: Iterable[N], where: str, prefers: Callable[[N], bool] = lambda run: True) -> N:
    """The only run with this id or name, or else the only one whose id or name starts with the word.

    Args:
        key: key for which the word was given, for messages.
        word: the user's input.
        runs: the candidates.
        where: place of the runs, for messages.
        prefers: decides among several matches, if it is true for any of them.

    Raises:
        ConfigError: if there is no such run, or several.
    """
    known = list(runs)
    if not word:
        raise ConfigError(f"{key}: found '', must be a run's id, its name, a prefix of one, or its folder")
    candidates = [run for run in known if (run.run_id or "").startswith(word) or run.name.startswith(word)]
    for matching in (
        [run for run in candidates if run.run_id == word],
        [run for run in candidates if run.name == word],
        candidates,
    ):
        meant = [run for run in matching if prefers(run)] or matching
        if len(meant) == 1:
            if matching is candidates:
                logger.info("%s: %s is short for %s", key, word, _shown(meant[0]))
            return meant[0]
        if meant:
            listed = ", ".join(map(_shown, meant[:8]))
            rest = ", …" if len(meant) > 8 else ""
            raise ConfigError(
                f"{key}: found {word!r}, which matches {len(meant)} runs: {listed}{rest}; give an id or a folder"
            )
    names = {run.name for run in known}
    hint = f"; {nearest(word, names)}" if names else ""
    raise ConfigError(f"{key}: found {word!r}, but {where} has no run whose id or name starts with it{hint}")


def _shown(run: Named) -> str:
    return f"{run.name} ({(run.run_id or 'no id')[:8]})"


def folder_at(word: str) -> RunFolder | None:
    """The run at a path or a URL; None if there is none.

    Raises:
        ConfigError: if the URL cannot be used.
        StorageError: if the storage cannot be used.
    """
    if is_remote(word) and not is_url_of_run(word):
        return None
    folder = opened_folder(word)
    return folder if word and folder.holds_run else None


def opened_folder(word: str) -> RunFolder:
    """The folder at a path, or a copy of that at a URL, whatever it holds; see `folder_at`."""
    if is_remote(word):
        if not is_url_of_run(word):
            raise ConfigError(
                f"run: found {word!r}; allowed: a folder, or the URL of a run or an export, <folder>/<recipe>/<name>; "
                "`hf download <owner>/<name> --local-dir <folder>` makes a folder of an export on the Hugging Face Hub"
            )
        return downloaded(word)
    path = Path(os.path.abspath(Path(word.removeprefix("file://")).expanduser()))
    # A recipe's folder may be a link to another disk: its runs stay those of their output folder, with its MLflow.
    output_dir = path.parent.parent
    return RunFolder(output_dir.resolve() / path.relative_to(output_dir))


def downloaded(url: str) -> RunFolder:
    """A copy of a run in object storage as it is now, without its checkpoints; this process removes it at its end.

    The run may be active, so its staging folder is left alone.

    Raises:
        ConfigError: if the URL cannot be used.
        StorageError: if the storage cannot be used.
    """
    output_dir, recipe, name = split_url(url)
    bucket = Bucket(url)
    stored = bucket.versions()
    folder, copied = _copies.get(bucket.url, (None, None))
    if folder is None:
        copy = new_copy(output_dir)
        folder = StoredFolder(copy / recipe / name, bucket, copy / "restored")
    if stored != copied:
        folder.refresh()
        _copies[bucket.url] = folder, stored
    return folder


def usable_folder(
    folder: RunFolder, word: str, jobs: Sequence[str], checkpoint: Checkpoint = "last"
) -> RunFolder | None:
    """The folder of a training run, if it holds all files of its network.

    Args:
        folder: the run's folder.
        word: value of the key `run`.
        jobs: jobs whose runs are accepted.
        checkpoint: which checkpoint is wanted; any but `last` may also be of a run that has not ended.

    Raises:
        ConfigError: if it holds a run of another job, or its last weights are wanted before the run has ended.
    """
    if (job := folder.identity.job) is None:
        return None
    if job not in jobs:
        raise ConfigError(f"run: found {word!r}, a run of jobs.{job}; allowed: a run of {joined_jobs(jobs)}")
    needed: tuple[str, ...] = ()
    if checkpoint == "last":
        require_finished(word, folder)  # one that is trained further has the weights of its earlier end
        needed = RECIPES[job].network_files
    return folder if folder.holds_data and all((folder.path / name).is_file() for name in needed) else None


def joined_jobs(jobs: Sequence[str]) -> str:
    """For example `jobs.pretrain or jobs.face`."""
    return " or ".join(f"jobs.{job}" for job in jobs)


def find_folder(key: str, word: str, output_dir: str, job: str | None = None) -> RunFolder:
    """The folder of a run: at a path, or found by name or id in the output folder.

    Args:
        key: key for which the word was given, for messages.
        word: an id, a name, a prefix of one, or a path.
        output_dir: folder in which runs are searched.
        job: job whose runs are meant; one of another job is found by its whole name or id alone. None for any job.

    Raises:
        ConfigError: if there is no such run, or several.
    """
    named = folder_at(word)
    if named is not None:
        return named
    if "/" in word:
        place = word if is_remote(word) else Path(word).expanduser().resolve()
        raise ConfigError(f"{key}: {place} holds no run; allowed: a run's folder")
    output = output_dir.rstrip("/") if is_remote(output_dir) else local_folder(output_dir)
    runs, where = _runs_in(output_dir, word), f"output_dir={output}"
    if job is not None:
        runs = [run for run in runs if run.identity.job in (None, job) or word in (run.name, run.run_id)]
    found = match_run(key, word, runs, where, lambda run: job in (None, run.identity.job))
    return downloaded(f"{output}/{found.path.parent.name}/{found.name}") if is_remote(output_dir) else found


def _runs_in(output_dir: str, word: str) -> list[RunFolder]:
    """The runs of an output folder, sorted by recipe and name.

    In object storage those that have the word as their name, or else all; of each only the naming files.

    Raises:
        StorageError: if the storage cannot be used.
    """
    if not is_remote(output_dir):
        return [RunFolder(path.parent) for path in sorted(local_folder(output_dir).glob("*/*/config.yaml"))]
    bucket, copy = Bucket(output_dir), new_copy(output_dir)
    named = [f"{recipe}/{word}" for recipe in bucket.folders()] if word else []
    places = [place for place in named if bucket.read(f"{place}/config.yaml") is not None]
    if not places:
        found = (name.removesuffix("/config.yaml") for name in bucket.files() if name.endswith("/config.yaml"))
        places = sorted(place for place in found if place.count("/") == 1)
    for place, name in itertools.product(places, _NAMING):
        with contextlib.suppress(FileNotFoundError):
            bucket.download(f"{place}/{name}", copy / place / name)
    return [RunFolder(copy / place) for place in places]
