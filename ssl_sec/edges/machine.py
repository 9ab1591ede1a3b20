"""What a run runs on, in words."""

import logging
import os

import torch

from ssl_sec.training.config import LocalConfig, RuntimeConfig

logger = logging.getLogger("ssl_sec")


def announce(runtime: RuntimeConfig) -> None:
    """Logs what a run is about to use, before the imports that it waits for.

    Raises:
        ConfigError: if this machine does not have the device.
    """
    logger.info(in_words(runtime))
    logger.info("importing what trains and tracks")


def in_words(runtime: RuntimeConfig) -> str:
    """Device, workers and precision, as far as the configuration and this machine say.

    Raises:
        ConfigError: if this machine does not have the device.
    """
    if isinstance(runtime, LocalConfig):
        device = runtime.resolve_device()
        is_gpu = device.type == "cuda"
        threads = torch.get_num_threads()
        kind = torch.cuda.get_device_name(device) if is_gpu else "1 thread" if threads == 1 else f"{threads} threads"
        return f"device: {device.type} ({kind}), one process, {runtime.on(device).precision}"
    workers = runtime.num_workers
    if isinstance(workers, tuple):
        asked = f"{workers[0]} to {workers[1]}"
    else:
        asked = "one for each GPU, or one on CPUs" if workers is None else str(workers)
    address = runtime.address or os.environ.get("RAY_ADDRESS")
    where = f"the Ray cluster at {address}" if address else "Ray on this machine"
    precision = runtime.precision or "bfloat16 on GPUs that have it"
    return f"workers: {asked}, on {where}; device: {runtime.device}, {precision}"
