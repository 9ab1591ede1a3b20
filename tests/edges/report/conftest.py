"""Small stores with hand-written runs."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from ssl_sec.edges.config import ReportConfig
from ssl_sec.edges.report.report import make_report, run_report
from ssl_sec.edges.tracking.store import connect_to_store
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.recipes.tracking import TrackingConfig
from ssl_sec.settings import flattened, from_values, to_values
from tests.jobs import configured


class Store:
    """A store of made-up runs; later ones are newer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = f"sqlite:///{folder}/mlflow.db"
        self.client = MlflowClient(self.uri)
        self._clock = 1_000
        self._experiments: dict[str, str] = {}

    def pretrained(self, recipe, seed, metrics=None, *, status="FINISHED", name=None, histogram=None, **changes):
        params = {**flattened(values_of(recipe)), "seed": seed, **dotted(changes)}
        run_id = self._run(recipe, "pretrain", params, metrics or {}, status, name or f"seed{seed}", {})
        if histogram is not None:
            self._attach(run_id, "norms.json", [histogram])
        return run_id

    def trained(self, job, recipe, seed, metrics=None, *, numbers=None, **params):
        """Adds a training of any job, with no other settings than these."""
        given = {"recipe": recipe, "seed": seed, "constraint.name": "none", **dotted(params)}
        run_id = self._run(recipe, job, given, metrics or {}, "FINISHED", f"seed{seed}", {})
        if numbers is not None:
            self._attach(run_id, "numbers.json", numbers)
        return run_id

    def _attach(self, run_id, name, values):
        path = self.folder / name
        path.write_text(json.dumps(values))
        self.client.log_artifact(run_id, str(path))

    def probed(self, parent, *top1, metric="probe/top1", status="FINISHED", **changes):
        recipe = self.client.get_run(parent).data.tags["recipe"]
        config = from_values(
            ProbeJobConfig, {"run": parent, **{key: values_of(recipe)[key] for key in ("probe", "runtime")}}
        )
        params = {**flattened(to_values(config)), **dotted(changes)}
        return self._run(recipe, "probe", params, {metric: top1}, status, "probe", {"mlflow.parentRunId": parent})

    def result(self, recipe, seed, *top1, **changes):
        """Adds a pretraining and its probe."""
        return self.probed(self.pretrained(recipe, seed, **changes), *top1)

    def _run(self, recipe, job, params, metrics, status, name, tags):
        if recipe not in self._experiments:
            location = (self.folder / "artifacts").as_uri()
            self._experiments[recipe] = self.client.create_experiment(recipe, artifact_location=location)
        self._clock += 1
        tags = {"recipe": recipe, "job": job, **tags}
        run = self.client.create_run(self._experiments[recipe], self._clock, tags, name)
        logged = [Param(key, str(value)) for key, value in params.items()]
        points = [
            Metric(key, value, self._clock, step)
            for key, values in metrics.items()
            for step, value in enumerate(values)
        ]
        self.client.log_batch(run.info.run_id, metrics=points, params=logged[:90])
        self.client.log_batch(run.info.run_id, params=logged[90:])
        self.client.set_terminated(run.info.run_id, status)
        return run.info.run_id

    def report(self, experiment=None, **keys):
        """Makes a report without writing it."""
        return make_report(ReportConfig(**keys, tracking=TrackingConfig(uri=self.uri, experiment=experiment)))

    def text(self, **keys):
        return self.report(**keys).text

    def write(self, *arguments):
        return run_report([*arguments, f"output={self.folder / 'report'}", f"tracking.uri={self.uri}"])

    def cells(self, **keys):
        """(recipe, metric) -> the row of Table 5."""
        return {(row["recipe"], row["metric"]): row for row in self.report(table=5, **keys).rows}


@cache
def values_of(recipe):
    return to_values(configured("pretrain", [f"experiment={recipe}"]))


def dotted(changes):
    return {key.replace("__", "."): value for key, value in changes.items()}


@pytest.fixture(scope="package")
def empty(tmp_path_factory):
    """A store without runs; its tables take longest to create."""
    folder = tmp_path_factory.mktemp("empty")
    connect_to_store(f"sqlite:///{folder}/mlflow.db")
    return folder / "mlflow.db"


@pytest.fixture
def store(empty, tmp_path: Path) -> Store:
    shutil.copy(empty, tmp_path / "mlflow.db")
    return Store(tmp_path)


def curves(level):
    return {
        "val/knn_top1": [level, level + 4.0],
        "train/norm_mean": [1.0, 2.0, 3.0],
        "train/norm_std": [0.5, 0.2, 0.1],
    }
