"""Face recognition from a config, on one worker of any runtime; measured on benchmarks whose people it never saw."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from ssl_sec.data.class_splits import hold_out_classes, without_people
from ssl_sec.data.decode import Decoding
from ssl_sec.data.image_set import ImageSet, on_device
from ssl_sec.errors import DataError
from ssl_sec.evaluation.faces.roc import equal_error_rate
from ssl_sec.evaluation.faces.verification import kfold_accuracy_of_scores, sum_of_directions, sum_of_embeddings
from ssl_sec.evaluation.features import extract_features
from ssl_sec.losses import Loss, NormFaceLoss
from ssl_sec.losses.config import PairLossConfig
from ssl_sec.losses.geometry import directions, norms
from ssl_sec.networks import save_weights
from ssl_sec.recipes.assembly import RunStore, assembled, initialised, taken_up
from ssl_sec.recipes.face.config import FaceConfig, FaceEvaluationConfig
from ssl_sec.recipes.face.test_set_config import open_benchmark
from ssl_sec.recipes.face.test_sets import Benchmark, Protocols, cosines
from ssl_sec.seeding import derived_seed
from ssl_sec.training.class_sharding import draw_templates
from ssl_sec.training.objective import Objective
from ssl_sec.training.step import Cadence, Recipe, Runtime, say, train


@runtime_checkable
class FaceStore(RunStore, Protocol):
    """Where a run keeps what outlives it, its head and what pictures are drawn from, too."""

    @property
    def head_path(self) -> Path:
        """Where the head's weights are left."""
        ...

    def benchmark_path(self, title: str) -> Path:
        """Where what pictures of a benchmark are drawn from is left."""
        ...


def run(config: FaceConfig, runtime: Runtime, store: FaceStore) -> None:
    """Trains the embedding that `config` describes, measures it on the benchmarks, and leaves it in the store.

    Args:
        config: the run, the same on every worker.
        runtime: this worker's.
        store: the run's, shared by all workers.
    """
    say(runtime, "loading %s", config.data.name)
    trained_on = watched = on_device(config.data.open("train"), runtime.device)
    num_channels, height, width = trained_on.image_shape
    # Opened before the training, so that what is missing is told at once.
    decoding = Decoding(image_size_px=min(height, width), num_channels=num_channels)
    benchmarks = {each.figures_title: open_benchmark(each, decoding) for each in config.benchmarks}
    tested = frozenset[str]().union(*(each.people for each in benchmarks.values()))
    if config.leave_out_tested and tested:
        trained_on = watched = without_people(trained_on, tested)
    if config.held_out_share > 0:
        trained_on, watched = hold_out_classes(trained_on, config.held_out_share, seed=0)
    recipe = build_recipe(config, trained_on, runtime)
    embedder = _Embedder(recipe, runtime, config)
    monitor = _Monitor(config, embedder, watched, runtime)
    first_step = taken_up(recipe, runtime, store)
    if first_step == 0:
        runtime.report(0, monitor(0))
    steps_per_epoch = recipe.sampler.steps_per_epoch
    cadence = Cadence(
        log_every_steps=config.steps_between_reports(runtime.device),
        save_every_steps=config.checkpoint.every_epochs * steps_per_epoch,
        monitor_every_steps=config.monitor.every_epochs * steps_per_epoch,
    )
    train(recipe, runtime, cadence, monitor, first_step)
    for title, benchmark in benchmarks.items():
        say(runtime, "measuring %s", title)
        kept = store.benchmark_path(title) if runtime.rank == 0 else None
        runtime.report(recipe.total_steps, _measured(title, benchmark, embedder, config.evaluation, kept))
    if runtime.rank == 0:
        assert isinstance(recipe.encoder.backbone, nn.Module)
        save_weights(recipe.encoder.backbone, store.encoder_path)
        save_weights(recipe.head, store.head_path)


def build_recipe(config: FaceConfig, image_set: ImageSet, runtime: Runtime) -> Recipe:
    """All that the run trains, on the runtime's device; equal on every worker, templates that are shared out aside."""
    encoder, head = initialised(config, image_set, runtime)
    class_sizes = image_set.labels.bincount(minlength=len(image_set.class_names))
    sampler = config.sampler.build(image_set.labels, config.global_batch_size, config.seed)
    total_steps = round(config.epochs * sampler.steps_per_epoch)
    loss = _build_loss(config, image_set)
    transform = config.transform.build(class_sizes, config.head.dim, config.seed)
    eta = config.constraint.weight(sampler.steps_per_epoch, total_steps)
    objective = Objective(loss, config.constraint.build(), eta, transform)
    computation = config.runtime.on(runtime.device)
    return Recipe(
        encoder=encoder,
        head=head,
        model=assembled(encoder, head, objective, runtime, computation),
        objective=objective,
        optimiser=config.optimiser.build(encoder, head, objective),
        learning_rate=config.optimiser.schedule(sampler.steps_per_epoch),
        image_set=image_set,
        sampler=sampler,
        views=config.augment.build(config.seed),
        row_labels=lambda batch, rows: batch.labels,
        total_steps=total_steps,
        computation=computation,
        num_loader_workers=config.runtime.num_loader_workers,
        more_figures=lambda: _loss_figures(loss),
    )


def _build_loss(config: FaceConfig, image_set: ImageSet) -> Loss:
    if isinstance(config.loss, PairLossConfig):
        alone = int((image_set.labels.bincount() == 1).sum())
        if alone:
            raise DataError(
                f"{image_set.name}: {alone} people have one image; loss={config.loss.name} needs two of each or more"
            )
        return config.loss.build()
    num_classes = len(image_set.class_names)
    with torch.device("meta"):
        loss = config.loss.build(num_classes, config.head.dim)
    draw_templates(loss, config.seed, shared_out=num_classes >= config.share_classes_from)
    return loss


def _loss_figures(loss: Loss) -> dict[str, float]:
    """What NormFace's loss could be at its best, beside what it is."""
    for module in loss.modules():
        if isinstance(module, NormFaceLoss):
            return {"train/loss_lower_bound": module.lower_bound(), "train/scale": module.current_scale}
    return {}


def _measured(
    title: str, benchmark: Benchmark, embedder: "_Embedder", config: FaceEvaluationConfig, kept: Path | None
) -> Mapping[str, float]:
    protocols = Protocols(pca=config.pca, fars=config.fars)
    return {f"face/{title}_{name}": value for name, value in benchmark.measure(embedder, protocols, kept).items()}


class _Embedder:
    """Embeddings of images and their mirror images, shared out among the workers."""

    def __init__(self, recipe: Recipe, runtime: Runtime, config: FaceConfig) -> None:
        self._network = _WithFlips(nn.Sequential(recipe.encoder, recipe.head), config.evaluation.flips)
        self._runtime = runtime
        self._num_loader_workers = config.runtime.num_loader_workers

    def __call__(self, image_set: ImageSet, indices: Int64[Tensor, " images"]) -> Float[Tensor, "images dim"]:
        embeddings, _ = extract_features(
            self._network,
            image_set,
            indices,
            self._runtime.device,
            batch_size=128,
            num_loader_workers=self._num_loader_workers,
        )
        return embeddings.cpu()


class _WithFlips(nn.Module):
    """Embeddings of images, with those of their mirror images where that is asked for."""

    def __init__(self, network: nn.Module, flips: Literal["none", "sum_of_directions", "sum_of_embeddings"]) -> None:
        super().__init__()
        self.network = network
        self._flips = flips

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch dim"]:
        embeddings = self.network(images)
        if self._flips == "none":
            return embeddings
        merge = sum_of_directions if self._flips == "sum_of_directions" else sum_of_embeddings
        merged = merge(embeddings, self.network(images.flip(-1)))
        # Benchmarks compare directions: the norm stays that of the image's own embedding.
        return directions(merged) * norms(embeddings).unsqueeze(1)


class _Monitor:
    """Verification of held-out people, or of the training people where none are held out."""

    def __init__(self, config: FaceConfig, embedder: _Embedder, watched: ImageSet, runtime: Runtime) -> None:
        self._pairs = drawn_pairs(watched.labels, config.monitor.max_pairs, seed=0)
        self._watched = watched
        self._embedder = embedder
        self._runtime = runtime
        self._name = "val" if config.held_out_share > 0 else "train"

    def __call__(self, steps_taken: int) -> dict[str, float]:
        if self._pairs is None:
            return {}
        first, second, same = self._pairs
        say(self._runtime, "measuring verification on %s pairs", f"{len(same):,}")
        images, places = torch.cat([first, second]).unique(return_inverse=True)
        embeddings = self._embedder(self._watched, images)
        scores = cosines(embeddings[places[: len(first)]], embeddings[places[len(first) :]])
        accuracy = kfold_accuracy_of_scores(scores, same, 10)
        return {
            f"{self._name}/verification_accuracy": 100 * accuracy.mean,
            f"{self._name}/verification_eer": 100 * equal_error_rate(scores, same),
        }


def drawn_pairs(
    labels: Int64[Tensor, " images"], max_pairs: int, seed: int
) -> tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"], Bool[Tensor, " pairs"]] | None:
    """As many pairs of images of one person as of two, taking turns; None where there are fewer than ten of either.

    Args:
        labels: the person on each image.
        max_pairs: of either kind.
        seed: decides the draws.

    Returns:
        Positions of the first and of the second image of each pair, and whether both show one person.
    """
    generator = torch.Generator().manual_seed(derived_seed(seed, "verification pairs"))
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]
    # Each image with the one after it, if that is of the same person; in any order, as a person may have very many.
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


# Of either kind, one for each fold.
_LEAST_PAIRS = 10
