"""Contrastive pretraining from a config, on one worker of any runtime."""

from functools import partial

import torch
from torch import nn

from ssl_sec.data.image_set import ImageSet, on_device
from ssl_sec.data.samplers import ShuffledBatches
from ssl_sec.evaluation.features import extract_features
from ssl_sec.evaluation.knn import knn_top1
from ssl_sec.evaluation.rank import rankme
from ssl_sec.evaluation.splits import stratified_sample, stratified_split
from ssl_sec.networks import save_weights
from ssl_sec.recipes.assembly import RunStore, assembled, initialised, taken_up
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.training.objective import Objective
from ssl_sec.training.step import Cadence, Recipe, Runtime, image_labels, say, train

NUM_VIEWS = 2


def run(config: PretrainConfig, runtime: Runtime, store: RunStore) -> None:
    """Trains the encoder that `config` describes, and leaves its weights in the store.

    Args:
        config: the run, the same on every worker.
        runtime: this worker's.
        store: the run's, shared by all workers.
    """
    say(runtime, "loading %s", config.data.name)
    image_set = on_device(config.data.open("train"), runtime.device)
    recipe = build_recipe(config, image_set, runtime)
    monitor = _Monitor(config, recipe.encoder, image_set, runtime)
    first_step = taken_up(recipe, runtime, store)
    steps_per_epoch = recipe.sampler.steps_per_epoch
    cadence = Cadence(
        log_every_steps=config.steps_between_reports(runtime.device),
        save_every_steps=config.checkpoint.every_epochs * steps_per_epoch,
        monitor_every_steps=config.monitor.every_epochs * steps_per_epoch,
    )
    if recipe.total_steps == 0:
        runtime.report(0, monitor(0))
    train(recipe, runtime, cadence, monitor, first_step)
    say(runtime, "computing the features of %s images for the plots", f"{monitor.num_images:,}")
    features, labels = monitor.features()
    if runtime.rank == 0:
        assert isinstance(recipe.encoder.backbone, nn.Module)
        save_weights(recipe.encoder.backbone, store.encoder_path)
        torch.save({"features": features.cpu(), "labels": labels.cpu()}, store.features_path)


def build_recipe(config: PretrainConfig, image_set: ImageSet, runtime: Runtime) -> Recipe:
    """All that the run trains, on the runtime's device; equal on every worker."""
    num_channels, height, width = image_set.image_shape
    encoder, head = initialised(config, image_set, runtime)
    sampler = ShuffledBatches(num_images=len(image_set), global_batch_size=config.global_batch_size, seed=config.seed)
    total_steps = config.epochs * sampler.steps_per_epoch
    eta = config.constraint.weight(sampler.steps_per_epoch, total_steps)
    objective = Objective(config.loss.build(), config.constraint.build(), eta)
    computation = config.runtime.on(runtime.device)
    model = assembled(encoder, head, objective, runtime, computation)
    return Recipe(
        encoder=encoder,
        head=head,
        model=model,
        objective=objective,
        optimiser=config.optimiser.build(encoder, head, objective),
        learning_rate=config.optimiser.schedule(sampler.steps_per_epoch, total_steps),
        image_set=image_set,
        sampler=sampler,
        views=config.augment.build(
            min(height, width), num_channels, config.seed, NUM_VIEWS, runtime.device, computation.layout
        ),
        row_labels=partial(image_labels, num_views=NUM_VIEWS),
        total_steps=total_steps,
        computation=computation,
        graphed=config.runtime.replays_steps(runtime.device, runtime.world_size),
        num_loader_workers=config.runtime.num_loader_workers,
    )


class _Monitor:
    """kNN accuracy and RankMe of the encoder on images of the training set, a tenth of them as queries."""

    def __init__(self, config: PretrainConfig, encoder: nn.Module, image_set: ImageSet, runtime: Runtime) -> None:
        images = stratified_sample(image_set.labels, config.monitor.max_images, seed=0)
        self._bank, self._queries = stratified_split(image_set.labels[images], 0.1, seed=0)
        self._images = images
        self._config = config
        self._encoder = encoder
        self._image_set = image_set
        self._runtime = runtime

    @property
    def num_images(self) -> int:
        return len(self._images)

    def __call__(self, steps_taken: int) -> dict[str, float]:
        say(self._runtime, "measuring kNN and RankMe on %s images", f"{self.num_images:,}")
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
