"""The chains of a sweep as they run in the cluster, with fake jobs."""

import json
import queue
import re
from types import SimpleNamespace

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from ray.job_submission import JobStatus

from ssl_sec.edges.packaging import JOB_ID_VARIABLE
from ssl_sec.edges.submit import pipeline as module
from ssl_sec.edges.submit.cluster import Cluster, ConnectionLost
from ssl_sec.edges.submit.orders import Order
from ssl_sec.edges.submit.pipeline import PipelinePlan, _Pipeline
from ssl_sec.edges.submit.submission import submit_order
from ssl_sec.edges.tracking.store import connect_to_store
from ssl_sec.edges.tracking.tracker import JOB_ID_TAG
from ssl_sec.errors import UserError
from ssl_sec.settings import from_values
from tests.edges.submit.test_submission import SentJobs


class FakeJobs(Cluster):
    """A cluster whose jobs have a run in MLflow, and nothing else.

    Attributes:
        lines: of the jobs that ran.
        refused: the end of a job's name that is refused.
    """

    def __init__(self, uri: str, refused: str | None = None) -> None:
        self.client = connect_to_store(uri)
        self.lines: list[str] = []
        self.refused = refused

    def submit_beside(self, line, job_id, metadata, parent) -> None:
        if self.refused is not None and metadata["job_name"].endswith(self.refused):
            raise UserError("the cluster refused the job")
        self.lines.append(line)
        experiment = self.client.get_experiment_by_name(metadata["recipe"])
        made = experiment.experiment_id if experiment else self.client.create_experiment(metadata["recipe"])
        run_id = self.client.create_run(made, tags={JOB_ID_TAG: job_id}).info.run_id
        measured = {"probe": "probe/top1", "finetune": "finetune/top1", "metric_learning": "retrieval/recall_at_1"}
        self.client.log_metric(run_id, measured.get(metadata["job"], "train/loss"), 1.5)

    def follow(self, job_id, write):
        return SimpleNamespace(status=JobStatus.SUCCEEDED, driver_exit_code=0)


@pytest.fixture
def pipeline(tmp_path, monkeypatch):
    """Makes the pipeline of a sweep, and its jobs: overrides, the end of the name that is refused -> both."""
    monkeypatch.delenv(JOB_ID_VARIABLE, raising=False)
    monkeypatch.setattr(
        "ssl_sec.edges.submit.cluster.find_gcs_addresses", lambda: {"127.0.0.1:6379"}
    )  # a local cluster

    def make(*overrides, job="pretrain", refused=None):
        sent = SentJobs()
        if job == "pretrain":
            order = Order(job=job, overrides=("epochs=1", f"output_dir={tmp_path}", *overrides), then="probe", name="n")
        else:
            order = Order(job=job, overrides=overrides, name="n")
        submit_order(order, sent)
        plan = from_values(PipelinePlan, json.loads(sent.sent[0][-1]["plan.json"]))
        jobs = FakeJobs(f"sqlite:///{tmp_path}/mlflow.db", refused)
        return _Pipeline(plan, jobs, "job"), jobs

    return make


def test_each_run_of_a_sweep_over_data_sets_is_probed(pipeline, capsys):
    chains, jobs = pipeline("data=digits,cifar10")
    assert chains.run() == 0
    assert len(jobs.lines) == 4 and sum("ssl_sec probe" in line for line in jobs.lines) == 2
    assert capsys.readouterr().out.count("succeeded") >= 2


def test_a_chain_continues_and_shows_its_end_while_mlflow_is_away(pipeline, tmp_path, monkeypatch, capsys):
    chains, jobs = pipeline("experiment=digits")

    def away(uri):
        raise MlflowException("no answer")

    monkeypatch.setattr("ssl_sec.edges.submit.pipeline.connect_to_store", away)
    assert chains.run() == 0
    assert f"run={tmp_path}/digits/n" in jobs.lines[1]
    assert capsys.readouterr().out.splitlines()[-1].split() == ["n", "succeeded"]


def test_a_sweep_of_probes_shows_what_each_found(pipeline, tmp_path, capsys):
    chains, jobs = pipeline(f"run={tmp_path}/digits/it", "checkpoint=10,20", job="probe")
    assert chains.run() == 0
    assert [re.search(r"run=\S+ checkpoint=\d+", line)[0] for line in sorted(jobs.lines)] == [
        f"run={tmp_path}/digits/it checkpoint={steps}" for steps in (10, 20)
    ]
    assert not any("tracking.parent_run" in line for line in jobs.lines)
    assert capsys.readouterr().out.count("succeeded  1.5") == 2


def test_a_job_that_probes_itself_has_the_metrics_of_both_of_its_runs(pipeline):
    chains, jobs = pipeline("experiment=digits")
    for job in ("pretrain", "probe"):
        jobs.submit_beside("", "it", {"job_name": job, "recipe": "digits", "job": job}, parent="")
    assert chains._metrics_of("it") == {"train/loss": 1.5, "probe/top1": 1.5}


@pytest.mark.parametrize(
    ("job", "overrides", "label"),
    [
        ("finetune", ("experiment=digits_finetune", "seed=0,1"), "top-1 %"),
        ("metric_learning", ("experiment=digits_retrieval", "seed=0,1"), "Recall@1 %"),
    ],
)
def test_the_table_of_a_sweep_has_the_results_of_its_recipe(pipeline, tmp_path, capsys, job, overrides, label):
    chains, _ = pipeline(*overrides, f"output_dir={tmp_path}", job=job)
    assert chains.run() == 0
    shown = capsys.readouterr().out
    assert label in shown and shown.count("succeeded  1.5") == 2


def test_a_refused_point_leaves_a_table_of_the_others(pipeline, capsys):
    chains, jobs = pipeline("experiment=digits", "seed=0,1,2", "tracking.parent_run=above", refused="seed1")
    assert chains.run() == 1
    shown = capsys.readouterr().out
    assert "pretrain failed: the cluster refused the job" in shown
    assert len(jobs.lines) == 4
    (sweep,) = MlflowClient(jobs.client.tracking_uri).search_runs(
        [each.experiment_id for each in jobs.client.search_experiments()], "tags.job = 'sweep'"
    )
    assert sweep.info.status == "FAILED" and "refused" in sweep.data.tags["ended"]
    assert sweep.data.tags["mlflow.parentRunId"] == "above"


def test_an_unexpected_error_ends_the_sweep_with_its_table(pipeline, capsys, monkeypatch):
    chains, jobs = pipeline("experiment=digits", "seed=0,1")
    follow = jobs.follow

    def failing(job_id, write):
        if "-1-" in job_id:
            raise RuntimeError("Request failed with status code 500")
        return follow(job_id, write)

    monkeypatch.setattr(jobs, "follow", failing)
    assert chains.run() == 1
    assert "pretrain failed: Request failed with status code 500" in capsys.readouterr().out
    (sweep,) = MlflowClient(jobs.client.tracking_uri).search_runs(
        [each.experiment_id for each in jobs.client.search_experiments()], "tags.job = 'sweep'"
    )
    assert sweep.info.status == "FAILED"


@pytest.mark.parametrize(
    "failure", [pytest.param(RuntimeError("status code 404"), marks=pytest.mark.slow), ConnectionLost("no answer")]
)
def test_a_stop_reaches_all_stages_though_one_cannot_be_stopped_yet(pipeline, monkeypatch, failure):
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    chains, jobs = pipeline("experiment=digits", "seed=0,1,2")
    chains._running = {"one", "two", "three"}
    asked, failures = queue.Queue(), iter([failure])

    def request_stop(job_id):
        asked.put(job_id)
        for error in failures:
            raise error

    monkeypatch.setattr(jobs, "request_stop", request_stop)
    chains._stop_all()
    again = isinstance(failure, ConnectionLost)  # a job that the cluster does not know yet is stopped by its stage
    requests = [asked.get(timeout=30) for _ in range(3 + again)]
    assert set(requests) == {"one", "two", "three"}
    if again:
        assert requests.count(requests[0]) == 2


def test_a_stage_that_is_being_submitted_at_a_stop_is_stopped_then(pipeline, monkeypatch, capsys):
    chains, jobs = pipeline("experiment=digits")
    submit, stopped = jobs.submit_beside, queue.Queue()

    def submit_beside(line, job_id, metadata, parent):
        chains._stopping.set()
        submit(line, job_id, metadata, parent)

    def follow(job_id, write):
        assert stopped.get(timeout=30) == job_id
        return SimpleNamespace(status=JobStatus.STOPPED, driver_exit_code=None)

    monkeypatch.setattr(jobs, "submit_beside", submit_beside)
    monkeypatch.setattr(jobs, "request_stop", stopped.put)
    monkeypatch.setattr(jobs, "follow", follow)
    assert chains.run() == 130
    assert len(jobs.lines) == 1 and "stopped" in capsys.readouterr().out
