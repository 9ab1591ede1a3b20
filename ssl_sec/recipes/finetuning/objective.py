"""Cross-entropy of mixed images; without mixup a fine-tuning has the objective of every recipe."""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ssl_sec.augment.mixup import Mixup, partners
from ssl_sec.collectives import gather_rows, own_rows, sum_over_workers
from ssl_sec.losses.geometry import in_full_precision, norms
from ssl_sec.training.objective import Objective, Terms


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

    def forward(
        self,
        embeddings: Float[Tensor, "rows dim"],
        labels: Int64[Tensor, " rows"],
        step: int,
        eta: Float[Tensor, ""] | None = None,
        features: Float[Tensor, "rows features"] | None = None,
        head: nn.Module | None = None,
        targets: Float[Tensor, "rows dim"] | None = None,
    ) -> Terms:
        """The objective of the global batch; arguments as for `Objective`, the embeddings being logits."""
        own = in_full_precision(embeddings)
        logits, labels = gather_rows(own), gather_rows(labels)
        anchors, share = own_rows(len(labels)), self.mixup.share(step)
        of_own, of_partners = (self.loss(logits, each, anchors=anchors) for each in (labels, partners(labels)))
        loss = sum_over_workers(torch.lerp(of_partners, of_own, share))
        nothing = loss.new_zeros(())
        return Terms(
            total=loss,
            metric_loss=loss.detach(),
            generated_loss=nothing,
            generator_loss=nothing,
            constraint=nothing,
            norms=norms(logits.detach()),
            embeddings=own,
        )
