"""What Ray's controller decides by: when a failing run is given up, and how many workers an elastic one has."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray.exceptions import RayActorError
from ray.train import ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer

# Ray has no public way yet to choose among the numbers of workers; the tests of an elastic run hold us to these names.
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.supervision import in_words
from ssl_sec.errors import UserError, first_line

# How long the others have to say that they wait for a worker that hangs.
_GRACE_S = 5.0


class FailureWatch(UserCallback):
    """Tells of each failure, and gives a run up that fails again and again without a new checkpoint.

    Ray counts the failures of the whole run, so that a long one on spot machines would run out of them.

    Args:
        folder: of the run.
        max_failures: restarts in a row without a new checkpoint; -1 for no limit.
    """

    def __init__(self, folder: RunFolder, max_failures: int) -> None:
        self._folder = folder
        self._max_failures = max_failures
        self._step: int | None = None
        self._in_a_row = 0

    def after_exception(self, run_context: object, worker_exceptions: Mapping[int, Exception]) -> None:
        """Asked by Ray's controller before it starts the workers again.

        Raises:
            UserError: which ends the run: what a worker found wrong, or that there were too many failures.
        """
        for error in worker_exceptions.values():
            if isinstance(error, UserError):
                raise error
        if any(map(_taken_away, worker_exceptions.values())):
            return
        step = self._folder.newest_step()
        self._in_a_row = self._in_a_row + 1 if step == self._step else 1
        self._step = step
        what = self._told(worker_exceptions)
        since = "without a checkpoint" if step is None else f"since the checkpoint of step {step}"
        if 0 <= self._max_failures < self._in_a_row:
            self._folder.tell("ERROR", what)
            raise UserError(
                f"{what}; {self._in_a_row} failures {since}, runtime.max_failures allows {self._max_failures}; "
                f"what workers failed with is in {self._folder.failures_path}"
            )
        limit = "" if self._max_failures < 0 else f" of {self._max_failures}"
        self._folder.tell("WARNING", f"{what}; the workers are started again (failure {self._in_a_row}{limit} {since})")

    def _told(self, worker_exceptions: Mapping[int, Exception]) -> str:
        said = {rank: self._in_words(rank, error) for rank, error in worker_exceptions.items()}
        if any("timed out" in words.lower() or "timeout" in words.lower() for words in said.values()):
            silent = self._silent_after_grace(said.keys())
            said |= {rank: "no sign of life" for rank in silent}
        return "; ".join(f"worker {rank}: {words}" for rank, words in sorted(said.items()))

    def _in_words(self, rank: int, error: Exception) -> str:
        death = _death(error)
        if death is None:
            return first_line(error)
        if "node has died" in str(death):
            return "its node died"
        if (number := self._folder.fatal_signal(rank)) is not None:
            return f"its process was {in_words(number)}; where it was is in {self._folder.crash_path(rank)}"
        return "its process died (killed by SIGKILL, or out of memory)"

    def _silent_after_grace(self, failed: Any) -> set[int]:
        """The workers of the newest group that did not fail; those that waited for them all do, at nearly one time."""
        workers = self._folder.workers()
        if not workers:
            return set()
        group = {
            worker["rank"]: worker["pid"] for worker in workers if worker["world_size"] == workers[-1]["world_size"]
        }
        deadline = time.monotonic() + _GRACE_S
        while True:
            noted = {failure["pid"] for failure in self._folder.failures()}
            silent = {rank for rank, pid in group.items() if rank not in failed and pid not in noted}
            if not silent or time.monotonic() > deadline:
                return silent
            time.sleep(0.1)


def _death(error: Exception) -> RayActorError | None:
    """What Ray says of a worker that did not fail, but died."""
    error = getattr(error, "health_check_failure", error)
    return error if isinstance(error, RayActorError) else None


def _taken_away(error: Exception) -> bool:
    """Whether a worker's node was drained, as a spot machine is."""
    death = _death(error)
    return death is not None and death.preempted


class ElasticPolicy(ElasticScalingPolicy):
    """As many workers as the cluster has room for, among the numbers that can share the batch.

    Before the number changes in a healthy run, the run is asked for a checkpoint, so that the change costs no steps.

    Args:
        scaling: with the least and the most workers.
        counts: allowed numbers of workers.
        folder: of the run.
    """

    def __init__(self, scaling: ScalingConfig, counts: Sequence[int], folder: RunFolder) -> None:
        super().__init__(scaling)
        self._counts = tuple(counts)
        self._folder = folder
        self._waiting: tuple[ResizeDecision, int | None] | None = None

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        possible = super()._count_possible_workers(reserved_resources)
        return max((count for count in self._counts if count <= possible), default=0)

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """At the start, and after a failure."""
        self._forget()
        return super().make_decision_for_non_running_worker_group()

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        """Asked again and again while the workers train."""
        decision = super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)
        if isinstance(decision, ResizeDecision):
            if decision.num_workers == worker_group_state.num_workers:
                self._forget()
            elif self._waiting is None:
                self._waiting = decision, self._folder.newest_step()
                self._folder.save_path.touch()
        if self._waiting is None or self._waiting[1] == self._folder.newest_step():
            return NoopDecision()
        decision = self._waiting[0]
        self._folder.tell(
            "INFO", f"the cluster has changed: from {worker_group_state.num_workers} to {decision.num_workers} workers"
        )
        self._forget()
        return decision

    def _forget(self) -> None:
        self._waiting = None
        self._folder.save_path.unlink(missing_ok=True)


class ElasticTrainer(TorchTrainer):
    """A TorchTrainer with a policy of ours for the number of workers."""

    def __init__(self, *args: Any, policy: ElasticPolicy, **options: Any) -> None:
        super().__init__(*args, **options)
        self._policy = policy

    def _initialize_and_run_controller(self, **controller_options: Any) -> Any:
        return super()._initialize_and_run_controller(**{**controller_options, "scaling_policy": self._policy})
