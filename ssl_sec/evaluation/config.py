"""The options of a linear probe."""

from dataclasses import dataclass
from typing import Annotated

from ssl_sec.effects import NoEffect
from ssl_sec.rules import BelowOne, Count, CountOrZero, NotEmpty, Range, Seed, Share, Side
from ssl_sec.settings import Settings
from ssl_sec.training.optimisers.config import PositiveRate


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(Settings, key="probe"):
    """Linear evaluation (SEC, appendix B.3).

    Attributes:
        enabled: whether a linear probe follows the pretraining.
        augment: whether the probe trains on freshly augmented images, as SimCLR does, instead of cached features.
        min_scale: smallest of these crops, as a share of the image's area, in (0, 1].
        learning_rates: learning rates, all trained at once; one is chosen on a held-out tenth of the training set.
        labels_per_class: labels of each class to train on; None takes all.
        epochs: epochs of the linear classifier's training, ≥ 1.
        batch_size: images in a step of its training, ≥ 1.
        momentum: momentum of its SGD, in [0, 1).
        decay_at: shares of the epochs, each in (0, 1), after which the learning rates fall; one epoch alone has none.
        decay_factor: divisor of the learning rates at those epochs, ≥ 1.
        seed: seed of the order of the images, the held-out tenth, the few labels and the noise of corrupted images.
        corruptions: whether the probe is also measured on blurred, noisy, JPEG-coded and faded test images, at five
            strengths each.
        logistic: whether a logistic regression by L-BFGS is measured, too, its penalty chosen on the held-out tenth.
        few_shot: numbers of labels of each class for the classification by the nearest class mean, over many draws.
        few_shot_draws: number of draws of those labels.
        mean_per_class: whether the logistic regression's penalty is chosen by the mean of the classes' accuracies, and
            few-shot accuracies are such means; for sets whose papers do so.
        test_share: share of each class of the training split that is held out as the test images; None takes the test
            split.
        image_size_px: side to which images are resized and cropped on the device, pixels; None leaves them as they are.
        num_channels: number of channels to which images are converted; None leaves them as they are.
        resident_limit_mib: size of the features of a split, MiB, up to which every worker holds them all; those of a
            larger one are divided among the workers, which exchange each batch's.
    """

    enabled: bool = False
    augment: bool = False
    min_scale: Share = 0.08
    epochs: Count = 100
    batch_size: Count = 256
    learning_rates: Annotated[tuple[PositiveRate, ...], NotEmpty()] = (
        *(0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
        *(1.0, 2.0, 5.0, 10.0),  # the paper's
    )
    momentum: BelowOne = 0.9
    decay_at: tuple[Annotated[float, Range(gt=0, lt=1)], ...] = (0.6, 0.75, 0.9)
    decay_factor: Annotated[float, Range(ge=1, le=1000)] = 5.0
    labels_per_class: Count | None = None
    seed: Seed = 0
    corruptions: bool = False
    logistic: bool = False
    few_shot: tuple[Count, ...] = ()
    few_shot_draws: Count = 100
    mean_per_class: bool = False
    test_share: Annotated[float, Range(gt=0, lt=1)] | None = None
    image_size_px: Side | None = None
    num_channels: Annotated[int, Range(ge=1, le=1024)] | None = None
    resident_limit_mib: NoEffect[CountOrZero] = 16384
