"""Cross-entropy of mixed images; without mixup a fine-tuning has the objective of every recipe."""

from typing import Any

import torch
from torch import Tensor

from ssl_sec.augment.mixup import Mixup, partners
from ssl_sec.collectives import own_rows, sum_over_workers
from ssl_sec.losses.base import Embeddings, Labels
from ssl_sec.training.objective import Objective


class MixedObjective(Objective):
    """λ L(z, y) + (1 − λ) L(z, y′), with the labels y′ of the partners and λ of the step (Zhang et al. 2018).

    For the cross-entropy L that is the loss against mixed labels, as it is linear in them.

    Args:
        parts: arguments of `Objective`, without a constraint or a transform.
        mixup: the mixup that mixes the images.
    """

    def __init__(self, *parts: Any, mixup: Mixup) -> None:
        super().__init__(*parts)
        assert self.constraint is None and self.transform is None
        self.mixup = mixup

    def _metric_loss(self, embeddings: Embeddings, labels: Labels, targets: Tensor | None, step: int) -> Tensor:
        anchors, share = own_rows(len(labels)), self.mixup.share(step)
        of_own, of_partners = (self.loss(embeddings, each, anchors=anchors) for each in (labels, partners(labels)))
        return sum_over_workers(torch.lerp(of_partners, of_own, share))
