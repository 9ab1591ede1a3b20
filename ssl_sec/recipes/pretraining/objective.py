"""The objective of a pretraining whose positives are images of one class, in batches that classes do not determine."""

import torch
from torch import Tensor

from ssl_sec.losses.base import Embeddings, Labels
from ssl_sec.losses.contrastive import TeacherLoss
from ssl_sec.training.objective import Objective


class SupervisedObjective(Objective):
    """As `Objective`, but a batch with nothing to compare, as of images of one class, has a loss and gradients of 0."""

    def _metric_loss(self, embeddings: Embeddings, labels: Labels, targets: Tensor | None, step: int) -> Tensor:
        if isinstance(self.loss, TeacherLoss):
            return super()._metric_loss(embeddings, labels, targets, step)
        comparable = self.loss.compares(labels)
        # Every loss compares two classes with two rows or more: nothing waits, and no gradient is NaN.
        two_classes = torch.arange(len(labels), device=labels.device) % 2
        loss = super()._metric_loss(embeddings, torch.where(comparable, labels, two_classes), targets, step)
        return torch.where(comparable, loss, 0.0)
