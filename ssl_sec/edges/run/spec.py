"""The specification of a run."""

import os
import shlex
from dataclasses import dataclass

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.overrides import assigned
from ssl_sec.edges.packaging import command
from ssl_sec.recipes.config import RunConfig
from ssl_sec.recipes.registry import RecipeRow


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """The specification of a run.

    Attributes:
        recipe: the run's recipe.
        config: the run's configuration.
        folder: folder of the run's files.
        identity: identity of the run in MLflow.
    """

    recipe: RecipeRow
    config: RunConfig
    folder: RunFolder
    identity: RunIdentity

    @property
    def group(self) -> str:
        """Name of the folder of the recipe's runs, and of its registered model."""
        return self.identity.tags["recipe"]

    @property
    def resume_command(self) -> str:
        """The shell command that resumes the run."""
        return resume_command(self.recipe.name, self.folder)


def command_line(job: str, key: str, value: str) -> str:
    """The shell command of a job with one override."""
    return f"{command(job)} {shlex.quote(assigned(key, value))}"


def resume_command(job: str, folder: RunFolder) -> str:
    """The shell command that resumes the run of a folder."""
    near = os.path.relpath(folder.path)
    is_near = folder.location == str(folder.path) and not near.startswith("..")
    return command_line(job, "resume", near if is_near else folder.location)


def replay_command(folder: RunFolder) -> str:
    """The shell command that uploads what MLflow is missing from a run."""
    return command_line("replay", "folder", folder.location)
