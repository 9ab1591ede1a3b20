"""Runs on Ray Train: two gloo workers on this machine, one Ray for all tests."""

import os
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train import ControllerError

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.cpu import ENVIRONMENT
from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.run.on_ray import joining
from ssl_sec.edges.run.on_ray.joining import connect
from ssl_sec.edges.run.on_ray.runtime import _death, _failure_of, _is_preempted, _join_again, _named_cluster
from ssl_sec.edges.run.signals import stop_requests
from ssl_sec.errors import ConfigError, DataError, Stopped, UserError
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.registry import PRETRAIN
from tests.edges.servers import QuietHandler, free_port, served
from tests.jobs import configured

KILLED = "killed by Ray because its node ran low on memory"
TWO_WORKERS = ("runtime=ray", "runtime.num_workers=2", "runtime.cpus_per_worker=1", "runtime.max_failures=0")


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine, with two CPUs whatever it has."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def config_of(*overrides: str) -> PretrainConfig:
    return configured("pretrain", overrides)


def train_workers() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if "RayTrainWorker" in " ".join(each.cmdline())]


@pytest.mark.parametrize("probed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.distributed
def test_two_workers_give_the_curve_of_one(cluster, quick, probed):
    exact = [*quick, "log_every_steps=1", "runtime.precision=float64", f"probe.enabled={probed}", "data.max_images=128"]
    two = run_training(PRETRAIN, config_of(*exact, *TWO_WORKERS, "run_name=zwölf"))  # Ray takes ASCII alone
    one = run_training(PRETRAIN, config_of(*exact, "runtime=local", "run_name=one"))
    for key in ("train/loss", "train/norm_std", "val/knn_top1", *(("probe/top1", "probe/loss") if probed else ())):
        assert two.metrics[key] == pytest.approx(one.metrics[key], rel=1e-8), key
    curves = [
        [record["metrics"]["train/loss"] for record in run.folder.records() if "train/loss" in record["metrics"]]
        for run in (one, two)
    ]
    assert len(curves[0]) == 4
    assert curves[1] == pytest.approx(curves[0], rel=1e-8)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_workers_data_error_reaches_the_user_unchanged(cluster, quick, tmp_path: Path):
    (tmp_path / "images").mkdir()  # a missing one would be an error before the workers start
    with pytest.raises(
        DataError, match=r"images: no images in it or below it; allowed: .*; data.root must hold"
    ) as caught:
        run_training(
            PRETRAIN,
            config_of("data=folder", f"data.root={tmp_path / 'images'}", f"output_dir={tmp_path}", *TWO_WORKERS),
        )
    assert caught.value.exit_code == 3


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stop_saves_on_all_workers(cluster, quick, monkeypatch):
    config = config_of(*quick, *TWO_WORKERS, "epochs=2000", "log_every_steps=1", "monitor.every_epochs=1000")
    config = replace(config, run_name="endless")
    figures = Path(config.output_dir) / "digits" / "endless" / "metrics.jsonl"

    def interrupt_once_it_trains() -> None:
        while not figures.exists() and waiting.is_set():
            done.wait(0.1)
        environments.extend(worker.environ() for worker in train_workers())
        signal.raise_signal(signal.SIGINT)

    environments: list[dict[str, str]] = []
    waiting, done = threading.Event(), threading.Event()
    waiting.set()
    thread = threading.Thread(target=interrupt_once_it_trains)
    thread.start()
    try:
        with pytest.raises(Stopped, match="resume it with: python -m jobs.pretrain resume=.*endless"):
            run_training(PRETRAIN, config)
    finally:
        waiting.clear()
        thread.join()
    (checkpoint,) = (figures.parent / "checkpoints").glob("step-*")
    assert int(checkpoint.name.removeprefix("step-")) >= 1
    assert [ENVIRONMENT.items() <= each.items() for each in environments] == [True, True]


def test_a_preemption_notice_is_seen_without_the_other_workers(monkeypatch):
    from ray.train import PreemptionInfo
    from ray.train.v2._internal.execution import context
    from ray.train.v2._internal.execution.preemption import PreemptionContext

    preemption = PreemptionContext()
    assert context.TrainContext.__dataclass_fields__["preemption_context"].type is PreemptionContext
    monkeypatch.setattr(context, "_train_context", SimpleNamespace(preemption_context=preemption))
    assert not _is_preempted()
    preemption.preemption_info = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"node": [1]})
    assert _is_preempted()


@pytest.fixture
def joined(monkeypatch):
    """Something that listens at the address of the joined cluster."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
        yield server


def stopped(folder: RunFolder, outcome: str | None) -> BaseException | None:
    """The failure of a run that is stopped while its controller waits without end."""
    is_over = threading.Event()
    folder.stop_path.touch()
    if outcome is not None:
        folder.write_outcome(outcome)
    try:
        return _failure_of(SimpleNamespace(fit=is_over.wait), folder)
    finally:
        is_over.set()


@pytest.mark.parametrize("outcome", [None, "finished"])
def test_a_stop_does_not_wait_for_workers_that_never_start_again(outcome, joined, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("ssl_sec.edges.run.on_ray.runtime._CONTROLLER_ENDS_WITHIN_S", 0.5)
    folder = RunFolder(tmp_path)
    assert stopped(folder, outcome) is None
    assert folder.outcome() == (outcome or "unsaved")


@pytest.mark.parametrize("outcome", [None, "stopped"])
def test_a_stop_does_not_wait_for_a_cluster_that_has_ended(outcome, joined, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(RunFolder, "is_training", True)
    joined.close()
    folder = RunFolder(tmp_path)
    assert stopped(folder, outcome) is None
    assert folder.outcome() == (outcome or "unsaved")


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (RayActorError(), "the process of Ray's controller died (killed by SIGKILL, or out of memory)"),
        (ControllerError(RayActorError()), "a worker died while the workers were started"),
        (
            OutOfMemoryError("low"),
            "the process of Ray's controller was killed by Ray because its node ran low on memory",
        ),
        (ControllerError(OutOfMemoryError("low")), "a worker was killed by Ray because its node ran low on memory"),
        (ControllerError(ValueError("bug")), None),
        (ValueError("bug"), None),
    ],
)
def test_deaths_after_which_the_workers_are_started_again(failure, expected):
    assert _death(failure) == expected


def test_an_address_without_a_cluster_is_one_line(monkeypatch):
    import ray

    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(ConfigError, match="runtime.address: no Ray cluster at 127.0.0.1:1"):
        connect("127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")
    with pytest.raises(ConfigError, match="RAY_ADDRESS: no Ray cluster at 127.0.0.1:2"):
        connect(None)


def test_a_run_keeps_its_handler_of_sigterm(cluster):
    """Ray's handler would end the process at once, before the workers have saved."""
    with stop_requests(lambda: None):
        ours = signal.getsignal(signal.SIGTERM)
        with _named_cluster():
            assert signal.getsignal(signal.SIGTERM) is ours


def test_a_run_has_its_name_in_the_dashboard(monkeypatch):
    import ray

    asked = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    connect(None, "mine")
    assert asked["job_config"].metadata == {"job_name": "mine"}


def test_a_cluster_of_this_machine_is_joined_while_it_runs(monkeypatch, tmp_path):
    import ray

    asked = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(joining, "_ANSWER_WITHIN_S", 0.2)  # the server never answers
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        connect(None)
        assert (asked["address"], asked["log_to_driver"]) == (address, True)
    connect(None)  # it was killed
    assert (asked["address"], asked["log_to_driver"]) == ("local", False)


def test_a_machine_on_which_ray_cannot_start_is_one_line(monkeypatch, tmp_path):
    import ray

    def time_out(**options):
        raise Exception("The current node timed out during startup. This could happen because of load.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", time_out)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(
        UserError, match=r"^Ray could not start on this machine \(The current node .* of load\); the same"
    ):
        connect(None)


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_cluster_is_joined_again_with_its_resources(is_alive, monkeypatch):
    """After the loss of a worker at its start; one that this process has started has ended meanwhile."""
    import ray

    asked = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0, "memory": 1e9}}])
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(joining, "_ANSWER_WITHIN_S", 0.2)  # the server never answers
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
        monkeypatch.setattr(ray, "shutdown", (lambda: None) if is_alive else server.close)
        _join_again(None, "mine")
    if is_alive:
        assert asked["address"] == address and "num_cpus" not in asked
    else:
        assert (asked["address"], asked["num_cpus"], asked["num_gpus"]) == ("local", 64, 8)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("has_dashboard", [True, False])
def test_the_state_of_a_run_is_requested_from_its_own_cluster(quick, monkeypatch, has_dashboard):
    """Ray ends the workers if the dashboard that it asks does not know the run's controller."""
    import ray

    if ray.is_initialized():
        ray.shutdown()
    asked = []

    class Other(QuietHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(500)

    port = free_port()
    if not has_dashboard:  # Ray names its port nonetheless, which the dashboard of another cluster takes later
        ray.init("local", num_cpus=1, include_dashboard=False, dashboard_port=port, log_to_driver=False)
    with served(Other, port) as address:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address if has_dashboard else "")
        run_training(PRETRAIN, config_of(*quick, *TWO_WORKERS, "runtime.num_workers=1", "epochs=20"))
        ray.shutdown()
    assert not asked
    assert os.environ["RAY_API_SERVER_ADDRESS"] == (address if has_dashboard else "")
