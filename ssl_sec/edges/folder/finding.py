"""The run that a user means by its id, its name, the beginning of one, or its folder."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.errors import ConfigError, nearest
from ssl_sec.recipes.registry import RECIPES


@runtime_checkable
class Named(Protocol):
    """A run with a name, and an id where MLflow knows it."""

    @property
    def run_id(self) -> str | None:
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
    candidates = [run for run in known if (run.run_id or "").startswith(word) or run.name.startswith(word)]
    for matching in (
        [run for run in candidates if run.run_id == word],
        [run for run in candidates if run.name == word],
        candidates,
    ):
        meant = [run for run in matching if prefers(run)] or matching
        if len(meant) == 1:
            return meant[0]
        if meant:
            listed = ", ".join(f"{run.name} ({(run.run_id or 'no id')[:8]})" for run in meant[:8])
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
    if folder is None or (job := folder.identity.job) is None:
        return None
    if job not in jobs:
        raise ConfigError(f"run: found {word!r}, a run of jobs.{job}; allowed: a run of {either(jobs)}")
    needed = [folder.path / name for name in RECIPES[job].network_files]
    return folder if folder.holds_data and all(path.is_file() for path in needed) else None


def either(jobs: Sequence[str]) -> str:
    """For example `jobs.pretrain or jobs.face`."""
    return " or ".join(f"jobs.{job}" for job in jobs)


def find_folder(key: str, word: str, output_dir: str, job: str | None = None) -> RunFolder:
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
    output = Path(output_dir).expanduser().resolve()
    runs = [RunFolder(path.parent) for path in sorted(output.glob("*/*/config.yaml"))]
    return the_one(key, word, runs, f"output_dir={output}", prefers=lambda run: job in (None, run.identity.job))
