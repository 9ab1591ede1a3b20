"""The run that a user means by its id, its name, the beginning of one, or its folder."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.masking import HIDDEN
from ssl_sec.errors import ConfigError, nearest
from ssl_sec.recipes.registry import RECIPES


@runtime_checkable
class Named(Protocol):
    """A run with an id in MLflow, empty if it has none, and a name."""

    @property
    def run_id(self) -> str:
        """In MLflow."""
        ...

    @property
    def name(self) -> str:
        """Of the run."""
        ...


N = TypeVar("N", bound=Named)


def the_one(key: str, word: str, runs: Iterable[N], where: str, prefers: Callable[[N], bool] = lambda run: True) -> N:
    """The one run with this id or name, or whose id or name alone begins so.

    Args:
        key: that the word was given for.
        word: what the user wrote.
        runs: to choose from.
        where: they are, for the message if there is none.
        prefers: which of several that match alike are meant, if any of them.

    Raises:
        ConfigError: if there is none, or several.
    """
    known = list(runs)
    if not word:
        raise ConfigError(f"{key}: found '', must be a run's id, its name, the beginning of one, or its folder")
    candidates = [run for run in known if run.run_id.startswith(word) or run.name.startswith(word)]
    for matching in (
        [run for run in candidates if run.run_id == word],
        [run for run in candidates if run.name == word],
        candidates,
    ):
        meant = [run for run in matching if prefers(run)] or matching
        if len(meant) == 1:
            return meant[0]
        if meant:
            listed = ", ".join(f"{run.name} ({run.run_id[:8] or 'no id'})" for run in meant[:8])
            rest = ", …" if len(meant) > 8 else ""
            raise ConfigError(f"{key}: found {word!r}, which {len(meant)} runs may be: {listed}{rest}")
    names = {run.name for run in known}
    hint = f"; {nearest(word, names)}" if names else ""
    raise ConfigError(f"{key}: found {word!r}, but {where} has no run whose id or name begins so{hint}")


def folder_named(word: str) -> RunFolder | None:
    """The run folder that the word is the path of, if it is one."""
    folder = RunFolder(Path(word).expanduser().resolve())
    return folder if word and folder.holds_run else None


def trained_folder(word: str, jobs: Sequence[str]) -> RunFolder | None:
    """The folder of a training that the word is the path of, if all is there that its network is built from.

    Args:
        word: that `run` was given.
        jobs: whose runs will do.

    Raises:
        ConfigError: if the folder is that of another job's run.
    """
    folder = folder_named(word)
    job = None if folder is None else job_of(folder)
    if folder is None or job is None:
        return None
    if job not in jobs:
        allowed = " or ".join(f"jobs.{each}" for each in jobs)
        raise ConfigError(f"run: found {word!r}, a run of jobs.{job}; allowed: a run of {allowed}")
    needed = [folder.path / name for name in RECIPES[job].network_files]
    return folder if folder.holds_data and all(path.is_file() for path in needed) else None


def find_folder(key: str, word: str, output_dir: Path, job: str | None = None) -> RunFolder:
    """The folder of the run that the word means: a path, or a run in the output folder.

    Args:
        key: that the word was given for.
        word: an id, a name, the beginning of one, or a path.
        output_dir: where runs are looked for.
        job: whose run is meant, where there are several.

    Raises:
        ConfigError: if there is none, or several.
    """
    named = folder_named(word)
    if named is not None:
        return named
    if "/" in word:
        raise ConfigError(f"{key}: {Path(word).expanduser().resolve()} holds no run; allowed: a run's folder")
    runs = [_LocalRun.read(path.parent) for path in sorted(output_dir.glob("*/*/config.yaml"))]
    where = f"output_dir={output_dir}"
    return the_one(key, word, runs, where, prefers=lambda run: job in (None, job_of(run.folder))).folder


@dataclass(frozen=True, kw_only=True, slots=True)
class _LocalRun:
    run_id: str
    name: str
    folder: RunFolder

    @classmethod
    def read(cls, path: Path) -> "_LocalRun":
        folder = RunFolder(path)
        return cls(run_id=id_of(folder) or "", name=path.name, folder=folder)


def id_of(folder: RunFolder) -> str | None:
    """The run's id in MLflow; None if it is not there."""
    try:
        return folder.run_id_path.read_text().strip() or None
    except OSError:
        return None


def job_of(folder: RunFolder) -> str | None:
    """The job whose run the folder holds; None if it does not say."""
    return tags_of(folder).get("job")


def tags_of(folder: RunFolder) -> dict[str, str]:
    """The tags that the folder's run has, or is to have, in MLflow."""
    tags = _identity(folder).get("tags")
    return tags if isinstance(tags, dict) else {}


def uri_of(folder: RunFolder) -> str | None:
    """The store of the folder's run; None if it does not say, or not without its credentials."""
    uri = stored_uri(folder)
    return None if uri is None or HIDDEN in uri else uri


def stored_uri(folder: RunFolder) -> str | None:
    """The store of the folder's run, without credentials; None if it does not say."""
    return _identity(folder).get("uri")


def _identity(folder: RunFolder) -> dict[str, Any]:
    try:
        identity = json.loads(folder.identity_path.read_text())
    except (OSError, ValueError):
        return {}
    return identity if isinstance(identity, dict) else {}
