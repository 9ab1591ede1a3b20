"""Two losses at once, NormFace's softmax with the center loss or with C-contrastive among them."""

from jaxtyping import Float, Int64
from torch import Tensor

from ssl_sec.losses.base import Loss
from ssl_sec.settings import Range


class CombinedLoss(Loss):
    """first + weight · second, each with class templates or centres of its own.

    Args:
        first: any loss.
        second: any other.
        weight: of the second, ≥ 0.
    """

    _shown = ("weight",)

    def __init__(self, first: Loss, second: Loss, weight: float) -> None:
        super().__init__()
        Range(ge=0).check("weight", weight)
        self.first = first
        self.second = second
        self.weight = weight

    def _share(
        self, embeddings: Float[Tensor, "batch dim"], labels: Int64[Tensor, " batch"], anchors: slice
    ) -> Float[Tensor, ""]:
        return self.first(embeddings, labels, anchors) + self.weight * self.second(embeddings, labels, anchors)
