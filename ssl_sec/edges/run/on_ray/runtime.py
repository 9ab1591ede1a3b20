"""Ray Train: one worker for each GPU, or the configured number on CPUs."""

import contextlib
import faulthandler
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray import train
from ray.exceptions import RayActorError
from ray.train import ControllerError, FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device

# Ray has no public API for the messages to a single worker; the tests of preemption notice if this name changes.
from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE
from ray.train.v2._internal.execution.context import get_train_context as get_internal_train_context

from ssl_sec.data.samplers import worker_rows
from ssl_sec.edges.environment import with_variables
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored import StoredFolder
from ssl_sec.edges.patience import Call
from ssl_sec.edges.run.cpu import ENVIRONMENT
from ssl_sec.edges.run.on_ray.channel import WorkerFolder, serve_folder
from ssl_sec.edges.run.on_ray.gauges import in_ascii, shown_metrics
from ssl_sec.edges.run.on_ray.joining import connect, own_signal_handlers, refusal
from ssl_sec.edges.run.on_ray.nodes import describe_cluster, followed_nodes
from ssl_sec.edges.run.on_ray.policies import (
    ElasticPolicy,
    ElasticTrainer,
    FailureWatch,
    GPUCheck,
    NetworkOfNodes,
    TrainingWatch,
    count_failure,
    killed_for_memory,
    record_failures,
)
from ssl_sec.edges.run.on_ray.scaling import (
    describe_workers,
    find_shortage,
    find_wait,
    make_scaling,
    node_resources,
)
from ssl_sec.edges.run.spec import RunSpec
from ssl_sec.edges.run.worker import Worker, work
from ssl_sec.errors import UserError
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.settings import to_values
from ssl_sec.training.config import RayConfig

if TYPE_CHECKING:
    from ssl_sec.edges.tracking.deferred import DeferredRun  # imports MLflow, which workers do not need

logger = logging.getLogger("ssl_sec")

# Time between two checks whether the cluster still has room for the workers.
_SHORTAGE_CHECKS_S = 5.0
# In place of the address of a dashboard: nothing answers there.
_NO_DASHBOARD = "http://127.0.0.1:1"
# How long Ray's controller may take to end after the workers have ended.
_CONTROLLER_ENDS_WITHIN_S = 30.0


def run_with_ray(spec: RunSpec, tracking: "DeferredRun") -> None:
    """Executes a run on the workers of a Ray cluster, and waits for its end.

    Args:
        spec: specification of the run; its folder is on storage that all nodes share, or kept in object storage.
        tracking: tracking of the run, for the utilisation of its nodes.

    Raises:
        ConfigError: if the cluster is too small, or the number of workers does not divide the batch.
    """
    options = spec.config.runtime
    assert isinstance(options, RayConfig)
    connect(options.address, spec.folder.name)
    tracking.describe_cluster(describe_cluster())
    counts = spec.config.worker_counts if isinstance(spec.config, TrainingConfig) else None
    scaling = make_scaling(options, node_resources(), counts)
    logger.info("starting %s", describe_workers(scaling))
    if isinstance(spec.config, TrainingConfig) and isinstance(scaling.num_workers, int):
        worker_rows(spec.config.global_batch_size, 0, scaling.num_workers)
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(options.start_timeout_s)
    record_failures(spec.folder, spec.folder.newest_step(), 0)  # those of an earlier process do not count
    while True:
        with _named_cluster(), followed_nodes(spec.folder, tracking), shown_metrics(spec):
            failure = _failure_of(_trainer(spec, options, scaling, counts), spec.folder)
        if failure is None:
            return
        if isinstance(failure, ControllerError) and isinstance(failure.controller_failure, UserError):
            raise failure.controller_failure
        if (what := _death(failure)) is None:
            raise failure
        try:
            which = count_failure(spec.folder, options.max_failures, what)
        except UserError as error:
            raise error from failure
        logger.warning("%s; the workers are started again (%s)", what, which)
        _join_again(options.address, spec.folder.name)


def _trainer(spec: RunSpec, options: RayConfig, scaling: ScalingConfig, counts: Sequence[int] | None) -> TorchTrainer:
    folder = spec.folder
    settings = {
        "job": spec.recipe.name,
        "values": to_values(spec.config),
        **_link(folder),
        "working_folder": os.getcwd(),
    }
    watches: list[Any] = [FailureWatch(folder, options.max_failures), TrainingWatch(folder)]
    watches.append(GPUCheck() if scaling.use_gpu else NetworkOfNodes())
    # Ray's detector of NCCL hangs (RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR) is for users to turn on: it is experimental,
    # and needs the program `ncclras`, which PyTorch's packages lack. A hang ends after timeout_s without it.
    common: dict[str, Any] = {
        "train_loop_config": settings,
        "torch_config": TorchConfig(backend="nccl" if scaling.use_gpu else "gloo", timeout_s=options.timeout_s),
        "scaling_config": scaling,
        "run_config": RunConfig(
            name=in_ascii(folder.name),
            storage_path=str(folder.path / "ray"),
            failure_config=FailureConfig(max_failures=-1),  # FailureWatch counts them
            callbacks=watches,
            # FailureWatch logs failures in one line; Ray's log files have the details.
            logging_config=LoggingConfig(log_level="CRITICAL"),
            worker_runtime_env={} if scaling.use_gpu else {"env_vars": ENVIRONMENT},
        ),
    }
    if isinstance(scaling.num_workers, int):
        return TorchTrainer(_worker, **common)
    policy = ElasticPolicy(scaling, counts or range(1, scaling.max_workers + 1), folder)
    return ElasticTrainer(_worker, **common, policy=policy)


def _link(folder: RunFolder) -> dict[str, Any]:
    """The access of workers to the run: a folder that all nodes share, or object storage and an actor."""
    if isinstance(folder, StoredFolder):
        folder.flush()  # workers read it there
        return {"url": folder.location, "server": serve_folder(folder)}
    return {"folder": str(folder.path), "launch": folder.write_launch_token()}


def _linked_folder(settings: Mapping[str, Any], rank: int) -> RunFolder:
    """The folder of the run, on a worker."""
    if "url" in settings:
        return WorkerFolder(settings["url"], rank, settings["server"])
    folder = RunFolder(Path(settings["folder"]))
    folder.require_launch_token(settings["launch"])
    return folder


def _failure_of(trainer: TorchTrainer, folder: RunFolder) -> BaseException | None:
    """Trains in a thread, so that the main thread handles signals: Ray would abort without a checkpoint.

    A stop waits for workers that train, and for no others: the cluster may never have room for them.
    """
    folder.unmark_training()
    training = Call(trainer.fit)
    training.start()
    room = _RoomWatch(trainer, folder)
    cluster = ray.get_runtime_context().gcs_address
    idle_since: float | None = None
    while training.is_alive():
        training.join(0.2)
        has_ended = _has_ended(folder)
        is_lost = folder.is_stop_requested() and refusal(cluster) is not None  # ended by the signal that requests it
        if not folder.is_stop_requested() or (folder.is_training and not has_ended and not is_lost):
            idle_since = None
        elif not has_ended:
            folder.write_outcome("unsaved")
            return None
        else:
            # One worker had ended and another failed after it, so the controller waits to start all of them again.
            idle_since = idle_since or time.monotonic()
            if is_lost or time.monotonic() > idle_since + _CONTROLLER_ENDS_WITHIN_S:
                return None
        room.look()
    return training.error


class _RoomWatch:
    """Logs that the cluster has become too small for the workers, or that other jobs leave them no room at the start.

    Args:
        trainer: the trainer of the workers.
        folder: the folder of the run, in which the messages are logged.
    """

    def __init__(self, trainer: TorchTrainer, folder: RunFolder) -> None:
        self._trainer = trainer
        self._folder = folder
        self._is_short = self._has_waited = False
        self._next_check = time.monotonic() + _SHORTAGE_CHECKS_S

    def look(self) -> None:
        """Looks at the cluster, unless it has done so a few seconds ago."""
        if time.monotonic() <= self._next_check:
            return
        self._next_check = time.monotonic() + _SHORTAGE_CHECKS_S
        scaling = self._trainer.scaling_config
        was_short, shortage = self._is_short, find_shortage(scaling, node_resources())
        self._is_short = shortage is not None
        if shortage is not None and not was_short:
            self._folder.log_message("WARNING", f"{shortage}; training waits until there are more")
        may_wait = not (self._is_short or self._has_waited or self._folder.is_training)
        if may_wait and (free := find_wait()) is not None:
            self._has_waited = True
            workers = describe_workers(scaling)
            self._folder.log_message("INFO", f"waiting until other jobs leave room for {workers}; free: {free}")


def _has_ended(folder: RunFolder) -> bool:
    """Whether the workers have ended by themselves; Ray's controller then ends soon."""
    return folder.outcome() is not None or folder.error() is not None


def _death(failure: BaseException) -> str | None:
    """The death of a process after which Ray does not start the workers again, in words; None for other failures."""
    if isinstance(failure, ControllerError):
        # Ray takes the death of a worker while others are started for an error of its own.
        cause, what, died = failure.controller_failure, "a worker", "died while the workers were started"
    else:
        cause, what, died = failure, "the process of Ray's controller", "died (killed by SIGKILL, or out of memory)"
    if (killed := killed_for_memory(cause)) is not None:
        return f"{what} was {killed}"
    return f"{what} {died}" if isinstance(cause, RayActorError) else None


def _join_again(address: str | None, name: str) -> None:
    """Leaves the cluster and joins it again: Ray keeps the resources of a dead group until its driver leaves.

    One that this process has started ends with that, and is started again with the same resources.
    """
    joined, nodes = ray.get_runtime_context().gcs_address, node_resources()
    ray.shutdown()
    if refusal(joined) is None:
        connect(joined if address in (None, "local") else address, name)
    else:
        counts = {f"num_{kind.lower()}s": sum(int(node.get(kind, 0)) for node in nodes) for kind in ("CPU", "GPU")}
        connect(address, name, **counts)


@contextlib.contextmanager
def _named_cluster() -> Iterator[None]:
    """Puts the address of the joined cluster into the environment, which Ray Train's actors get too.

    Ray's PlacementGroupCleaner asks for the state of the run's controller. Without an address it asks the cluster that
    was last started on the machine, or the one whose dashboard the environment names, and removes the run's workers if
    that cluster does not know the controller. Of a cluster without a dashboard Ray names the usual port of dashboards,
    which may be another cluster's.
    """
    # A second `ray.init` returns the context of the cluster that was joined, and replaces the handler of SIGTERM, too.
    with own_signal_handlers():
        has_dashboard = bool(ray.init(ignore_reinit_error=True, logging_level=logging.ERROR).dashboard_url)
    own = {
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "RAY_API_SERVER_ADDRESS": "" if has_dashboard else _NO_DASHBOARD,
    }
    ENV_VARS_TO_PROPAGATE.update(own)
    with with_variables(own):
        yield


def _is_preempted() -> bool:
    """Whether Ray has informed this worker that machines of the run are about to be preempted.

    Ray's public `get_preemption_info` waits for all workers, so it would need a thread beside the training. Without it,
    and without `ray.train.report`, `FailureConfig.relax_collectives_on_preemption` has nothing to relax. Nor does
    `preemption_grace_s` help: after the deadline the survivors wait for the lost worker, not for a checkpoint.
    """
    return get_internal_train_context().preemption_context.preemption_info is not None


class _FolderHandler(logging.Handler):
    """Writes a worker's messages to the run's folder, where the driver reads them."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        super().__init__()
        self._folder = folder
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        self._folder.log_message(record.levelname, f"worker {self._rank}: {record.getMessage()}")


def _worker(settings: dict[str, Any]) -> None:
    """Runs in each worker process of Ray."""
    context = train.get_context()
    folder = _linked_folder(settings, context.get_world_rank())
    if isinstance(folder, WorkerFolder):
        folder.mark_training()
    # Ray starts workers in another folder; paths of a configuration are relative to the driver's folder.
    with contextlib.suppress(OSError):  # it may not exist on another machine
        os.chdir(settings["working_folder"])
    logging.getLogger("ssl_sec").addHandler(_FolderHandler(folder, context.get_world_rank()))
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):  # the driver would show these messages a second time
            handler.addFilter(lambda record: not record.name.startswith("ssl_sec"))
    logging.getLogger("ssl_sec").setLevel(logging.INFO)
    device = get_device()
    assert isinstance(device, torch.device)
    worker = Worker(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        device=device,
        node=f"{socket.gethostname()} {ray.get_runtime_context().get_node_id()}",
        is_preempted=_is_preempted,
    )
    with _crash_reported(folder.crash_path(worker.rank)):
        work(settings["job"], settings["values"], folder, worker)
    if isinstance(folder, WorkerFolder):
        folder.tidy()


@contextlib.contextmanager
def _crash_reported(path: Path) -> Iterator[None]:
    """Makes this process dump its stack to a file when a signal kills it."""
    with path.open("w") as file:
        faulthandler.enable(file)
        try:
            yield
        finally:
            faulthandler.disable()
            path.unlink(missing_ok=True)
