"""The MLflow run of a job of embeddings: its settings, and the place, number and origin of the embeddings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ssl_sec.data.config import DataConfig
from ssl_sec.data.image_set import ImageSet
from ssl_sec.edges.config.embed import EmbedConfig
from ssl_sec.edges.folder.descriptions import DataDescription
from ssl_sec.edges.folder.names import CHECKPOINT_TAG, new_name
from ssl_sec.edges.folder.record import data_set
from ssl_sec.edges.masking import masked, masked_values
from ssl_sec.edges.run.sweeps import JobRun
from ssl_sec.edges.storage.places import is_remote, local_folder
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.recipes.tracking import Checkpoint, TrackingConfig
from ssl_sec.settings import to_values


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The run or export that the network of a job of embeddings is from, for the job's own run in MLflow.

    Attributes:
        tracking: tracking of the job, in the store of the network's run.
        recipe: recipe of the run; for an export, the name of its folder.
        name: name of the run or the export.
        tags: tags that describe the network.
        run_id: id of the run in that store; None if it is not there, and for an export.
        checkpoint: the checkpoint of the run; the best one with its step.
    """

    tracking: TrackingConfig
    recipe: str
    name: str
    tags: Mapping[str, str] = field(default_factory=dict)
    run_id: str | None = None
    checkpoint: Checkpoint | str = "last"


def start_run(config: EmbedConfig, source: Source, data: DataConfig) -> JobRun:
    """Creates the run of a job as a child of the network's run; without a run if MLflow cannot be used."""
    parent = source.tracking.parent_run or source.run_id
    checkpoint = {} if config.checkpoint == "last" else {CHECKPOINT_TAG: str(config.checkpoint)}
    output = config.output if is_remote(config.output) else str(local_folder(config.output))
    return JobRun.opened(
        replace(source.tracking, parent_run=parent),
        config.output_dir,
        {**to_values(config), "data": to_values(data)},
        recipe=source.recipe,
        job="embed",
        name=new_name(f"{source.name}-embeddings"),
        tags={**source.tags, **checkpoint, "data": data.title, "folder": masked(output)},
    )


def upload_results(
    run: TrackedRun, metrics: Mapping[str, float], origin: Mapping[str, Any], image_set: ImageSet, data: DataConfig
) -> None:
    """Logs the metrics of a job as `embed/<name>`, its data set as an input, and the origin of its files."""
    run([{"step": 0, "metrics": {f"embed/{name}": value for name, value in metrics.items()}}])
    run.client.log_dict(run.run_id, masked_values(origin), "origin.json")
    described = DataDescription.of(image_set, origin["digest"])
    run.log_data(data_set(described, f"{data.title}/{origin['split']}"), "embedding")
