"""The shell commands for a run, as messages show them."""

import os
import shlex

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.overrides import assigned
from ssl_sec.edges.packaging import command


def command_line(job: str, key: str, value: str) -> str:
    """The command of a job with one override."""
    return f"{command(job)} {shlex.quote(assigned(key, value))}"


def resume_command(job: str, folder: RunFolder) -> str:
    """The command that resumes the run of a folder."""
    near = os.path.relpath(folder.path)
    is_near = folder.location == str(folder.path) and not near.startswith("..")
    return command_line(job, "resume", near if is_near else folder.location)


def replay_command(folder: RunFolder) -> str:
    """The command that uploads what MLflow is missing from a run."""
    return command_line("replay", "folder", folder.location)
