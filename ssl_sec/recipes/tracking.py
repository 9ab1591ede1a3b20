"""The options of tracking; importing them needs no torch."""

import re
from dataclasses import dataclass

from ssl_sec.settings import check

# The tags that a run sets itself, and `tracking.tags` may not.
RUN_TAGS = (
    "job", "recipe", "data", "encoder", "loss", "constraint", "seed", "folder", "command", "git.dirty", "ran_on",
    "ended", "probe.protocol", "ray.job_id", "ssl_sec.version",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where metrics are logged.

    Attributes:
        uri: of the MLflow server; None takes MLFLOW_TRACKING_URI, or sqlite in the output folder.
        experiment: in MLflow; None takes the recipe's name, or the data set's if it has none.
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
