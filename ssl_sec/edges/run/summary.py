"""The text that a job prints at its end."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored_config import stored_values
from ssl_sec.edges.tracking.pages import run_page, scores_page
from ssl_sec.metrics import known_metrics
from ssl_sec.recipes.pretraining.config import OF_LABELS, MonitorConfig
from ssl_sec.settings import from_values


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The result of a run; `print` shows what the command prints.

    Attributes:
        folder: the run's folder; `folder.location` is its path or URL.
        uri: address of MLflow's store.
        run_id: id of the run in MLflow; None if MLflow could not be reached.
        experiment_id: id of its experiment; None if MLflow could not be reached, or was not asked.
        metrics: the last value of each metric.
    """

    folder: RunFolder
    uri: str
    run_id: str | None
    experiment_id: str | None
    metrics: Mapping[str, float]

    def __str__(self) -> str:
        """The metrics, the folder, and how to see the run in MLflow, as the command prints them."""
        results = [
            (key, _meaning(key, found.meaning, self.folder))
            for key, found in known_metrics(self.metrics)
            if found.is_result
        ]
        lines = [f"{meaning}: {_with_spread(key, self.metrics)}" for key, meaning in results]
        run = [f"MLflow run: {self.run_id}"] if self.run_id else ["MLflow run: none; see the warning above"]
        return "\n".join([*lines, f"folder: {self.folder.location}", *run, ui_instructions(self)])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """A notebook shows the result of a cell so, in place of all metrics."""
        printer.text(str(self))


def _meaning(key: str, meaning: str, folder: RunFolder) -> str:
    """The meaning of a metric of a run; with `monitor.data`, scores of labelled images are of that set."""
    if key not in OF_LABELS:
        return meaning
    data = from_values(MonitorConfig, stored_values(folder.config_path)["monitor"]).data
    return meaning if data is None else meaning.replace("training images", f"images of {data.title}")


def _with_spread(key: str, metrics: Mapping[str, float]) -> str:
    """The value of a metric, with its spread over folds or trials, or its interval over draws, if it has one."""
    shown, mean, std = f"{metrics[key]:.4g}", metrics.get(f"{key}_mean"), metrics.get(f"{key}_std")
    if (interval := metrics.get(f"{key}_interval")) is not None:
        return f"{shown} ± {interval:.2g} (95 % interval)"
    if std is not None:
        shown += f" ± {std:.2g}" if mean is None else f" ({mean:.4g} - {std:.2g})"
    return shown


def ui_instructions(finished: Finished, *, whole_experiment: bool = False) -> str:
    """The command that starts the MLflow UI, and the address of the run's page, or of its experiment."""
    path = ""
    if whole_experiment:
        path = "" if finished.experiment_id is None else scores_page(finished.experiment_id)
    elif finished.run_id is not None:
        path = run_page(finished.experiment_id, finished.run_id)
    return ui_command(finished.uri, path)


def ui_command(uri: str, path: str) -> str:
    """The command that starts the MLflow UI, and the address of a page."""
    if uri.startswith(("http://", "https://")):
        return f"MLflow UI: {uri}{path}"
    program = Path(sys.executable).parent / "mlflow"
    near = os.path.relpath(program)
    shown = "mlflow" if not program.exists() else str(program) if near.startswith("..") else near
    command = shlex.join([shown, "ui", "--backend-store-uri", uri])
    return f"MLflow UI: {command}\n           then open http://127.0.0.1:5000{path}"
