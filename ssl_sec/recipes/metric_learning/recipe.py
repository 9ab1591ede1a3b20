"""Deep metric learning from a config, on one worker of any runtime, measured on classes that it was not trained on."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from safetensors.torch import save_file
from torch import Tensor, nn

from ssl_sec.data.crops import row_draws
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.image_set import ImageSet, on_device, subset
from ssl_sec.data.selection.config import TripletSamplerConfig
from ssl_sec.data.stores import with_crop
from ssl_sec.errors import DataError, counted
from ssl_sec.evaluation.clustering import kmeans_assignments, nmi_f1
from ssl_sec.evaluation.feature_maps import strongest_feature_maps
from ssl_sec.evaluation.feature_table import FeatureTable
from ssl_sec.evaluation.features import readable
from ssl_sec.evaluation.retrieval import examples, num_without_positive, precision_at_r, recall_at_k
from ssl_sec.evaluation.splits import stratified_sample
from ssl_sec.evaluation.variation import rotation_shifts
from ssl_sec.files import replaced
from ssl_sec.losses.generators.memory import CrossBatchMemory
from ssl_sec.losses.geometry import norms
from ssl_sec.recipes.assembly import RunStore, assemble, build_loss, extractor, hold_out, save_network, train_recipe
from ssl_sec.recipes.metric_learning.config import MetricLearningConfig, RetrievalConfig
from ssl_sec.recipes.stopping import stop_if_requested, until_a_stop
from ssl_sec.training.recipe import Recipe
from ssl_sec.training.step import Runtime, log_once

logger = logging.getLogger(__name__)

# How many test images a figure shows with their neighbours, and how many of those with their feature maps.
_MAPPED = 4
_CHANNELS = 6
_NORMS = 100_000  # training images whose norms are measured


@runtime_checkable
class EmbeddingStore(RunStore, Protocol):
    """Stores the results of a run, including the data of its figures."""

    def watched_path(self, steps_taken: int) -> Path:
        """File for the embeddings of the watched images after that many steps."""
        ...


def run(config: MetricLearningConfig, runtime: Runtime, store: EmbeddingStore) -> None:
    """Trains the embedding that `config` describes, measures it on the test classes, and saves it in the store.

    Args:
        config: the run, the same on every worker.
        runtime: this worker's runtime.
        store: the run's store, shared by all workers.
    """
    log_once(runtime, "loading %s", config.data.name)
    crop, centre = config.augment.random_crop(), config.augment.centre_crop()
    image_set = on_device(config.data.open_by_class("train", crop), runtime.device)
    # Opened before the training, so that a missing test split is an error at once.
    test = on_device(config.data.open_by_class("test", centre), runtime.device)
    if len(test) < 2:
        raise DataError(f"{test.name}: found one image, must be two or more, which rank each other")
    if runtime.rank == 0:
        _warn_of_hopeless(test)
    trained_on, watched, watched_name = hold_out(image_set, config.held_out_share)
    recipe = build_recipe(config, trained_on, runtime)
    extract = extractor(nn.Sequential(recipe.encoder, recipe.head), recipe.computation, runtime, batch_size=128)
    embed = partial(_embed_readable, extract, runtime.device)
    if len(watched) > config.monitor.max_images:
        watched = subset(watched, watched_images(watched.labels, config.monitor.max_images), "watched")
    tested = test if config.monitor.test_classes else None
    monitor = _Monitor(watched_name, with_crop(watched, centre), tested, embed, store, runtime)
    train_recipe(config, recipe, runtime, store, monitor, config.monitor.every_steps, at_start=True)
    if runtime.rank == 0:
        save_network(recipe, store, with_head=True)
    if not config.evaluation.enabled:
        return
    asking = "" if test.queries is None else f", {int(test.queries.sum()):,} of them queries"
    log_once(runtime, "measuring retrieval on %s images of the test classes%s", f"{len(test):,}", asking)
    num_norms = min(len(trained_on), _NORMS)
    some = subset(trained_on, torch.arange(num_norms) * len(trained_on) // num_norms, "for their norms")
    embed = partial(_embed_readable, until_a_stop(extract, runtime), runtime.device)
    (embeddings, labels, test), (trained, *_) = embed(test), embed(with_crop(some, centre))
    if runtime.rank == 0:
        store.describe_test_data({f"{config.data.title}/test": test})
        stop = partial(stop_if_requested, runtime, alone=True)
        metrics = {
            **retrieval_metrics(config.evaluation, embeddings, labels, test.queries, stop),
            **_norm_metrics("retrieval/test", embeddings),
            **_norm_metrics("retrieval/train", trained),
            **_variation_metrics(embeddings, labels),
        }
        runtime.report(recipe.total_steps, metrics)
        kept = {"features": embeddings.cpu(), "labels": labels.cpu(), "class_names": list(test.class_names)}
        torch.save({**kept, "training_norms": norms(trained).cpu()}, store.features_path)
        shown = examples(test.read, embeddings, config.evaluation.neighbours, test.queries)
        maps = strongest_feature_maps(recipe.encoder, shown["queries"][:_MAPPED], _CHANNELS)
        torch.save({**shown, **({} if maps is None else maps._asdict())}, store.examples_path)


def build_recipe(config: MetricLearningConfig, image_set: ImageSet, runtime: Runtime) -> Recipe:
    """Everything that the run trains, on the runtime's device; equal on every worker."""
    if isinstance(image_set, EncodedImages) and isinstance(config.sampler, TripletSamplerConfig):
        image_set = replace(image_set, within_class=True)  # an image of another class makes no triplet
    recipe = assemble(
        config,
        image_set,
        runtime,
        sampler=config.sampler.build(image_set.labels, config.global_batch_size, config.seed),
        total_steps=config.steps,
        loss=build_loss(config, config.loss, image_set, config.share_classes_from, config.class_sample_rate),
        views=config.augment.views_for(image_set, config.seed),
        transform=config.transform.build,
        draws=partial(row_draws, config.seed, global_batch_size=config.global_batch_size),
    )
    memory = recipe.objective.transform
    if isinstance(memory, CrossBatchMemory) and 0 < config.steps <= memory.first_step(config.global_batch_size):
        unused = "transform=memory: it is used from step %d on, which this run of %s does not reach"
        log_once(runtime, unused, memory.first_step(config.global_batch_size), counted(config.steps, "step"))
    return recipe


def watched_images(labels: Int64[Tensor, " images"], max_images: int) -> Int64[Tensor, " chosen"]:
    """A stratified sample of at most `max_images` images, without those whose class has no other image in it.

    An image without another of its class would be wrong with any embedding.

    Args:
        labels: class of each image, on the CPU.
        max_images: largest number of images, ≥ 2.
    """
    chosen = stratified_sample(labels, max_images, seed=0)
    _, numbers, sizes = labels[chosen].unique(return_inverse=True, return_counts=True)
    in_pairs = chosen[sizes[numbers] > 1]
    return in_pairs if len(in_pairs) else chosen


def retrieval_metrics(
    config: RetrievalConfig,
    embeddings: Float[Tensor, "images dim"],
    labels: Int64[Tensor, " images"],
    queries: Bool[Tensor, " images"] | None = None,
    on_pass: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """The metrics of the test classes: Recall@K, R-precision, MAP@R, NMI and F1, in percent.

    Args:
        config: the metrics to compute.
        embeddings: raw embeddings of all images.
        labels: class of each image.
        queries: the images that are queries, with the others as the gallery; None: each image is both.
        on_pass: function called for each pass of k-means.
    """
    recalls = recall_at_k(embeddings, labels, config.ks, queries)
    metrics = {f"retrieval/recall_at_{k}": 100 * share for k, share in recalls.items()}
    r_precision, map_at_r = precision_at_r(embeddings, labels, queries)
    metrics |= {"retrieval/r_precision": 100 * r_precision, "retrieval/map_at_r": 100 * map_at_r}
    if config.clustering:
        assignments = kmeans_assignments(
            embeddings,
            len(labels.unique()),
            config.seed,
            num_starts=config.kmeans_starts,
            num_iterations=config.kmeans_iterations,
            on_pass=on_pass,
        )
        nmi, f1 = nmi_f1(assignments, labels)
        metrics |= {"retrieval/nmi": 100 * nmi, "retrieval/f1": 100 * f1}
    return metrics


def _warn_of_hopeless(test: ImageSet) -> None:
    """Warns of test images that are wrong at any K, as there is no other image of their class to find."""
    count = num_without_positive(test.labels, test.queries)
    if not count:
        return
    has, its, wrong = ("has", "its", "it is") if count == 1 else ("have", "their", "they are")
    if test.queries is None:
        found = f"{count:,} of the test images {has} no other of {its} class to find"
    else:
        found = f"{count:,} of the {int(test.queries.sum()):,} queries {has} no image of {its} class in the gallery"
    logger.warning("%s: %s wrong at any K", found, wrong)


def _embed_readable(
    extract: Callable[[ImageSet], FeatureTable], device: torch.device, image_set: ImageSet
) -> tuple[Float[Tensor, "images dim"], Int64[Tensor, " images"], ImageSet]:
    """Embeddings and labels of the images that can be read, and these images; every worker calls this function.

    An image that replaces an unreadable one would find itself.
    """
    embeddings, labels = extract(image_set).rows
    is_read = readable(image_set, device)
    if bool(is_read.all()):
        return embeddings, labels, image_set
    return embeddings[is_read], labels[is_read], subset(image_set, is_read.cpu().nonzero().flatten(), "the readable")


def _norm_metrics(name: str, embeddings: Float[Tensor, "images dim"]) -> dict[str, float]:
    lengths = norms(embeddings)
    return {f"{name}_norm_mean": float(lengths.mean()), f"{name}_norm_variance": float(lengths.var(correction=0))}


def _variation_metrics(embeddings: Float[Tensor, "images dim"], labels: Int64[Tensor, " images"]) -> dict[str, float]:
    """How far rotations between classes move the variation, and r_w (SFT, Fig. 6b, Eq. 8); none without directions."""
    try:
        found = rotation_shifts(embeddings, labels, seed=0)
    except DataError:  # a row of length 0
        return {}
    mean = {} if found.shifts.mean is None else {"retrieval/rotation_shift_mean": found.shifts.mean}
    return {**mean, "retrieval/within_class_energy": 100 * found.within_class_energies[-1]}


@dataclass(frozen=True, eq=False, slots=True)
class _Monitor:
    """Recall@1 of held-out classes, or of the training classes if none are held out; saves their embeddings.

    Recall@1 of the test classes is measured too, if they are given.
    """

    name: str
    watched: ImageSet
    tested: ImageSet | None
    embed: Callable[[ImageSet], tuple[Tensor, Tensor, ImageSet]]
    store: EmbeddingStore
    runtime: Runtime

    def __call__(self, steps_taken: int) -> dict[str, float]:
        log_once(self.runtime, "measuring Recall@1 on %s images", f"{len(self.watched):,}")
        embeddings, labels, _ = self.embed(self.watched)
        if self.runtime.rank == 0:
            path = self.store.watched_path(steps_taken)
            path.parent.mkdir(exist_ok=True)
            with replaced(path, sync=False) as temporary:
                save_file({"embeddings": embeddings.float().cpu()}, temporary)
        metrics = {f"{self.name}/recall_at_1": 100 * recall_at_k(embeddings, labels, (1,))[1]}
        if self.tested is not None:
            embeddings, labels, tested = self.embed(self.tested)
            metrics["test/recall_at_1"] = 100 * recall_at_k(embeddings, labels, (1,), tested.queries)[1]
        return metrics
