"""Face recognition from a config, on one worker of any runtime, measured on test sets of other people."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from ssl_sec.data.decode import Decoding
from ssl_sec.data.image_set import ImageSet, on_device, require_labels
from ssl_sec.data.selection.class_splits import without_people
from ssl_sec.data.selection.config import HeadAndTailConfig
from ssl_sec.data.shards.streamed import require_any_order
from ssl_sec.errors import DataError
from ssl_sec.evaluation.faces.roc import equal_error_rate
from ssl_sec.evaluation.faces.verification import (
    cosines,
    kfold_accuracy_of_scores,
    sum_of_directions,
    sum_of_embeddings,
)
from ssl_sec.evaluation.feature_table import FeatureTable
from ssl_sec.evaluation.features import readable
from ssl_sec.evaluation.plane import plane_grid
from ssl_sec.losses import Loss, NormFaceLoss
from ssl_sec.losses.config import PairLossConfig
from ssl_sec.losses.geometry import directions, in_full_precision, norms
from ssl_sec.losses.templates.softmax import class_probabilities
from ssl_sec.recipes.assembly import RunStore, assemble, build_loss, extractor, hold_out, save_network, train_recipe
from ssl_sec.recipes.face.config import FaceConfig
from ssl_sec.recipes.face.test_set_config import open_test_set
from ssl_sec.recipes.face.test_sets import Embed, FaceTestSet, OpenSetTestSet, Protocols
from ssl_sec.recipes.stopping import until_a_stop
from ssl_sec.seeding import derived_seed
from ssl_sec.training.class_sharding import template_losses
from ssl_sec.training.recipe import Recipe
from ssl_sec.training.step import Runtime, log_once

# Number of rows that are classified together.
_ROWS_AT_ONCE = 8192
# Number of embeddings on the plane, as in NormFace's Fig. 2.
_ON_THE_PLANE = 10_000
_FOLDS = 10
# The least number of pairs of either kind: one for each fold.
_LEAST_PAIRS = _FOLDS


@runtime_checkable
class FaceStore(RunStore, Protocol):
    """Stores the results of a run, including the data of its figures."""

    def test_set_path(self, title: str) -> Path:
        """File for the results on a test set, from which its figures are drawn."""
        ...


def run(config: FaceConfig, runtime: Runtime, store: FaceStore) -> None:
    """Trains the embedding that `config` describes, measures it on the test sets, and saves it in the store.

    Args:
        config: the run, the same on every worker.
        runtime: this worker's runtime.
        store: the run's store, shared by all workers.
    """
    image_set = _open_images(config, runtime)
    # Opened before the training, so that missing files are errors at once.
    test_sets = _open_test_sets(config, image_set)
    evaluation = config.evaluation
    protocols = Protocols(pca=evaluation.pca, fars=evaluation.fars, similarities=evaluation.similarities)
    for each in test_sets.values():
        if isinstance(each, OpenSetTestSet):
            each.require_components(protocols)
    if config.leave_out_tested:
        image_set = _without_tested(config, image_set, test_sets, runtime)
    divided = config.split.divide(image_set) if isinstance(config.split, HeadAndTailConfig) else None
    if divided is not None:
        image_set = divided.train
    trained_on, watched, watched_name = hold_out(image_set, config.held_out_share)
    recipe = build_recipe(config, trained_on, runtime)
    network = _WithFlips(nn.Sequential(recipe.encoder, recipe.head), config.evaluation.flips)
    watch = extractor(network, recipe.computation, runtime, batch_size=128)
    extract = until_a_stop(watch, runtime)
    embed_watched, embed = (partial(_embed, each) for each in (watch, extract))
    verification = _Monitor(watched_name, watched, config.monitor.max_pairs, embed_watched, runtime)

    at_the_end: dict[str, Mapping[str, float]] = {}

    def measure(title: str, embedding: Embed, keeps: bool) -> Mapping[str, float]:
        log_once(runtime, "measuring %s", title)
        kept = store.test_set_path(title) if keeps and runtime.rank == 0 else None
        return test_sets[title].measure(embedding, protocols, kept)

    def monitor(steps_taken: int) -> dict[str, float]:
        accuracies: dict[str, float] = {}
        for title in config.monitor.test_sets:
            is_end = config.evaluation.enabled and steps_taken == recipe.total_steps
            found = measure(title, embed_watched, is_end)
            accuracies[f"test/{title}_accuracy"] = found["accuracy"]
            if is_end:
                at_the_end[title] = found
        return {**verification(steps_taken), **accuracies}

    monitor_every = config.monitor.every_epochs * recipe.sampler.steps_per_epoch
    train_recipe(config, recipe, runtime, store, monitor, monitor_every, at_start=True)
    for title in test_sets if config.evaluation.enabled else ():
        metrics = at_the_end.get(title) or measure(title, embed, True)
        runtime.report(recipe.total_steps, {f"face/{title}_{name}": value for name, value in metrics.items()})
    if config.evaluation.enabled and runtime.rank == 0:
        image_sets = (image_set for each in test_sets.values() for image_set in each.image_sets)
        store.describe_test_data({image_set.name: image_set for image_set in image_sets})
    if config.head.dim == 2:
        _keep_plane(config, recipe, trained_on, runtime, store)
    if divided is not None and config.evaluation.enabled:
        log_once(runtime, "classifying the %s other images of the training classes", f"{len(divided.test):,}")
        metrics = classification_metrics(recipe.objective.loss, *extract(divided.test).rows, divided.tail)
        runtime.report(recipe.total_steps, metrics)
    if runtime.rank == 0:
        save_network(recipe, store, with_head=True)


def _open_images(config: FaceConfig, runtime: Runtime) -> ImageSet:
    """The training images, on the run's device if they are resident.

    Raises:
        DataError: they have no labels, or are not square, as those of test sets are.
    """
    log_once(runtime, "loading %s", config.data.name)
    image_set = on_device(config.data.open("train"), runtime.device)
    require_labels(image_set, "face recognition")
    require_any_order(image_set, "face recognition")
    _, height, width = image_set.image_shape
    if config.test_sets and height != width:
        raise DataError(
            f"{image_set.name}: found images of {width} x {height} pixels, must be square, as those of test_sets are; "
            "data.image_size_px cuts squares"
        )
    return image_set


def _open_test_sets(config: FaceConfig, image_set: ImageSet) -> dict[str, FaceTestSet]:
    """The test sets by their titles, with images of the size, the channels and the ranges of those in training."""
    num_channels, height, width = image_set.image_shape
    decoding = Decoding(image_size_px=min(height, width), num_channels=num_channels, value_ranges=config.data.ranges)
    return {each.shown_title: open_test_set(each, decoding) for each in config.test_sets}


def _without_tested(
    config: FaceConfig, image_set: ImageSet, test_sets: Mapping[str, FaceTestSet], runtime: Runtime
) -> ImageSet:
    """The training images without people of the test sets; logs whom it cannot leave out."""
    if unnamed := [title for title, each in test_sets.items() if not each.people]:
        log_once(runtime, "test sets without names of people, none of whom can be left out: %s", ", ".join(unnamed))
    tested = frozenset[str]().union(*(each.people for each in test_sets.values()))
    if tested and config.data.name != "folder" and _are_numbers(image_set.class_names):
        # They may also be names of a test set's folders, which show others.
        log_once(runtime, "%s: its people have numbers, not names: nobody is left out", image_set.name)
        return image_set
    return without_people(image_set, tested) if tested else image_set


def _embed(
    extract: Callable[..., FeatureTable], image_set: ImageSet, indices: Int64[Tensor, " images"]
) -> Float[Tensor, "images dim"]:
    return extract(image_set, indices).features.cpu()


def _are_numbers(class_names: Sequence[str]) -> bool:
    """Whether the names of the classes are the numbers of the labels, as of files without names."""
    return all(name == str(label) for label, name in enumerate(class_names))


def build_recipe(config: FaceConfig, image_set: ImageSet, runtime: Runtime) -> Recipe:
    """Everything that the run trains, on the runtime's device; equal on every worker, except for sharded templates."""
    sampler = config.sampler.build(image_set.labels, config.global_batch_size, config.seed)
    loss = _build_loss(config, image_set)
    return assemble(
        config,
        image_set,
        runtime,
        sampler=sampler,
        total_steps=max(round(config.epochs * sampler.steps_per_epoch), int(config.epochs > 0)),
        loss=loss,
        views=config.augment.build(config.seed),
        transform=config.transform.build,
        more_metrics=lambda: _loss_metrics(loss),
    )


def classification_metrics(
    loss: nn.Module,
    embeddings: Float[Tensor, "images dim"],
    labels: Int64[Tensor, " images"],
    tail: Bool[Tensor, " classes"],
) -> dict[str, float]:
    """Percent of images that the loss's templates classify correctly, in head and in tail classes (SFT, Table 5).

    Args:
        loss: a loss with templates; every worker calls this function.
        embeddings: raw embeddings of images that were not trained on.
        labels: class of each image; all these classes were trained on.
        tail: whether each class is a tail class.
    """
    classifier = next(template_losses(loss))
    rows = zip(embeddings.split(_ROWS_AT_ONCE), labels.split(_ROWS_AT_ONCE), strict=True)
    right = torch.cat([classifier.recognised(*some) for some in rows]).double().cpu()
    in_tail = tail[labels.cpu()]
    return {
        "face/head_classes_accuracy": 100 * float(right[~in_tail].mean()),
        "face/tail_classes_accuracy": 100 * float(right[in_tail].mean()),
    }


def _build_loss(config: FaceConfig, image_set: ImageSet) -> Loss:
    if isinstance(config.loss, PairLossConfig):
        alone = int((image_set.labels.bincount() == 1).sum())
        if alone:
            people = "1 person has" if alone == 1 else f"{alone} people have"
            raise DataError(f"{image_set.name}: {people} one image; loss={config.loss.name} needs two of each or more")
    return build_loss(config, config.loss, image_set, config.share_classes_from, config.class_sample_rate)


def _loss_metrics(loss: Loss) -> dict[str, float]:
    """NormFace's lower bound of its loss, and the loss's scale."""
    for module in loss.modules():
        if isinstance(module, NormFaceLoss):
            return {"train/loss_lower_bound": module.lower_bound(), "train/scale": module.current_scale}
    return {}


def _keep_plane(config: FaceConfig, recipe: Recipe, images: ImageSet, runtime: Runtime, store: FaceStore) -> None:
    """Saves what the figure of the plane shows: embeddings of some training images, and the probability of class 0."""
    generator = torch.Generator().manual_seed(derived_seed(config.seed, "plane"))
    chosen = torch.randperm(len(images), generator=generator)[:_ON_THE_PLANE]
    extract = extractor(nn.Sequential(recipe.encoder, recipe.head), recipe.computation, runtime, batch_size=128)
    embeddings, labels = extract(images, chosen).rows
    if runtime.rank == 0:
        embeddings = in_full_precision(embeddings)
        kept = {"embeddings": embeddings.cpu(), "labels": labels.cpu()}
        probabilities = class_probabilities(recipe.objective.loss, plane_grid(embeddings))
        if probabilities is not None:
            kept["probabilities"] = probabilities[:, 0].cpu()
        torch.save(kept, store.features_path)


class _WithFlips(nn.Module):
    """Embeddings of images, combined with those of their mirror images if the config asks for it."""

    def __init__(self, network: nn.Module, flips: Literal["none", "sum_of_directions", "sum_of_embeddings"]) -> None:
        super().__init__()
        self.network = network
        self._flips = flips

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch dim"]:
        embeddings = self.network(images)
        if self._flips == "none":
            return embeddings
        flipped = self.network(images.flip(-1))
        if self._flips == "sum_of_embeddings":
            # Half the sum, so that it is about as long as an embedding: no measure depends on a common factor.
            return sum_of_embeddings(embeddings, flipped) / 2
        # A sum of directions has no norm of its own; it gets that of the image's embedding.
        return directions(sum_of_directions(embeddings, flipped)) * norms(embeddings).unsqueeze(1)


class _Monitor:
    """Verification of held-out people, or of the training people if none are held out."""

    def __init__(self, name: str, watched: ImageSet, max_pairs: int, embed: Embed, runtime: Runtime) -> None:
        self._name = name
        self._watched = watched
        self._pairs = drawn_pairs(watched.labels, max_pairs, seed=0)
        self._embed = embed
        self._runtime = runtime
        if self._pairs is None:
            log_once(runtime, "%s: fewer than %d pairs of one person or of two; not verified", name, _LEAST_PAIRS)

    def __call__(self, steps_taken: int) -> dict[str, float]:
        if self._pairs is None:
            return {}
        first, second, same = self._pairs
        log_once(self._runtime, "measuring verification on %s pairs", f"{len(same):,}")
        images, places = torch.cat([first, second]).unique(return_inverse=True)
        embeddings = self._embed(self._watched, images)
        scores = cosines(embeddings[places[: len(first)]], embeddings[places[len(first) :]])
        # An unreadable image was replaced by another, whose person may differ from the pair's: leave such pairs out.
        is_read = readable(self._watched, self._runtime.device).cpu()
        is_read = is_read[first] & is_read[second]
        scores, same = scores[is_read], same[is_read]
        if min(int(same.sum()), int((~same).sum())) < _LEAST_PAIRS:
            return {}
        accuracy = kfold_accuracy_of_scores(scores, same, _FOLDS)
        return {
            f"{self._name}/verification_accuracy": 100 * accuracy.mean,
            f"{self._name}/verification_eer": 100 * equal_error_rate(scores, same),
        }


def drawn_pairs(
    labels: Int64[Tensor, " images"], max_pairs: int, seed: int
) -> tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"], Bool[Tensor, " pairs"]] | None:
    """Equal numbers of pairs of images of one person and of two, alternating; None for fewer than ten of either kind.

    Args:
        labels: the person on each image.
        max_pairs: largest number of pairs of either kind.
        seed: seed of the draws.

    Returns:
        Positions of the first and of the second image of each pair, and whether both show one person.
    """
    generator = torch.Generator().manual_seed(derived_seed(seed, "verification pairs"))
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]
    # Each image with the next one, if that is of the same person: not all pairs, as a person may have very many.
    together = (labels[order[:-1]] == labels[order[1:]]).nonzero().flatten()
    together = together[torch.randperm(len(together), generator=generator)[:max_pairs]]
    apart = torch.randint(len(labels), (2, 4 * len(together)), generator=generator)
    apart = apart[:, labels[apart[0]] != labels[apart[1]]][:, : len(together)]
    count = min(len(together), apart.shape[1])
    if count < _LEAST_PAIRS:
        return None
    first = torch.stack([order[together[:count]], apart[0, :count]], 1).flatten()
    second = torch.stack([order[together[:count] + 1], apart[1, :count]], 1).flatten()
    return first, second, torch.tensor([True, False]).repeat(count)
