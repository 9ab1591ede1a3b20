"""Metric loss and norm constraint on the global batch: L = L_metric + η_t · L_sec (SEC, Eq. 21)."""

from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor, nn

from ssl_sec.collectives import gather_rows, own_rows, sum_over_workers
from ssl_sec.losses.geometry import norms
from ssl_sec.losses.spherical import SphericalConstraint
from ssl_sec.schedules import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The objective of one step and its parts, the same on every worker.

    Attributes:
        total: what is differentiated.
        metric_loss: the loss on directions.
        constraint: the norm constraint, not weighted; 0 where there is none.
        eta: its weight at this step.
        norms: norms of the raw embeddings of the global batch.
    """

    total: Float[Tensor, ""]
    metric_loss: Float[Tensor, ""]
    constraint: Float[Tensor, ""]
    eta: float
    norms: Float[Tensor, " batch"]


class Objective(nn.Module):
    """Gathers the rows once, asks the loss for this worker's share of anchors, and adds the constraint.

    Args:
        loss: `loss(embeddings, labels, anchors) -> scalar`; the shares of a partition of anchors add up.
        constraint: the norm constraint, or None.
        eta: its weight as a function of the global step.
    """

    def __init__(self, loss: nn.Module, constraint: SphericalConstraint | None, eta: Schedule) -> None:
        super().__init__()
        self.loss = loss
        self.constraint = constraint
        self.eta = eta

    def forward(self, embeddings: Float[Tensor, "rows dim"], labels: Int64[Tensor, " rows"], step: int) -> Terms:
        """The objective of the global batch.

        Args:
            embeddings: this worker's raw rows; the same number on every worker.
            labels: their labels; equal labels are positives, on whichever worker they are.
            step: 0-based global step.
        """
        embeddings, labels = gather_rows(embeddings), gather_rows(labels)
        metric_loss = sum_over_workers(self.loss(embeddings, labels, anchors=own_rows(len(labels))))
        if self.constraint is None:
            constraint, eta, total = metric_loss.new_zeros(()), 0.0, metric_loss
        else:
            constraint, eta = self.constraint(embeddings), self.eta(step)
            total = metric_loss + eta * constraint
        return Terms(
            total=total,
            metric_loss=metric_loss.detach(),
            constraint=constraint.detach(),
            eta=eta,
            norms=norms(embeddings.detach()),
        )
