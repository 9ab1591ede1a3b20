"""Where runs are kept and tracked; importing these options needs no torch."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from ssl_sec.errors import ConfigError, printable
from ssl_sec.rules import Count, LocalPath, check

# Kinds of object storage: S3, Google Cloud Storage and Azure.
STORAGE_SCHEMES = ("s3", "gs", "az", "abfs", "abfss")

# The tags that a run sets itself, and `tracking.tags` may not.
RUN_TAGS = (
    "job", "recipe", "data", "encoder", "loss", "constraint", "seed", "folder", "command", "git.dirty", "ran_on",
    "checkpoint", "labels", "start",
    "ended", "probe.protocol", "ray.job_id", "ssl_sec.version", "upload.missing",
)  # fmt: skip


class OutputPlace(LocalPath):
    """A folder, or a URL of object storage, such as s3://bucket/runs."""

    def check(self, key: str, value: str) -> None:
        """Raises a ConfigError that names the key, unless the value is such a place."""
        scheme, sign, rest = value.partition("://")
        if not sign or "/" in scheme:
            super().check(key, value)
        elif scheme == "file":
            super().check(key, rest)
        elif scheme not in STORAGE_SCHEMES or not rest.strip("/"):
            allowed = ", ".join(f"{scheme}://…" for scheme in STORAGE_SCHEMES)
            raise ConfigError(f"{key}: found {printable(value)!r}, must be a folder, or a URL: {allowed}")


OutputDir = Annotated[str, OutputPlace()]

# Which checkpoint of a run: its last state, the one with the best held-out score, or the one after that many steps.
Checkpoint = Count | Literal["last", "best"]


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where metrics are logged.

    Attributes:
        uri: address of the MLflow server; None takes MLFLOW_TRACKING_URI, or sqlite in the output folder (in the folder
            `runs` if runs are kept in object storage).
        experiment: name of the experiment in MLflow; None takes the recipe's name, or the data set's if it has none. On
            a server with passwords, another user's experiment needs the permission EDIT.
        register_model: whether the encoder becomes a registered model.
        system_metrics: whether the use of the run's machines (processor, memory, disk, network, GPUs) is logged.
        parent_run: the MLflow run of a sweep that this run belongs to.
        tags: further tags of the run.
    """

    uri: str | None = None
    experiment: str | None = None
    register_model: bool = True
    system_metrics: bool = True
    parent_run: str | None = None
    tags: dict[str, str | bool | int | float] | None = None

    def __post_init__(self) -> None:
        for name in self.tags or {}:
            key = f"tracking.tags.{name}"
            check(re.fullmatch(r"[\w.:/ -]{1,250}", name) is not None, key, name, "letters, digits and _ - . : /")
            own = name in RUN_TAGS or name.startswith("mlflow.")
            check(not own, key, name, f"another name: {', '.join(RUN_TAGS)} and mlflow.* are set by the job")
