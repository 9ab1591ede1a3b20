"""Contrastive pretraining from a config, on one worker of any runtime."""

import logging
from dataclasses import replace
from functools import partial

import torch

from ssl_sec.data.image_set import ImageSet, on_device, require_labels
from ssl_sec.data.shards.streamed import shuffled_batches
from ssl_sec.evaluation.classification.linear_probe import divided_rows
from ssl_sec.evaluation.splits import opening_test_images, with_test_images
from ssl_sec.losses.config import TeacherLossConfig
from ssl_sec.networks.encoder import Network, check_size
from ssl_sec.networks.initialisation import cut_
from ssl_sec.recipes.assembly import RunStore, assemble, save_network, train_recipe
from ssl_sec.recipes.pretraining.checking import check_images
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.pretraining.examples import neighbours, save_first_views
from ssl_sec.recipes.pretraining.monitor import Monitor
from ssl_sec.recipes.pretraining.objective import SupervisedObjective
from ssl_sec.recipes.pretraining.opening import open_encoded
from ssl_sec.training.objective import Objective
from ssl_sec.training.recipe import Recipe, class_labels_of_views, image_labels
from ssl_sec.training.step import Runtime, log_once

logger = logging.getLogger(__name__)

# A rate that is more than this many times the usual one is probably that of another batch.
_HIGH = 4
# Images this many times as large as the views are probably of a size that was changed alone.
_LARGER = 2


def run(config: PretrainConfig, runtime: Runtime, store: RunStore) -> None:
    """Trains the encoder that `config` describes, and saves its weights in the store.

    Args:
        config: the run, the same on every worker.
        runtime: this worker's runtime.
        store: the run's store, shared by all workers.
    """
    log_once(runtime, "loading %s", config.data.name)
    image_set = on_device(config.augment.crops(config.trained_data.open("train")), runtime.device)
    if config.probe.enabled:
        _require_probed(config, image_set)
    recipe = build_recipe(config, image_set, runtime)
    monitor = Monitor(config, recipe, runtime)
    recipe = replace(recipe, observer=monitor.online_probe)
    check_images(config, image_set, runtime, store.check_path)
    monitor.warn_of_few_queries()
    if runtime.rank == 0:
        _warn_of_a_high_rate(config)
        _warn_of_small_views(config, image_set)
        views = (recipe.views, *recipe.more_views)
        save_first_views(image_set, recipe.sampler, views, runtime.device, store.views_path, recipe.draws)
    monitor_every = config.monitor.every_epochs * recipe.sampler.steps_per_epoch
    train_recipe(config, recipe, runtime, store, monitor, monitor_every)
    if recipe.total_steps == 0:
        runtime.report(0, monitor(0))
    features, labels = monitor.features_at_the_end()
    if runtime.rank == 0:
        save_network(recipe, store, with_head=False)
        torch.save({"features": features.cpu(), "labels": labels.cpu()}, store.features_path)
        torch.save(neighbours(*monitor.measured, features), store.examples_path)


def _warn_of_a_high_rate(config: PretrainConfig) -> None:
    """Names the usual rate for the batch if the run's is much higher, as a default for batches of thousands is."""
    rate, usual = config.optimiser.learning_rate, config.optimiser.usual_rate(config.global_batch_size)
    if rate > _HIGH * usual and config.epochs > 0:
        logger.warning(
            "optimiser.learning_rate: %g is %.3g times the usual rate of %s for batches of %s images, %.3g",
            *(rate, rate / usual, config.optimiser.name, f"{config.global_batch_size:,}", usual),
        )


def _warn_of_small_views(config: PretrainConfig, image_set: ImageSet) -> None:
    """Says if images are much larger than the views that the encoder is trained on, as when one size was changed."""
    views_px, images_px = config.augment.view_size_px, min(image_set.image_shape[1:])
    if views_px is not None and images_px >= _LARGER * views_px and config.epochs > 0:
        logger.warning(
            "augment.view_size_px: the encoder is trained on views of %d pixels, and measured and exported for images "
            "of %d; null makes the views as large",
            views_px,
            images_px,
        )


def _require_probed(config: PretrainConfig, image_set: ImageSet) -> None:
    """Raises a ConfigError or a DataError now if the probe after the training could not start."""
    require_labels(image_set, "the probe after the training (probe.enabled=true; false leaves it out)")
    share = config.probe.test_share
    if share is None:
        with opening_test_images("probe.test_share"):
            open_encoded(config.data, "test")
    if config.data.max_images is None:  # else it is not known what the probe, which takes all images, will have
        probed = image_set if share is None else with_test_images(image_set, share, config.probe.seed)[0]
        divided_rows(probed.labels, config.probe, probed.name)


def build_recipe(config: PretrainConfig, image_set: ImageSet, runtime: Runtime) -> Recipe:
    """Everything that the run trains, on the runtime's device; equal on every worker.

    Raises:
        ConfigError: if the encoder cannot take views of their size.
        DataError: if positives are images of one class, and the images have no labels.
    """
    if config.positives == "classes":
        require_labels(image_set, "positives=classes")
    num_channels, height, width = image_set.image_shape
    sampler = shuffled_batches(image_set, config.global_batch_size, config.seed)
    size_px, augment = min(height, width), config.augment
    options = {"device": runtime.device, "layout": config.runtime.on(runtime.device).layout}
    recipe = assemble(
        config,
        image_set,
        runtime,
        sampler=sampler,
        total_steps=config.epochs * sampler.steps_per_epoch,
        loss=config.loss.build(),
        objective_of=partial(
            SupervisedObjective if config.positives == "classes" else Objective,
            grad_scale=config.grad_scale,
            grad_scale_by=config.grad_scale_by,
        ),
        prepare=partial(cut_, cut=config.cut_init),
        draws=config.draws(config.seed, config.global_batch_size),
        views=augment.build(size_px, num_channels, config.seed, **options),
        more_views=augment.build_small(size_px, num_channels, config.seed, **options),
        row_labels=partial(
            class_labels_of_views if config.positives == "classes" else image_labels,
            num_views=augment.num_views + augment.small_views,
        ),
        graphed=not isinstance(config.loss, TeacherLossConfig)
        and config.runtime.replays_steps(runtime.device, runtime.world_size),
    )
    for key, view_size_px in augment.sizes_px(size_px).items():
        check_size(key, Network(recipe.encoder, recipe.head), num_channels, view_size_px)
    return recipe
