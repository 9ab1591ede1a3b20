"""The utilisation of a run's nodes, which comes from Ray's pages."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.on_ray import nodes
from ssl_sec.edges.run.on_ray.nodes import NodeMonitor, describe_cluster, metrics_pages, utilisation
from ssl_sec.edges.tracking.deferred import DeferredRun
from tests.edges.servers import QuietHandler, free_port, served

PAGE = """\
# HELP ray_node_cpu_utilization Total CPU usage on a ray node
# TYPE ray_node_cpu_utilization gauge
ray_node_cpu_utilization{IsHeadNode="false",ip="10.0.0.2"} 86.7
ray_node_mem_used{ip="10.0.0.2"} 4e+09
ray_node_mem_total{ip="10.0.0.2"} 1.6e+10
ray_node_disk_utilization_percentage{ip="10.0.0.2"} 28.68
ray_node_disk_usage{ip="10.0.0.2"} 3.1e+10
ray_node_disk_free{ip="10.0.0.2"} 7.7e+10
ray_node_network_sent{ip="10.0.0.2"} 3e+06
ray_node_network_received{ip="10.0.0.2"} 5e+06
ray_node_gpus_utilization{GpuDeviceName="NVIDIA H100",GpuIndex="0",ip="10.0.0.2"} 97.0
ray_node_gpus_utilization{GpuDeviceName="NVIDIA H100",GpuIndex="1",ip="10.0.0.2"} 12.0
ray_node_gram_used{GpuDeviceName="NVIDIA H100",GpuIndex="0",ip="10.0.0.2"} 20000.0
ray_node_gram_available{GpuDeviceName="NVIDIA H100",GpuIndex="0",ip="10.0.0.2"} 60000.0
ray_node_gpu_power_milliwatts{GpuDeviceName="NVIDIA H100",GpuIndex="0",ip="10.0.0.2"} 512345.0
ray_tasks{State="RUNNING"} 3.0
"""


def test_a_page_of_ray_is_read_in_mlflows_names_and_units():
    assert utilisation(PAGE) == {
        "cpu_utilization_percentage": 86.7,
        "system_memory_usage_megabytes": 4000.0,
        "system_memory_usage_percentage": 25.0,
        "disk_usage_percentage": 28.7,
        "disk_usage_megabytes": 31000.0,
        "disk_available_megabytes": 77000.0,
        "network_receive_megabytes": 5.0,
        "network_transmit_megabytes": 3.0,
        "gpu_0_utilization_percentage": 97.0,
        "gpu_0_memory_usage_megabytes": 20971.5,
        "gpu_0_memory_usage_percentage": 25.0,
        "gpu_0_power_usage_watts": 512.3,
        "gpu_1_utilization_percentage": 12.0,
    }
    assert utilisation("ray_tasks 3.0\n") == {}


def test_the_names_are_those_of_mlflow():
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor("0" * 32, tracking_uri="http://127.0.0.1:1")
    monitor.collect_metrics()
    assert {name for name in utilisation(PAGE) if not name.startswith("gpu")} == {
        name for name in monitor.aggregate_metrics() if not name.startswith("gpu")
    }


def node(number: int, host: str, alive: bool = True) -> dict:
    return {
        "NodeID": str(number) * 56,
        "NodeManagerHostname": host,
        "NodeManagerAddress": f"10.0.0.{number}",
        "MetricsExportPort": 8080,
        "Alive": alive,
    }


def test_the_nodes_of_the_newest_workers_are_read_and_each_once(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    found = [node(1, "head"), node(2, "a"), node(3, "b"), node(4, "b"), node(5, "lost", alive=False), node(6, "other")]
    monkeypatch.setattr(nodes.ray, "nodes", lambda: found)
    assert metrics_pages(folder, "1" * 56) == {}
    for rank, number in enumerate((1, 2, 2, 5, 6)):
        folder.log_worker(rank, 5, f"host {str(number) * 56}")
    assert set(metrics_pages(folder, "1" * 56)) == {"a", "other"}
    for rank, number in enumerate((1, 2, 2, 3)):
        folder.log_worker(rank, 4, f"host {str(number) * 56}")
    assert metrics_pages(folder, "1" * 56) == {
        "a": "http://10.0.0.2:8080/metrics",
        "b-333333": "http://10.0.0.3:8080/metrics",
    }


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ([{"CPU": 2.0}], "1 node, 2 CPUs, Ray 2.60.0"),
        (
            [{"CPU": 4.0}]
            + 2 * [{"CPU": 8.0, "GPU": 2.0, "accelerator_type:H100": 1.0}]
            + [{"CPU": 8.0, "GPU": 1.0, "accelerator_type:A100": 1.0}],
            "4 nodes, 28 CPUs, 5 GPUs (1 A100, 4 H100), Ray 2.60.0",
        ),
        ([{"CPU": 1.0, "GPU": 1.0}], "1 node, 1 CPU, 1 GPU, Ray 2.60.0"),
    ],
)
def test_a_cluster_is_described_in_words(monkeypatch, resources, expected):
    found = [{**node(number, "host"), "Resources": each} for number, each in enumerate(resources)]
    lost = {**node(9, "lost", alive=False), "Resources": {"CPU": 64.0}}
    monkeypatch.setattr(nodes.ray, "nodes", lambda: [*found, lost])
    monkeypatch.setattr(nodes.ray, "__version__", "2.60.0")
    monkeypatch.setattr(nodes, "get_dashboard_url", lambda: None)
    assert describe_cluster() == expected
    monkeypatch.setattr(nodes, "get_dashboard_url", lambda: "head:8265")
    job = SimpleNamespace(get_job_id=lambda: "02000000")
    monkeypatch.setattr(nodes.ray, "get_runtime_context", lambda: job)
    assert describe_cluster() == f"{expected}, [job in the dashboard](http://head:8265/#/jobs/02000000)"


@contextmanager
def page_of_a_node(text: list[str]) -> Iterator[str]:
    """The address of a page with this text, which may change."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text[0].encode())

    with served(Handler) as address:
        yield f"{address}/metrics"


def samples_of(pages: dict[str, str], logged: list, count: int) -> NodeMonitor:
    """A monitor that has logged this many samples."""
    monitor = NodeMonitor(lambda: pages, logged.append, 0.02)
    monitor.start()
    deadline = time.monotonic() + 20
    while len(logged) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return monitor


def test_nodes_are_followed_while_they_come_and_go_and_the_network_counts_from_the_start(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which is not asked
    text, logged = [PAGE], []
    with page_of_a_node(text) as address:
        pages = {"a": address}
        monitor = samples_of(pages, logged, 2)
        assert logged[0]["system/a/cpu_utilization_percentage"] == 86.7
        assert logged[0]["system/a/network_receive_megabytes"] == 0
        text[0] = PAGE.replace("5e+06", "9e+06")
        pages["b"] = address
        while "system/b/cpu_utilization_percentage" not in logged[-1]:
            time.sleep(0.01)
        assert logged[-1]["system/a/network_receive_megabytes"] == 4
        del pages["a"]
        while "system/a/cpu_utilization_percentage" in logged[-1]:
            time.sleep(0.01)
        monitor.close()
    assert not monitor.is_alive()


def test_a_node_that_never_answers_is_one_warning_and_the_others_are_followed(caplog):
    caplog.set_level(logging.WARNING)
    logged = []
    away = f"http://127.0.0.1:{free_port()}/metrics"
    with page_of_a_node([PAGE]) as address:
        monitor = samples_of({"away": away, "gone": away, "a": address}, logged, 8)
        monitor.close()
    assert logged and all("system/a/cpu_utilization_percentage" in metrics for metrics in logged)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"MLflow gets no metrics of the machine away: {away} cannot be read from here"
    )


def test_an_unreachable_store_ends_nothing(monkeypatch):
    calls, answers = [], threading.Event()

    def fail(metrics: object) -> None:
        calls.append(metrics)
        if len(calls) > 3:
            answers.wait(30)
        raise OSError("MLflow is away")

    monkeypatch.setattr(nodes, "_END_WITHIN_S", 0.2)
    with page_of_a_node([PAGE]) as address:
        monitor = NodeMonitor(lambda: {"a": address}, fail, 0.01)
        monitor.start()
        while len(calls) < 4:
            assert monitor.is_alive()
        started = time.monotonic()
        monitor.close()
        assert time.monotonic() - started < 5
        answers.set()
        monitor.join(10)
        assert not monitor.is_alive()


def test_without_system_metrics_no_node_is_followed(tmp_path: Path, monkeypatch):
    tracking = DeferredRun(RunIdentity(), {}, RunFolder(tmp_path), system_metrics=False)
    monkeypatch.setattr(nodes, "NodeMonitor", SimpleNamespace)  # is not made
    with nodes.followed_nodes(RunFolder(tmp_path), tracking):
        assert tracking.machine_interval_s is None
    assert DeferredRun(RunIdentity(), {}, RunFolder(tmp_path), system_metrics=True).machine_interval_s == 10
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "2")
    assert DeferredRun(RunIdentity(), {}, RunFolder(tmp_path), system_metrics=True).machine_interval_s == 2


def test_the_utilisation_is_logged_by_samples_since_the_run_began_and_is_no_step_of_training(tmp_path: Path):
    identity = RunIdentity(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="e", name="it")
    folder = RunFolder(tmp_path / "it")
    folder.start({})
    tracking = DeferredRun(identity, {}, folder, system_metrics=True)
    tracking.log_machines({"system/a/cpu_utilization_percentage": 1.0})  # not connected yet: dropped
    run = tracking.connect()
    created = run.client.get_run(run.run_id).info.start_time / 1000
    run._created_ms = int((created - 100) * 1000)
    tracking.log_machines({"system/a/cpu_utilization_percentage": 50.0})
    (point,) = run.client.get_metric_history(run.run_id, "system/a/cpu_utilization_percentage")
    assert (point.value, point.step) == (50.0, 10)
    run([{"step": 3, "metrics": {"train/loss": 1.0}}])
    reopened = type(run).reopen(identity.uri, run.run_id)
    assert reopened is not None and reopened._newest_step == {"train/loss": 3}
