"""Common steps of the recipes from a config to a trained network, on this worker of any runtime."""

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from ssl_sec.augment.views import Views
from ssl_sec.collectives import (
    average_gradients,
    average_parameter_gradients,
    gather_objects,
    max_int_over_workers,
    world_size,
)
from ssl_sec.data.fingerprint import listing
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.samplers import Sampler, worker_rows
from ssl_sec.data.selection.class_splits import hold_out_classes
from ssl_sec.errors import ConfigError, DataError, counted
from ssl_sec.evaluation.feature_table import FeatureTable
from ssl_sec.evaluation.features import feature_table
from ssl_sec.losses import Loss, TeacherLoss
from ssl_sec.losses.config import ClassLossConfig, PairLossConfig, TeacherLossConfig, Transformed
from ssl_sec.losses.templates.softmax import sample_classes
from ssl_sec.networks import Encoder, Network, save_weights
from ssl_sec.networks.batch_norm import globalise_batch_norm
from ssl_sec.networks.convolutions import lay_out
from ssl_sec.networks.heads import PredictionHead, ProjectionHead
from ssl_sec.networks.micro_batches import require_separable
from ssl_sec.networks.recomputation import recompute_blocks
from ssl_sec.networks.weights import UnfitWeightsError
from ssl_sec.recipes.config import StepCheckpointConfig, TrainingConfig
from ssl_sec.rules import check
from ssl_sec.seeding import derived_seed
from ssl_sec.training.cadence import Cadence
from ssl_sec.training.class_sharding import draw_templates, template_losses
from ssl_sec.training.config import RuntimeConfig, SphericalConfig
from ssl_sec.training.objective import Objective, Transform
from ssl_sec.training.recipe import Computation, Recipe
from ssl_sec.training.schedules import Cosine, Polynomial, TeacherMomentum
from ssl_sec.training.step import Runtime, log_once, train
from ssl_sec.training.teacher import Teacher


@runtime_checkable
class RunStore(Protocol):
    """Stores the results of a run.

    Attributes:
        encoder_path: file for the encoder's weights.
        head_path: file for the head's weights, if it belongs to the trained network.
        features_path: file for features of some training images.
        views_path: file for the views of some images of the first step.
        examples_path: file for some images and their neighbours.
        check_path: file for the numbers of duplicates and unreadable images.
    """

    encoder_path: Path
    head_path: Path
    features_path: Path
    views_path: Path
    examples_path: Path
    check_path: Path

    def describe_data(self, image_set: ImageSet, *, is_resumed: bool = False) -> None:
        """Records the description of the training set.

        Raises:
            DataError: if a resumed run began with other images.
        """
        ...

    def describe_test_data(self, image_sets: Mapping[str, ImageSet]) -> None:
        """Records the descriptions of test images that the run itself measures, by their names in MLflow."""
        ...

    def forget_records_from(self, step: int) -> None:
        """Drops metrics of steps that will be repeated."""
        ...

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint, whole or not; None at the start."""
        ...

    def restored_state(self, device: torch.device, held: slice | None = None) -> Mapping[str, Any] | None:
        """The state of the newest whole checkpoint, or None at the start; see `ssl_sec.training.checkpoint`."""
        ...


def assemble(
    config: TrainingConfig,
    image_set: ImageSet,
    runtime: Runtime,
    *,
    sampler: Sampler,
    total_steps: int,
    loss: Loss | TeacherLoss,
    views: Views,
    transform: Callable[[Transformed], Transform | None] | None = None,
    objective_of: Callable[..., Objective] = Objective,
    prepare: Callable[[Network], None] = lambda network: None,
    **more: Any,
) -> Recipe:
    """Everything that a run trains, on the runtime's device; equal on every worker, except for sharded templates.

    Args:
        config: the run's configuration.
        image_set: the training set.
        runtime: this worker's runtime.
        sampler: draws the images of step t.
        total_steps: number of steps of the whole run.
        loss: the metric loss.
        views: augments the images.
        transform: builds the feature transform, which generates further rows; None for none.
        objective_of: makes the objective from its parts.
        prepare: changes the network after it has its initial weights, for example freezes some of them.
        more: further fields of the `Recipe`.

    Raises:
        ConfigError: if the workers cannot share the batch equally.
        DataError: if they have opened different images.
    """
    require_same_images(image_set)
    encoder, head = _initialise(config, image_set, runtime)
    prepare(Network(encoder, head))
    eta = config.constraint.weight(sampler.steps_per_epoch, total_steps)
    constraint = config.constraint
    # No ramp falls.
    if isinstance(constraint, SphericalConfig) and constraint.eta > 0 and total_steps > 0 and eta(total_steps - 1) == 0:
        without = "constraint.ramp=%s: η is 0 in all %s steps, as in a run without the constraint"
        log_once(runtime, without, constraint.ramp, f"{total_steps:,}")
    made = None
    if transform is not None:
        made = transform(
            Transformed(
                class_sizes=image_set.labels.bincount(minlength=len(image_set.class_names)),
                num_features=encoder.num_features,
                dim=config.head.dim,
                steps_per_epoch=sampler.steps_per_epoch,
                seed=config.seed,
            )
        )
    objective = objective_of(loss, config.constraint.build(), eta, made)
    _require_parameters(config, (encoder, head, objective), total_steps)
    rate = config.optimiser.schedule(sampler.steps_per_epoch, total_steps)
    if isinstance(rate, Cosine | Polynomial) and 0 < total_steps < rate.warmup_steps:
        without = "optimiser.warmup_epochs: the run's %s steps are all warm-up: the rate ends at %.3g, below %g"
        log_once(runtime, without, f"{total_steps:,}", rate(total_steps - 1), rate.value)
    computation = agreed_computation(config.runtime, runtime.device)
    if (reason := config.runtime.why_not_compiled(runtime.device)) is not None:
        log_once(runtime, "the network is not compiled: %s", reason)
    model = _to_device(encoder, head, objective, runtime, computation)
    return Recipe(
        encoder=encoder,
        head=head,
        model=model,
        objective=objective,
        optimiser=config.optimiser.build(encoder, head, objective),
        learning_rate=rate,
        clip_norm=config.optimiser.clip_norm,
        image_set=image_set,
        sampler=sampler,
        views=views,
        total_steps=total_steps,
        computation=computation,
        teacher=_teacher(config, encoder, head, total_steps, computation.micro_batch_size),
        **more,
    )


def build_loss(
    config: TrainingConfig,
    loss: PairLossConfig | ClassLossConfig,
    image_set: ImageSet,
    share_classes_from: int,
    class_sample_rate: float,
) -> Loss:
    """The loss of a run; the templates of its classes depend on the run's seed alone.

    Args:
        config: the run's configuration.
        loss: its loss.
        image_set: the images to train on.
        share_classes_from: number of classes from which their templates are sharded over the workers.
        class_sample_rate: share of the classes that a step's rows are compared with, in (0, 1].

    Raises:
        ConfigError: if there would be no template for some workers.
    """
    if isinstance(loss, PairLossConfig):
        return loss.build()
    num_classes, num_workers = len(image_set.class_names), world_size()
    is_sharded = num_classes >= share_classes_from
    allowed = f"above {num_classes}, the number of classes, with {counted(num_workers, 'worker')}"
    check(not is_sharded or num_classes >= num_workers, "share_classes_from", share_classes_from, allowed)
    with torch.device("meta"):
        built = loss.build(num_classes, config.head.dim)
    draw_templates(built, config.seed, sharded=is_sharded)
    sample_classes(built, class_sample_rate, config.seed)
    return built


def train_recipe(
    config: TrainingConfig,
    recipe: Recipe,
    runtime: Runtime,
    store: RunStore,
    monitor: Callable[[int], Mapping[str, float]],
    monitor_every_steps: int,
    at_start: bool = False,
) -> None:
    """Trains from the run's stored state to the recipe's last step.

    Args:
        config: the run's configuration.
        recipe: the network, its objective and its data.
        runtime: this worker's runtime.
        store: the run's store, shared by all workers.
        monitor: steps taken -> metrics of the encoder; every worker calls it.
        monitor_every_steps: steps between two calls of `monitor`, ≥ 1.
        at_start: whether the network is also monitored before the first step.
    """
    first_step = _restore(recipe, runtime, store)
    if at_start and first_step == 0:
        runtime.report(0, monitor(0))
    checkpoint = config.checkpoint
    in_steps = isinstance(checkpoint, StepCheckpointConfig)
    save_every = checkpoint.every_steps if in_steps else checkpoint.every_epochs * recipe.sampler.steps_per_epoch
    cadence = Cadence(
        log_every_steps=config.steps_between_reports(runtime.device),
        save_every_steps=save_every,
        monitor_every_steps=monitor_every_steps,
    )
    train(recipe, runtime, cadence, monitor, first_step)


def hold_out(image_set: ImageSet, share: float) -> tuple[ImageSet, ImageSet, str]:
    """The classes to train on, the classes to monitor, and the prefix of the latter's metrics.

    If the share is 0, all classes are both trained on and monitored.
    """
    if share == 0:
        return image_set, image_set, "train"
    return *hold_out_classes(image_set, share, seed=0), "val"


def extractor(
    network: nn.Module, computation: Computation, runtime: Runtime, batch_size: int, limit_mib: int | None = None
) -> Callable[..., FeatureTable]:
    """A function that computes the features and labels of a set's images; see `feature_table`."""
    options = {"num_loader_workers": computation.num_loader_workers, "limit_mib": limit_mib}
    return partial(feature_table, network, device=runtime.device, batch_size=batch_size, **options)


def describe_images(image_set: ImageSet) -> str:
    """A set's name, the number and shape of its images, and the number of its classes."""
    num_channels, height, width = image_set.image_shape
    classes = counted(len(image_set.class_names), "class") if image_set.class_names else "no labels"
    return f"{image_set.name}, {counted(len(image_set), 'image')} of {num_channels} x {height} x {width}, {classes}"


@contextmanager
def building_for(image_shape: tuple[int, int, int], run: str | None, remedy: str) -> Iterator[None]:
    """Makes the error about a run's weights that do not fit a ConfigError with the name of the run.

    Args:
        image_shape: channels, height and width of the images.
        run: the run whose weights are loaded; None if they are from a file, which the error names already.
        remedy: what the user can do about it.
    """
    try:
        yield
    except UnfitWeightsError as error:
        if run is None:
            raise
        shape = " x ".join(map(str, image_shape))
        raise ConfigError(f"run: {run} does not fit {error.what}, for images of {shape}; {remedy}") from error


def save_network(recipe: Recipe, store: RunStore, with_head: bool) -> None:
    """Saves the trained weights in the store; one worker calls it."""
    assert isinstance(recipe.encoder.backbone, nn.Module)
    save_weights(recipe.encoder.backbone, store.encoder_path)
    if with_head:
        save_weights(recipe.head, store.head_path)


def require_same_images(image_set: ImageSet) -> None:
    """Refuses to train if the workers have opened different images, as where a folder is incomplete on one node.

    Raises:
        DataError: on every worker, with the first worker whose number of images, labels or names of files differ.
    """
    own = (len(image_set), listing(image_set) if world_size() > 1 else "")
    (first, host), *others = gather_objects((own, socket.gethostname()))
    for rank, (found, other_host) in enumerate(others, start=1):
        if found != first:
            differ = counted(found[0], "image") if found[0] != first[0] else "other labels or names of files"
            raise DataError(
                f"{image_set.name}: worker {rank} on {other_host} has {differ}, worker 0 on {host} has "
                f"{counted(first[0], 'image')}; all nodes must have the same images, and data.on_bad_image=skip leaves "
                "out the unreadable ones of each node"
            )


def agreed_computation(options: RuntimeConfig, device: torch.device) -> Computation:
    """How the network computes, the same on all workers: without given values, in bfloat16, or compiled, if all can."""
    own = options.on(device)
    if options.precision is None and max_int_over_workers(int(own.precision == "float32"), device):
        own = replace(own, precision="float32")
    if options.compile is None and max_int_over_workers(int(not own.compiled), device):
        own = replace(own, compiled=False)
    return own


def _initialise(config: TrainingConfig, image_set: ImageSet, runtime: Runtime) -> tuple[Encoder, nn.Module]:
    """The encoder and the head with the run's initial weights, equal on every worker."""
    num_channels, height, width = image_set.image_shape
    log_once(runtime, "data: %s", describe_images(image_set))
    worker_rows(config.global_batch_size, runtime.rank, runtime.world_size)
    torch.manual_seed(derived_seed(config.seed, "weights"))
    encoder = config.encoder.build(num_channels, min(height, width))
    head = config.head.build(encoder.num_features, config.seed)
    if isinstance(config.loss, TeacherLossConfig):
        head = PredictionHead(head, ProjectionHead(config.head.dim, config.loss.predictor_dim, config.head.dim))
    return encoder, head


def _require_parameters(config: TrainingConfig, modules: Iterable[nn.Module], total_steps: int) -> None:
    """Refuses to train a network without parameters, such as the pixels themselves, for one step or more."""
    if total_steps and not any(parameter.requires_grad for module in modules for parameter in module.parameters()):
        raise ConfigError(
            f"encoder: found {config.encoder.name!r} with head={config.head.name}, which have nothing to train; "
            "allowed: a run of no epochs or steps, which measures it"
        )


def _teacher(
    config: TrainingConfig, encoder: Encoder, head: nn.Module, total_steps: int, micro_batch_size: int | None
) -> Teacher | None:
    """The teacher of a network that is on its device, if the loss needs one."""
    if not isinstance(config.loss, TeacherLossConfig):
        return None
    assert isinstance(head, PredictionHead)
    momentum = TeacherMomentum(config.loss.momentum, total_steps)
    return Teacher(Network(encoder, head.projector, micro_batch_size), momentum).train()


def _to_device(
    encoder: Encoder, head: nn.Module, objective: Objective, runtime: Runtime, computation: Computation
) -> nn.Module:
    """The network with batch norm and gradients of all workers; it and the objective are moved."""
    log_once(runtime, "computing in %s", computation)
    network: nn.Module = Network(encoder, head, computation.micro_batch_size)
    if computation.micro_batch_size is not None:
        require_separable(encoder, computation.micro_batch_size)
    if runtime.world_size > 1:
        network = globalise_batch_norm(network)
    network.to(runtime.device, computation.dtype)
    lay_out(network, runtime.device, computation.channels_last)
    if computation.recomputed:
        recompute_blocks(encoder.backbone)
    if computation.precision == "float64":
        objective.double()
    objective.to(runtime.device)
    average_parameter_gradients(objective, [each.weight for each in template_losses(objective) if not each.holds_all])
    model = average_gradients(network, runtime.device)
    # All training batches have one size; other sizes, as of a test set, are compiled separately.
    return cast(nn.Module, torch.compile(model, dynamic=False)) if computation.compiled else model


def _restore(recipe: Recipe, runtime: Runtime, store: RunStore) -> int:
    """Restores the run's stored state; returns the steps taken so far."""
    is_resumed = any(gather_objects(store.newest_step()))
    if runtime.rank == 0:
        store.describe_data(recipe.image_set, is_resumed=is_resumed)
    gather_objects(None)  # no worker looks for its templates before the images are known to be those of the run
    state = store.restored_state(runtime.device, recipe.held_classes)
    first_step = 0 if state is None else recipe.restore(state)
    if first_step:
        workers = counted(runtime.world_size, "worker")
        log_once(runtime, "resuming after step %d of %d on %s", first_step, recipe.total_steps, workers)
    if runtime.rank == 0:
        store.forget_records_from(first_step)
    steps, batch = counted(recipe.total_steps - first_step, "step"), counted(recipe.sampler.global_batch_size, "image")
    log_once(runtime, "training %s of %s", steps, batch)
    return first_step
