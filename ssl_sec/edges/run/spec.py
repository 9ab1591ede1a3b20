"""What a run is made of."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.overrides import assigned
from ssl_sec.edges.packaging import command
from ssl_sec.recipes.config import RunConfig
from ssl_sec.recipes.registry import RecipeRow


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """What a run is made of.

    Attributes:
        recipe: what it does.
        config: with which settings.
        folder: where its files are.
        identity: what it is in MLflow.
    """

    recipe: RecipeRow
    config: RunConfig
    folder: RunFolder
    identity: RunIdentity

    @property
    def group(self) -> str:
        """What the folder of its runs and its registered model are called."""
        return self.identity.tags["recipe"]

    @property
    def resume_command(self) -> str:
        """What resumes the run, as a shell takes it."""
        path = self.folder.path
        near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return command_line(self.recipe.name, "resume", str(near))


def command_line(job: str, key: str, value: str) -> str:
    """A job with one override, as a shell takes it."""
    return f"{command(job)} {shlex.quote(assigned(key, value))}"


def replay_command(folder: RunFolder) -> str:
    """What sends to MLflow what it misses of a folder's run."""
    return command_line("replay", "folder", str(folder.path))
