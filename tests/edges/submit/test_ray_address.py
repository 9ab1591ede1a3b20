"""Where `jobs.submit` looks for a cluster, and what it says if there is none; no cluster is needed."""

import asyncio
import json
import socket
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.job_submission import JobStatus, JobSubmissionClient

from ssl_sec.edges import patience
from ssl_sec.edges.run import uploading
from ssl_sec.edges.storage import bucket, checkpoints
from ssl_sec.edges.submit import cluster as ray_jobs
from ssl_sec.edges.submit.cluster import Cluster, ConnectionLost
from ssl_sec.edges.submit.command import submit
from ssl_sec.errors import ConfigError
from tests.edges.servers import QuietHandler, free_port


class Dashboard(QuietHandler):
    """Answers as Ray's job server does while it has no jobs."""

    def do_GET(self) -> None:
        answer = [] if self.path.startswith("/api/jobs") else {"ray_version": ray.__version__}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def dashboard():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Dashboard)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def no_address(monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)


def address_of(server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.mark.parametrize("scheme", ["", "http://", "ray://"])
def test_a_stale_address_of_the_environment_is_one_line_at_once(scheme, monkeypatch):
    address = f"{scheme}127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=rf"no Ray cluster at {address} \(Connection refused\); start one with"):
        submit(["list"])


def test_a_proxy_that_cannot_reach_the_cluster_is_named(monkeypatch):
    for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(
        ConfigError, match=r"refused\); it was asked through the proxy .*; no_proxy=head asks it directly;"
    ):
        submit(["list", "--address", "http://head:8265"])


def test_the_address_of_a_cluster_that_was_killed_is_one_line_at_once(monkeypatch):
    last = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr(ray_jobs, "canonicalize_bootstrap_address_or_die", lambda asked: last)
    with pytest.raises(ConfigError, match=rf"no Ray cluster at {last} \(Connection refused\)"):
        submit(["list"])


def test_a_port_that_never_answers_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(ray_jobs, "_ANSWER_WITHIN_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ConfigError, match=r"no Ray cluster at .* \(no answer within 0.2 s\)"),
    ):
        submit(["list", "--address", f"http://127.0.0.1:{silent.getsockname()[1]}"])


def test_the_command_lines_address_overrides_the_environments(dashboard, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", f"http://127.0.0.1:{free_port()}")
    assert submit(["list", "--address", address_of(dashboard)]) == 0
    assert capsys.readouterr().out == "no jobs\n"


def test_secrets_in_the_output_of_a_job_are_hidden(dashboard, monkeypatch, capsys):
    details = SimpleNamespace(status=JobStatus.FAILED, message="at http://ada:geheim@host", submission_id="mine")
    details.start_time, details.end_time, details.metadata = 0, 0, {}
    monkeypatch.setattr(Cluster, "details", lambda self, job_id: details)
    monkeypatch.setattr(JobSubmissionClient, "get_job_logs", lambda self, job_id: "to http://ada:geheim@host\n")
    for verb in ("logs", "status"):
        assert submit([verb, "mine", "--address", address_of(dashboard)]) == 0
        assert "http://***@host" in (output := capsys.readouterr().out) and "geheim" not in output


def test_a_cluster_lost_while_following_is_one_line(dashboard, monkeypatch):
    monkeypatch.setattr(ray_jobs, "_LOST_FOR_S", 0.0)
    monkeypatch.setattr(ray_jobs, "_POLL_S", 0.0)
    cluster = Cluster(address_of(dashboard))
    assert cluster.jobs() == []
    dashboard.shutdown()
    dashboard.server_close()
    with pytest.raises(ConnectionLost, match=r"no longer answers \(Connection refused\); a job may still run"):
        cluster.jobs()
    with pytest.raises(ConnectionLost):
        cluster.follow("mine", print)


def test_a_connection_lost_after_a_long_output_is_tried_again(dashboard, monkeypatch):
    monkeypatch.setattr(ray_jobs, "_LOST_FOR_S", 0.5)
    monkeypatch.setattr(ray_jobs, "_POLL_S", 0.0)
    answers = iter([500, 404])

    async def output(self, job_id):
        await asyncio.sleep(0.6)
        yield "epoch 1\n"

    def details(self, job_id):
        raise RuntimeError(f"Request failed with status code {next(answers)}: no answer.")

    monkeypatch.setattr(JobSubmissionClient, "tail_job_logs", output)
    monkeypatch.setattr(JobSubmissionClient, "get_job_info", details)
    with pytest.raises(ConnectionLost, match="was started again"):
        Cluster(address_of(dashboard)).follow("mine", lambda text: None)


def test_a_cluster_that_was_started_again_while_following_is_no_mistake_of_the_user(dashboard, monkeypatch):
    async def output(self, job_id):
        yield "python: /usr/bin/python\n"

    def details(self, job_id):
        raise RuntimeError("Request failed with status code 404: no such job.")

    monkeypatch.setattr(JobSubmissionClient, "tail_job_logs", output)
    monkeypatch.setattr(JobSubmissionClient, "get_job_info", details)
    with pytest.raises(ConnectionLost, match="was started again and no longer knows mine; its run can be resumed: "):
        Cluster(address_of(dashboard)).follow("mine", lambda text: None)


def test_only_a_404_makes_a_job_unknown(dashboard, monkeypatch):
    monkeypatch.setattr(ray_jobs, "_POLL_S", 0.0)
    answers = iter([500, 503, 404])

    def details(self, job_id):
        raise RuntimeError(f"Request failed with status code {next(answers)}: no answer.")

    monkeypatch.setattr(JobSubmissionClient, "get_job_info", details)
    cluster = Cluster(address_of(dashboard))
    with pytest.raises(ConfigError, match="job: found 'mine', which .* does not know; newest jobs: there are none"):
        cluster.follow("mine", print)
    assert next(answers, None) is None


def test_a_stopped_job_may_take_as_long_as_its_last_upload_and_mlflow_do():
    waits_s = (checkpoints._END_WITHIN_S, bucket.ANSWER_S, bucket.ANSWER_S, patience.ANSWER_S, uploading._END_S)
    assert ray_jobs._STOP_WITHIN_S > sum(waits_s) + 60


@pytest.mark.parametrize(
    ("method", "ask"), [("list_jobs", Cluster.jobs), ("stop_job", lambda cluster: cluster.request_stop("mine"))]
)
def test_a_cluster_that_is_too_busy_to_list_or_stop_jobs_is_one_line(dashboard, monkeypatch, method, ask):
    def busy(self, *arguments):
        raise RuntimeError("Request failed with status code 500: Traceback\nGCS timed out.")

    monkeypatch.setattr(JobSubmissionClient, method, busy)
    with pytest.raises(ConnectionLost, match=r"no longer answers \(Request failed with status code 500: Traceback\)"):
        ask(Cluster(address_of(dashboard)))


@pytest.mark.parametrize(
    ("running", "is_here"),
    [
        ({"127.0.0.1:6379"}, True),
        ({"127.0.1.1:6379"}, True),
        (set(), False),
        ({"192.0.2.3:6379"}, False),  # in a container here, or a node here of another machine's cluster
    ],
)
def test_the_published_port_of_a_container_or_of_another_machine_is_not_this_machine(running, is_here, monkeypatch):
    monkeypatch.setattr(ray_jobs, "find_gcs_addresses", lambda: running)
    assert {ray_jobs.is_this_machine(f"http://{host}:8265") for host in ("127.0.0.1", "localhost")} == {is_here}
    assert not any(ray_jobs.is_this_machine(f"http://{host}:8265") for host in ("10.0.0.1", "127.0.0.1.example.org"))


def test_a_job_on_this_machine_finds_the_python_that_sent_it_first(dashboard, monkeypatch):
    monkeypatch.setattr(ray_jobs, "find_gcs_addresses", lambda: {"127.0.0.1:6379"})
    sent = {}
    monkeypatch.setattr(JobSubmissionClient, "submit_job", lambda self, **job: sent.update(job))
    Cluster(address_of(dashboard)).submit("exec python", "mine", {"job_name": "mine"}, {"A": "1"}, {"plan.json": "{}"})
    assert sent["runtime_env"]["env_vars"]["PATH"] == f"{Path(sys.executable).parent}:${{PATH}}"
    assert (sent["runtime_env"]["env_vars"]["A"], sent["metadata"]) == ("1", {"job_name": "mine"})
