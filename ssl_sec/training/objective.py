"""Metric loss and norm constraint on the global batch.

    L = L_metric(X) + λ L_metric(X_gen) + η_t L_sec            (SEC, Section 3.3; SFT, Eq. 10)

with X_gen the rows that a feature transform generates from X, if there is one. A generator with parameters of its own
has further terms and weights (`ssl_sec.losses.generators.base`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int64, Integer
from torch import Tensor, nn

from ssl_sec.collectives import (
    gather_objects,
    gather_rows,
    max_over_workers,
    own_rows,
    sum_over_workers,
    world_size,
)
from ssl_sec.errors import check_option
from ssl_sec.losses.agents import AgentDistortion, agent_distortion, agent_distortion_bound
from ssl_sec.losses.averages import Averages
from ssl_sec.losses.base import Embeddings, Labels, Loss, require_labels
from ssl_sec.losses.contrastive import TeacherLoss
from ssl_sec.losses.generators.base import GlobalBatch, RowGenerator
from ssl_sec.losses.geometry import GradScaleBy, grad_scale, in_full_precision, norms
from ssl_sec.losses.spherical import SphericalConstraint
from ssl_sec.losses.templates.center import CenterLoss
from ssl_sec.losses.templates.hinges import AgentLoss
from ssl_sec.losses.transform import SphericalFeatureTransform
from ssl_sec.rules import Range
from ssl_sec.training.schedules import Constant, Schedule

Transform = SphericalFeatureTransform | RowGenerator


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The objective of one step and its parts, the same on every worker.

    Attributes:
        total: the value that is differentiated.
        metric_loss: the loss of the batch's rows.
        generated_loss: the loss of the generated rows, without its weight; 0 if there are none, or nothing to compare.
        generator_loss: the loss that trains the parameters of a generator; 0 if there is none.
        constraint: the norm constraint, without its weight; 0 if there is none.
        norms: norms of the raw embeddings of the global batch.
        embeddings: this worker's raw rows, in float32 or float64.
    """

    total: Float[Tensor, ""]
    metric_loss: Float[Tensor, ""]
    generated_loss: Float[Tensor, ""]
    generator_loss: Float[Tensor, ""]
    constraint: Float[Tensor, ""]
    norms: Float[Tensor, " batch"]
    embeddings: Float[Tensor, "rows dim"]


@contextmanager
def _fixed_averages(loss: nn.Module) -> Iterator[None]:
    """Centres (SFT, Eq. 9) and averages of norms follow the batch's own rows alone, not generated ones."""
    moving = [module for module in loss.modules() if isinstance(module, Averages | CenterLoss)]
    for module in moving:
        module.moves = False
    try:
        yield
    finally:
        for module in moving:
            module.moves = True


class Objective(nn.Module):
    """Gathers the rows once, computes the loss of this worker's anchors, and adds the constraint.

    Args:
        loss: any loss of `ssl_sec.losses`, or a `Loss` of your own; a `TeacherLoss` also takes a teacher's rows.
        constraint: the norm constraint; None for none.
        eta: weight of the constraint: a number ≥ 0, or a function of the global step.
        transform: transform or generator of further rows; None for none.
        grad_scale: exponent p ≥ 0 of GradScale, for the gradients of the loss but not of the constraint; see
            `ssl_sec.losses.geometry.grad_scale`.
        grad_scale_by: the norms that GradScale uses.

    Raises:
        TypeError: `loss` is no such loss, or a transform or generator is combined with a `TeacherLoss`.

    Attributes:
        distortion: how much the agents of classes distort distances; None if the loss has no agents.
    """

    def __init__(
        self,
        loss: Loss | TeacherLoss,
        constraint: SphericalConstraint | None = None,
        eta: Schedule | float = 1.0,
        transform: Transform | None = None,
        grad_scale: float = 0.0,
        grad_scale_by: GradScaleBy = "rows",
    ) -> None:
        super().__init__()
        given = cast("object", loss)  # perhaps its class, or a loss of another library
        if not isinstance(given, Loss | TeacherLoss):
            found = given.__name__ if isinstance(given, type) else type(given).__name__
            raise TypeError(f"Objective: loss: found {found}, must be a Loss of ssl_sec, such as NTXentLoss()")
        if transform is not None and isinstance(loss, TeacherLoss):
            found = type(transform).__name__
            raise TypeError(f"Objective: found {found}, which has no rows of a teacher for {type(loss).__name__}")
        if not callable(eta):
            Range(ge=0).check("eta", eta)
        Range(ge=0).check("grad_scale", grad_scale)
        check_option("grad_scale_by", grad_scale_by, GradScaleBy)
        self.loss = loss
        self.constraint = constraint
        self.eta = eta if callable(eta) else Constant(eta)
        self.transform = transform
        self.grad_scale = grad_scale
        self.grad_scale_by: GradScaleBy = grad_scale_by
        self.distortion = None if self._agents is None else AgentDistortion()
        self._agreed_rows = 0

    def forward(
        self,
        embeddings: Float[Tensor, "rows dim"],
        labels: Integer[Tensor, " rows"],
        step: int,
        eta: Float[Tensor, ""] | None = None,
        features: Float[Tensor, "rows features"] | None = None,
        head: nn.Module | None = None,
        targets: Float[Tensor, "rows dim"] | None = None,
    ) -> Terms:
        """The objective of the global batch.

        Args:
            embeddings: this worker's raw rows; the same number on every worker.
            labels: labels of these rows; equal labels are positives, on whichever worker they are.
            step: 0-based global step.
            eta: the constraint's weight; None takes its value at the step.
            features: the backbone's features of the same rows; a generator needs them.
            head: features -> raw embeddings; a generator needs it.
            targets: a teacher's raw rows of the same views; a `TeacherLoss` needs them.

        Raises:
            TypeError: `embeddings` are no floats, `labels` are not one whole number for each row, there are targets
                without a `TeacherLoss`, or the other way round, or a generator lacks the features or the head.
            ValueError: the workers have different numbers of rows; GPUs check it where the numbers of all change.
        """
        require_labels("Objective", embeddings, labels)
        if world_size() > 1 and not torch.compiler.is_compiling():
            self._require_as_many_rows(len(embeddings), embeddings.device)
        if isinstance(self.loss, TeacherLoss) != (targets is not None):
            found = (
                "no targets, but a teacher's rows are needed by" if targets is None else "targets, but no teacher in"
            )
            raise TypeError(f"Objective: found {found} {type(self.loss).__name__}")
        own = in_full_precision(embeddings)
        rows, labels = gather_rows(own), gather_rows(labels.long())
        # The losses take these rows. The constraint takes the rows themselves: its gradient is not scaled.
        embeddings = grad_scale(rows, self.grad_scale, self.grad_scale_by)
        total = metric_loss = self._metric_loss(embeddings, labels, targets, step)
        if self.training:
            self._watch_agents(embeddings.detach(), labels)
        generated_loss = generator_loss = constraint = metric_loss.new_zeros(())
        if isinstance(self.transform, RowGenerator):
            assert isinstance(self.loss, Loss)
            if features is None or head is None:
                raise TypeError(f"Objective: {type(self.transform).__name__} needs the features and the head, too")
            batch = GlobalBatch(
                features=gather_rows(in_full_precision(features)), embeddings=embeddings, labels=labels, step=step
            )
            with _fixed_averages(self.loss):
                shares = self.transform(batch, own_rows(len(labels)), head, self.loss)
            generated_loss, generator_loss, classifier_loss = sum_over_workers(torch.stack(shares))
            of_batch, of_generated = self.transform.weights(step)
            total = of_batch * metric_loss + of_generated * generated_loss + generator_loss + classifier_loss
            if self.training:
                self.transform.observe(step, metric_loss.detach(), generator_loss.detach())
        elif self.transform is not None:
            generated, classes = self.transform(embeddings, labels, step)
            with _fixed_averages(self.loss):
                generated_loss = self._of_generated(generated, classes, embeddings, labels)
            total = total + self.transform.weight * generated_loss
        if self.constraint is not None:
            constraint = self.constraint(rows)
            # As a tensor: a number that changes with the step would be compiled into the graph.
            weight = constraint.new_full((), self.eta(step)) if eta is None else eta
            total = total + weight * constraint
        return Terms(
            total=total,
            metric_loss=metric_loss.detach(),
            generated_loss=generated_loss.detach(),
            generator_loss=generator_loss.detach(),
            constraint=constraint.detach(),
            norms=norms(embeddings.detach()),
            embeddings=own,
        )

    def _require_as_many_rows(self, own: int, device: torch.device) -> None:
        """Refuses different numbers, with which gloo would end a process.

        A GPU would wait for the answer, so that its workers ask at their first step, and where their number changes.
        """
        if own == self._agreed_rows and device.type != "cpu":
            return
        most, least = max_over_workers(torch.tensor([own, -own], device=device)).abs().tolist()
        if most != least:
            found = gather_objects(own)
            raise ValueError(f"Objective: found {found} rows on the workers, must be the same number on each")
        self._agreed_rows = own

    def _metric_loss(self, embeddings: Embeddings, labels: Labels, targets: Tensor | None, step: int) -> Tensor:
        """The loss of the batch's rows."""
        return self._on_all_workers(embeddings, labels, targets)

    def _of_generated(
        self,
        generated: Float[Tensor, "generated dim"],
        targets: Int64[Tensor, " generated"],
        embeddings: Float[Tensor, "batch dim"],
        labels: Int64[Tensor, " batch"],
    ) -> Tensor:
        """The loss of the generated rows; 0 if their classes leave nothing to compare."""
        assert isinstance(self.loss, Loss)
        comparable = self.loss.compares(targets)
        if len(targets) != len(labels):  # a number that depends on the labels: the transform has waited for the device
            return self._on_all_workers(generated, targets) if comparable else embeddings.new_zeros(())
        # The batch replaces rows that cannot be compared: nothing waits, and no gradient is NaN.
        rows = torch.where(comparable, generated, embeddings.detach())
        return torch.where(comparable, self._on_all_workers(rows, torch.where(comparable, targets, labels)), 0.0)

    def _on_all_workers(
        self,
        embeddings: Float[Tensor, "batch dim"],
        labels: Int64[Tensor, " batch"],
        targets: Float[Tensor, "rows dim"] | None = None,
    ) -> Tensor:
        rows = (embeddings,) if targets is None else (embeddings, gather_rows(in_full_precision(targets)))
        return sum_over_workers(self.loss(*rows, labels, anchors=own_rows(len(labels))))

    @property
    def _agents(self) -> AgentLoss | None:
        return next((module for module in self.loss.modules() if isinstance(module, AgentLoss)), None)

    def _watch_agents(self, embeddings: Float[Tensor, "batch dim"], labels: Int64[Tensor, " batch"]) -> None:
        if self.distortion is None or self._agents is None:
            return
        agents = self._agents.templates_of(labels).to(embeddings.dtype)
        with torch.autocast(embeddings.device.type, enabled=False):
            shared = sum_over_workers(agent_distortion(embeddings, agents, own_rows(len(labels))))
            self.distortion.average(shared, agent_distortion_bound(embeddings, agents))
