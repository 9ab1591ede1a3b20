"""Cross-entropy of logits that the network itself computes, as in classification.

    L = −(1 / B) Σ_i Σ_k q_ik log softmax(z_i)_k,    q_ik = (1 − ε) [k = y_i] + ε / n

with the logits z, n classes and label smoothing ε (Szegedy et al. 2016, section 7).
"""

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional

from ssl_sec.losses.base import Embeddings, Labels, Loss, Scalar
from ssl_sec.settings import Range


class CrossEntropyLoss(Loss):
    """Cross-entropy of the embeddings as logits of the classes, with label smoothing.

    Args:
        label_smoothing: ε in [0, 1), the share of a label that is spread evenly over all classes.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        Range(ge=0, lt=1).check("label_smoothing", label_smoothing)
        self.label_smoothing = label_smoothing

    def compares(self, labels: Labels) -> Bool[Tensor, ""]:
        """Whether there is a row at all."""
        return torch.tensor(len(labels) > 0, device=labels.device)

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        own = embeddings[anchors], labels[anchors]
        terms = functional.cross_entropy(*own, label_smoothing=self.label_smoothing, reduction="sum")
        return terms / len(labels)
