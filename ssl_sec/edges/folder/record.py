"""A run as an MLflow entity, made from the run's folder."""

import hashlib
import json

from mlflow.entities import Dataset, DatasetInput, Metric, Param, Run, RunData, RunInfo, RunInputs, RunTag

from ssl_sec.edges.folder.descriptions import DataDescription
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored_config import stored_values
from ssl_sec.edges.masking import masked
from ssl_sec.settings import flattened

_UNKNOWN = "none"
# MLflow's contexts of the data of a run.
TRAINING, EVALUATION = "training", "evaluation"


def run_record(folder: RunFolder, data_title: str) -> Run:
    """The run with its parameters, last metrics, tags and data; without an id if it is not in MLflow."""
    metrics = {key: (value, record["step"]) for record in folder.records() for key, value in record["metrics"].items()}
    return Run(
        RunInfo(
            run_id=folder.run_id or _UNKNOWN,
            experiment_id=_UNKNOWN,
            user_id="",
            status=folder.status,
            start_time=0,
            end_time=None,
            lifecycle_stage="active",
            run_name=folder.path.name,
        ),
        RunData(
            metrics=[Metric(key, value, 0, step) for key, (value, step) in metrics.items()],
            params=[Param(key, str(value)) for key, value in flattened(stored_values(folder.config_path)).items()],
            tags=[RunTag(key, value) for key, value in folder.identity.tags.items()],
        ),
        RunInputs([DatasetInput(data_set(folder.data(), f"{data_title}/train"), [])]),
    )


def data_of(run: Run) -> Dataset | None:
    """The training set of a run, or the test set of a probe; None if MLflow has no record of it."""
    inputs = run.inputs.dataset_inputs if run.inputs is not None else []
    trained_on = [item.dataset for item in inputs if any(tag.value == TRAINING for tag in item.tags)]
    return next(iter([*trained_on, *(item.dataset for item in inputs)]), None)


def data_set(data: DataDescription, name: str) -> Dataset:
    """One split of the data of a run, which may have been held out of the images of the other, with its counts.

    Without a digest of the images, it has a digest of the counts.
    """
    profile = {"images": data.num_images, "bad_images": data.num_bad_images, "classes": len(data.class_names)}
    if data.num_checked:
        profile |= {
            "checked": data.num_checked,
            "duplicates": data.num_duplicates,
            "unreadable": data.num_unreadable,
        }
    return Dataset(
        name=name,
        digest=data.digest or hashlib.sha256(f"{data.description}:{profile}".encode()).hexdigest()[:8],
        source_type="ssl_sec",
        source=masked(data.description),  # an old folder has it whole
        profile=json.dumps(profile),
    )
