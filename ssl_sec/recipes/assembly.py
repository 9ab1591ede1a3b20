"""What every recipe needs to become a run on this worker: a network on its device, and the state it had before."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from ssl_sec.collectives import average_gradients, average_parameter_gradients
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.samplers import worker_rows
from ssl_sec.networks import Encoder
from ssl_sec.networks.batch_norm import globalise_batch_norm
from ssl_sec.networks.convolutions import lay_out
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.seeding import derived_seed
from ssl_sec.training.class_sharding import template_losses
from ssl_sec.training.objective import Objective
from ssl_sec.training.step import Computation, Recipe, Runtime, say

logger = logging.getLogger(__name__)


@runtime_checkable
class RunStore(Protocol):
    """Where a run keeps what outlives it."""

    @property
    def encoder_path(self) -> Path:
        """Where the encoder's weights are left."""
        ...

    @property
    def features_path(self) -> Path:
        """Where features of some training images are left."""
        ...

    def describe_data(self, image_set: ImageSet) -> None:
        """Keeps what is to be told of the training set."""
        ...

    def forget_records_from(self, step: int) -> None:
        """Drops figures of steps that will be taken again."""
        ...

    def restored_state(self, device: torch.device, held: slice | None = None) -> Mapping[str, Any] | None:
        """The state of the newest whole checkpoint, or None at the start; see `ssl_sec.training.checkpoint`."""
        ...


def initialised(config: TrainingConfig, image_set: ImageSet, runtime: Runtime) -> tuple[Encoder, nn.Module]:
    """The encoder and the head as the run's seed draws them, equal on every worker.

    Raises:
        ConfigError: if the workers cannot share the batch equally.
    """
    num_channels, height, width = image_set.image_shape
    size = f"{len(image_set):,} images of {num_channels} x {height} x {width}, {len(image_set.class_names):,} classes"
    say(runtime, "data: %s, %s", image_set.name, size)
    worker_rows(config.global_batch_size, runtime.rank, runtime.world_size)
    torch.manual_seed(derived_seed(config.seed, "weights"))
    encoder = config.encoder.build(num_channels, min(height, width))
    return encoder, config.head.build(encoder.num_features, config.seed)


def assembled(
    encoder: nn.Module, head: nn.Module, objective: Objective, runtime: Runtime, computation: Computation
) -> nn.Module:
    """head(encoder(images)) on the worker's device, with batch norm and gradients of all workers.

    Args:
        encoder: images in [0, 1] -> features; changed in place, as are the others.
        head: features -> raw embeddings.
        objective: moved to the same device and precision; the gradients of its parameters are averaged too.
        runtime: this worker's.
        computation: precision, layout and compilation.
    """
    say(runtime, "computing in %s", computation)
    network: nn.Module = nn.Sequential(encoder, head)
    if runtime.world_size > 1:
        network = globalise_batch_norm(network)
    network.to(runtime.device, computation.dtype)
    lay_out(network, runtime.device, computation.channels_last)
    if computation.precision == "float64":
        objective.double()
    objective.to(runtime.device)
    average_parameter_gradients(objective, [each.weight for each in template_losses(objective) if not each.holds_all])
    model = average_gradients(network, runtime.device)
    # All batches have one size: another one, as of a benchmark, is compiled for itself and not for any size.
    return cast(nn.Module, torch.compile(model, dynamic=False)) if computation.compiled else model


def taken_up(recipe: Recipe, runtime: Runtime, store: RunStore) -> int:
    """Restores what the store has of the run; returns the steps taken so far."""
    state = store.restored_state(runtime.device, recipe.held_classes)
    first_step = 0 if state is None else recipe.restore(state)
    if first_step and runtime.rank == 0:
        workers = "1 worker" if runtime.world_size == 1 else f"{runtime.world_size} workers"
        logger.info("resuming after step %d of %d on %s", first_step, recipe.total_steps, workers)
    if runtime.rank == 0:
        store.describe_data(recipe.image_set)
        store.forget_records_from(first_step)
    steps, batch_size = f"{recipe.total_steps - first_step:,}", f"{recipe.sampler.global_batch_size:,}"
    say(runtime, "training %s steps of %s images", steps, batch_size)
    return first_step
