"""Multinomial logistic regression of features by L-BFGS, the linear evaluation of transfer.

The classifier minimises, over all n training images, with weights W and biases b,

    Σᵢ cross-entropy(W xᵢ + b, yᵢ) + (λ / 2) ‖W‖²,

so that λ is 1 / C of scikit-learn. SimCLR (Chen et al. 2020, appendix B.8) chooses λ on validation images out of 45
logarithmically spaced values between 10⁻⁶ and 10⁵, and trains again on training and validation images. It does not say
whether its loss is the sum or the mean over the images; here it is the sum.

The search is for V = W diag(s) and b + W c over (xᵢ - c) / s, with the features' means c and standard deviations s,
at least their median: the same minimum with the penalties λ / s², which is found at any scale and mean of the features,
and beside a few that are far larger than the others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from ssl_sec.collectives import of_first_worker, rank, sum_over_workers
from ssl_sec.errors import DataError
from ssl_sec.evaluation.classification.scores import Part, hits_of, in_parts, top1
from ssl_sec.evaluation.feature_table import FeatureTable

PENALTIES = tuple(torch.logspace(-6, 5, 45, dtype=torch.float64).tolist())

Measure = Callable[[Bool[Tensor, " images"], Int64[Tensor, " images"]], float]


@dataclass(frozen=True, eq=False)
class LogisticRegression:
    """A linear classifier.

    Attributes:
        weight: weights, one row for each class.
        bias: bias of each class.
    """

    weight: Float[Tensor, "classes dim"]
    bias: Float[Tensor, " classes"]

    def logits(self, features: Float[Tensor, "images dim"]) -> Float[Tensor, "images classes"]:
        """The logits of each class, in the precision of the weights."""
        return functional.linear(features.to(self.weight), self.weight, self.bias)

    def parts(self, rows: FeatureTable) -> Iterator[Part]:
        """The logits and labels of some images after the others."""
        return in_parts(self.logits, rows, len(self.bias))


@dataclass(frozen=True, eq=False)
class TunedLogisticRegression:
    """A classifier whose penalty was chosen on validation images.

    Attributes:
        classifier: classifier trained with that penalty, by default on training and validation images.
        penalty: the chosen λ.
        validation_scores: score of each λ tried, in [0, 1].
    """

    classifier: LogisticRegression
    penalty: float
    validation_scores: dict[float, float]


def fit_logistic(
    rows: FeatureTable,
    num_classes: int,
    penalty: float,
    start: LogisticRegression | None = None,
    *,
    max_iterations: int = 1000,
    tolerance: float = 1e-5,
    chunk_size: int = 8192,
) -> LogisticRegression:
    """Minimises the penalised loss with one penalty, by L-BFGS with line searches for the strong Wolfe conditions.

    Each worker computes the loss of its share of the rows; every worker must call this with the same images and gets
    the same classifier. Worker 0 alone searches: processors of two kinds round differently, and a search that ends one
    evaluation earlier would leave the others waiting. Memory beyond the features grows with chunk_size · classes and
    with 20 times the classifier.

    Args:
        rows: features and labels of the training images; at least one.
        num_classes: number of classes; labels are below it.
        penalty: weight λ ≥ 0 of the penalty.
        start: classifier at which the search starts; None for weights of 0, and biases of the classes' frequencies.
        max_iterations: largest number of iterations of L-BFGS, ≥ 1.
        tolerance: largest partial derivative of the objective at which the search ends, relative to the largest one
            with weights of 0, > 0.
        chunk_size: images whose logits are held at once, ≥ 1.

    Returns:
        The classifier in float64, on the features' device.

    Raises:
        DataError: a feature is not finite, or there are no rows.
    """
    features, labels = rows.share()
    num_not_finite = int(sum_over_workers((~features.isfinite().all(1)).sum()))
    if len(rows) == 0 or num_not_finite:
        raise DataError(
            f"logistic regression: {num_not_finite} of {len(rows)} images have features that are not finite; "
            "allowed: 1 image or more, all with finite features"
        )
    centre, scale = _centre_and_scale(features, len(rows), chunk_size)
    objective = _Objective(features, labels.to(features.device), len(rows), num_classes, chunk_size, centre, scale)
    flat = features.new_zeros(num_classes * (features.shape[1] + 1), dtype=torch.float64)
    flat[-num_classes:] = rows.labels.bincount(minlength=num_classes).clamp(min=1).log()
    _, steepest = objective(flat, penalty)
    if start is not None:
        flat.copy_(objective.flat(start))
    if rank() > 0:
        while (announced := of_first_worker(flat.new_zeros(len(flat) + 1)))[-1] > 0:
            objective(announced[:-1], penalty)
        return objective.classifier(announced[:-1])
    flat.requires_grad_()
    search = torch.optim.LBFGS(
        [flat],
        max_iter=max_iterations,
        tolerance_grad=tolerance * float(steepest.abs().max()),
        # The features' precision limits how finely losses can be compared.
        tolerance_change=torch.finfo(features.dtype).eps * 1e-2,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    @torch.no_grad()
    def evaluate() -> float:
        of_first_worker(functional.pad(flat, (0, 1), value=1.0))
        loss, flat.grad = objective(flat.detach(), penalty)
        return loss

    search.step(evaluate)
    of_first_worker(functional.pad(flat, (0, 1), value=0.0))
    return objective.classifier(flat.detach())


def tuned_logistic(
    rows: FeatureTable,
    num_trained_on: int,
    num_classes: int,
    measure: Measure = top1,
    penalties: Sequence[float] = PENALTIES,
    on_fit: Callable[[int], object] = lambda count: None,
    iterations_per_penalty: int = 100,
    refit: bool = True,
    **search: int | float,
) -> TunedLogisticRegression:
    """Chooses the penalty with the best score on validation images, the largest in a tie; then trains to the end.

    The penalties are tried from the largest to the smallest, and each search starts where the one before ended, or
    was stopped by `iterations_per_penalty`, as happens where the minimum is flat, at the smallest penalties.

    Args:
        rows: features and labels of the training images, followed by those of the validation images.
        num_trained_on: number of the training images; one image or more follows them.
        num_classes: number of classes; labels are below it.
        measure: function (which images are classified correctly, labels) -> score, higher is better: `top1` or
            `mean_per_class`.
        penalties: penalties λ, one or more, each ≥ 0.
        on_fit: function called after each penalty with the number of penalties tried so far.
        iterations_per_penalty: iterations of L-BFGS while the penalty is chosen, ≥ 1; the default is scikit-learn's.
        refit: whether the last training also uses the validation images.
        search: further arguments of `fit_logistic`; `max_iterations` is that of the last training.

    Raises:
        DataError: a feature is not finite, or a part has no images.
    """
    train, validation = rows.between(0, num_trained_on), rows.between(num_trained_on, len(rows))
    if len(validation) == 0:
        raise DataError("logistic regression: found no validation images, on which the penalty is chosen")
    scores: dict[float, float] = {}
    tried = {**search, "max_iterations": iterations_per_penalty}
    current: LogisticRegression | None = None
    best: tuple[float, LogisticRegression] | None = None
    for penalty in sorted(set(penalties), reverse=True):
        current = fit_logistic(train, num_classes, penalty, current, **tried)  # pyright: ignore[reportArgumentType]
        score = measure(*hits_of(current.parts(validation)))
        scores[penalty] = float(of_first_worker(current.bias.new_tensor(score)))
        if best is None or scores[penalty] > scores[best[0]]:
            best = penalty, current
        on_fit(len(scores))
    assert best is not None, "one penalty or more"
    last = rows if refit else train
    classifier = fit_logistic(last, num_classes, *best, **search)  # pyright: ignore[reportArgumentType]
    return TunedLogisticRegression(classifier, best[0], scores)


def _centre_and_scale(
    features: Float[Tensor, "own dim"], num_images: int, chunk_size: int
) -> tuple[Float[Tensor, " dim"], Float[Tensor, " dim"]]:
    """The means of all workers' features and their standard deviations, at least the median of those above 0."""
    chunks, total = features.split(chunk_size), features.new_zeros(features.shape[1], dtype=torch.float64)
    for chunk in chunks:
        total += chunk.sum(0, dtype=torch.float64)
    centre = (sum_over_workers(total) / num_images).to(features.dtype)
    total.zero_()
    for chunk in chunks:
        total += (chunk - centre).double().square().sum(0)
    deviations = (sum_over_workers(total) / num_images).sqrt()
    varying = deviations[deviations > 0]
    floor = varying.median() if len(varying) else deviations.new_ones(())
    return centre, deviations.clamp(min=floor).to(features.dtype)


@dataclass(frozen=True)
class _Objective:
    """The objective over n of centred and scaled features, and its gradient, on the rows of all workers.

    Attributes:
        features: features of this worker's images.
        labels: labels of this worker's images.
        num_images: number n of the images of all workers.
        num_classes: number of classes of the classifier.
        chunk_size: images whose logits are held at once.
        centre: what is subtracted from each feature.
        scale: by which each is then divided.
    """

    features: Tensor
    labels: Tensor
    num_images: int
    num_classes: int
    chunk_size: int
    centre: Tensor
    scale: Tensor

    def flat(self, classifier: LogisticRegression) -> Tensor:
        """The variables of the search for a classifier of the features as they are."""
        bias = classifier.bias + classifier.weight @ self.centre.to(classifier.weight)
        return torch.cat([(classifier.weight * self.scale.to(classifier.weight)).flatten(), bias])

    def classifier(self, flat: Tensor) -> LogisticRegression:
        """The classifier of the features as they are."""
        weight, bias = self.split(flat)
        weight = weight / self.scale.to(weight)
        return LogisticRegression(weight, bias - weight @ self.centre.to(weight))

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and biases."""
        weight = flat[: -self.num_classes]
        return weight.view(self.num_classes, -1), flat[-self.num_classes :]

    def __call__(self, flat: Tensor, penalty: float) -> tuple[float, Tensor]:
        weight, bias = (part.to(self.features.dtype) for part in self.split(flat))
        # Chunks are added in float64; the last entry is the loss.
        total = flat.new_zeros(len(flat) + 1)
        weight_gradient, bias_gradient = self.split(total[:-1])
        for features, labels in zip(
            self.features.split(self.chunk_size), self.labels.split(self.chunk_size), strict=True
        ):
            features = (features - self.centre).div_(self.scale)
            log_probabilities = functional.linear(features, weight, bias).log_softmax(1)
            total[-1] -= log_probabilities.gather(1, labels.unsqueeze(1)).double().sum()
            residuals = log_probabilities.exp_()
            residuals[torch.arange(len(labels), device=labels.device), labels] -= 1
            weight_gradient += residuals.T @ features
            bias_gradient += residuals.sum(0)
        total = sum_over_workers(total) / self.num_images
        own, _ = self.split(flat)
        penalised = penalty / self.num_images / self.scale.to(own).square() * own
        weight_gradient, _ = self.split(total[:-1])
        weight_gradient += penalised
        return float(total[-1] + (penalised * own).sum() / 2), total[:-1]
