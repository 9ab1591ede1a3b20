"""A linear probe that is trained together with the encoder, without passing gradients to it.

With features f of d columns, whose mean μ and variance σ² are those of the global batch,

    x = (f − μ) / √(d (σ² + ε)),    p = softmax(W x + b),    L = −mean log p_y ,

one step of SGD with momentum for each step of the encoder, from W = 0. The rows x have a mean squared norm of 1, so
that the curvature of L is at most 1/2 in W, and one learning rate suits the features of every encoder.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from ssl_sec.batch import Batch
from ssl_sec.collectives import sum_over_workers
from ssl_sec.evaluation.classification.scores import top_k_accuracy
from ssl_sec.networks.batch_norm import GlobalBatchNorm

logger = logging.getLogger("ssl_sec.evaluation")

# Heavy-ball descent is stable below 2 (1 + momentum) / curvature = 7.6.
_LEARNING_RATE = 3.0
_MOMENTUM = 0.9


class OnlineProbe(nn.Module):
    """A linear classifier of features, the same on every worker.

    Args:
        num_features: width d ≥ 1 of the features.
        num_classes: number of classes, ≥ 2.
        left_out: indices of the images that it is not trained on, ascending, one or more.
    """

    weight: Tensor
    bias: Tensor
    velocity: Tensor
    left_out: Tensor

    def __init__(self, num_features: int, num_classes: int, left_out: Int64[Tensor, " images"]) -> None:
        super().__init__()
        self.normalise = GlobalBatchNorm(num_features, affine=False, track_running_stats=False)
        self.register_buffer("weight", torch.zeros(num_classes, num_features))
        self.register_buffer("bias", torch.zeros(num_classes))
        self.register_buffer("velocity", torch.zeros(num_classes, num_features + 1))
        self.register_buffer("left_out", left_out)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Restores the probe of a run that left out the same images; else it stays as it is, and a warning says so."""
        left_out = state_dict.get("left_out", self.left_out)  # version 0.1 did not save them
        if not torch.equal(left_out.to(self.left_out), self.left_out):
            logger.warning("the online probe starts anew: `monitor` holds out other images than before")
            return None
        return super().load_state_dict({**state_dict, "left_out": left_out}, strict, assign)

    @torch.no_grad()
    def update(self, features: Float[Tensor, "views dim"], batch: Batch) -> None:
        """Takes one step of SGD; every worker must call this.

        Args:
            features: features of the views of this worker's images, all first views before all second ones.
            batch: this worker's images.
        """
        num_views = len(features) // len(batch.labels)
        labels = batch.labels.repeat(num_views).unsqueeze(1)
        is_trained_on = ~self._is_left_out(batch.indices).repeat(num_views)
        rows = self._rows(features)
        gradient = self._logits(rows).softmax(1)
        gradient.scatter_add_(1, labels, gradient.new_full(labels.shape, -1.0))
        gradient *= is_trained_on.unsqueeze(1)
        own = torch.cat([(gradient.T @ rows).flatten(), gradient.sum(0), is_trained_on.sum(0, keepdim=True).to(rows)])
        # A single sum over the workers for all three.
        of_weight, of_bias, count = sum_over_workers(own).split([self.weight.numel(), len(self.bias), 1])
        of_both = torch.cat([of_weight.view_as(self.weight), of_bias.unsqueeze(1)], dim=1)
        self.velocity.mul_(_MOMENTUM).add_(of_both / count.clamp(min=1))
        self.weight.sub_(self.velocity[:, :-1], alpha=_LEARNING_RATE)
        self.bias.sub_(self.velocity[:, -1], alpha=_LEARNING_RATE)

    @torch.no_grad()
    def top1(
        self,
        features: Float[Tensor, "images dim"],
        labels: Int64[Tensor, " images"],
        others: Float[Tensor, "others dim"],
    ) -> float:
        """The probe's accuracy, in [0, 1].

        An encoder's running statistics lag behind while it trains, and its features of whole images differ from those
        of views: so the mean and variance are taken from other images.

        Args:
            features: features of whole images by an encoder in evaluation mode.
            labels: classes of these images.
            others: features of two or more other images by the same encoder.
        """
        variance, mean = torch.var_mean(others.to(self.weight), 0, correction=0)
        scale = (features.shape[1] * (variance + self.normalise.eps)).sqrt()
        return top_k_accuracy(self._logits((features.to(self.weight) - mean) / scale), labels, 1)

    def _rows(self, features: Tensor) -> Tensor:
        return self.normalise(features.to(self.weight)) / features.shape[1] ** 0.5

    def _logits(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.weight, self.bias)

    def _is_left_out(self, indices: Int64[Tensor, " images"]) -> Bool[Tensor, " images"]:
        places = torch.searchsorted(self.left_out, indices).clamp(max=len(self.left_out) - 1)
        return self.left_out[places] == indices
