"""Ray Train: one worker for each GPU, or as many as asked for on CPUs."""

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import ray
import torch
from ray import train
from ray.exceptions import RayActorError, RayError
from ray.job_config import JobConfig
from ray.train import ControllerError, FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device

from ssl_sec.data.samplers import worker_counts, worker_rows
from ssl_sec.edges.environment import require_files_for_ray
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.patience import Call
from ssl_sec.edges.run.cpu import ENVIRONMENT
from ssl_sec.edges.run.on_ray.policies import ElasticPolicy, ElasticTrainer, FailureWatch
from ssl_sec.edges.run.spec import RunSpec
from ssl_sec.edges.run.worker import Worker, work
from ssl_sec.errors import ConfigError, UserError
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.settings import to_values
from ssl_sec.training.config import RayConfig

logger = logging.getLogger("ssl_sec")

# Between looks at whether the cluster still has room for the workers.
_SHORTAGE_LOOKS_S = 5.0
# Between questions whether a machine is about to be taken away.
_NOTICE_LOOKS_S = 1.0


def run_with_ray(spec: RunSpec) -> None:
    """Does a run on the workers of a Ray cluster, and waits for its end.

    Args:
        spec: of the run, whose folder is on storage that all nodes share.

    Raises:
        ConfigError: if the cluster has not what is asked for, or the workers do not divide the batch.
    """
    options = spec.config.runtime
    assert isinstance(options, RayConfig)
    connect(options.address, spec.folder.name)
    scaling = scaling_for(options, ray.cluster_resources())
    logger.info("starting %s", workers_in_words(scaling))
    if isinstance(spec.config, TrainingConfig) and isinstance(scaling.num_workers, int):
        worker_rows(spec.config.global_batch_size, 0, scaling.num_workers)
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(options.start_timeout_s)
    deaths_at_start = 0
    while True:
        failure = _failure_of(_trainer(spec, options, scaling), spec.folder)
        if failure is None:
            return
        if isinstance(failure, ControllerError) and isinstance(failure.controller_failure, UserError):
            raise failure.controller_failure
        deaths_at_start += 1
        if not _died_at_start(failure) or 0 <= options.max_failures < deaths_at_start:
            raise failure
        logger.warning("a worker died while the workers were started; they are started again")
        # Ray keeps what the dead group held until its driver leaves.
        ray.shutdown()
        connect(options.address, spec.folder.name)


def _trainer(spec: RunSpec, options: RayConfig, scaling: ScalingConfig) -> TorchTrainer:
    folder = spec.folder
    settings = {
        "job": spec.recipe.name,
        "values": to_values(spec.config),
        "folder": str(folder.path),
        "launch": folder.note_launch(),
        "working_folder": os.getcwd(),
    }
    common: dict[str, Any] = {
        "train_loop_config": settings,
        "torch_config": TorchConfig(backend="nccl" if scaling.use_gpu else "gloo", timeout_s=options.timeout_s),
        "scaling_config": scaling,
        "run_config": RunConfig(
            name=folder.name,
            storage_path=str(folder.path / "ray"),
            failure_config=FailureConfig(max_failures=-1),  # the watch counts them
            callbacks=[FailureWatch(folder, options.max_failures)],
            # The watch tells what failed, in a line; Ray's log files have the rest.
            logging_config=LoggingConfig(log_level="CRITICAL"),
            worker_runtime_env={} if scaling.use_gpu else {"env_vars": ENVIRONMENT},
        ),
    }
    if isinstance(scaling.num_workers, int):
        return TorchTrainer(_worker, **common)
    if isinstance(spec.config, TrainingConfig):
        counts = worker_counts(spec.config.global_batch_size)
    else:
        counts = range(1, scaling.max_workers + 1)
    return ElasticTrainer(_worker, **common, policy=ElasticPolicy(scaling, counts, folder))


def _failure_of(trainer: TorchTrainer, folder: RunFolder) -> BaseException | None:
    """Trains in a thread of its own, so that the main one keeps its signals: Ray would abort without a checkpoint."""
    training = Call(trainer.fit)
    training.start()
    is_short, next_look = False, time.monotonic() + _SHORTAGE_LOOKS_S
    while training.is_alive():
        training.join(0.2)
        if time.monotonic() > next_look:
            next_look = time.monotonic() + _SHORTAGE_LOOKS_S
            was_short, lack = is_short, shortage(trainer.scaling_config, ray.cluster_resources())
            is_short = lack is not None
            if lack is not None and not was_short:
                folder.tell("WARNING", f"{lack}; training goes on when there are more")
    return training.error


def shortage(scaling: ScalingConfig, resources: Mapping[str, float]) -> str | None:
    """What the cluster lacks, while machines are away; None if nothing."""
    a_worker: dict[str, float] = {"GPU": 1.0} if scaling.use_gpu else {}
    a_worker |= cast(dict[str, float], scaling.resources_per_worker)
    needs = {kind: round(scaling.min_workers * each) for kind, each in a_worker.items()}
    for kind, needed in needs.items():
        if (found := int(resources.get(kind, 0))) < needed:
            return f"the cluster has {found} {kind}s, and the workers need {needed}"
    return None


def _died_at_start(failure: BaseException) -> bool:
    """A worker's death while Ray sets up the others; Ray takes it for an error of its own and does not try again."""
    return isinstance(failure, ControllerError) and isinstance(failure.controller_failure, RayActorError)


def connect(address: str | None, name: str | None = None) -> None:
    """Joins the cluster, or starts one on this machine; a second call does nothing.

    Args:
        address: of the cluster; None for the environment's, or a new one.
        name: of this job in Ray's dashboard.
    """
    if ray.is_initialized():
        return
    require_files_for_ray()
    # What the workers have to say comes through the run's folder. A Ray of our own keeps the rest in its log files;
    # of a cluster the rest may tell why nothing starts.
    started_here = address is None and "RAY_ADDRESS" not in os.environ
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray gives its workers a low priority, so that they wait for its own services where workers fill all cores. It
    # reads this when it starts nodes.
    os.environ.setdefault("RAY_worker_niceness", "0")
    _check_listening(address or os.environ.get("RAY_ADDRESS"))
    logger.info("starting Ray on this machine" if started_here else "connecting to the Ray cluster")
    with _own_signal_handlers():
        ray.init(
            address=address,
            logging_level=logging.ERROR,
            log_to_driver=not started_here,
            job_config=JobConfig(metadata={} if name is None else {"job_name": name}),
        )


def workers_in_words(scaling: ScalingConfig) -> str:
    """For example `2 to 8 workers with 4 CPUs and 1 GPU each`."""
    workers = scaling.num_workers
    count = f"{workers[0]} to {workers[1]}" if isinstance(workers, tuple) else str(workers)
    cpus = int(cast(dict[str, float], scaling.resources_per_worker)["CPU"])
    each = f"{cpus} CPU{'s' if cpus > 1 else ''}{' and 1 GPU' if scaling.use_gpu else ''}"
    return f"1 worker with {each}" if count == "1" else f"{count} workers with {each} each"


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Puts back the handlers that Ray replaces by its own, with which a SIGTERM would end the driver at once."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)


def _check_listening(address: str | None) -> None:
    """Asks the cluster's port, since Ray itself tries for minutes.

    Raises:
        ConfigError: if nothing listens at an address of the form host:port.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ConfigError(
            f"runtime.address: no Ray cluster at {address} ({error.strerror or error}); start one with "
            "`ray start --head`, or leave the address out to start Ray here"
        ) from error


def scaling_for(options: RayConfig, resources: Mapping[str, float]) -> ScalingConfig:
    """How many workers there are, and what each gets.

    Raises:
        ConfigError: if the cluster has not as much.
    """
    num_gpus, num_cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    use_gpu = options.device == "cuda" or (options.device == "auto" and num_gpus > 0)
    available, kind = (num_gpus, "GPU") if use_gpu else (num_cpus, "CPU")
    if isinstance(options.num_workers, tuple):
        least, most = options.num_workers
        # What a worker gets is fixed, while machines come and go: its part of the machines of now.
        cpus = options.cpus_per_worker or (max(1, num_cpus // max(1, num_gpus)) if use_gpu else 1)
    else:
        least = most = options.num_workers or (max(1, num_gpus) if use_gpu else 1)
        cpus = options.cpus_per_worker or max(1, num_cpus // least)
    if least > available:
        raise ConfigError(
            f"runtime.num_workers: found {least}, but the cluster has {available} {kind}s; allowed: 1 to {available}"
        )
    if least * cpus > num_cpus:
        raise ConfigError(
            f"runtime.cpus_per_worker: found {cpus} for {least} workers, but the cluster has {num_cpus} CPUs; "
            f"allowed: 1 to {num_cpus // least}"
        )
    return ScalingConfig(
        num_workers=least if not isinstance(options.num_workers, tuple) else (least, most),
        use_gpu=use_gpu,
        resources_per_worker={"CPU": cpus},
        elastic_resize_monitor_interval_s=options.resize_interval_s,
    )


class _Notice(threading.Thread):
    """Asks Ray, beside the training, whether machines of the run are about to be taken away.

    Ray's answer is a barrier of all workers, so each asks as often as the others do.
    """

    def __init__(self) -> None:
        super().__init__(name="preemption-notice", daemon=True)
        self._given = threading.Event()

    def run(self) -> None:
        """Asks until the workers are ended."""
        with contextlib.suppress(RayError, RuntimeError):  # Ray ends while we ask
            while not self._given.wait(_NOTICE_LOOKS_S):
                if train.get_preemption_info() is not None:
                    self._given.set()

    def given(self) -> bool:
        """Whether a notice was given."""
        return self._given.is_set()


class _FolderHandler(logging.Handler):
    """Lays a worker's messages into the run's folder, where the driver finds them."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        super().__init__()
        self._folder = folder
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        self._folder.tell(record.levelname, f"worker {self._rank}: {record.getMessage()}")


def _worker(settings: dict[str, Any]) -> None:
    """Runs in each of Ray's worker processes."""
    context, folder = train.get_context(), RunFolder(Path(settings["folder"]))
    folder.require_launch(settings["launch"])
    # Ray puts its workers into a folder of its own, while paths of a configuration start where the driver was started.
    with contextlib.suppress(OSError):  # another machine may not have it
        os.chdir(settings["working_folder"])
    logging.getLogger("ssl_sec").addHandler(_FolderHandler(folder, context.get_world_rank()))
    logging.getLogger("ssl_sec").setLevel(logging.INFO)
    device = get_device()
    assert isinstance(device, torch.device)
    notice = _Notice()
    notice.start()
    worker = Worker(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        device=device,
        node=f"{socket.gethostname()} {ray.get_runtime_context().get_node_id()}",
        leaving=notice.given,
    )
    with _crash_reported(folder.crash_path(worker.rank)):
        work(settings["job"], settings["values"], settings["folder"], worker)


@contextlib.contextmanager
def _crash_reported(path: Path) -> Iterator[None]:
    """Has this process write to a file where it was when a signal kills it."""
    with path.open("w") as file:
        faulthandler.enable(file)
        try:
            yield
        finally:
            faulthandler.disable()
            path.unlink(missing_ok=True)
