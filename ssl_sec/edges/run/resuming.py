"""Whether a run can be resumed as it is asked for, and whether there is anything left to do."""

from collections.abc import Mapping

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored_config import stored_values
from ssl_sec.edges.run.worker import CONFIGS, Job, RecipeConfig
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.settings import from_values, to_values

_LENGTHS: Mapping[str, str] = {"pretrain": "epochs", "metric_learning": "steps", "face": "epochs"}


def resume_run(job: Job, folder: RunFolder, config: RecipeConfig) -> bool:
    """Opens a run's folder again, unless the run is finished.

    Args:
        job: which.
        folder: of the run.
        config: with which it is resumed: that of the run, but for what may change, and more epochs or steps where no
            schedule depends on their number.

    Returns:
        Whether there is anything left to do.

    Raises:
        ConfigError: if there is no run, or with other settings.
    """
    folder.require_run()
    before = to_values(from_values(CONFIGS[job], stored_values(folder.config_path)))
    now = to_values(config)
    length = _LENGTHS[job]
    is_longer = now[length] > before[length]
    if is_longer and (dependent := _tied_to_the_length(config)):
        raise ConfigError(
            f"{length}: found {now[length]!r}, but the run to resume has {before[length]!r}; more are possible only "
            f"where no schedule depends on their number; here these do: {', '.join(dependent)}"
        )
    folder.require_same(before, now, free=(length,) if is_longer else ())
    if folder.is_complete and not is_longer:
        return False
    folder.resume(now)
    return True


def _tied_to_the_length(config: RecipeConfig) -> list[str]:
    """The keys whose schedule is another one in a longer run."""
    keys: list[str] = []
    if isinstance(config, PretrainConfig) and config.optimiser.schedule(1, 2) != config.optimiser.schedule(1, 3):
        keys.append("optimiser.learning_rate (a cosine over the run)")
    if config.constraint.weight(1, 2) != config.constraint.weight(1, 3):
        keys.append("constraint.ramp")
    return keys
