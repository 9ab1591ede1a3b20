"""A cluster of several nodes, on this machine: nodes that are lost, that join and that are announced to leave."""

import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
import torch
from mlflow.tracking import MlflowClient
from ray.cluster_utils import Cluster

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.run.on_ray.runtime import run_with_ray
from ssl_sec.edges.run.spec import RunSpec
from ssl_sec.edges.tracking.deferred import DeferredRun
from ssl_sec.errors import ConfigError, StorageError
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.settings import to_values
from tests.edges.run.faulty import Once, config_of, figures, folder_of, in_one_process, messages, steps_so_far
from tests.edges.servers import mlflow_server

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

EXACT = ("runtime.precision=float64", "probe.enabled=false")
ELASTIC = (*EXACT, "runtime.num_workers=[1,2]", "runtime.start_timeout_s=5", "runtime.resize_interval_s=1")
# Small steps, so that rounding does not grow over many of them; nothing is saved at the end of an epoch.
ENDLESS = (*ELASTIC, "epochs=3000", "optimiser.learning_rate=0.0001", "monitor.every_epochs=3000")
ENDLESS = (*ENDLESS, "checkpoint.every_epochs=3000")


@pytest.fixture
def cluster(monkeypatch, tmp_path_factory):
    """One node with one CPU, which runs the driver; tests add others."""
    monkeypatch.chdir(tmp_path_factory.mktemp("nodes"))
    monkeypatch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.5")
    # Concurrent tests would join it.
    monkeypatch.setattr("ray._private.utils.write_ray_address", lambda address: None)
    health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": health}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> RunFolder:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("whole")
    run_training(PRETRAIN, in_one_process(config_of(folder)))
    return folder_of(folder)


def assert_the_same_curve(run: RunFolder, other: RunFolder, steps: int) -> None:
    curves = [{(step, name): value for step, name, value in figures(each) if step < steps} for each in (run, other)]
    assert len(curves[0]) >= steps
    assert curves[0] == pytest.approx(curves[1], rel=1e-8)


def groups(run: RunFolder) -> list[set[str]]:
    """The nodes of each group of workers, in the order of their starts."""
    found, left = [], 0
    for worker in run.workers():
        if left == 0:
            found.append(set())
            left = worker["world_size"]
        found[-1].add(worker["node"])
        left -= 1
    return found


def test_workers_on_two_nodes_give_the_curve_of_one_process(cluster, whole, tmp_path):
    cluster.add_node(num_cpus=1)
    run_training(PRETRAIN, config_of(tmp_path, *EXACT))
    run = folder_of(tmp_path)
    assert [len(nodes) for nodes in groups(run)] == [2]
    assert_the_same_curve(run, whole, 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds a GPU here")
def test_a_node_whose_gpu_pytorch_does_not_find_ends_the_run_in_one_line(cluster, tmp_path):
    cluster.add_node(num_cpus=1, num_gpus=1)
    with pytest.raises(ConfigError, match="^runtime.device: Ray has GPUs on the node .*, but PyTorch finds none there"):
        run_training(PRETRAIN, config_of(tmp_path, *EXACT, "runtime.num_workers=1"))
    assert groups(folder_of(tmp_path)) == []


@pytest.mark.parametrize("num_workers", [2, "[2,2]"])
def test_workers_wait_for_the_nodes_of_a_cluster_that_grows(cluster, whole, tmp_path, num_workers):
    growing = (*EXACT, "runtime.wait_for_nodes=true", "runtime.device=cpu", "runtime.start_timeout_s=5")
    config, run = config_of(tmp_path, *growing, f"runtime.num_workers={num_workers}"), folder_of(tmp_path)

    def is_waiting() -> bool:
        return run.metrics_path.exists() and "the cluster has 1 CPU, and the workers need 2" in messages(run)

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(run_training, PRETRAIN, config)
        with Once(lambda: is_waiting() or training.done(), lambda: None) as waiting:
            waiting.join(90)
        cluster.add_node(num_cpus=1)
        training.result(120)
    assert [len(nodes) for nodes in groups(run)] == [2]
    assert_the_same_curve(run, whole, 8)


def test_a_lost_node_leaves_a_run_on_the_others(cluster, whole, tmp_path):
    lost = cluster.add_node(num_cpus=1)
    run = folder_of(tmp_path)
    with Once(lambda: steps_so_far(run) >= 3, lambda: cluster.remove_node(lost, allow_graceful=False)) as losing:
        run_training(PRETRAIN, config_of(tmp_path, *ELASTIC))
    assert losing.happened
    before, *_, after = groups(run)  # Ray may start a group on the lost node before it notices
    assert len(before) == 2 and len(after) == 1 and after < before
    assert re.search(
        r"the workers are started again \(failure 1 of 3 since the checkpoint of step [246]\)", messages(run)
    )
    assert_the_same_curve(run, whole, 8)


def in_the_background(config) -> threading.Thread:
    """The run in a thread; the test stops it, so Stopped is expected."""

    def go() -> None:
        with pytest.raises(Exception, match="stopped; resume it with"):
            run_training(PRETRAIN, config)

    thread = threading.Thread(target=go)
    thread.start()
    return thread


def wait_for(condition, thread: threading.Thread, timeout_s: float = 90) -> None:
    with Once(condition, lambda: None) as event:
        event.join(timeout_s)
    assert event.happened and thread.is_alive()


def stopped_after(steps: int, folder: Path) -> RunFolder:
    """The endless run on one process, for at least this many steps."""
    run = folder_of(folder)
    with (
        Once(lambda: steps_so_far(run) >= steps, run.stop_path.touch),
        pytest.raises(Exception, match="stopped; resume it with"),
    ):
        run_training(PRETRAIN, in_one_process(config_of(folder, *ENDLESS)))
    return run


def test_a_node_that_joins_is_used_without_losing_a_step(cluster, tmp_path):
    run = folder_of(tmp_path)
    thread = in_the_background(config_of(tmp_path, *ENDLESS))
    wait_for(lambda: steps_so_far(run) >= 3, thread)
    cluster.add_node(num_cpus=1)
    wait_for(lambda: len(run.workers()) == 3, thread)
    saved = run.newest_step()
    wait_for(lambda: steps_so_far(run) > saved + 3, thread)
    run.stop_path.touch()
    thread.join()
    assert [len(nodes) for nodes in groups(run)] == [1, 2]
    assert "the cluster has changed: from 1 to 2 workers" in messages(run)
    assert f"resuming after step {saved} of 6000 on 2 workers" in messages(run)
    assert not run.save_path.exists()
    assert_the_same_curve(run, stopped_after(saved + 3, tmp_path / "one"), saved + 3)


def test_mlflow_shows_each_node_of_a_run_while_it_takes_part(cluster, tmp_path, monkeypatch):
    """On a server, to which only the driver connects."""
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "1")
    store = ("--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--workers", "1")
    with mlflow_server("server", *store, log=tmp_path / "server.log") as address:
        run, client = folder_of(tmp_path), MlflowClient(address)
        more = ("tracking.system_metrics=true", f"tracking.uri={address}")
        thread = in_the_background(config_of(tmp_path, *ENDLESS, *more))

        def samples() -> dict[str, int]:
            """The number of CPU samples by node; the driver's node has no name."""
            time.sleep(0.5)
            names = [
                key for key in client.get_run(run.run_id).data.metrics if key.endswith("cpu_utilization_percentage")
            ]
            return {
                name.removeprefix("system/").rpartition("/")[0]: len(client.get_metric_history(run.run_id, name))
                for name in names
            }

        wait_for(lambda: steps_so_far(run) >= 3 and run.run_id is not None, thread)
        wait_for(lambda: samples().get("", 0) >= 3, thread)
        assert set(samples()) == {""}
        joined = cluster.add_node(num_cpus=1)
        name = f"{socket.gethostname()}-{joined.node_id[:6]}"
        wait_for(lambda: samples().get(name, 0) >= 3, thread)
        assert set(samples()) == {"", name}
        cluster.remove_node(joined, allow_graceful=False)
        wait_for(lambda: len(run.workers()) == 4, thread)
        at_the_loss = samples()
        wait_for(lambda: samples()[""] > at_the_loss[""] + 5, thread)
        assert samples()[name] <= at_the_loss[name] + 1
        run.stop_path.touch()
        thread.join()
        assert not any(each.name in ("node-monitor", "SystemMetricsMonitor") for each in threading.enumerate())
    assert "figures of the machine" not in messages(run)


def drain(cluster, node_id: str, seconds: int) -> None:
    """Drains a node, as a cloud's notice does."""
    command = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", cluster.address]
    command += ["--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", "the spot machine is taken away", "--deadline-remaining-seconds", str(seconds)]
    subprocess.run(command, check=True, capture_output=True)


def test_an_announced_node_loss_loses_no_step_and_is_no_failure(cluster, tmp_path):
    cluster.add_node(num_cpus=1)
    run = folder_of(tmp_path)
    thread = in_the_background(config_of(tmp_path, *ENDLESS, "runtime.max_failures=0"))
    wait_for(lambda: steps_so_far(run) >= 3, thread)
    assert run.newest_step() is None
    head = ray.get_runtime_context().get_node_id()
    (leaving,) = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != head]
    drain(cluster, leaving, 5)
    wait_for(lambda: run.newest_step() is not None, thread)
    wait_for(lambda: len(run.workers()) == 3, thread)
    saved = run.newest_step()
    wait_for(lambda: steps_so_far(run) > saved + 3, thread)
    run.stop_path.touch()
    thread.join()
    assert [len(nodes) for nodes in groups(run)] == [2, 1]
    assert "a machine of this run is about to be preempted" in messages(run)
    assert f"resuming after step {saved} of 6000 on 1 worker" in messages(run)
    assert_the_same_curve(run, stopped_after(saved + 3, tmp_path / "one"), saved + 3)


def test_a_folder_that_not_all_nodes_share_is_one_line(cluster, tmp_path):
    """A path under the working directory of each process is another folder in each: Ray gives each worker its own."""
    run = RunFolder(Path("/proc/self/cwd/it"))
    config = config_of(tmp_path, "runtime.num_workers=1")
    run.start(to_values(config))
    spec = RunSpec(recipe=PRETRAIN, config=config, folder=run, identity=RunIdentity(tags={"recipe": "digits"}))
    with pytest.raises(StorageError, match="^output_dir: /proc/self/cwd/it on .* is not the folder that the driver"):
        run_with_ray(spec, DeferredRun(spec.identity, {}, run))
