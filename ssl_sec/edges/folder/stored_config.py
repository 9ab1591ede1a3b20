"""Reads the configuration that a run keeps in `config.yaml`, also if version 0.1 wrote it."""

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from ssl_sec.edges.masking import HIDDEN, masked
from ssl_sec.errors import ConfigError, StorageError, first_line
from ssl_sec.recipes.registry import RecipeRow
from ssl_sec.settings import flattened, from_values

if TYPE_CHECKING:
    from ssl_sec.recipes.config import TrainingConfig
    from ssl_sec.recipes.probing.config import ProbedRun

# Keys of version 0.1 -> their present names.
RENAMED = {"benchmarks": "test_sets"}


def stored_values(path: Path) -> dict[str, Any]:
    """The values of a stored configuration, under the keys of this version.

    Raises:
        StorageError: if the file cannot be read, or holds no configuration.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise StorageError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise StorageError(f"{path} holds no configuration of a run")
    probe = values.get("probe")
    if isinstance(probe, dict) and "decay_epochs" in probe:
        values["probe"] = _with_shares(probe)
    return {RENAMED.get(key, str(key)): value for key, value in values.items()}


def training_config(recipe: RecipeRow, path: Path) -> "TrainingConfig":
    """The stored configuration of a training run.

    Raises:
        StorageError: if the file cannot be read, or holds no configuration.
        ConfigError: if it is not a configuration of this recipe.
    """
    return cast("TrainingConfig", from_values(recipe.config, stored_values(path)))


def probed_run(path: Path) -> "ProbedRun":
    """The stored configuration of a run, as far as a probe of that run needs it, for any recipe.

    Raises:
        StorageError: if the file cannot be read, or holds no configuration.
        ConfigError: if parts that the probe needs are missing.
    """
    from ssl_sec.recipes.probing.config import ProbedRun  # with torch

    values = stored_values(path)
    return from_values(ProbedRun, {each.name: values[each.name] for each in fields(ProbedRun) if each.name in values})


def _with_shares(probe: dict[str, Any]) -> dict[str, Any]:
    """Probe settings of version 0.1, which had decays in epochs; decays after the last epoch are dropped."""
    settings = dict(probe)
    epochs, decays = settings["epochs"], settings.pop("decay_epochs")
    return {**settings, "decay_at": [decay / epochs for decay in decays if decay < epochs]}


def require_whole_data(data: Mapping[str, Any]) -> None:
    """Refuses the data set of a run if its secrets, as those of signed URLs, were not kept with the run.

    Raises:
        ConfigError: if a value is hidden, with what the user can do.
    """
    for key, value in flattened(data).items():
        if HIDDEN in str(value):
            raise ConfigError(
                f"data.{key}: its credentials were not kept with the run; give the data again: "
                f"data={data['name']} data.{key}=..."
            )


def with_credentials(uri: str, key: str) -> str:
    """A store's address with credentials from the environment, since they are not kept with a run.

    Raises:
        ConfigError: if the credentials are missing.
    """
    known = os.environ.get("MLFLOW_TRACKING_URI", "")
    if HIDDEN not in uri:
        return uri
    if masked(known) != uri:
        raise ConfigError(
            f"{key}: the run is tracked at {uri}; give its credentials by MLFLOW_TRACKING_URI or {key}=..."
        )
    return known
