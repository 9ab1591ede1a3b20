"""Contrastive pretraining from a config, on one worker of any runtime."""

from functools import partial

import torch

from ssl_sec.data.image_set import ImageSet, on_device
from ssl_sec.data.shards.streamed import shuffled_batches
from ssl_sec.recipes.assembly import RunStore, assemble, save_network, train_recipe
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.pretraining.monitor import Monitor
from ssl_sec.training.recipe import Recipe, image_labels
from ssl_sec.training.step import Runtime, log_once


def run(config: PretrainConfig, runtime: Runtime, store: RunStore) -> None:
    """Trains the encoder that `config` describes, and saves its weights in the store.

    Args:
        config: the run, the same on every worker.
        runtime: this worker's.
        store: the run's, shared by all workers.
    """
    log_once(runtime, "loading %s", config.data.name)
    image_set = on_device(config.data.open("train"), runtime.device)
    recipe = build_recipe(config, image_set, runtime)
    monitor = Monitor(config, recipe, runtime)
    monitor_every = config.monitor.every_epochs * recipe.sampler.steps_per_epoch
    train_recipe(config, recipe, runtime, store, monitor, monitor_every)
    if recipe.total_steps == 0:
        runtime.report(0, monitor(0))
    log_once(runtime, "computing the features of %s images for the plots", f"{monitor.num_images:,}")
    features, labels = monitor.features()
    if runtime.rank == 0:
        save_network(recipe, store, with_head=False)
        torch.save({"features": features.cpu(), "labels": labels.cpu()}, store.features_path)


def build_recipe(config: PretrainConfig, image_set: ImageSet, runtime: Runtime) -> Recipe:
    """Everything that the run trains, on the runtime's device; equal on every worker."""
    num_channels, height, width = image_set.image_shape
    sampler = shuffled_batches(image_set, config.global_batch_size, config.seed)
    layout = config.runtime.on(runtime.device).layout
    return assemble(
        config,
        image_set,
        runtime,
        sampler=sampler,
        total_steps=config.epochs * sampler.steps_per_epoch,
        loss=config.loss.build(),
        views=config.augment.build(min(height, width), num_channels, config.seed, device=runtime.device, layout=layout),
        row_labels=partial(image_labels, num_views=config.augment.num_views),
        graphed=config.runtime.replays_steps(runtime.device, runtime.world_size),
    )
