"""What a step sends, counted on gloo workers, and what that costs on many GPUs, reckoned.

A worker of W has b images, two views each, embeddings of D values, a network of P weights and L batch norms with C
channels in all. Per step it takes part in

    embeddings        a gather of 2bW · D values and of 2bW labels of 8 bytes, and backward a sum of as many values,
                      of which each worker gets its own rows
    loss              a sum of one value, and one in the backward pass
    batch norm        L gathers of (2C_l + 1) · W values, and L sums of 2C_l in the backward pass
    gradients         a mean of P values, in buckets of 25 MiB, while the backward pass goes on

A ring of W moves 2 (W − 1)/W of a sum's bytes through each worker, and half of that for a gather and for a sum of which
each gets its part; a call takes one latency for each of log2 W levels. What overlaps with the backward pass costs only
what it takes longer.
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
    """What one worker told the others.

    Attributes:
        calls: of collectives, without DDP's.
        num_bytes: of the larger of what goes in and what comes out.
        seconds: until they were done, waiting for the others included; on CPUs, where a call returns only then.
    """

    calls: int = 0
    num_bytes: int = 0
    seconds: float = field(default=0.0, compare=False)


@contextlib.contextmanager
def counted() -> Iterator[Sent]:
    """Counts collectives that the package calls; DDP's gradients go past it."""
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
    """The machines of the reckoning.

    Attributes:
        bytes_per_s: that each GPU sends, and receives at the same time.
        latency_s: of one level of a collective.
        flops_per_s: that a GPU reaches in training.
    """

    bytes_per_s: float
    latency_s: float
    flops_per_s: float


# One 400 Gb/s port a GPU; a fifth of the 790 TFLOP/s that matrix products reach on an H200.
CLUSTER = Cluster(bytes_per_s=50e9, latency_s=10e-6, flops_per_s=158e12)
IMAGES_A_GPU = 256
ENCODER = "resnet50"
FLOPS_A_VIEW = 7.8e9  # forward and backward of ResNet-50 with the CIFAR stem
ASSUMED = (
    f"{ENCODER} with the CIFAR stem, {IMAGES_A_GPU} images a GPU, {CLUSTER.bytes_per_s / 1e9:.0f} GB/s a GPU, "
    f"{1e6 * CLUSTER.latency_s:.0f} us a level, {CLUSTER.flops_per_s / 1e12:.0f} TFLOP/s"
)


def reckoned(workers: tuple[int, ...] = (8, 16, 64, 256, 1024)) -> list[dict[str, Any]]:
    """Milliseconds of a step on so many GPUs, by the parts of the module's docstring."""
    with torch.device("meta"):
        network = ResNetConfig(name=ENCODER).build(3, 32)
    num_weights = sum(parameter.numel() for parameter in network.parameters())
    channels = [module.num_features for module in network.modules() if isinstance(module, _BatchNorm)]
    rows = []
    for count in workers:
        embeddings = 2 * IMAGES_A_GPU * count * DIM * BYTES
        compute = 2 * IMAGES_A_GPU * FLOPS_A_VIEW / CLUSTER.flops_per_s
        # Cosines and two products of the backward pass, of own rows with all.
        loss = 3 * 2 * (2 * IMAGES_A_GPU) * (2 * IMAGES_A_GPU * count) * DIM / CLUSTER.flops_per_s
        batch_norm = sum(_gather(BYTES * (2 * c + 1) * count, count) + _sum(BYTES * 2 * c, count) for c in channels)
        gathered = 2 * _gather(embeddings, count)  # backward, it is scattered
        gradients = _sum(BYTES * num_weights, count, calls=-(-BYTES * num_weights // BUCKET_BYTES))
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
                "of_them_waited_for_ms": 1e3 * exposed,
                "step_ms": 1e3 * step,
                "efficiency_percent": 100 * compute / step,
                "images_per_s": count * IMAGES_A_GPU / step,
            }
        )
    return rows


def expected(network: nn.Module, rows_a_worker: int, workers: int) -> Sent:
    """What the formulas say that a worker sends in a step, beside gradients."""
    channels = [module.num_features for module in network.modules() if isinstance(module, _BatchNorm)]
    embeddings = rows_a_worker * workers * DIM * BYTES
    batch_norm = sum(BYTES * ((2 * c + 1) * workers + 2 * c) for c in channels)
    labels = rows_a_worker * workers * 8
    return Sent(calls=3 + 2 + 2 * len(channels), num_bytes=2 * embeddings + labels + 2 * BYTES + batch_norm)


def _sum(num_bytes: float, workers: int, calls: int = 1) -> float:
    moved = 2 * (workers - 1) / workers * num_bytes / CLUSTER.bytes_per_s
    return moved + calls * 2 * log2(workers) * CLUSTER.latency_s


def _gather(num_bytes: float, workers: int) -> float:
    return (workers - 1) / workers * num_bytes / CLUSTER.bytes_per_s + log2(workers) * CLUSTER.latency_s
