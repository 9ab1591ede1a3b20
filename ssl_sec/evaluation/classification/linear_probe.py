"""Linear evaluation: the accuracy of a linear classifier on frozen features.

The protocol is that of SEC's appendix B.3 for SimCLR: SGD with momentum 0.9, batches of 256, 100 epochs,
the learning rate divided by 5 at epochs 60, 75 and 90 and tuned in {1, 2, 5, 10}, to which the default adds lower
rates; no weight decay. The paper does not name the images on which the rate is tuned. Here it is chosen on images held
out of the training set, and the test set is used once, by the chosen probe.

The classifiers of all learning rates are trained at once over the same batches. For logits z = W x + b and
cross-entropy the gradient is known, (softmax(z) - onehot(y)) xᵀ averaged over the batch, so one step for all
rates is two matrix products.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from ssl_sec.data.image_set import check_num_classes
from ssl_sec.errors import DataError
from ssl_sec.evaluation.arrays import Labels, Rows, as_labelled, require_same_dim
from ssl_sec.evaluation.classification.scores import Part, Scores, in_parts, is_in_top_k, scores_of
from ssl_sec.evaluation.config import ProbeConfig
from ssl_sec.evaluation.feature_table import FeatureTable, LabelledRows, rows_at_once
from ssl_sec.evaluation.splits import labelled_subset, require_held_out, stratified_split
from ssl_sec.seeding import derived_seed
from ssl_sec.training.schedules import epochs_at

# Share of each class's training images on which the learning rate is chosen.
HELD_OUT_SHARE = 0.1


def divided_rows(
    labels: Int64[Tensor, " images"], config: ProbeConfig, name: str
) -> tuple[Int64[Tensor, " kept"], Int64[Tensor, " held_out"]]:
    """The images that a probe is trained on, and those on which its learning rate is chosen, ascending, on the CPU.

    Args:
        labels: class of each training image.
        config: how the probe is trained.
        name: name of the images, for messages.

    Raises:
        DataError: no image can be held out.
        ConfigError: a class has fewer images than labels.
    """
    kept, held_out = stratified_split(labels, HELD_OUT_SHARE, seed=config.seed)
    require_held_out(held_out, name)
    if config.labels_per_class is not None:
        kept = kept[labelled_subset(labels[kept], config.labels_per_class, seed=config.seed)]
    return kept, held_out


@dataclass(frozen=True, eq=False)
class LinearProbes:
    """One linear classifier for each learning rate.

    Attributes:
        weight: the classifiers' weights.
        bias: the classifiers' biases.
        learning_rates: the base learning rate of each, distinct, > 0.
    """

    weight: Float[Tensor, "rates classes dim"]
    bias: Float[Tensor, "rates classes"]
    learning_rates: tuple[float, ...]

    def logits(self, features: Float[Tensor, "images dim"]) -> Float[Tensor, "rates images classes"]:
        """The logits of every classifier."""
        rates, num_classes, dim = self.weight.shape
        features = features.to(self.weight)
        flat = functional.linear(features, self.weight.reshape(-1, dim), self.bias.flatten())
        return flat.reshape(len(features), rates, num_classes).transpose(0, 1)

    def only(self, learning_rate: float) -> "LinearProbes":
        """The one classifier trained with `learning_rate`, which must be among `learning_rates`."""
        row = self.learning_rates.index(learning_rate)
        return LinearProbes(self.weight[row : row + 1], self.bias[row : row + 1], (learning_rate,))

    def parts(self, learning_rate: float, rows: FeatureTable) -> Iterator[Part]:
        """The logits of one classifier, and the labels, of some images after the others."""
        one = self.only(learning_rate)
        return in_parts(lambda features: one.logits(features)[0], rows, self.weight.shape[1])


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeResult(Scores):
    """The result of a linear evaluation on the test set.

    Attributes:
        top1: top-1 accuracy on the test set, in [0, 1].
        top5: top-5 accuracy on the test set; None with at most five classes.
        mean_per_class: the mean of the accuracies of the classes that have test images.
        confusion: number of test images by true class (row) and predicted class (column); a sparse tensor with more
            than 1,000 classes.
        calibration: confidence and accuracy of the classifier on the test set, in bins.
        learning_rate: the base learning rate that was chosen on the held-out images.
        held_out_top1: accuracy on the held-out images for each learning rate, in [0, 1].
    """

    learning_rate: float
    held_out_top1: dict[float, float]


def linear_probe(
    train: tuple[Rows, Labels],
    test: tuple[Rows, Labels],
    config: ProbeConfig | None = None,
) -> ProbeResult:
    """The whole protocol on features: chooses a learning rate on held-out training images, then tests once.

    Args:
        train: features of the training images, with shape (images, dim), and their labels, ≥ 0, with shape (images,).
        test: features and labels of the test images, likewise.
        config: how classifiers are trained; of its fields, learning_rates, epochs, batch_size, momentum, decay_at,
            decay_factor, labels_per_class and seed. The others concern images. None for the defaults.

    Raises:
        ConfigError: a class has fewer images than labels.
        DataError: every classifier diverged, all training images are of one class, each class has one of them, there
            are no images, the numbers of rows and labels or the dimensions differ, a label is below 0, or there would
            be far more classes up to the largest label than images.
    """
    config = config or ProbeConfig()
    features, labels = as_labelled("linear probe, train", *train)
    test_features, test_labels = as_labelled("linear probe, test", *test)
    require_same_dim("linear probe, train and test", features, test_features)
    if bool((labels == labels[0]).all()):
        raise DataError(f"linear probe, train: found one class, {int(labels[0])}; it needs two or more")
    num_classes = int(torch.cat([labels, test_labels.to(labels)]).max()) + 1
    check_num_classes(num_classes, len(labels), "linear probe")
    kept, held_out = divided_rows(labels, config, "linear probe, train")
    rows = FeatureTable(features, labels)

    def train_on(images: Tensor, rates: Sequence[float]) -> LinearProbes:
        seed = derived_seed(config.seed, "probe")
        batches = shuffled(rows, config.batch_size, seed, images)
        return train_linear_probes(
            batches, config, rates, num_classes=num_classes, dim=rows.dim, device=features.device
        )

    probes = train_on(kept, config.learning_rates)
    rate, held_out_top1 = select_learning_rate(probes, FeatureTable(*rows.at(held_out)))
    if config.labels_per_class is None:
        probes = train_on(torch.cat([kept, held_out]), (rate,))
    return evaluate_probe(probes, rate, held_out_top1, FeatureTable(test_features, test_labels))


def shuffled(
    rows: FeatureTable, batch_size: int, seed: int, chosen: Int64[Tensor, " chosen"] | None = None
) -> Callable[[int], Iterator[LabelledRows]]:
    """Batches of cached features, in an order that depends on (seed, epoch) alone.

    Args:
        rows: features and labels of the training images.
        batch_size: rows of a batch, ≥ 1; the last batch of an epoch has the rest.
        seed: seed of the order.
        chosen: the rows that are trained on, on the CPU, as a copy of them would take their memory again; None for all.

    Returns:
        A function from an epoch to its batches.
    """
    # Rows of other workers arrive for several batches at once: each exchange takes a while to start.
    batches_at_once = max(1, rows_at_once(rows.dim) // batch_size) if rows.is_divided else 1

    def batches(epoch: int) -> Iterator[LabelledRows]:
        generator = torch.Generator().manual_seed(derived_seed(seed, "probe", epoch))
        order = torch.randperm(len(rows if chosen is None else chosen), generator=generator)
        order = order if chosen is None else chosen[order]
        for places in order.to(rows.features.device).split(batches_at_once * batch_size):
            yield from zip(*(each.split(batch_size) for each in rows.at(places)), strict=True)

    return batches


@torch.no_grad()
def train_linear_probes(
    feature_batches: Callable[[int], Iterable[LabelledRows]],
    config: ProbeConfig,
    learning_rates: Sequence[float],
    *,
    num_classes: int,
    dim: int,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    on_epoch: Callable[[int, Tensor], None] | None = None,
) -> LinearProbes:
    """Trains a linear classifier for every learning rate at once (SEC, appendix B.3).

    Each is trained as `torch.optim.SGD` without weight decay would train it alone. They start from zero: the problem is
    convex, so a random start would only need another seed.

    Args:
        feature_batches: function from a 0-based epoch to its batches: `shuffled` for cached features, or the features
            of freshly augmented images. It runs without gradients.
        config: epochs, momentum (without dampening) and decays, which take place at the nearest epochs.
        learning_rates: base learning rates, distinct, > 0.
        num_classes: number of classes; labels are below it.
        dim: width of the features.
        device: device of the classifiers, to which batches are moved; the CPU by default.
        dtype: type of the classifiers, to which batches are converted.
        on_epoch: function called after each epoch with its number and the mean training loss of each learning
            rate, with shape (rates,), in nats.

    Raises:
        DataError: an epoch has no images.
    """
    rates = len(learning_rates)
    base = torch.tensor(learning_rates, device=device, dtype=dtype).repeat_interleave(num_classes)
    weight = torch.zeros(rates * num_classes, dim, device=device, dtype=dtype)
    bias = torch.zeros(rates * num_classes, device=device, dtype=dtype)
    weight_velocity, bias_velocity = torch.zeros_like(weight), torch.zeros_like(bias)
    decay_epochs = epochs_at(config.decay_at, config.epochs)
    for epoch in range(config.epochs):
        step_size = base / config.decay_factor ** sum(epoch >= decayed for decayed in decay_epochs)
        total_loss, num_images = torch.zeros(rates, device=device, dtype=dtype), 0
        for batch, batch_labels in feature_batches(epoch):
            features, labels = batch.to(weight), batch_labels.to(weight.device)
            logits = functional.linear(features, weight, bias).view(-1, rates, num_classes)
            log_probabilities = logits.log_softmax(dim=2)
            onehot = functional.one_hot(labels, num_classes).to(dtype).unsqueeze(1)
            gradient = (log_probabilities.exp() - onehot).flatten(1) / len(labels)
            weight_velocity.mul_(config.momentum).addmm_(gradient.T, features)
            bias_velocity.mul_(config.momentum).add_(gradient.sum(0))
            weight.addcmul_(weight_velocity, step_size.unsqueeze(1), value=-1)
            bias.addcmul_(bias_velocity, step_size, value=-1)
            targets = labels.view(-1, 1, 1).expand(-1, rates, 1)
            total_loss -= log_probabilities.gather(2, targets).sum((0, 2))
            num_images += len(labels)
        if not num_images:
            raise DataError("the linear probe was given no training images")
        if on_epoch is not None:
            on_epoch(epoch, total_loss / num_images)
    return LinearProbes(weight.view(rates, num_classes, dim), bias.view(rates, num_classes), tuple(learning_rates))


def select_learning_rate(probes: LinearProbes, held_out: FeatureTable) -> tuple[float, dict[float, float]]:
    """The learning rate with the highest accuracy on held-out training images; the smallest if several have it.

    Args:
        probes: the trained classifiers.
        held_out: features and labels of images that are neither trained on nor in the test set.

    Returns:
        The learning rate, and the top-1 accuracy of each in [0, 1]; a classifier that diverged has 0.

    Raises:
        DataError: every classifier diverged.
    """
    is_finite = probes.weight.isfinite().all(2).all(1) & probes.bias.isfinite().all(1)
    if not is_finite.any():
        rates = ", ".join(f"{rate:g}" for rate in probes.learning_rates)
        raise DataError(f"the linear probe diverged at every learning rate ({rates}); are the features finite?")
    num_rates, num_classes, dim = probes.weight.shape
    hits: list[Tensor] = []
    for features, labels in held_out.parts(rows_at_once(max(num_rates * num_classes, dim))):
        logits = probes.logits(features)
        hits.append(torch.stack([is_in_top_k(of_one, labels.to(logits.device), 1) for of_one in logits]))
    top1 = torch.cat(hits, 1).double().mean(1).tolist()
    accuracies = dict(zip(probes.learning_rates, top1, strict=True))
    finite = [rate for rate, kept in zip(probes.learning_rates, is_finite.tolist(), strict=True) if kept]
    return min(finite, key=lambda rate: (-accuracies[rate], rate)), accuracies


def evaluate_probe(
    probes: LinearProbes, learning_rate: float, held_out_top1: dict[float, float], test: FeatureTable
) -> ProbeResult:
    """Evaluates the chosen classifier on the test set.

    Args:
        probes: the trained classifiers.
        learning_rate: the chosen learning rate, from `select_learning_rate`.
        held_out_top1: the held-out accuracies, from `select_learning_rate`.
        test: features and labels of the test images.
    """
    scores = scores_of(probes.parts(learning_rate, test))
    return ProbeResult(**vars(scores), learning_rate=learning_rate, held_out_top1=held_out_top1)
