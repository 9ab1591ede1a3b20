"""Runs a training or a probe from Python, as its command does."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ssl_sec.edges.composition.config_folders import own_configs, without_folder
from ssl_sec.edges.composition.keys import kind_of
from ssl_sec.edges.environment import prepare, use_allowed_cpus
from ssl_sec.edges.run.job_values import values_of
from ssl_sec.errors import ConfigError, nearest, shown
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.settings import from_values

if TYPE_CHECKING:
    from ssl_sec.edges.run.summary import Finished


def train(job: str, *overrides: str) -> "Finished":
    """Trains an encoder, or probes a trained one, as the command `ssl-sec <job> <overrides>` does.

    It returns when the run has ended. Its messages go to the logger "ssl_sec". In the main thread, a Ctrl-C requests
    the run to save its state and stop. The states of PyTorch's random number generators are as before.

    Args:
        job: "pretrain", "finetune", "probe", "metric_learning" or "face".
        *overrides: the arguments of the command: "experiment=digits", "optimiser.learning_rate=0.1".

    Returns:
        The result of the run.

    Raises:
        UserError: for mistakes of the user: ConfigError, DataError, StorageError.
        Stopped: if a stop was requested; the state of a training is saved, and `resume=<its folder>` continues it.
    """
    if job not in RECIPES:
        raise ConfigError(f"job: found {shown(job)}; {nearest(str(job), RECIPES)}")
    prepare()
    folder, rest = without_folder(overrides)
    with own_configs(folder):
        config = announced_config(job, rest)
        import torch

        from ssl_sec.edges.run.driver import run_recipe

        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(gpus):  # pyright: ignore[reportUnknownMemberType]
            return run_recipe(RECIPES[job], config)


def announced_config(job: str, overrides: Sequence[str]) -> Any:
    """The configuration of a job, which uses no more CPUs than it may; a job with a runtime announces the machine."""
    values = values_of(job, overrides)  # most mistakes are found before torch is imported
    config = from_values(kind_of(job), values)
    use_allowed_cpus()
    if "runtime" in values:
        from ssl_sec.edges.machine import announce

        announce(config.runtime)
    return config
