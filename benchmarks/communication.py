"""Counts the data that a step sends between gloo workers, and estimates its time on many GPUs.

Each of W workers has b images with two views each, embeddings of D values, a network of P weights, and L batch norms
with C channels in total. In each step it takes part in

    embeddings        an all-gather of 2bW · D values and of 2bW labels of 8 bytes, and in the backward pass a
                      reduce-scatter of as many values
    rows              on CPUs, an all-reduce of two numbers of 8 bytes: all workers have as many rows
    loss              an all-reduce of one value, and another in the backward pass
    batch norm        L all-gathers of (2C_l + 1) · W values, and L all-reduces of 2C_l in the backward pass
    figures           in a step that is reported, all-gathers of 2bW turns, norms of gradients and angles, and the
                      all-gathers of batch norm once more, for the embeddings after the step
    gradients         an all-reduce of P values, in buckets of 25 MiB, overlapped with the backward pass

A ring all-reduce moves 2 (W − 1)/W of its bytes through each worker; an all-gather and a reduce-scatter move half of
that. A call has one latency for each of log2 W levels. Of the gradients, only the time beyond the backward pass counts.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import log2
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from ssl_sec.networks.config import ResNetConfig

BYTES = 4
DIM = 128
BUCKET_BYTES = 25 * 2**20


@dataclass
class Sent:
    """The data that one worker sent.

    Attributes:
        calls: the number of collectives, without DDP's.
        num_bytes: sum over calls of the bytes of the input or of the output, whichever is larger.
        seconds: the time in the calls, including the wait for other workers; on CPUs, where calls are synchronous.
    """

    calls: int = 0
    num_bytes: int = 0
    seconds: float = field(default=0.0, compare=False)


@contextlib.contextmanager
def count_sent() -> Iterator[Sent]:
    """Counts the collectives that the package calls; DDP's gradients are not counted."""
    sent = Sent()

    def counting(name: str) -> Any:
        collective = getattr(dist, name)

        def call(*arguments: Any, **options: Any) -> Any:
            sent.calls += 1
            sent.num_bytes += max(each.nbytes for each in arguments if isinstance(each, Tensor))
            start = time.perf_counter()
            try:
                return collective(*arguments, **options)
            finally:
                sent.seconds += time.perf_counter() - start

        return mock.patch.object(dist, name, call)

    with counting("all_reduce"), counting("all_gather_into_tensor"), counting("reduce_scatter_tensor"):
        yield sent


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines assumed in the estimate.

    Attributes:
        bytes_per_s: rate at which each GPU sends, and receives at the same time.
        latency_s: the latency of one level of a collective.
        flops_per_s: operations per second that a GPU reaches in training.
    """

    bytes_per_s: float
    latency_s: float
    flops_per_s: float


# One 400 Gb/s port per GPU; a fifth of the 790 TFLOP/s that matrix products reach on an H200.
CLUSTER = Cluster(bytes_per_s=50e9, latency_s=10e-6, flops_per_s=158e12)
IMAGES_PER_GPU = 256
ENCODER = "resnet50"
FLOPS_PER_VIEW = 7.8e9  # forward and backward of ResNet-50 with the CIFAR stem
ASSUMED = (
    f"{ENCODER} with the CIFAR stem, {IMAGES_PER_GPU} images per GPU, {CLUSTER.bytes_per_s / 1e9:.0f} GB/s per GPU, "
    f"{1e6 * CLUSTER.latency_s:.0f} us per level, {CLUSTER.flops_per_s / 1e12:.0f} TFLOP/s"
)


def estimate(gpus: tuple[int, ...] = (8, 16, 64, 256, 1024)) -> list[dict[str, Any]]:
    """Estimates the milliseconds of a step on these numbers of GPUs, for each part of the module's docstring."""
    with torch.device("meta"):
        network = ResNetConfig(name=ENCODER).build(3, 32)
    num_weights = sum(parameter.numel() for parameter in network.parameters())
    channels = [module.num_features for module in network.modules() if isinstance(module, _BatchNorm)]
    rows = []
    for count in gpus:
        embeddings = 2 * IMAGES_PER_GPU * count * DIM * BYTES
        compute = 2 * IMAGES_PER_GPU * FLOPS_PER_VIEW / CLUSTER.flops_per_s
        # The cosines of the worker's rows with all rows, and two products in the backward pass.
        loss = 3 * 2 * (2 * IMAGES_PER_GPU) * (2 * IMAGES_PER_GPU * count) * DIM / CLUSTER.flops_per_s
        batch_norm = sum(
            _gather_s(BYTES * (2 * c + 1) * count, count) + _reduce_s(BYTES * 2 * c, count) for c in channels
        )
        gathered = 2 * _gather_s(embeddings, count)  # forward, and the reduce-scatter backward
        gradients = _reduce_s(BYTES * num_weights, count, calls=-(-BYTES * num_weights // BUCKET_BYTES))
        exposed = max(0.0, gradients - 2 / 3 * compute)
        step = compute + loss + batch_norm + gathered + exposed
        rows.append(
            {
                "gpus": count,
                "network_ms": 1e3 * compute,
                "loss_ms": 1e3 * loss,
                "batch_norm_ms": 1e3 * batch_norm,
                "embeddings_ms": 1e3 * gathered,
                "gradients_ms": 1e3 * gradients,
                "gradients_exposed_ms": 1e3 * exposed,
                "step_ms": 1e3 * step,
                "efficiency_percent": 100 * compute / step,
                "images_per_s": count * IMAGES_PER_GPU / step,
            }
        )
    return rows


def compute_expected(network: nn.Module, rows_per_worker: int, workers: int, is_saved: bool = False) -> Sent:
    """Computes from the formulas the data that a worker sends in a reported step on CPUs, without gradients.

    Args:
        network: the network, whose batch norms communicate.
        rows_per_worker: number of views of a worker.
        workers: number of workers.
        is_saved: whether the step's state is saved too, before which the workers agree that all weights are finite.
    """
    channels = [module.num_features for module in network.modules() if isinstance(module, _BatchNorm)]
    embeddings = rows_per_worker * workers * DIM * BYTES
    batch_norm = sum(BYTES * (2 * (2 * c + 1) * workers + 2 * c) for c in channels)
    labels = rows_per_worker * workers * 8
    figures = 3 * rows_per_worker * workers * BYTES
    num_bytes = 2 * embeddings + labels + 2 * 8 + 2 * BYTES + figures + batch_norm
    agreed = Sent(calls=1, num_bytes=8) if is_saved else Sent()
    calls = 3 + 1 + 2 + 3 + 3 * len(channels)
    return Sent(calls=calls + agreed.calls, num_bytes=num_bytes + agreed.num_bytes)


def _reduce_s(num_bytes: float, workers: int, calls: int = 1) -> float:
    moved = 2 * (workers - 1) / workers * num_bytes / CLUSTER.bytes_per_s
    return moved + calls * 2 * log2(workers) * CLUSTER.latency_s


def _gather_s(num_bytes: float, workers: int) -> float:
    return (workers - 1) / workers * num_bytes / CLUSTER.bytes_per_s + log2(workers) * CLUSTER.latency_s
