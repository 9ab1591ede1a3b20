"""Hardness-aware deep metric learning (HDML): negatives that are moved toward the anchor (Zheng et al. 2019).

For an anchor z with its positive at the distance d⁺, a negative z⁻ of the distance d is moved to

    ẑ⁻ = z + [λ d + (1 − λ) d⁺] (z⁻ − z) / d,    λ = exp(−α / J_avg),    where d > d⁺, else ẑ⁻ = z⁻,

with J_avg the mean of the metric loss over the last epoch: as the loss falls, λ falls, and negatives come nearer; λ = 0
if J_avg is not positive. A generator G takes the moved row back to the backbone's features, ỹ⁻ = G(ẑ⁻), and the head
embeds these like features of images. With the rows that are not moved, y' = G(z), and a softmax classifier C,

    J_gen    = w_r Σ ‖y − y'‖² + w_s mean(softmax loss of C(ỹ))
    J_metric = e^{−β / J_gen} J(Z) + (1 − e^{−β / J_gen}) J(Z̃) .

J_gen trains the generator alone, J_metric the backbone and the head alone, and C learns from the backbone's features,
which it does not move.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from ssl_sec.losses.base import Loss
from ssl_sec.losses.classes import classes_of, negative_pairs
from ssl_sec.losses.generators.base import GlobalBatch, RatedLayers, RowGenerator, Shares, frozen, initialised
from ssl_sec.losses.geometry import directions, root, squared_distances
from ssl_sec.modes import evaluating
from ssl_sec.rules import Range, check

# Generated rows held at once. If there are more, they are computed again in the backward pass, part by part.
ROWS_AT_ONCE = 4096

# Nothing is drawn.
_checkpoint = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore


class HardnessAwareSynthesis(RowGenerator):
    """HDML: harder negatives, generated for each anchor (Zheng et al. 2019).

    Each anchor has a batch of its own, in which every row of another class is moved toward it; its term of the loss is
    computed there. z are directions, as the losses compare them, and the anchor's positive is the first other row of
    its class; an anchor without one moves nothing. The head embeds generated features as in evaluation, without
    dropout and with batch norm's running statistics, so that no row depends on another.

    A step generates N² rows for N rows of the batch, in bounded memory. During the first epoch λ = 1 and only the
    batch counts.

    Args:
        num_classes: number of classes of the data, ≥ 1.
        num_features: width of the backbone's features.
        dim: dimensions of the embeddings.
        steps_per_epoch: steps over which J_avg and the J_gen of the weights are averaged, ≥ 1.
        alpha: α ≥ 0; larger values make the negatives harder.
        beta: β ≥ 0; larger values give the generated rows more weight relative to the batch.
        reconstruction_weight: weight w_r ≥ 0 of the sum of squared errors over the batch.
        softmax_weight: weight w_s ≥ 0 of the generated rows' mean softmax loss.
        hidden_dim: width of the generator's hidden layer, ≥ 1.
        generator_learning_rate: initial rate of the generator, > 0.
        classifier_learning_rate: initial rate of the classifier, > 0.
        seed: seed of the initial weights.
    """

    averages: Tensor
    sums: Tensor

    def __init__(
        self,
        num_classes: int,
        num_features: int,
        dim: int,
        steps_per_epoch: int,
        alpha: float = 90.0,
        beta: float = 1e4,
        reconstruction_weight: float = 0.5,
        softmax_weight: float = 5000.0,
        hidden_dim: int = 512,
        generator_learning_rate: float = 1e-2,
        classifier_learning_rate: float = 1e-3,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check(steps_per_epoch >= 1, "steps_per_epoch", steps_per_epoch, "≥ 1")
        Range(ge=0).check("alpha", alpha)
        Range(ge=0).check("beta", beta)
        Range(ge=0).check("reconstruction_weight", reconstruction_weight)
        Range(ge=0).check("softmax_weight", softmax_weight)
        Range(ge=1, le=2**20).check("hidden_dim", hidden_dim)
        Range(gt=0).check("generator_learning_rate", generator_learning_rate)
        Range(gt=0).check("classifier_learning_rate", classifier_learning_rate)
        self.steps_per_epoch = steps_per_epoch
        self.alpha = alpha
        self.beta = beta
        self.reconstruction_weight = reconstruction_weight
        self.softmax_weight = softmax_weight
        with initialised(seed):
            self.generator = RatedLayers(
                nn.Linear(dim, hidden_dim),
                nn.ReLU(),
                nn.Linear(hidden_dim, num_features),
                learning_rate=generator_learning_rate,
            )
            self.classifier = RatedLayers(nn.Linear(num_features, num_classes), learning_rate=classifier_learning_rate)
        # For the metric loss and J_gen: the means over the last epoch, and the sums over the steps of this one.
        self.register_buffer("averages", torch.full((2,), torch.inf))
        self.register_buffer("sums", torch.zeros(2))

    def extra_repr(self) -> str:
        """The values that define the generator."""
        weights = f"reconstruction_weight={self.reconstruction_weight}, softmax_weight={self.softmax_weight}"
        return f"alpha={self.alpha}, beta={self.beta}, {weights}, steps_per_epoch={self.steps_per_epoch}"

    def weights(self, step: int) -> tuple[Tensor, Tensor]:
        """e^{−β / J_gen} and 1 minus it."""
        of_batch = self._falling(self.beta)[1]
        return of_batch, 1 - of_batch

    def _falling(self, rate: float) -> Float[Tensor, " 2"]:
        """e^{−rate / J} of both averages; where J ≤ 0, as it may be of DCL, its limit for J → 0."""
        smallest = torch.finfo(self.averages.dtype).tiny
        return torch.exp(-rate / self.averages.clamp(min=smallest))

    @torch.no_grad()
    def observe(self, step: int, metric_loss: Float[Tensor, ""], generator_loss: Float[Tensor, ""]) -> None:
        """Adds finite losses to those of the epoch; after its last step they become the averages."""
        losses = torch.stack([metric_loss, generator_loss])
        self.sums += torch.where(losses.isfinite(), losses, 0.0)
        if (step + 1) % self.steps_per_epoch == 0:
            self.averages.copy_(self.sums / self.steps_per_epoch)
            self.sums.zero_()

    def forward(self, batch: GlobalBatch, anchors: slice, head: nn.Module, loss: Loss) -> Shares:
        """The anchors' shares of the losses: of their own batches, of the reconstruction and of the classifier."""
        with torch.autocast(batch.embeddings.device.type, enabled=False):
            unit, labels = directions(batch.embeddings), batch.labels
            own = range(len(labels))[anchors]
            features = batch.features[anchors].detach()
            errors = features - self.generator(unit[anchors].detach())
            classified = functional.cross_entropy(self.classifier(features), labels[anchors], reduction="sum")
            pulls = self._pulls(unit, labels, anchors)
            num_at_once = max(1, ROWS_AT_ONCE // len(labels))
            parts = [
                slice(first, min(first + num_at_once, own.stop)) for first in range(own.start, own.stop, num_at_once)
            ]
            compute = self._of_part
            if len(parts) > 1:
                compute = cast(Callable[..., Tensor], partial(_checkpoint, compute))
            each_pulls = torch.split(pulls, num_at_once)
            sums = torch.stack(
                [
                    compute(unit, of_part, labels, part, head, loss)
                    for part, of_part in zip(parts, each_pulls, strict=True)
                ]
            ).sum(0)
            reconstruction = self.reconstruction_weight * errors.square().sum()
            return Shares(
                generated_loss=sums[0],
                generator_loss=reconstruction + self.softmax_weight * sums[1] / len(labels) ** 2,
                classifier_loss=classified / len(labels),
            )

    def _pulls(
        self, unit: Float[Tensor, "batch dim"], labels: Int64[Tensor, " batch"], anchors: slice
    ) -> Float[Tensor, "anchors batch"]:
        """How far rows are moved, ẑ⁻ = z⁻ + p (z − z⁻): p = (1 − λ) max(0, 1 − d⁺ / d), and 0 within a class."""
        classes = classes_of(labels)
        distances = root(squared_distances(unit, anchors))
        to_positive = distances.gather(1, classes.positive[anchors].unsqueeze(1))
        has_positive = (classes.size[anchors] > 1).unsqueeze(1)
        farther = negative_pairs(labels, anchors) & has_positive & (distances > to_positive)
        hardness = 1 - self._falling(self.alpha)[0]
        return torch.where(farther, hardness * (1 - to_positive / torch.where(farther, distances, 1.0)), 0.0)

    def _of_part(
        self,
        unit: Float[Tensor, "batch dim"],
        pulls: Float[Tensor, "part batch"],
        labels: Int64[Tensor, " batch"],
        part: slice,
        head: nn.Module,
        loss: Loss,
    ) -> Float[Tensor, " 2"]:
        """For some anchors' batches: their terms of the metric loss, and the sum of the softmax losses of all rows."""
        moved = (unit + pulls.unsqueeze(2) * (unit[part].unsqueeze(1) - unit)).flatten(0, 1)
        embeddings = _as_evaluated(head, frozen(self.generator, moved))
        terms = [
            loss(rows, labels, slice(anchor, anchor + 1))
            for anchor, rows in enumerate(embeddings.view(*pulls.shape, -1), start=part.start)
        ]
        logits = frozen(self.classifier, self.generator(moved.detach()))
        softmax = functional.cross_entropy(logits, labels.repeat(len(pulls)), reduction="sum")
        return torch.stack([torch.stack(terms).sum(), softmax])


def _as_evaluated(head: nn.Module, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows dim"]:
    """The head's embeddings of the features, computed as in evaluation."""
    with evaluating(head):
        return head(features)
