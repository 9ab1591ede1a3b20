"""When a failing run ends, and how many workers an elastic one has, without a cluster."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train import ScalingConfig
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision, ResizeDecision

from ssl_sec.data.samplers import worker_counts
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.on_ray import policies
from ssl_sec.edges.run.on_ray.network import use_network_of
from ssl_sec.edges.run.on_ray.policies import (
    ElasticPolicy,
    FailureWatch,
    GPUCheck,
    NetworkOfNodes,
    TrainingWatch,
    count_failure,
    record_failures,
    recorded_failures,
)
from ssl_sec.edges.storage.bucket import RefusedError
from ssl_sec.errors import ConfigError, DataError, StorageError, UserError
from ssl_sec.gpus import why_no_gpu
from tests.edges.run.faulty import messages

TIMED_OUT = RuntimeError("Timed out waiting 600000ms for recv operation to complete")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.start({})
    return folder


def save(folder: RunFolder, step: int) -> None:
    (folder.checkpoints_path / f"step-{step:09d}").mkdir(parents=True)


def raised(error: Exception):
    raise error


def failed(watch: FailureWatch, **errors: Exception) -> None:
    watch.after_exception(None, {int(rank.removeprefix("w")): error for rank, error in errors.items()})


def test_failures_are_counted_since_the_newest_checkpoint(folder):
    watch = FailureWatch(folder, max_failures=2)
    error = RuntimeError("out of luck")
    failed(watch, w1=error)
    failed(watch, w1=error)
    save(folder, 5)
    for _ in range(2):
        failed(watch, w1=error)
    save(folder, 10)
    for _ in range(2):
        failed(watch, w1=error)
    with pytest.raises(UserError, match="^worker 1: out of luck; 3 failures since the checkpoint of step 10, "):
        failed(watch, w1=error)
    found = messages(folder)
    assert "worker 1: out of luck; the workers are started again (failure 2 of 2 without a checkpoint)" in found
    assert "(failure 1 of 2 since the checkpoint of step 5)" in found


def test_deaths_while_the_workers_were_started_count_until_the_next_checkpoint(folder):
    save(folder, 5)
    record_failures(folder, folder.newest_step(), 1)
    watch = FailureWatch(folder, max_failures=1)
    with pytest.raises(UserError, match="2 failures since the checkpoint of step 5"):
        failed(watch, w0=RuntimeError("again"))
    save(folder, 6)
    failed(watch, w0=RuntimeError("again"))
    assert "(failure 1 of 1 since the checkpoint of step 6)" in messages(folder)


def test_the_driver_and_the_controller_count_together(folder):
    assert recorded_failures(folder, folder.newest_step()) == 0
    save(folder, 5)
    watch = FailureWatch(folder, max_failures=3)
    failed(watch, w0=RuntimeError("again"))
    assert recorded_failures(folder, folder.newest_step()) == 1
    record_failures(folder, folder.newest_step(), 2)  # a death while the workers were started
    failed(watch, w0=RuntimeError("again"))
    assert recorded_failures(folder, folder.newest_step()) == 3
    save(folder, 6)
    assert recorded_failures(folder, folder.newest_step()) == 0


def test_a_failure_is_described_and_recorded_and_one_too_many_is_refused(folder):
    assert count_failure(folder, -1, "lost") == "failure 1 without a checkpoint"
    save(folder, 5)
    record_failures(folder, folder.newest_step(), 1)
    assert count_failure(folder, 2, "lost") == "failure 2 of 2 since the checkpoint of step 5"
    with pytest.raises(UserError, match=r"^lost; 3 failures since .* step 5, runtime.max_failures allows 2; see x$"):
        count_failure(folder, 2, "lost", "; see x")
    assert recorded_failures(folder, folder.newest_step()) == 3


def test_a_failure_while_the_storage_is_away_counts_as_one_without_a_newer_checkpoint(folder, monkeypatch):
    save(folder, 5)
    watch = FailureWatch(folder, max_failures=2)
    failed(watch, w0=RuntimeError("once"))
    with monkeypatch.context() as away:
        away.setattr(RunFolder, "newest_step", lambda self: raised(StorageError("connection refused")))
        failed(watch, w0=RuntimeError("again"))
        away.setattr(RunFolder, "newest_step", lambda self: raised(RefusedError("Access Denied")))
        with pytest.raises(RefusedError):
            failed(watch, w0=RuntimeError("again"))
    assert "worker 0: again; the workers are started again (failure 2 of 2 without a checkpoint that " in messages(
        folder
    )
    save(folder, 6)
    assert recorded_failures(folder, folder.newest_step()) == 0


def test_without_a_limit_no_run_ends_and_with_limit_0_the_first_failure_ends_it(folder):
    watch = FailureWatch(folder, max_failures=-1)
    for _ in range(20):
        failed(watch, w0=RuntimeError("again"))
    assert "(failure 20 without a checkpoint)" in messages(folder)
    record_failures(folder, folder.newest_step(), 0)  # as a new process does
    with pytest.raises(UserError, match="1 failure without a checkpoint, runtime.max_failures allows 0"):
        failed(FailureWatch(folder, max_failures=0), w0=RuntimeError("once"))


def test_user_errors_end_the_run_with_their_message(folder):
    with pytest.raises(DataError, match="^no such folder$"):
        failed(FailureWatch(folder, max_failures=5), w0=RuntimeError("lost"), w1=DataError("no such folder"))


def test_a_crash_is_reported_with_its_signal_and_line(folder):
    folder.crash_path(1).write_text("Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 ...\n")
    with pytest.raises(
        UserError, match="^worker 1: its process was killed by SIGSEGV, a crash in native code; .*crash-1.txt; 1 fail"
    ):
        failed(FailureWatch(folder, max_failures=0), w1=RayActorError(error_msg="The actor died unexpectedly."))


def test_nccls_abort_of_the_workers_that_wait_names_the_one_that_does_not_respond(folder, monkeypatch):
    monkeypatch.setattr(policies, "_GRACE_S", 0.0)
    for rank in range(4):
        folder.add_worker({"rank": rank, "world_size": 4, "pid": 100 + rank})
    for rank in (0, 2, 3):  # worker 3 has crashed too, and Ray has not noticed yet
        folder.crash_path(rank).write_text("Fatal Python error: Aborted\n")
    died = RayActorError(error_msg="The actor died unexpectedly.")
    failed(FailureWatch(folder, max_failures=1), w0=died, w2=died)
    silent = "worker 1: has logged no error: it does not respond, or waited for the others; the workers are started"
    assert silent in messages(folder) and "worker 3" not in messages(folder)
    assert messages(folder).count("killed by SIGABRT") == 2


def test_a_connection_broken_by_a_lost_node_is_told_without_gloos_advice(folder):
    gloo = RuntimeError(
        "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [10.0.0.5]:26836: Connection reset "
        "by peer. This is typically caused by a remote worker hanging or bugs in the application. GLHF!"
    )
    failed(FailureWatch(folder, max_failures=3), w1=gloo)
    assert "worker 1: Read error [10.0.0.5]:26836: Connection reset by peer; the workers are" in messages(folder)


def test_a_death_is_reported_without_the_broken_connections_it_causes(folder):
    died, reset = RayActorError(error_msg="The actor died unexpectedly."), RuntimeError("Connection reset by peer")
    with pytest.raises(UserError, match=r"^worker 1: its process died \(killed [^;]*; worker 2: no space left; 1 fail"):
        failed(FailureWatch(folder, max_failures=0), w0=reset, w1=died, w2=RuntimeError("no space left"))
    with pytest.raises(
        UserError, match="^worker 0: Connection reset by peer; worker 1: Connection reset by peer; 2 fail"
    ):
        failed(FailureWatch(folder, max_failures=0), w0=reset, w1=reset)


@pytest.mark.parametrize(
    ("addresses", "expected"), [(["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"]), (["::1"] * 2, [])]
)
def test_workers_of_several_nodes_use_the_network_of_the_nodes(addresses, expected, monkeypatch):
    """By its own name, which is 127.0.1.1 on Debian, no node reaches another."""
    used = []
    monkeypatch.setattr(policies.ray, "get", lambda references: references)

    def execute_async(function, address):
        assert function is use_network_of
        used.append(address)

    workers = [SimpleNamespace(metadata=SimpleNamespace(node_ip=ip), execute_async=execute_async) for ip in addresses]
    assert NetworkOfNodes().before_init_train_context(workers) == {}
    assert used == expected


@pytest.mark.parametrize(
    ("reasons", "named"),
    [
        ({"a": None, "b": None}, None),
        ({"b": "no driver", "a": None}, "the node b, but PyTorch finds none there (no driver)"),
        ({"c": "no CUDA", "a": None, "b": "too old"}, "the node b and 1 other node, but PyTorch finds none there (too"),
    ],
)
def test_a_node_on_which_pytorch_finds_no_gpu_ends_the_run(reasons, named, monkeypatch):
    """Before the workers connect: NCCL's error has no node and no reason."""
    monkeypatch.setattr(policies.ray, "get", lambda references: references)

    def worker(host, why):
        def execute_async(function):
            assert function is why_no_gpu
            return why

        return SimpleNamespace(metadata=SimpleNamespace(hostname=host), execute_async=execute_async)

    workers = [worker(host, why) for host, why in reasons.items()]
    if named is None:
        assert GPUCheck().before_init_train_context(workers) == {}
        return
    with pytest.raises(ConfigError, match=rf"^runtime\.device: Ray has GPUs on {re.escape(named)}.*runtime.device=cpu"):
        GPUCheck().before_init_train_context(workers)


def test_a_death_is_described_in_words(folder):
    watch = FailureWatch(folder, max_failures=5)
    failed(
        watch,
        w0=WorkerHealthCheckFailedError(
            "failed\nworker info", RayActorError(error_msg="The actor died because its node has died.")
        ),
    )
    failed(watch, w1=WorkerHealthCheckFailedError("failed\nworker info", RayActorError()))
    assert "worker 0: its node died;" in messages(folder)
    assert "worker 1: its process died (killed by SIGKILL, or out of memory);" in messages(folder)


LOW_MEMORY = OutOfMemoryError(
    "4 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: a9) was "
    "22.36GB used / 23.54GB limit (0.949974)\nOOM kill reason: ..."
)


def test_a_worker_killed_for_lack_of_memory_is_named_without_those_that_lost_it(folder):
    lost = RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    failed(FailureWatch(folder, max_failures=5), w0=lost, w1=WorkerHealthCheckFailedError("failed", LOW_MEMORY))
    found = messages(folder)
    assert "worker 1: killed by Ray because its node ran low on memory (22.36GB of 23.54GB used);" in found
    assert "worker 0" not in found


def test_an_announced_preemption_is_no_failure(folder):
    watch = FailureWatch(folder, max_failures=0)
    failed(watch, w1=WorkerHealthCheckFailedError("failed", RayActorError(preempted=True)))
    assert not folder.metrics_path.exists()


def test_a_stop_waits_only_for_workers_that_train(folder):
    watch = TrainingWatch(folder)
    assert not folder.is_training
    watch.after_worker_group_start(None)
    assert folder.is_training
    watch.before_worker_group_shutdown(None)  # a worker has died, and there may be no room for another
    assert not folder.is_training
    watch.after_worker_group_start(None)
    folder.unmark_training()  # of a driver that was killed
    assert not folder.is_training
    watch.after_worker_group_start(None)
    FailureWatch(folder, -1).after_exception(None, {0: RuntimeError("lost")})  # which may wait for the storage
    assert not folder.is_training
    folder.remove()
    watch.after_worker_group_start(None)
    watch.before_worker_group_shutdown(None)


def test_a_hanging_worker_is_named(folder, monkeypatch):
    monkeypatch.setattr(policies, "_GRACE_S", 0.2)
    for rank, pid in enumerate((101, 102, 103)):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        folder.log_worker(rank, 3, "node")
    folder.log_failure(2, TIMED_OUT)  # process 103
    failed(FailureWatch(folder, max_failures=5), w0=TIMED_OUT)
    assert f"worker 0: {TIMED_OUT}; worker 1: does not respond; the workers" in messages(folder)
    failed(FailureWatch(folder, max_failures=5), w0=RuntimeError("a bug"))
    assert "worker 0: a bug; the workers" in messages(folder)


@pytest.fixture
def room(monkeypatch):
    """The number of workers that fit the cluster, as Ray's own policy finds."""
    found = SimpleNamespace(workers=1)

    def decide(self, group=None, status=None):
        possible = self._count_possible_workers({})
        return NoopDecision() if group and possible == group.num_workers else ResizeDecision(possible, {})

    monkeypatch.setattr(ElasticScalingPolicy, "_count_possible_workers", lambda self, reserved: found.workers)
    monkeypatch.setattr(ElasticScalingPolicy, "make_decision_for_running_worker_group", decide)
    monkeypatch.setattr(ElasticScalingPolicy, "make_decision_for_non_running_worker_group", decide)
    monkeypatch.setattr(ElasticScalingPolicy, "_get_reserved_resources", lambda self: {})
    return found


def policy_for(folder: RunFolder) -> ElasticPolicy:
    return ElasticPolicy(ScalingConfig(num_workers=(1, 13)), worker_counts(4096), folder)


@pytest.mark.parametrize(("has_room_for", "taken"), [(1, 1), (2, 2), (3, 2), (7, 4), (8, 8), (13, 8), (0, 0)])
def test_the_most_workers_that_divide_the_batch_are_used(folder, room, has_room_for, taken):
    room.workers = has_room_for
    assert policy_for(folder).make_decision_for_non_running_worker_group() == ResizeDecision(taken, {})


def test_a_resize_waits_for_storage_that_is_away(folder, room, monkeypatch):
    policy = policy_for(folder)
    room.workers = 5

    def decision():
        return policy.make_decision_for_running_worker_group(SimpleNamespace(num_workers=1), None)

    with monkeypatch.context() as away:
        away.setattr(RunFolder, "newest_step", lambda self: raised(StorageError("connection refused")))
        assert decision() == NoopDecision() and not folder.save_path.exists()
    assert decision() == NoopDecision() and folder.save_path.exists()
    with monkeypatch.context() as away:
        away.setattr(RunFolder, "newest_step", lambda self: raised(StorageError("connection refused")))
        assert decision() == NoopDecision()
    save(folder, 5)
    assert decision().num_workers == 4


def test_a_healthy_run_is_resized_after_a_checkpoint(folder, room):
    save(folder, 5)
    policy = policy_for(folder)

    def decision(now: int):
        return policy.make_decision_for_running_worker_group(SimpleNamespace(num_workers=now), None)

    assert decision(1) == NoopDecision()
    assert not folder.save_path.exists()
    room.workers = 5
    assert decision(1) == NoopDecision()
    assert folder.save_path.exists()
    folder.save_path.unlink()  # the run has seen it
    assert decision(1) == NoopDecision()
    save(folder, 7)
    assert decision(1).num_workers == 4
    assert "the cluster has changed: from 1 to 4 workers" in messages(folder)
    assert decision(4) == NoopDecision()
    assert not folder.save_path.exists()


@pytest.mark.parametrize(("left", "taken"), [(0, None), (1, None), (2, 2)])
def test_the_room_is_counted_again_once_the_checkpoint_is_saved(folder, room, left, taken):
    policy = policy_for(folder)
    room.workers = 4
    state = SimpleNamespace(num_workers=1)
    assert policy.make_decision_for_running_worker_group(state, None) == NoopDecision()
    room.workers = left
    save(folder, 3)
    decision = policy.make_decision_for_running_worker_group(state, None)
    assert (decision.num_workers if isinstance(decision, ResizeDecision) else None) == taken
    assert not folder.save_path.exists()


def test_a_failure_before_the_checkpoint_ends_the_plan(folder, room):
    policy = policy_for(folder)
    state = SimpleNamespace(num_workers=1)
    room.workers = 2
    assert policy.make_decision_for_running_worker_group(state, None) == NoopDecision()
    policy.make_decision_for_non_running_worker_group()  # after a failure
    assert not folder.save_path.exists()


def test_a_wait_for_other_runs_is_logged_once_but_no_lack_of_machines(folder, monkeypatch):
    monkeypatch.setattr(ElasticScalingPolicy, "make_decision_for_non_running_worker_group", lambda self: NoopDecision())
    monkeypatch.setattr(policies, "_WAIT_S", 0.0)
    nodes = [{"CPU": 1.0}]
    monkeypatch.setattr(policies, "node_resources", lambda: nodes)
    scaling = ScalingConfig(num_workers=(2, 4), resources_per_worker={"CPU": 1})
    policy = ElasticPolicy(scaling, worker_counts(4096), folder)
    for _ in range(2):
        policy.make_decision_for_non_running_worker_group()
    assert not folder.metrics_path.exists()
    nodes[0]["CPU"] = 4.0
    for _ in range(2):
        policy.make_decision_for_non_running_worker_group()
    assert messages(folder).count("waiting until other runs leave room for 2 to 4 workers with 1 CPU each") == 1
