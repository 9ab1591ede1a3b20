"""One training step and the loop around it, the same for every recipe, runtime and number of workers.

Everything is a function of the global step t: the samples, their views, dropout, the learning rate and η. A resume
needs the state that `save` was given, and t.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.optim import Optimizer

from ssl_sec.augment.views import Views
from ssl_sec.batch import Batch
from ssl_sec.collectives import highest_of_workers
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.loading import batches
from ssl_sec.data.samplers import Sampler, worker_rows
from ssl_sec.errors import Stopped, StorageError
from ssl_sec.networks.dropout import draw_dropout
from ssl_sec.training.class_sharding import HeldRows, held_templates
from ssl_sec.training.norms import NormHistogram, norm_histogram
from ssl_sec.training.objective import Objective, Terms
from ssl_sec.training.optimisers import set_learning_rate
from ssl_sec.training.replaying import CUDAGraphs, Graphs, Replayed
from ssl_sec.training.schedules import Schedule

logger = logging.getLogger(__name__)

Precision = Literal["float32", "bfloat16", "float64"]


class Request(IntEnum):
    """What may be asked of a run while it trains; the highest that any worker hears counts for all."""

    NONE = 0
    SAVE = 1
    STOP = 2


@runtime_checkable
class Runtime(Protocol):
    """What training sees of the machine that it runs on."""

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
        """Records metrics at a 0-based global step; one worker's word counts."""
        ...

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Saves a checkpoint after `step` steps."""
        ...

    def request(self) -> Request:
        """What someone asks of this worker; every worker looks at the same steps."""
        ...


def say(runtime: Runtime, message: str, *values: object) -> None:
    """Logs what is being done, once for all workers."""
    if runtime.rank == 0:
        logger.info(message, *values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """How a network computes.

    Attributes:
        precision: of the forward pass; bfloat16 is autocast, with weights in float32.
        channels_last: whether activations are laid out so.
        compiled: whether the network is compiled by torch.compile.
    """

    precision: Precision = "float32"
    channels_last: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        layout = ["channels_last"] if self.channels_last else []
        return ", ".join([self.precision, *layout, *(["compiled"] if self.compiled else [])])

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the views."""
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def layout(self) -> torch.memory_format:
        """Of the views."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that a run trains, and how.

    Attributes:
        encoder: images in [0, 1] -> features.
        head: features -> raw embeddings.
        model: head(encoder(images)), with the gradients of all workers averaged.
        objective: loss and constraint on the global batch.
        optimiser: over the parameters of all three.
        learning_rate: by global step.
        image_set: where images come from.
        sampler: which of them are in step t.
        views: how they are augmented.
        row_labels: labels of the rows of the views, from a batch and its rows in the global batch.
        total_steps: T.
        computation: how the network computes.
        graphed: whether the launches of a step are recorded once and replayed (`ssl_sec.training.replaying`).
        num_loader_workers: processes that decode a streamed set.
        draws: what the loader's crops are drawn from, a number for each row of a step's global batch; None if it draws
            nothing.
        more_figures: what is reported beside what every recipe reports.
    """

    encoder: nn.Module
    head: nn.Module
    model: nn.Module
    objective: Objective
    optimiser: Optimizer
    learning_rate: Schedule
    image_set: ImageSet
    sampler: Sampler
    views: Views
    row_labels: Callable[[Batch, slice], Tensor]
    total_steps: int
    computation: Computation = Computation()
    graphed: bool = False
    num_loader_workers: int = 0
    draws: Callable[[int], Tensor] | None = None
    more_figures: Callable[[], Mapping[str, float]] = dict

    def state(self, step: int) -> dict[str, Any]:
        """All that a resume after `step` steps needs.

        Templates that are shared out, and what the optimiser keeps of them, are HeldRows.
        """
        held = held_templates(self.objective)
        optimiser = self.optimiser.state_dict()
        for group in optimiser["param_groups"]:
            group["lr"] = float(group["lr"])  # a tensor where steps are replayed
        parameters = [parameter for group in self.optimiser.param_groups for parameter in group["params"]]
        for templates in held.values():
            number = next(number for number, each in enumerate(parameters) if each is templates.rows)
            # A copy: the optimiser goes on with its own.
            optimiser["state"][number] = {
                key: HeldRows(value, templates.first) if getattr(value, "shape", ()) == templates.rows.shape else value
                for key, value in optimiser["state"].get(number, {}).items()
            }
        return {
            "step": step,
            "num_classes": len(self.image_set.class_names),
            "encoder": self.encoder.state_dict(),
            "head": self.head.state_dict(),
            "objective": {**self.objective.state_dict(), **held},
            "optimiser": optimiser,
        }

    @property
    def held_classes(self) -> slice | None:
        """The classes whose templates this worker holds, if they are shared out."""
        for templates in held_templates(self.objective).values():
            return slice(templates.first, templates.first + len(templates.rows))
        return None

    def restore(self, state: Mapping[str, Any]) -> int:
        """Takes up a saved state; returns the steps taken so far.

        Raises:
            StorageError: the training set has another number of classes than the one of the state.
        """
        found, saved = len(self.image_set.class_names), int(state.get("num_classes", len(self.image_set.class_names)))
        if found != saved:
            raise StorageError(f"{self.image_set.name} has {found} classes, but the checkpoint's run had {saved}")
        self.encoder.load_state_dict(state["encoder"])
        self.head.load_state_dict(state["head"])
        self.objective.load_state_dict(state["objective"])
        # The state is the checkpoint's; the options are this run's, which may compute on another device.
        groups = [
            {**theirs, **own, "params": theirs["params"]}
            for theirs, own in zip(state["optimiser"]["param_groups"], self.optimiser.param_groups, strict=True)
        ]
        self.optimiser.load_state_dict({**state["optimiser"], "param_groups": groups})
        return int(state["step"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence:
    """How often the loop reports, saves and monitors; it does all three after the last step, too.

    Attributes:
        log_every_steps: ≥ 1.
        save_every_steps: ≥ 1.
        monitor_every_steps: ≥ 1.
    """

    log_every_steps: int
    save_every_steps: int
    monitor_every_steps: int


# Views, their labels and the step's number -> the terms of the objective, before the weights moved.
Steps = Callable[[Tensor, Tensor, int], Terms]


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """The forward pass in bfloat16 where that is asked for; the objective leaves it again."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bfloat16" else nullcontext()


def image_labels(batch: Batch, rows: slice, num_views: int) -> Int64[Tensor, " views"]:
    """Labels of self-supervision: the views of one image of the global batch share its row number."""
    numbers = torch.arange(rows.start, rows.stop, device=batch.images.device)
    return numbers.repeat(num_views)


def train_step(
    recipe: Recipe,
    views: Float[Tensor, "views channels height width"],
    labels: Int64[Tensor, " views"],
    step: int,
) -> Terms:
    """One step of the optimiser on this worker's views of global step `step`."""
    set_learning_rate(recipe.optimiser, recipe.learning_rate(step))
    return update_weights(recipe, views, labels, step)


def update_weights(
    recipe: Recipe,
    views: Float[Tensor, "views channels height width"],
    labels: Int64[Tensor, " views"],
    step: int,
    eta: Float[Tensor, ""] | None = None,
) -> Terms:
    """The part of a step that computes on the device alone, at the learning rate that the optimiser has.

    Args:
        recipe: what is trained.
        views: of this worker's images.
        labels: theirs.
        step: 0-based global step.
        eta: the constraint's weight; None takes that of the step.
    """
    recipe.optimiser.zero_grad(set_to_none=True)
    with autocast(views.device, recipe.computation.precision):
        embeddings = recipe.model(views)
    terms = recipe.objective(embeddings, labels, step, eta)
    terms.total.backward()
    recipe.optimiser.step()
    return terms


def steps_of(recipe: Recipe, device: torch.device) -> Steps:
    """What takes a recipe's steps: calls each, or replays them."""
    return ReplayedSteps(recipe, device, CUDAGraphs(device)) if recipe.graphed else partial(train_step, recipe)


class ReplayedSteps:
    """The steps of one worker, their launches recorded once and replayed; see `ssl_sec.training.replaying`.

    Args:
        recipe: what is trained; it generates no rows of other classes, and drops none out.
        device: where.
        graphs: what records a step.
    """

    def __init__(self, recipe: Recipe, device: torch.device, graphs: Graphs) -> None:
        assert recipe.objective.transform is None, "what a transform generates depends on the step's number"
        self._recipe = recipe
        number = partial(torch.zeros, (), device=device, dtype=recipe.computation.dtype)
        self._eta = number()
        for group in recipe.optimiser.param_groups:
            group["lr"] = number()
        self._update = Replayed(
            lambda views, labels: update_weights(recipe, views, labels, step=0, eta=self._eta), graphs
        )

    def __call__(
        self,
        views: Float[Tensor, "views channels height width"],
        labels: Int64[Tensor, " views"],
        step: int,
    ) -> Terms:
        """As for `train_step`; the terms hold until the next step."""
        set_learning_rate(self._recipe.optimiser, self._recipe.learning_rate(step))
        self._eta.fill_(self._recipe.objective.eta(step))
        return self._update(views, labels)


def train(
    recipe: Recipe,
    runtime: Runtime,
    cadence: Cadence,
    monitor: Callable[[int], Mapping[str, float]],
    first_step: int = 0,
    take_step: Steps | None = None,
) -> None:
    """Trains from `first_step` to the recipe's last, reporting, monitoring and saving on the way.

    Args:
        recipe: what is trained.
        runtime: where.
        cadence: how often to report, save and monitor.
        monitor: figures of the encoder after so many steps, asked for by every worker.
        first_step: steps already taken.
        take_step: takes a step; None takes that of `steps_of`.

    Raises:
        Stopped: after a save, if a stop was asked for.
        FloatingPointError: if the objective or a weight is not finite, on every worker at the same step.
    """
    sampler = recipe.sampler
    rows = worker_rows(sampler.global_batch_size, runtime.rank, runtime.world_size)
    steps = range(first_step, recipe.total_steps)
    draws = recipe.draws
    flow = batches(
        recipe.image_set,
        (sampler.indices(step)[rows] for step in steps),
        runtime.device,
        recipe.num_loader_workers,
        draws=None if draws is None else (draws(step)[rows] for step in steps),
    )
    dtype, layout = recipe.computation.dtype, recipe.computation.layout
    take_step = take_step or steps_of(recipe, runtime.device)
    recipe.model.train()
    recipe.objective.train()
    clock, clock_step, saved_step = time.perf_counter(), first_step, first_step
    for step, batch in zip(steps, flow, strict=True):
        views = recipe.views(batch.images, step, rows, sampler.global_batch_size)
        views = views.to(dtype=dtype, memory_format=layout)
        draw_dropout(recipe.head, step, rows, len(views) // len(batch.images), runtime.device)
        terms = take_step(views, recipe.row_labels(batch, rows), step)
        # On a CPU looking costs nothing; on a GPU it waits until figures are reported.
        if runtime.device.type == "cpu" and not math.isfinite(float(terms.total.detach())):
            _require_finite(recipe, _terms_figures(recipe, terms), step)
        taken = step + 1
        last = taken == recipe.total_steps
        at_epoch_end = taken % sampler.steps_per_epoch == 0
        is_monitored = last or taken % cadence.monitor_every_steps == 0
        is_saved = last or taken % cadence.save_every_steps == 0
        if step % cadence.log_every_steps and not (at_epoch_end or is_monitored or is_saved):
            continue
        figures = _figures(recipe, terms, step)
        _require_finite(recipe, figures, step)
        now = time.perf_counter()
        figures["train/images_per_s"] = (taken - clock_step) * sampler.global_batch_size / (now - clock)
        figures["train/epoch"] = taken / sampler.steps_per_epoch
        with_histogram = at_epoch_end or last or step == first_step
        runtime.report(step, figures, norm_histogram(terms.norms.cpu(), step) if with_histogram else None)
        if is_monitored:
            runtime.report(step, monitor(taken))
            recipe.model.train()
        if is_saved:
            _save(recipe, runtime, step)
            saved_step = taken
        if not last:
            request = highest_of_workers(runtime.request(), runtime.device)
            if request >= Request.SAVE and saved_step != taken:
                _save(recipe, runtime, step)
                saved_step = taken
            if request == Request.STOP:
                raise Stopped(f"stopped after step {step}; the state is saved")
        clock, clock_step = time.perf_counter(), taken


def _save(recipe: Recipe, runtime: Runtime, step: int) -> None:
    """Saves the state after `step`; one that is not finite is never saved."""
    weights = dict(recipe.model.named_parameters())
    are_finite = (
        torch.stack([weight.isfinite().all() for weight in weights.values()]).cpu().tolist()
    )  # one wait for them all
    for name, is_finite in zip(weights, are_finite, strict=True):
        if not is_finite:
            raise FloatingPointError(f"{name} is not finite after step {step}")
    runtime.save(step + 1, recipe.state(step + 1))


def _require_finite(recipe: Recipe, figures: Mapping[str, float], step: int) -> None:
    if not math.isfinite(figures["train/loss"]):
        raise FloatingPointError(
            f"the objective is {figures['train/loss']} at step {step} (metric loss {figures['train/metric_loss']}, "
            f"constraint {figures['train/constraint']}, learning rate {recipe.learning_rate(step)})"
        )


def _terms_figures(recipe: Recipe, terms: Terms) -> dict[str, float]:
    """Figures of the objective's terms, in one transfer: the one place where the device is waited for."""
    figures = {
        "train/loss": terms.total.detach(),
        "train/metric_loss": terms.metric_loss,
        "train/constraint": terms.constraint,
        "train/norm_mean": terms.norms.mean(),
        "train/norm_std": terms.norms.std(correction=0),
    }
    if recipe.objective.transform is not None:
        figures["train/generated_loss"] = terms.generated_loss
    return dict(zip(figures, torch.stack(list(figures.values())).cpu().tolist(), strict=True))


def _figures(recipe: Recipe, terms: Terms, step: int) -> dict[str, float]:
    """What is reported of a step."""
    objective = recipe.objective
    return {
        **_terms_figures(recipe, terms),
        "train/eta": 0.0 if objective.constraint is None else objective.eta(step),
        "train/lr": recipe.learning_rate(step),
        **recipe.more_figures(),
    }
