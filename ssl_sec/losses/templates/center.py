"""Center loss: the mean over the rows of ½ ‖f − μ_y‖², on raw rows, with centres μ that follow (Wen et al. 2016)."""

import torch
from torch import Tensor

from ssl_sec.losses.base import Embeddings, Labels, Scalar
from ssl_sec.losses.centres import move_centres, snapshot
from ssl_sec.losses.templates.base import ClassLoss


class CenterLoss(ClassLoss):
    """Center loss (Wen et al. 2016), moved by SFT's Eq. 9.

    ½ ‖f − μ_y‖² on raw rows; the centres move by SFT's Eq. 9, after their use.

    In training mode a call updates the centres, from the whole batch, whatever the anchors.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.

    Attributes:
        moves: whether a call in training mode moves the centres; False for rows that are not a batch's own.
    """

    centres: Tensor

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__(num_classes, dim)
        self.register_buffer("centres", torch.zeros(num_classes, dim))
        self.moves = True

    def _share_of(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        terms = (embeddings[anchors] - snapshot(self.centres[labels[anchors]])).square().sum(1) / 2
        if self.training and self.moves:
            move_centres(self.centres, embeddings, labels)
        return terms.sum() / len(labels)
