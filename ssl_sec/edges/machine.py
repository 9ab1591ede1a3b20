"""Describes the device, the workers and the precision of a run."""

import logging

import torch

from ssl_sec.edges.environment import cluster_address
from ssl_sec.errors import counted
from ssl_sec.training.config import LocalConfig, RuntimeConfig

logger = logging.getLogger("ssl_sec")


def announce(runtime: RuntimeConfig) -> None:
    """Logs what a run will use, before slow imports.

    Raises:
        ConfigError: if this machine does not have the device.
    """
    logger.info(describe_runtime(runtime))
    logger.info("importing the libraries for training and tracking")


def describe_runtime(runtime: RuntimeConfig) -> str:
    """Device, workers and precision, as far as they are known here.

    Raises:
        ConfigError: if this machine does not have the device, or the address is not one of a Ray cluster.
    """
    if isinstance(runtime, LocalConfig):
        device = runtime.resolve_device()
        is_gpu = device.type == "cuda"
        threads = torch.get_num_threads()
        kind = torch.cuda.get_device_name(device) if is_gpu else counted(threads, "thread")
        return f"device: {device.type} ({kind}), one process, {runtime.on(device).precision}"
    workers = runtime.num_workers
    if isinstance(workers, tuple):
        count = f"{workers[0]} to {workers[1]}"
    else:
        count = "one for each GPU, or one on CPUs" if workers is None else str(workers)
    address = cluster_address(runtime.address)
    where = f"the Ray cluster at {address}" if address else "Ray on this machine"
    precision = runtime.precision or ("float32" if runtime.device == "cpu" else "bfloat16 on GPUs that have it")
    return f"workers: {count}, on {where}; device: {runtime.device}, {precision}"
