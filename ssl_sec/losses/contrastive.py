"""Contrastive losses over pairs of a batch.

NT-Xent (Chen et al. 2020, SimCLR, Eq. 1; the contrastive loss of SEC, Section 3.4). With s_ij = <f̂_i, f̂_j>,
temperature T and p(i) the other view of row i,

    ℓ_i = −log( exp(s_{i p(i)} / T) / Σ_{k ≠ i} exp(s_ik / T) ),    L = (1/2N) Σ_i ℓ_i .
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ssl_sec.losses.geometry import directions, positive_pairs


class NTXentLoss(nn.Module):
    """Normalised, temperature-scaled cross-entropy over all other rows of the batch.

    Args:
        temperature: T > 0.
    """

    def __init__(self, temperature: float = 0.5) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature: found {temperature}, must be > 0")
        self.temperature = temperature

    def extra_repr(self) -> str:
        """The value that defines the loss."""
        return f"temperature={self.temperature}"

    def forward(
        self,
        embeddings: Float[Tensor, "batch dim"],
        labels: Int64[Tensor, " batch"],
        anchors: slice = slice(None),
    ) -> Float[Tensor, ""]:
        """The mean of ℓ_i over all rows, or the share of it that a range of anchors contributes.

        Args:
            embeddings: raw rows of the global batch; normalised here.
            labels: index of the image that a row is a view of. Where a row has several positives, ℓ_i is the
                mean over them.
            anchors: the range of rows whose terms are summed; the shares of a partition add up to the loss.

        Raises:
            ValueError: if a row has no positive (checked where it costs no synchronisation: on the CPU).
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            unit = directions(embeddings)
            positive, itself = positive_pairs(labels, anchors)
            if labels.device.type == "cpu" and not torch.compiler.is_compiling():
                _require_positives(positive, labels[anchors])
            logits = (unit[anchors] @ unit.T / self.temperature).masked_fill(itself, -torch.inf)
            at_positives = torch.where(positive, logits, 0.0).sum(1) / positive.sum(1)
            return (logits.logsumexp(1) - at_positives).sum() / len(embeddings)


def _require_positives(positive: Tensor, labels: Tensor) -> None:
    lonely = ~positive.any(1)
    if lonely.any():
        raise ValueError(
            f"NT-Xent needs a positive for every row: label {int(labels[lonely][0])} occurs once in the batch"
        )
