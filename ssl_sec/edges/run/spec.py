"""The specification of a run."""

from dataclasses import dataclass

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.recipes.config import RunConfig
from ssl_sec.recipes.registry import RecipeRow


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """The specification of a run.

    Attributes:
        recipe: its recipe.
        config: its configuration.
        folder: its folder.
        identity: its identity in MLflow.
        was_finished: whether it had finished, and is extended; in MLflow it stays finished until it has new metrics.
    """

    recipe: RecipeRow
    config: RunConfig
    folder: RunFolder
    identity: RunIdentity
    was_finished: bool = False

    @property
    def group(self) -> str:
        """Name of the folder of the recipe's runs, and of its registered model."""
        return self.identity.tags["recipe"]
