"""Everything that a run trains, how its network computes, and the state from which it resumes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.optim import Optimizer

from ssl_sec.augment.views import Views
from ssl_sec.batch import Batch
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.samplers import Sampler
from ssl_sec.errors import StorageError, counted
from ssl_sec.training.class_sharding import HeldRows, held_templates
from ssl_sec.training.objective import Objective
from ssl_sec.training.schedules import Schedule
from ssl_sec.training.teacher import Teacher

Precision = Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """How a network computes.

    Attributes:
        precision: precision of the forward pass; bfloat16 is autocast, with weights in float32.
        channels_last: whether activations are in the channels_last layout.
        compiled: whether the network is compiled by torch.compile.
        recomputed: whether the backbone's blocks compute their activations again in the backward pass.
        micro_batch_size: views that the encoder takes at once, whose activations are computed again, too; None for all.
        num_loader_workers: processes that decode the images of a streamed set.
    """

    precision: Precision = "float32"
    channels_last: bool = False
    compiled: bool = False
    recomputed: bool = False
    micro_batch_size: int | None = None
    num_loader_workers: int = 0

    def __str__(self) -> str:
        layout = ["channels_last"] if self.channels_last else []
        compiled = ["compiled"] if self.compiled else []
        recomputed = ["with recomputed blocks"] if self.recomputed else []
        size = self.micro_batch_size
        micro_batches = [] if size is None else [f"in micro-batches of {counted(size, 'view')}"]
        return ", ".join([self.precision, *layout, *compiled, *recomputed, *micro_batches])

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights and the views."""
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def layout(self) -> torch.memory_format:
        """The memory layout of the views."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


def image_labels(batch: Batch, rows: slice, num_views: int) -> Int64[Tensor, " views"]:
    """Labels of self-supervision: the label of a view is the row of its image in the global batch."""
    return torch.arange(rows.start, rows.stop, device=batch.images.device).repeat(num_views)


def class_labels_of_views(batch: Batch, rows: slice, num_views: int) -> Int64[Tensor, " views"]:
    """Labels of supervision by views: the label of a view is the class of its image."""
    return batch.labels.repeat(num_views)


def class_labels(batch: Batch, rows: slice) -> Int64[Tensor, " views"]:
    """Labels of supervision: the classes of the images, one view of each."""
    return batch.labels


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is saved with the run's."""

    def state_dict(self) -> dict[str, Any]:
        """The object's state."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Restores a state."""
        ...


@runtime_checkable
class FeatureObserver(Stateful, Protocol):
    """Learns from the features of every step without changing them; its state is saved with the run's."""

    def update(self, features: Float[Tensor, "views dim"], batch: Batch) -> None:
        """Learns from the features of the views of this worker's images; every worker calls it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that a run trains, and the way that it is trained.

    Attributes:
        encoder: images in [0, 1] -> features.
        head: features -> raw embeddings.
        model: batches of views, one of each size -> features and embeddings (`Embedded`), with the gradients of all
            workers averaged.
        objective: loss and constraint on the global batch.
        optimiser: optimiser over the parameters of encoder, head and objective.
        learning_rate: learning rate by global step.
        clip_norm: largest norm of the gradient of all weights together, > 0; None for no limit.
        image_set: the training images.
        sampler: sampler that draws the images of step t.
        views: function that makes the views of the images.
        more_views: functions that make further views of each image, one for each other size.
        total_steps: number of steps T of the run.
        row_labels: function from a batch and its rows in the global batch to the labels of the views.
        computation: how the network computes.
        graphed: whether the launches of a step are recorded once and replayed (`ssl_sec.training.replaying`).
        draws: random numbers for the loader's crops, one for each row of a step's global batch; None if it draws
            nothing.
        observer: learns from the features of every step; None if nothing does.
        best: the best network so far; None if the last network is the result.
        teacher: teacher whose rows of the same views the loss also takes; None if there is none.
        more_metrics: function that returns metrics reported in addition to the common ones.
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
    total_steps: int
    clip_norm: float | None = None
    row_labels: Callable[[Batch, slice], Tensor] = class_labels
    computation: Computation = Computation()
    graphed: bool = False
    draws: Callable[[int], Tensor] | None = None
    observer: FeatureObserver | None = None
    best: Stateful | None = None
    more_metrics: Callable[[], Mapping[str, float]] = dict
    more_views: tuple[Views, ...] = ()
    teacher: Teacher | None = None

    def state(self, step: int) -> dict[str, Any]:
        """Everything that a resume after `step` steps needs.

        Sharded templates, and the optimiser's state of them, are HeldRows.
        """
        held = held_templates(self.objective)
        optimiser = self.optimiser.state_dict()
        for group in optimiser["param_groups"]:
            group["lr"] = float(group["lr"])  # a tensor where steps are replayed
        parameters = [parameter for group in self.optimiser.param_groups for parameter in group["params"]]
        for templates in held.values():
            number = next(number for number, each in enumerate(parameters) if each is templates.rows)
            # A copy: the optimiser keeps its own.
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
            **({} if self.observer is None else {"observer": self.observer.state_dict()}),
            **({} if self.best is None else {"best": self.best.state_dict()}),
            **({} if self.teacher is None else {"teacher": self.teacher.state_dict()}),
        }

    @property
    def held_classes(self) -> slice | None:
        """The classes whose templates this worker holds, if they are sharded."""
        for templates in held_templates(self.objective).values():
            return slice(templates.first, templates.first + len(templates.rows))
        return None

    def restore(self, state: Mapping[str, Any]) -> int:
        """Restores a saved state; returns the steps taken so far.

        Raises:
            StorageError: the training set has another number of classes than that of the saved run.
        """
        found, saved = len(self.image_set.class_names), int(state.get("num_classes", len(self.image_set.class_names)))
        if found != saved:
            raise StorageError(
                f"{self.image_set.name} has {counted(found, 'class')}, but the checkpoint's run had {saved}"
            )
        self.encoder.load_state_dict(state["encoder"])
        self.head.load_state_dict(state["head"])
        self.objective.load_state_dict(state["objective"])
        # The state is the checkpoint's; the options are those of this run, which may use another device.
        groups = [
            {**theirs, **own, "params": theirs["params"]}
            for theirs, own in zip(state["optimiser"]["param_groups"], self.optimiser.param_groups, strict=True)
        ]
        self.optimiser.load_state_dict({**state["optimiser"], "param_groups": groups})
        self._lay_out_optimiser_state()
        if self.observer is not None and "observer" in state:  # else its key may have changed: it starts anew
            self.observer.load_state_dict(state["observer"])
        if self.best is not None:
            self.best.load_state_dict(state["best"])
        if self.teacher is not None:
            self.teacher.load_state_dict(state["teacher"])
        return int(state["step"])

    def _lay_out_optimiser_state(self) -> None:
        """Gives the optimiser's state the memory layout of the weights: fused optimisers rely on it.

        The saved run may have had another one (`runtime.channels_last`).
        """
        for parameter, state in self.optimiser.state.items():
            for name, value in state.items():
                if getattr(value, "shape", None) == parameter.shape and value.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
