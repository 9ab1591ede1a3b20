"""Cross-batch memory: the rows of a batch are also compared with those of earlier steps (XBM, Wang et al. 2020).

With the rows X of the batch and those of the last steps, M, as they were then,

    L = L_metric(X) + w L_metric(X, M),

where L_metric(X, M) is the loss of all these rows as far as the batch's rows are its anchors: the mean over the terms
of these anchors. No gradient passes through M.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ssl_sec.losses.base import Loss
from ssl_sec.losses.classes import classes_of
from ssl_sec.losses.contrastive import ContrastiveLoss, SupConLoss
from ssl_sec.losses.generators.base import GlobalBatch, RowGenerator, Shares
from ssl_sec.losses.pair import CircleLoss, MultiSimilarityLoss, RankedListLoss, SemihardTripletLoss, TripletLoss
from ssl_sec.rules import Range

# Means over anchors, their pairs or triplets. The others need more of a remembered row, as its place in its batch, its
# own positive, or all distances.
WITH_MEMORY = (
    ContrastiveLoss,
    SupConLoss,
    TripletLoss,
    SemihardTripletLoss,
    MultiSimilarityLoss,
    CircleLoss,
    RankedListLoss,
)


class CrossBatchMemory(RowGenerator):
    """Cross-batch memory: rows of earlier steps, too (XBM, Wang et al. 2020).

    A row meets many more positives and negatives than those of its batch, at the cost of similarities alone. The memory
    is that of the global batch, the same on any number of workers; every worker holds all of it.

    The loss must be a mean over anchors, their pairs or triplets: contrastive, SupCon, triplet, semihard,
    multi-similarity, circle or ranked list. What others compute with the memory is not such a mean.

    The memory is used once it is full, and from `from_step` on: embeddings drift too fast at the start.

    Args:
        dim: dimensions of the embeddings.
        size: remembered rows, 1 to 4,194,304.
        from_step: first step that uses it, ≥ 0.
        weight: w ≥ 0 of its loss.
    """

    rows: Tensor
    labels: Tensor

    def __init__(self, dim: int, size: int = 4096, from_step: int = 1000, weight: float = 1.0) -> None:
        super().__init__()
        Range(ge=1, le=2**22).check("size", size)
        Range(ge=0).check("from_step", from_step)
        Range(ge=0).check("weight", weight)
        self.size = size
        self.from_step = from_step
        self.weight = weight
        self.register_buffer("rows", torch.zeros(size, dim))
        self.register_buffer("labels", torch.zeros(size, dtype=torch.int64))

    def extra_repr(self) -> str:
        """The values that define the memory."""
        return f"size={self.size}, from_step={self.from_step}, weight={self.weight}"

    def first_step(self, batch_size: int) -> int:
        """The first step that uses the memory, with batches of `batch_size` rows."""
        return max(self.from_step, -(-self.size // batch_size))

    def weights(self, step: int) -> tuple[float, float]:
        """1 and w."""
        return 1.0, self.weight

    def forward(self, batch: GlobalBatch, anchors: slice, head: torch.nn.Module, loss: Loss) -> Shares:
        """The anchors' share of the loss with the memory; in training mode, the batch is remembered afterwards."""
        embeddings, labels = batch.embeddings, batch.labels
        nothing = embeddings.new_zeros(())
        share = nothing
        if batch.step >= self.first_step(len(labels)):
            rows = torch.cat([embeddings, self.rows.to(embeddings.dtype)])
            all_labels = torch.cat([labels, self.labels])
            num_terms = loss.num_terms(classes_of(all_labels))
            of_all, of_batch = num_terms.sum(), num_terms[: len(labels)].sum()
            share = loss(rows, all_labels, anchors) * of_all / of_batch.clamp(min=1)
        if self.training:
            self._remember(embeddings.detach(), labels)
        return Shares(share, nothing, nothing)

    @torch.no_grad()
    def _remember(self, embeddings: Float[Tensor, "batch dim"], labels: Int64[Tensor, " batch"]) -> None:
        """The newest rows come first; the oldest are forgotten."""
        self.rows.copy_(torch.cat([embeddings.to(self.rows.dtype), self.rows])[: self.size])
        self.labels.copy_(torch.cat([labels, self.labels])[: self.size])
