"""Policies of Ray's controller: when a failing run ends, the number of an elastic run's workers, their machines."""

import contextlib
import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train import ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer

# Ray has no public API yet to follow the group of workers, or to choose their number; the tests of stops and of
# elastic runs notice if these names change.
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored import StoredFolder
from ssl_sec.edges.folder.text import text_of
from ssl_sec.edges.run.on_ray.network import use_network_of
from ssl_sec.edges.run.on_ray.scaling import describe_workers, find_shortage, node_resources
from ssl_sec.edges.run.supervision import describe_signal, dumped_signal
from ssl_sec.edges.storage.bucket import RefusedError
from ssl_sec.errors import ConfigError, StorageError, UserError, counted, first_line
from ssl_sec.files import replace_text
from ssl_sec.gpus import why_no_gpu

# Error messages of gloo and NCCL on a worker whose peer has died.
_BROKEN_CONNECTION = re.compile(r"connection (reset|closed|refused)|broken pipe|remote process exited", re.IGNORECASE)
# What gloo puts around such a message: the line of its source, and advice.
_GLOO_FRAME = re.compile(r"^\[\S+:\d+\] |\. This is typically caused by a remote worker .*$")
# How long to wait for the errors of workers that wait for a hanging one.
_GRACE_S = 5.0
# How long Ray may have no room for an elastic run before that is said: at the start, it has not reserved any.
_WAIT_S = 5.0


def recorded_failures(folder: RunFolder, step: int | None) -> int:
    """The number of failures since the checkpoint of a step, as last recorded by the driver or the controller.

    Ray runs the controller on the driver's machine.
    """
    found = _read_count(folder)
    return int(found["count"]) if found["step"] == step else 0


def record_failures(folder: RunFolder, step: int | None, count: int) -> None:
    """Records the number of failures since the checkpoint of a step."""
    replace_text(_count_path(folder), json.dumps({"step": step, "count": count}))


def count_failure(folder: RunFolder, max_failures: int, what: str, where: str = "") -> str:
    """Records one more failure since the newest checkpoint; returns which it is, as `failure 1 of 3 since ...`.

    While the storage cannot be reached, no newer checkpoint is seen, and workers that are started again wait for it.

    Args:
        folder: the run's folder.
        max_failures: consecutive restarts without a new checkpoint; -1 for no limit.
        what: what has failed, for the error.
        where: where more is said about it, for the error.

    Raises:
        UserError: these are too many, or the storage refuses to be read.
    """
    try:
        step = folder.newest_step()
        since = "without a checkpoint" if step is None else f"since the checkpoint of step {step}"
    except RefusedError:
        raise
    except StorageError:
        step, since = _read_count(folder)["step"], "without a checkpoint that could be seen"
    count = recorded_failures(folder, step) + 1
    record_failures(folder, step, count)
    if 0 <= max_failures < count:
        raise UserError(
            f"{what}; {counted(count, 'failure')} {since}, runtime.max_failures allows {max_failures}{where}"
        )
    return f"failure {count}{'' if max_failures < 0 else f' of {max_failures}'} {since}"


def _read_count(folder: RunFolder) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        return json.loads(text_of(_count_path(folder)) or "")
    return {"step": None, "count": 0}


def _count_path(folder: RunFolder) -> Path:
    return folder.path / "failures_since_checkpoint.json"


class FailureWatch(UserCallback):
    """Logs each failure, and gives up a run that fails repeatedly without a new checkpoint.

    Ray would count the failures of the whole run; a long run on spot machines has many.

    Args:
        folder: the run's folder.
        max_failures: consecutive restarts without a new checkpoint; -1 for no limit.
    """

    def __init__(self, folder: RunFolder, max_failures: int) -> None:
        self._folder = folder
        self._max_failures = max_failures

    def after_exception(self, run_context: object, worker_exceptions: Mapping[int, Exception]) -> None:
        """Called by Ray's controller before it restarts the workers.

        Raises:
            UserError: the user error of a worker, or too many failures; it ends the run.
        """
        self._folder.unmark_training()  # a stop does not wait for what follows
        for error in worker_exceptions.values():
            if isinstance(error, UserError):
                raise error
        if any(map(_is_preempted, worker_exceptions.values())):
            return
        what = self._describe(worker_exceptions)
        where = f"; the errors of the workers are in {self._folder.location}/{self._folder.failures_path.name}"
        try:
            which = count_failure(self._folder, self._max_failures, what, where)
        except UserError:
            self._folder.log_message("ERROR", what)
            raise
        self._folder.log_message("WARNING", f"{what}; the workers are started again ({which})")

    def _describe(self, worker_exceptions: Mapping[int, Exception]) -> str:
        causes = {rank: self._cause(rank, error) for rank, error in worker_exceptions.items()}
        if any("timed out" in cause.lower() or "timeout" in cause.lower() for cause in causes.values()):
            causes |= {rank: "does not respond" for rank in self._find_silent(causes.keys())}
        elif any(self._crash_signal(rank) == signal.SIGABRT for rank in causes):
            # After runtime.timeout_s without an answer, NCCL aborts the processes that wait.
            silent = "has logged no error: it does not respond, or waited for the others"
            causes |= {rank: silent for rank in self._find_silent(causes.keys())}
        died = {rank for rank, error in worker_exceptions.items() if _death(error) or killed_for_memory(error)}
        if died:  # other workers' broken connections follow from it; see `failures.jsonl`
            causes = {
                rank: cause for rank, cause in causes.items() if rank in died or not _BROKEN_CONNECTION.search(cause)
            }
        in_order = sorted(causes, key=lambda rank: (rank not in died, rank))
        return "; ".join(f"worker {rank}: {causes[rank]}" for rank in in_order)

    def _cause(self, rank: int, error: Exception) -> str:
        if (ended := killed_for_memory(error)) is not None:
            return ended
        death = _death(error)
        if death is None:
            return _GLOO_FRAME.sub("", first_line(error))
        if "node has died" in str(death):
            return "its node died"
        if (number := self._crash_signal(rank)) is not None:
            return f"its process was {describe_signal(number)}; its stack is in {self._folder.crash_path(rank)}"
        return "its process died (killed by SIGKILL, or out of memory)"

    def _crash_signal(self, rank: int) -> signal.Signals | None:
        return dumped_signal(self._folder.crash_path(rank))

    def _find_silent(self, failed: Any) -> set[int]:
        """The newest group's workers that logged no error; those that waited for one log theirs almost together."""
        group = {rank: worker["pid"] for rank, worker in self._folder.newest_workers().items()}
        deadline = time.monotonic() + _GRACE_S
        while True:
            logged = {failure["pid"] for failure in self._folder.failures()}
            silent = {
                rank
                for rank, pid in group.items()
                if rank not in failed and pid not in logged and self._crash_signal(rank) is None
            }
            if not silent or time.monotonic() > deadline:
                return silent
            time.sleep(0.1)


class TrainingWatch(WorkerGroupCallback):
    """Marks in the run's folder whether workers train, on which a stop has to wait."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def after_worker_group_start(self, worker_group: object) -> None:
        """Called before the workers begin to train; those of a run in object storage may have to wait for it first."""
        if not isinstance(self._folder, StoredFolder):
            self._folder.mark_training()

    def before_worker_group_shutdown(self, worker_group: object) -> None:
        """Called after the end of the workers, or the death of some of them."""
        self._folder.unmark_training()


class NetworkOfNodes(WorkerGroupCallback):
    """Makes the workers of several nodes reach each other as Ray's nodes do."""

    def before_init_train_context(self, workers: Sequence[Any]) -> dict[str, list[Any]]:
        """Called before the workers connect to each other."""
        addresses = [worker.metadata.node_ip for worker in workers]
        if len(set(addresses)) > 1:
            ray.get(
                [
                    worker.execute_async(use_network_of, address)
                    for worker, address in zip(workers, addresses, strict=True)
                ]
            )
        return {}


class GPUCheck(WorkerGroupCallback):
    """Ends a run whose workers were given GPUs that PyTorch does not find, before they connect to each other."""

    def before_init_train_context(self, workers: Sequence[Any]) -> dict[str, list[Any]]:
        """Called once Ray has set CUDA_VISIBLE_DEVICES, which a process reads only once.

        Raises:
            ConfigError: PyTorch finds no GPU on a node.
        """
        reasons = ray.get([worker.execute_async(why_no_gpu) for worker in workers])
        found = {worker.metadata.hostname: why for worker, why in zip(workers, reasons, strict=True) if why is not None}
        if found:
            host, why = min(found.items())
            others = f" and {counted(len(found) - 1, 'other node')}" if len(found) > 1 else ""
            raise ConfigError(
                f"runtime.device: Ray has GPUs on the node {host}{others}, but PyTorch finds none there ({why}); "
                "runtime.device=cpu trains on CPUs"
            )
        return {}


def _reported(error: BaseException) -> BaseException:
    """The error of a worker, which Ray wraps if its checks of the workers found it."""
    return getattr(error, "health_check_failure", error)


def _death(error: Exception) -> RayActorError | None:
    """Ray's error about a worker that died."""
    reported = _reported(error)
    return reported if isinstance(reported, RayActorError) else None


def killed_for_memory(error: BaseException) -> str | None:
    """Says that Ray killed processes before their node ran out of memory; None for other errors."""
    reported = _reported(error)
    if not isinstance(reported, OutOfMemoryError):
        return None
    found = re.search(r"([\d.]+GB) used / ([\d.]+GB) limit", str(reported))
    used = f" ({found[1]} of {found[2]} used)" if found else ""
    return f"killed by Ray because its node ran low on memory{used}"


def _is_preempted(error: Exception) -> bool:
    """Whether the worker's node was drained, as happens to spot machines."""
    death = _death(error)
    return death is not None and death.preempted


class ElasticPolicy(ElasticScalingPolicy):
    """Chooses as many workers as the cluster has room for, among the numbers that divide the batch.

    Before the number changes in a healthy run, a checkpoint is requested, so that the change costs no steps.
    """

    def __init__(self, scaling: ScalingConfig, counts: Sequence[int], folder: RunFolder) -> None:
        super().__init__(scaling)
        self._counts = tuple(counts)
        self._folder = folder
        self._is_planned = False
        self._step_before: int | None = None  # of the newest checkpoint when a change was planned
        self._waits_since: float | None = None
        self._has_said_so = False

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        possible = super()._count_possible_workers(reserved_resources)
        return max((count for count in self._counts if count <= possible), default=0)

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Called at the start, and after a failure."""
        self._reset()
        decision = super().make_decision_for_non_running_worker_group()
        if isinstance(decision, ResizeDecision):
            self._waits_since, self._has_said_so = None, False
        else:
            self._report_wait()
        return decision

    def _report_wait(self) -> None:
        """Logs once that Ray has reserved the room for other runs; the driver logs that machines are away."""
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        if self._has_said_so or now < self._waits_since + _WAIT_S:
            return
        if find_shortage(self.scaling_config, node_resources()) is None:
            self._has_said_so = True
            workers = describe_workers(self.scaling_config)
            self._folder.log_message("INFO", f"waiting until other runs leave room for {workers}")

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        """Called repeatedly while the workers train."""
        decision = super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)
        if not isinstance(decision, ResizeDecision) and not self._is_planned:
            return NoopDecision()
        try:
            step = self._folder.newest_step()
        except StorageError:  # the workers continue to train until it can be reached, or refuses a checkpoint
            return NoopDecision()
        if not self._is_planned:
            self._is_planned, self._step_before = True, step
            self._folder.save_path.touch()
        if step == self._step_before:
            return NoopDecision()
        self._reset()
        # A machine may have gone again since the change was planned.
        reserved, now = self._get_reserved_resources(), worker_group_state.num_workers
        possible = now if reserved is None else self._count_possible_workers(reserved)
        if possible == now or possible < self.scaling_config.min_workers:
            return NoopDecision()
        self._folder.log_message("INFO", f"the cluster has changed: from {now} to {counted(possible, 'worker')}")
        return self._get_resize_decision(possible)

    def _reset(self) -> None:
        self._is_planned = False
        self._folder.save_path.unlink(missing_ok=True)


class ElasticTrainer(TorchTrainer):
    """A TorchTrainer with our policy for the number of workers."""

    def __init__(self, *args: Any, policy: ElasticPolicy, **options: Any) -> None:
        super().__init__(*args, **options)
        self._policy = policy

    def _initialize_and_run_controller(self, **controller_options: Any) -> Any:
        return super()._initialize_and_run_controller(**{**controller_options, "scaling_policy": self._policy})
