"""One training step and the loop around it, the same for every recipe, runtime and number of workers.

Everything is a function of the global step t: the samples, their views, dropout, the learning rate and η. A resume
needs the saved state and t.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ssl_sec.batch import Batch
from ssl_sec.collectives import gather_rows, max_int_over_workers, world_size
from ssl_sec.data.loading import batches
from ssl_sec.data.samplers import worker_rows
from ssl_sec.errors import Stopped
from ssl_sec.losses.generators.base import RowGenerator
from ssl_sec.losses.geometry import angles, in_full_precision, norms, turn_tangents
from ssl_sec.losses.templates.softmax import draw_classes
from ssl_sec.networks.dropout import draw_dropout
from ssl_sec.networks.encoder import Network
from ssl_sec.training.cadence import Cadence
from ssl_sec.training.class_sharding import held_templates
from ssl_sec.training.divergence import DivergenceWarning
from ssl_sec.training.norms import NormHistogram, norm_histogram
from ssl_sec.training.objective import Terms
from ssl_sec.training.optimisers.clipping import clip_gradients
from ssl_sec.training.optimisers.groups import set_learning_rate
from ssl_sec.training.recipe import Precision, Recipe
from ssl_sec.training.replaying import CUDAGraphs, Graphs, Replayed

logger = logging.getLogger(__name__)


class Request(IntEnum):
    """A request to a run while it trains; the highest request to any worker applies to all."""

    NONE = 0
    SAVE = 1
    STOP = 2


@runtime_checkable
class Runtime(Protocol):
    """The machine that training runs on, as training sees it."""

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """The number of workers."""
        ...

    @property
    def device(self) -> torch.device:
        """This worker's device."""
        ...

    def report(self, step: int, metrics: Mapping[str, float], norms: NormHistogram | None = None) -> None:
        """Records metrics at a 0-based global step; one worker calls it."""
        ...

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Saves a checkpoint after `step` steps."""
        ...

    def request(self) -> Request:
        """The request to this worker; every worker checks it at the same steps."""
        ...


def log_once(runtime: Runtime, message: str, *values: object) -> None:
    """Logs a message on one worker."""
    if runtime.rank == 0:
        logger.info(message, *values)


# The views of a step: a batch of one size, or a batch of each size.
SizedViews = Float[Tensor, "views channels height width"] | tuple[Float[Tensor, "_ channels _ _"], ...]


class StepResult(NamedTuple):
    """The result of a step.

    Attributes:
        terms: terms of the objective, before the update.
        features: features of this worker's views, without a gradient.
        gradient_norm: norm of the gradient of all weights before it was clipped; None if it is not clipped.
    """

    terms: Terms
    features: Float[Tensor, "all_views dim"]
    gradient_norm: Float[Tensor, ""] | None = None


# Takes a step with views and their labels; the last argument is its number.
TakeStep = Callable[[SizedViews, Tensor, int], StepResult]


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """A context for the forward pass, in bfloat16 if that is the precision; the objective is computed outside it."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bfloat16" else nullcontext()


def train_step(recipe: Recipe, views: SizedViews, labels: Int64[Tensor, " all_views"], step: int) -> StepResult:
    """One step of the optimiser on this worker's views of global step `step`."""
    set_learning_rate(recipe.optimiser, recipe.learning_rate(step))
    return update_weights(recipe, views, labels, step)


def update_weights(
    recipe: Recipe,
    views: SizedViews,
    labels: Int64[Tensor, " all_views"],
    step: int,
    eta: Float[Tensor, ""] | None = None,
) -> StepResult:
    """The part of a step that computes on the device alone, at the optimiser's current learning rate.

    Args:
        recipe: the recipe that is trained.
        views: views of this worker's images.
        labels: labels of the views, size by size.
        step: 0-based global step.
        eta: the constraint's weight; None takes its value at the step.
    """
    recipe.optimiser.zero_grad(set_to_none=True)
    taught: dict[str, Tensor] = {}
    with autocast(labels.device, recipe.computation.precision):
        features, embeddings = recipe.model(*_by_size(views))
        if recipe.teacher is not None:
            taught["targets"] = recipe.teacher(*_by_size(views))
    embeddings = in_full_precision(embeddings)
    if not embeddings.requires_grad:  # of pixels, where the templates of the classes alone are trained
        embeddings.requires_grad_()
    embeddings.retain_grad()
    terms = recipe.objective(embeddings, labels, step, eta, features, recipe.head, **taught)
    terms.total.backward()
    norm = None
    if recipe.clip_norm is not None:
        held = [templates.rows for templates in held_templates(recipe.objective).values()]
        norm = clip_gradients(recipe.optimiser, recipe.clip_norm, held)
    recipe.optimiser.step()
    if recipe.teacher is not None:
        recipe.teacher.follow(step)
    return StepResult(terms, features.detach(), norm)


def _by_size(views: SizedViews) -> tuple[Tensor, ...]:
    return views if isinstance(views, tuple) else (views,)


def choose_step(recipe: Recipe, device: torch.device) -> TakeStep:
    """The function that takes a recipe's steps: `train_step`, or its replay."""
    return ReplayedSteps(recipe, device, CUDAGraphs(device)) if recipe.graphed else partial(train_step, recipe)


class ReplayedSteps:
    """The steps of one worker, with launches recorded once and replayed; see `ssl_sec.training.replaying`.

    Args:
        recipe: the recipe that is trained, without a feature transform or a teacher.
        device: a GPU.
        graphs: recorder of a step.
    """

    def __init__(self, recipe: Recipe, device: torch.device, graphs: Graphs) -> None:
        assert recipe.teacher is None, "its momentum depends on the step's number"
        assert recipe.objective.transform is None, "what a transform generates depends on the step's number"
        self._recipe = recipe
        number = partial(torch.zeros, (), device=device, dtype=recipe.computation.dtype)
        self._eta = number()
        for group in recipe.optimiser.param_groups:
            group["lr"] = number()
        self._update = Replayed(
            lambda labels, *views: update_weights(recipe, views, labels, step=0, eta=self._eta), graphs
        )

    def __call__(self, views: SizedViews, labels: Int64[Tensor, " all_views"], step: int) -> StepResult:
        """As for `train_step`; the result holds until the next step."""
        set_learning_rate(self._recipe.optimiser, self._recipe.learning_rate(step))
        self._eta.fill_(self._recipe.objective.eta(step))
        return self._update(labels, *_by_size(views))


def train(
    recipe: Recipe,
    runtime: Runtime,
    cadence: Cadence,
    monitor: Callable[[int], Mapping[str, float]],
    first_step: int = 0,
    take_step: TakeStep | None = None,
) -> None:
    """Trains from `first_step` to the recipe's last step, and reports, monitors and saves on the way.

    Args:
        recipe: the recipe that is trained.
        runtime: runtime of this worker.
        cadence: how often to report, save and monitor.
        monitor: function from the steps taken to metrics of the encoder; every worker calls it.
        first_step: number of steps already taken.
        take_step: function that takes a step; None for that of `choose_step`.

    Raises:
        Stopped: if a stop was requested; the state is saved first.
        FloatingPointError: if the objective or a weight is not finite, on every worker at the same step.
    """
    sampler = recipe.sampler
    rows = worker_rows(sampler.global_batch_size, runtime.rank, runtime.world_size)
    steps = range(first_step, recipe.total_steps)
    draws = recipe.draws
    loaded = batches(
        recipe.image_set,
        (sampler.indices(step)[rows] for step in steps),
        runtime.device,
        recipe.computation.num_loader_workers,
        draws=None if draws is None else (draws(step)[rows] for step in steps),
    )
    take_step = take_step or choose_step(recipe, runtime.device)
    # bfloat16 rounds the step's own embeddings by more than small steps turn them.
    is_rounded = recipe.computation.precision == "bfloat16"
    recipe.model.train()
    recipe.objective.train()
    divergence = DivergenceWarning()
    clock, clock_step = time.perf_counter(), first_step
    for step, batch in zip(steps, loaded, strict=True):
        due = cadence.after(step, sampler.steps_per_epoch, recipe.total_steps)
        views = _make_views(recipe, batch, step, rows)
        num_views = sum(map(len, views)) // len(batch.images)
        draw_dropout(recipe.head, step, rows, num_views, runtime.device)
        draw_classes(recipe.objective.loss, step)
        # Not every report has the two passes in float32, which are slow beside the compiled steps of a GPU.
        has_angles = due.report and not is_rounded or step == 0 or due.epoch_end or due.monitor or due.save
        before = _embedded(recipe, views) if has_angles and is_rounded else None
        terms, features, gradient_norm = take_step(views, recipe.row_labels(batch, rows), step)
        if recipe.observer is not None:
            recipe.observer.update(features, batch)
        # On a CPU this check is free; on a GPU it waits until metrics are reported.
        if runtime.device.type == "cpu" and not math.isfinite(float(terms.total.detach())):
            _require_finite(recipe, _terms_metrics(recipe, terms), step)
        if not due.report:
            continue
        more = {} if gradient_norm is None else {"train/weight_gradient_norm": gradient_norm}
        if has_angles:
            before = terms.embeddings.detach() if before is None else before
            more |= _step_angle_metrics(before, _embedded(recipe, views))
        metrics = _metrics(recipe, terms, step, more)
        _require_finite(recipe, metrics, step)
        if runtime.rank == 0:
            divergence.check(metrics["train/loss"], step)
        seconds = time.perf_counter() - clock
        metrics["train/images_per_s"] = (step + 1 - clock_step) * sampler.global_batch_size / seconds
        metrics["train/epoch"] = (step + 1) / sampler.steps_per_epoch
        with_histogram = due.epoch_end or step == first_step
        runtime.report(step, metrics, norm_histogram(terms.norms.cpu(), step) if with_histogram else None)
        if due.monitor:
            runtime.report(step, monitor(step + 1))
            recipe.model.train()
        if due.save:
            _save(recipe, runtime, step)
        if not due.last:
            request = max_int_over_workers(runtime.request(), runtime.device)
            if request >= Request.SAVE and not due.save:
                _save(recipe, runtime, step)
            if request == Request.STOP:
                raise Stopped(f"stopped after step {step}; the state is saved")
        clock, clock_step = time.perf_counter(), step + 1


def _make_views(recipe: Recipe, batch: Batch, step: int, rows: slice) -> tuple[Tensor, ...]:
    """The views of this worker's images, a batch of each size, as the network takes them."""
    dtype, layout = recipe.computation.dtype, recipe.computation.layout
    return tuple(
        make(batch.images, step, rows, recipe.sampler.global_batch_size).to(dtype=dtype, memory_format=layout)
        for make in (recipe.views, *recipe.more_views)
    )


def _save(recipe: Recipe, runtime: Runtime, step: int) -> None:
    """Saves the state after `step`; a state that is not finite is never saved."""
    objective = ((f"objective.{name}", weight) for name, weight in recipe.objective.named_parameters())
    weights = dict([*recipe.model.named_parameters(), *objective])
    # One transfer for all weights.
    are_finite = torch.stack([weight.isfinite().all() for weight in weights.values()]).cpu().tolist()
    # Sharded templates may be finite on some workers only; all of them name the same weight.
    found = max((number for number, is_finite in enumerate(are_finite) if not is_finite), default=-1)
    found = max_int_over_workers(found, runtime.device)
    if found >= 0:
        raise FloatingPointError(f"{list(weights)[found]} is not finite after step {step}")
    runtime.save(step + 1, recipe.state(step + 1))


def _require_finite(recipe: Recipe, metrics: Mapping[str, float], step: int) -> None:
    if not math.isfinite(metrics["train/loss"]):
        constraint = f"constraint {metrics['train/constraint']:.4g}, " if "train/constraint" in metrics else ""
        raise FloatingPointError(
            f"the objective is {metrics['train/loss']:.4g} at step {step} (metric loss "
            f"{metrics['train/metric_loss']:.4g}, {constraint}learning rate {recipe.learning_rate(step):.4g})"
        )


def _terms_metrics(recipe: Recipe, terms: Terms, more: Mapping[str, Tensor] = MappingProxyType({})) -> dict[str, float]:
    """Metrics of the objective's terms and others in one transfer: the only place where a step waits for the device."""
    assert terms.embeddings.grad is not None, "the gradient of the embeddings is kept"
    gradients = terms.embeddings.grad / world_size()  # each worker differentiates its own copy of the global loss
    turned = gather_rows(turn_tangents(terms.embeddings.detach(), gradients))
    metrics = {
        "train/loss": terms.total.detach(),
        "train/metric_loss": terms.metric_loss,
        "train/norm_mean": terms.norms.mean(),
        "train/norm_std": terms.norms.std(correction=0),
        "train/turn_mean": turned.mean(),
        "train/turn_std": turned.std(correction=0),
        "train/gradient_norm_mean": gather_rows(norms(gradients)).mean(),
        **more,
    }
    if recipe.objective.constraint is not None:
        metrics["train/constraint"] = terms.constraint
    if recipe.objective.transform is not None:
        metrics["train/generated_loss"] = terms.generated_loss
    if isinstance(recipe.objective.transform, RowGenerator) and recipe.objective.transform.is_trained:
        metrics["train/generator_loss"] = terms.generator_loss
    if recipe.objective.distortion is not None:
        metrics["train/agent_distortion"] = recipe.objective.distortion.distortion.to(terms.total.dtype)
        metrics["train/agent_distortion_bound"] = recipe.objective.distortion.bound.to(terms.total.dtype)
    return dict(zip(metrics, torch.stack(list(metrics.values())).cpu().tolist(), strict=True))


@torch.no_grad()
def _embedded(recipe: Recipe, views: SizedViews) -> Float[Tensor, "rows dim"]:
    """The raw embeddings of this worker's views at the present weights, in float32, or float64 if that is trained."""
    network = Network(recipe.encoder, recipe.head, recipe.computation.micro_batch_size)
    kept = [(each, *named) for each in network.modules() for named in each.named_buffers(recurse=False)]
    for module, name, buffer in kept:  # copies, so that batch norm's running statistics count no view twice
        setattr(module, name, buffer.clone())
    embeddings = network(*_by_size(views)).embeddings
    for module, name, buffer in kept:
        setattr(module, name, buffer)
    return embeddings


def _step_angle_metrics(before: Float[Tensor, "rows dim"], after: Float[Tensor, "rows dim"]) -> dict[str, Tensor]:
    """How far a step has turned the embeddings of its own views on this worker, in radians."""
    turned = gather_rows(angles(before, after))
    return {"train/step_angle_mean": turned.mean(), "train/step_angle_std": turned.std(correction=0)}


def _metrics(recipe: Recipe, terms: Terms, step: int, more: Mapping[str, Tensor]) -> dict[str, float]:
    """The metrics that are reported for a step."""
    objective = recipe.objective
    return {
        **_terms_metrics(recipe, terms, more),
        **({} if objective.constraint is None else {"train/eta": objective.eta(step)}),
        "train/lr": recipe.learning_rate(step),
        **recipe.more_metrics(),
    }
