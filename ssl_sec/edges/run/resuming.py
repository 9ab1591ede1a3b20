"""Whether a run can be resumed as it is asked for, and whether there is anything left to do."""

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored_config import stored_values
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.registry import RecipeRow
from ssl_sec.settings import from_values, to_values


def resume_run(recipe: RecipeRow, folder: RunFolder, config: TrainingConfig) -> bool:
    """Opens a run's folder again, unless the run is finished.

    Args:
        recipe: of the run.
        folder: of the run.
        config: with which it is resumed: that of the run, but for what may change, and more epochs or steps where no
            schedule depends on their number.

    Returns:
        Whether there is anything left to do.

    Raises:
        ConfigError: if there is no run, or with other settings.
    """
    folder.require_run()
    before = to_values(from_values(recipe.config, stored_values(folder.config_path)))
    now = to_values(config)
    length = recipe.length
    is_longer = now[length] > before[length]
    if is_longer and (dependent := config.tied_to_the_length()):
        raise ConfigError(
            f"{length}: found {now[length]!r}, but the run to resume has {before[length]!r}; more are possible only "
            f"where no schedule depends on their number; here these do: {', '.join(dependent)}"
        )
    folder.require_same(before, now, free=(length,) if is_longer else ())
    if folder.is_complete and not is_longer:
        return False
    folder.resume(now)
    return True
