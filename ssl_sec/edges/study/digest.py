"""A digest of the settings that affect a run's results, by which the same run is recognised anywhere.

It needs neither Hydra nor MLflow.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from ssl_sec.edges.tracking.comparing import deciding
from ssl_sec.effects import file_names, image_files
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.settings import to_values


def digest_of(config: TrainingConfig, job: str = PRETRAIN.name, **others: Any) -> str:
    """A digest of all settings that affect the results, except the seed and the places of files.

    Files of images count by their names, without their folders.

    Default settings are left out, so that the digest stays the same when a later version has more settings.
    """
    files = image_files(type(config))
    changed = {key: file_names(value) if key in files else value for key, value in _changed(config)}
    found = deciding({key: str(value) for key, value in changed.items()}, job) | others
    if job != PRETRAIN.name:
        found["job"] = job
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]


def _changed(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values that differ from their defaults, and the names of options."""
    for field in fields(settings):
        value, key = getattr(settings, field.name), f"{path}{field.name}"
        if is_dataclass(value):
            yield from _changed(value, f"{key}.")
        elif field.name == "name" or value != field.default:
            yield key, to_values(value)
