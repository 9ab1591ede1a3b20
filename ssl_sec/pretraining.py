"""Contrastive pretraining from a config, on one worker of any runtime."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ssl_sec.collectives import average_gradients, average_parameter_gradients
from ssl_sec.config import PretrainConfig
from ssl_sec.data.image_set import ImageSet, ResidentImages
from ssl_sec.data.samplers import ShuffledBatches, worker_rows
from ssl_sec.encoders import save_weights
from ssl_sec.evaluation.features import extract_features
from ssl_sec.evaluation.knn import knn_top1
from ssl_sec.evaluation.rank import rankme
from ssl_sec.evaluation.splits import stratified_split
from ssl_sec.global_batch_norm import globalise_batch_norm
from ssl_sec.objective import Objective
from ssl_sec.seeding import derived_seed
from ssl_sec.training import Cadence, Recipe, Runtime, image_labels, train

logger = logging.getLogger(__name__)

NUM_VIEWS = 2


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

    def restored_state(self, device: torch.device) -> Mapping[str, Any] | None:
        """The state of the newest whole checkpoint, or None at the start of a run."""
        ...


def pretrain(config: PretrainConfig, runtime: Runtime, store: RunStore) -> None:
    """Trains the encoder that `config` describes, and leaves its weights in the store.

    Args:
        config: the run, the same on every worker.
        runtime: this worker's.
        store: the run's, shared by all workers.
    """
    image_set = config.data.open("train")
    if isinstance(image_set, ResidentImages):
        image_set = image_set.to(runtime.device)
    recipe = build_recipe(config, image_set, runtime)
    monitor = _Monitor(config, recipe.encoder, image_set, runtime)
    state = store.restored_state(runtime.device)
    first_step = 0 if state is None else recipe.restore(state)
    if first_step and runtime.rank == 0:
        workers = "1 worker" if runtime.world_size == 1 else f"{runtime.world_size} workers"
        logger.info("resuming after step %d of %d on %s", first_step, recipe.total_steps, workers)
    if runtime.rank == 0:
        store.describe_data(image_set)
        store.forget_records_from(first_step)
    cadence = Cadence(
        log_every_steps=config.log_every_steps,
        save_every_epochs=config.checkpoint.every_epochs,
        monitor_every_epochs=config.monitor.every_epochs,
    )
    if recipe.total_steps == 0:
        runtime.report(0, monitor())
    train(recipe, runtime, cadence, monitor, first_step)
    features, labels = monitor.features()
    if runtime.rank == 0:
        assert isinstance(recipe.encoder.backbone, nn.Module)
        save_weights(recipe.encoder.backbone, store.encoder_path)
        torch.save({"features": features.cpu(), "labels": labels.cpu()}, store.features_path)


def build_recipe(config: PretrainConfig, image_set: ImageSet, runtime: Runtime) -> Recipe:
    """All that the run trains, on the runtime's device; equal on every worker."""
    num_channels, height, width = image_set.image_shape
    worker_rows(config.global_batch_size, runtime.rank, runtime.world_size)
    torch.manual_seed(derived_seed(config.seed, "weights"))
    encoder = config.encoder.build(num_channels, min(height, width))
    head = config.head.build(encoder.num_features)
    sampler = ShuffledBatches(num_images=len(image_set), global_batch_size=config.global_batch_size, seed=config.seed)
    total_steps = config.epochs * sampler.steps_per_epoch
    eta = config.constraint.weight(sampler.steps_per_epoch, total_steps)
    objective = Objective(config.loss.build(), config.constraint.build(), eta)
    options = config.runtime
    network: nn.Module = nn.Sequential(encoder, head)
    if runtime.world_size > 1:
        network = globalise_batch_norm(network)
    network.to(runtime.device, torch.float64 if options.precision == "float64" else torch.float32)
    if options.channels_last:
        network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if options.precision == "float64":
        objective.double()
    objective.to(runtime.device)
    average_parameter_gradients(objective)
    model = average_gradients(network, runtime.device)
    return Recipe(
        encoder=encoder,
        head=head,
        model=torch.compile(model) if options.compile else model,  # pyright: ignore[reportArgumentType]
        objective=objective,
        optimiser=config.optimiser.build(encoder, head, objective),
        learning_rate=config.optimiser.schedule(sampler.steps_per_epoch, total_steps),
        image_set=image_set,
        sampler=sampler,
        views=config.augment.build(min(height, width), num_channels, config.seed, NUM_VIEWS).to(runtime.device),
        row_labels=partial(image_labels, num_views=NUM_VIEWS),
        total_steps=total_steps,
        precision=options.precision,
        channels_last=options.channels_last,
        num_loader_workers=options.num_loader_workers,
    )


class _Monitor:
    """kNN accuracy and RankMe of the encoder on images of the training set, a tenth of them as queries."""

    def __init__(self, config: PretrainConfig, encoder: nn.Module, image_set: ImageSet, runtime: Runtime) -> None:
        images = torch.arange(len(image_set))
        if len(images) > config.monitor.max_images:
            share = config.monitor.max_images / len(images)
            _, images = stratified_split(image_set.labels, share, seed=0)
        self._bank, self._queries = stratified_split(image_set.labels[images], 0.1, seed=0)
        self._images = images
        self._config = config
        self._encoder = encoder
        self._image_set = image_set
        self._runtime = runtime

    def __call__(self) -> dict[str, float]:
        features, labels = self.features()
        bank, queries = self._bank.to(features.device), self._queries.to(features.device)
        accuracy = knn_top1(
            features[bank],
            labels[bank],
            features[queries],
            labels[queries],
            num_classes=len(self._image_set.class_names),
            k=self._config.monitor.neighbours,
        )
        return {"val/knn_top1": 100 * accuracy, "val/rankme": rankme(features)}

    def features(self) -> tuple[torch.Tensor, torch.Tensor]:
        return extract_features(
            self._encoder,
            self._image_set,
            self._images,
            self._runtime.device,
            num_loader_workers=self._config.runtime.num_loader_workers,
        )
