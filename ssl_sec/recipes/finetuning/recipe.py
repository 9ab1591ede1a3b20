"""Fine-tuning from a config, on one worker of any runtime.

As in a linear evaluation, a tenth of the training images is held out, the labelled ones are drawn from the rest, the
best epoch is chosen by its accuracy on the held-out tenth, and the test set is used once, at the end.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from ssl_sec.augment.mixup import Mixup
from ssl_sec.augment.views import Views
from ssl_sec.data.crops import row_draws
from ssl_sec.data.image_set import ImageSet, on_device, require_labels, subset
from ssl_sec.data.samplers import ShuffledBatches, worker_rows
from ssl_sec.data.shards.streamed import require_any_order
from ssl_sec.data.stores import with_crop
from ssl_sec.errors import ConfigError
from ssl_sec.evaluation.classification.scores import (
    Part,
    Scores,
    confusion_values,
    hits_of,
    in_parts,
    mean_per_class,
    scores_of,
    top1,
)
from ssl_sec.evaluation.feature_table import FeatureTable
from ssl_sec.evaluation.features import readable_rows
from ssl_sec.evaluation.splits import opening_test_images, require_same_classes, with_test_images
from ssl_sec.networks import Encoder, Network
from ssl_sec.networks.stages import freeze_all_but
from ssl_sec.recipes.assembly import RunStore, assemble, building_for, extractor, save_network, train_recipe
from ssl_sec.recipes.finetuning.config import TEST_SEED, FinetuneConfig
from ssl_sec.recipes.finetuning.objective import MixedObjective
from ssl_sec.recipes.stopping import until_a_stop
from ssl_sec.rules import check
from ssl_sec.training.objective import Objective
from ssl_sec.training.recipe import Recipe
from ssl_sec.training.step import Runtime, log_once


@runtime_checkable
class FinetuneStore(RunStore, Protocol):
    """Holds the encoder that the run starts from, and stores its results.

    Attributes:
        initial_path: file with the encoder's weights, if the run starts from those of another run.
        confusion_path: file for the confusion matrix and the calibration.
    """

    initial_path: Path
    confusion_path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledImages:
    """The parts of a training split.

    Attributes:
        trained_on: labelled images.
        watched: held-out images in order of the split, or the labelled ones if none are held out; not augmented.
        watched_name: prefix of the metrics of the watched ones.
    """

    trained_on: ImageSet
    watched: ImageSet
    watched_name: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Classified(Scores):
    """The results of a classifier on the test images."""

    def metrics(self) -> dict[str, float]:
        """Percentages by metric name."""
        return {
            "finetune/top1": 100 * self.top1,
            **({} if self.top5 is None else {"finetune/top5": 100 * self.top5}),
            "finetune/mean_per_class": 100 * self.mean_per_class,
            "finetune/ece": 100 * self.calibration.ece,
        }


class BestNetwork:
    """The weights of the epoch with the highest score so far, the first one of equals.

    Args:
        encoder: the encoder whose state is kept and restored.
        head: the head, likewise.
        score: the metric that is the score.

    Attributes:
        found: the metrics of these weights; empty before the first ones.
        epoch: epoch after which they were measured; None before the first ones.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module, score: str) -> None:
        self._network = nn.ModuleDict({"encoder": encoder, "head": head})
        self._weights: Mapping[str, Tensor] = {}
        self._score = score
        self.found: Mapping[str, float] = {}
        self.epoch: float | None = None

    def offer(self, found: Mapping[str, float], epoch: float) -> None:
        """Keeps the network's weights if their score is the highest so far.

        Args:
            found: metrics of the weights, the score among them.
            epoch: epoch after which they were measured.
        """
        if not self.found or found[self._score] > self.found[self._score]:
            self._weights = {
                name: value.detach().to("cpu", copy=True) for name, value in self._network.state_dict().items()
            }
            self.found, self.epoch = dict(found), epoch

    def restore(self) -> None:
        """Puts the best weights into the network, if there are some."""
        if self._weights:
            self._network.load_state_dict(self._weights)

    def state_dict(self) -> dict[str, Any]:
        """The best weights, their metrics and their epoch."""
        return {"weights": self._weights, "found": self.found, "epoch": self.epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a state."""
        self._weights = {name: value.cpu() for name, value in state_dict["weights"].items()}
        self.found, self.epoch = state_dict["found"], state_dict["epoch"]


def run(config: FinetuneConfig, runtime: Runtime, store: FinetuneStore) -> None:
    """Trains the classifier that `config` describes, measures it on the test images, and saves it in the store.

    Args:
        config: the run, the same on every worker.
        runtime: this worker's runtime.
        store: the run's store, shared by all workers.
    """
    log_once(runtime, "loading %s", config.data.name)
    crop, centre = config.augment.random_crop(), config.augment.centre_crop()
    train_set = on_device(config.data.open("train", crop), runtime.device)
    require_labels(train_set, "fine-tuning")  # before the test images, which unlabelled sets often lack
    # Opened before the training, so that a missing test split is an error at once.
    if config.test_share is None:
        with opening_test_images("test_share"):
            test = on_device(config.data.open("test", centre), runtime.device)
        require_labels(test, "fine-tuning")
    else:
        train_set, held_out = with_test_images(train_set, config.test_share, TEST_SEED)
        test = with_crop(held_out, centre)
    for image_set in (train_set, test):
        require_any_order(image_set, "fine-tuning")
    require_same_classes(train_set, test, "fine-tuning")
    images = labelled_images(config, train_set)
    log_once(runtime, "labels of %s of %s images", f"{len(images.trained_on):,}", f"{len(train_set):,}")
    if config.run is not None:
        config = replace(config, encoder=replace(config.encoder, weights=str(store.initial_path)))
    with building_for(images.trained_on.image_shape, config.run, "data.image_size_px is their size"):
        recipe = build_recipe(config, images.trained_on, runtime)
    best = None
    if config.evaluated == "best":
        best = BestNetwork(recipe.encoder, recipe.head, "mean_per_class" if config.balanced else "top1")
    recipe = replace(recipe, best=best)
    extract = extractor(nn.Sequential(recipe.encoder, recipe.head), recipe.computation, runtime, batch_size=256)
    classify = partial(readable_rows, extract, runtime.device)
    monitor = _Monitor(images, classify, best, recipe.sampler.steps_per_epoch, runtime)
    train_recipe(config, recipe, runtime, store, monitor, config.monitor.every_epochs * recipe.sampler.steps_per_epoch)
    if best is not None:
        best.restore()
    log_once(runtime, "measuring the classifier on %s test images", f"{len(test):,}")
    logits = readable_rows(until_a_stop(extract, runtime), runtime.device, test)
    found = Classified(**vars(scores_of(_parts_of(logits))))
    if runtime.rank == 0:
        store.describe_test_data({f"{config.data.title}/test": test})
        epoch = config.epochs if best is None or best.epoch is None else best.epoch
        metrics = {**found.metrics(), "finetune/epoch": float(epoch)}
        if best is not None:
            metrics |= {f"finetune/val_{name}": value for name, value in best.found.items()}
        runtime.report(recipe.total_steps, metrics)
        save_network(recipe, store, with_head=True)
        record = {
            "confusion": confusion_values(found.confusion),
            "class_names": list(train_set.class_names),
            "calibration": asdict(found.calibration),
        }
        store.confusion_path.write_text(json.dumps(record))


def labelled_images(config: FinetuneConfig, train_set: ImageSet) -> LabelledImages:
    """The images that are trained on and those that are watched; errors as for `FinetuneConfig.divided`."""
    chosen, held_out = config.divided(train_set)
    trained_on = subset(train_set, chosen, "labelled")
    watched = trained_on if held_out is None else subset(train_set, held_out, "held out")
    return LabelledImages(
        trained_on=trained_on,
        watched=with_crop(watched, config.augment.centre_crop()),
        watched_name="train" if held_out is None else "val",
    )


def build_recipe(config: FinetuneConfig, image_set: ImageSet, runtime: Runtime) -> Recipe:
    """Everything that the run trains, on the runtime's device; equal on every worker.

    Args:
        config: the run's configuration; `encoder.weights` are those that it starts from.
        image_set: the labelled images.
        runtime: this worker's runtime.

    Raises:
        ConfigError: the encoder has fewer stages than are to be trained, the head has outputs for another number of
            classes, or the workers cannot share the batch, in pairs for mixup.
    """
    num_classes, dim = len(image_set.class_names), config.head.dim
    check(dim in (None, num_classes), "head.dim", dim, f"null or {num_classes}, the number of classes")
    batch_size, seed = config.global_batch_size, config.seed
    sampler = ShuffledBatches(num_images=len(image_set), global_batch_size=batch_size, seed=seed)
    views: Views = config.augment.views_for(image_set, seed)
    objective_of: Callable[..., Objective] = Objective
    if config.mixup > 0:
        _require_pairs(config, runtime)
        views = Mixup(views, config.mixup, seed)
        objective_of = partial(MixedObjective, mixup=views)

    def freeze(network: Network) -> None:
        if config.trained_stages != "all":
            assert isinstance(network.encoder, Encoder)
            freeze_all_but(network.encoder.backbone, config.trained_stages, key="trained_stages")

    return assemble(
        replace(config, head=replace(config.head, dim=num_classes)),
        image_set,
        runtime,
        sampler=sampler,
        total_steps=config.epochs * sampler.steps_per_epoch,
        loss=config.loss.build(class_sizes=_class_sizes(image_set) if config.balanced else None),
        views=views,
        objective_of=objective_of,
        prepare=freeze,
        draws=partial(row_draws, seed, global_batch_size=batch_size),
    )


def _parts_of(logits: FeatureTable) -> Iterator[Part]:
    return in_parts(lambda rows: rows, logits, logits.dim)


def _class_sizes(image_set: ImageSet) -> list[int]:
    """The number of images of each class; a class without images counts as if it had one."""
    return image_set.labels.cpu().bincount(minlength=len(image_set.class_names)).clamp(min=1).tolist()


def _require_pairs(config: FinetuneConfig, runtime: Runtime) -> None:
    rows = worker_rows(config.global_batch_size, runtime.rank, runtime.world_size)
    if (rows.stop - rows.start) % 2:
        raise ConfigError(
            f"mixup: found {config.mixup:g}, must be 0 where each of {runtime.world_size} workers has an odd number of "
            f"rows, {rows.stop - rows.start} of global_batch_size = {config.global_batch_size}"
        )


@dataclass(frozen=True, eq=False, slots=True)
class _Monitor:
    """The accuracies of the watched images; offers the network to the best ones."""

    images: LabelledImages
    classify: Callable[[ImageSet], FeatureTable]
    best: BestNetwork | None
    steps_per_epoch: int
    runtime: Runtime

    def __call__(self, steps_taken: int) -> dict[str, float]:
        log_once(self.runtime, "measuring the accuracy on %s images", f"{len(self.images.watched):,}")
        logits = self.classify(self.images.watched)
        hits = hits_of(_parts_of(logits))
        found = {"top1": 100 * top1(*hits), "mean_per_class": 100 * mean_per_class(*hits)}
        if self.best is not None:
            self.best.offer(found, steps_taken / self.steps_per_epoch)
        return {f"{self.images.watched_name}/{name}": value for name, value in found.items()}
