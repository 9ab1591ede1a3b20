"""What to do about a run that has no trained network yet."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ssl_sec.edges.folder.checkpoints import kept_checkpoints
from ssl_sec.edges.folder.commands import command_line
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.errors import ConfigError

# Status in MLflow -> what is said of the run.
_SAID = {"KILLED": "was stopped", "FAILED": "has failed or was killed", "RUNNING": "has not finished"}


def require_finished(word: str, folder: RunFolder) -> None:
    """Refuses a run without its last weights, unless its training has ended.

    Raises:
        ConfigError: if its training has not ended, with what the user can do.
        StorageError: if the storage cannot be used.
    """
    if folder.status == "FINISHED":
        return
    # A folder without an outcome may be of a run that another process trains.
    status = "RUNNING" if folder.outcome() is None and folder.error() is None else folder.status
    steps = kept_checkpoints(folder) if folder.holds_data else ()
    raise unfinished(word, status, str(folder.identity.job), folder.location, steps)


def unfinished(
    word: str, status: str, job: str, resumed: str, steps: Collection[int], elsewhere: str = ""
) -> ConfigError:
    """The error for a run that is asked for its last weights before it has any.

    Args:
        word: the value of the key `run`.
        status: status of the run in MLflow.
        job: job that made the run.
        resumed: what `resume` takes for the run; empty if it ended before its first checkpoint and has no folder.
        steps: steps of the checkpoints whose weights can be had instead.
        elsewhere: the run's folder, if its checkpoints are there and it cannot be read here.
    """
    said = _SAID.get(status, _SAID["RUNNING"])
    if not resumed:
        return ConfigError(f"run: found {word!r}, which {said} before its first checkpoint; allowed: a finished run")
    resume = command_line(job, "resume", resumed)
    instead = f", or checkpoint=<steps> with one that it has kept: {', '.join(map(str, steps))}" if steps else ""
    if elsewhere:
        said += f" and keeps its checkpoints only in its folder, {elsewhere}"
        instead = ", or run=<that folder> checkpoint=<steps> on a machine that can read it"
    ends = "finish it with" if status in ("KILLED", "FAILED") else "unless a process still trains it, finish it with"
    return ConfigError(f"run: found {word!r}, which {said}; allowed: a finished run{instead}; {ends}: {resume}")


@contextmanager
def named_run_checkpoint() -> Iterator[None]:
    """Errors about `checkpoint` name the key `run_checkpoint`, as a fine-tuning calls it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(re.sub(r"\bcheckpoint(?=[:=])", "run_checkpoint", str(error))) from error
