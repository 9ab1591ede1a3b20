"""Further measures of a probe beside its linear classifier, if its options ask for them."""

import time
from collections.abc import Callable

from ssl_sec.data.image_set import ImageSet
from ssl_sec.errors import DataError
from ssl_sec.evaluation.classification.corruptions import STRENGTHS, corruptions
from ssl_sec.evaluation.classification.few_shot import few_shot
from ssl_sec.evaluation.classification.linear_probe import LinearProbes
from ssl_sec.evaluation.classification.logistic import PENALTIES, tuned_logistic
from ssl_sec.evaluation.classification.scores import hits_of, mean_per_class, top1
from ssl_sec.evaluation.config import ProbeConfig
from ssl_sec.evaluation.feature_table import FeatureTable
from ssl_sec.recipes.stopping import stop_if_requested
from ssl_sec.training.step import Runtime, log_once

# Time between two messages about a long search.
_SPACE_S = 20.0


def transfer_metrics(
    config: ProbeConfig,
    rows: FeatureTable,
    num_kept: int,
    test: FeatureTable,
    num_classes: int,
    runtime: Runtime,
) -> dict[str, float]:
    """The metrics of logistic regression and of few labels, in percent; all workers call it.

    Args:
        config: the probe's configuration.
        rows: features and labels of the training images, those on which options are chosen last.
        num_kept: number of the others.
        test: features and labels of the test images.
        num_classes: number of classes, above all labels.
        runtime: this worker's runtime.

    Raises:
        Stopped: a stop was requested between two fits.
    """
    found: dict[str, float] = {}
    if config.logistic:
        count = len(PENALTIES)
        log_once(runtime, "fitting logistic regressions with %d penalties to %s images", count, f"{num_kept:,}")
        measure = mean_per_class if config.mean_per_class else top1
        refit = config.labels_per_class is None
        tuned = tuned_logistic(rows, num_kept, num_classes, measure, on_fit=_Spaced(runtime), refit=refit)
        hits = hits_of(tuned.classifier.parts(test))
        found["probe/logistic_top1"] = 100 * top1(*hits)
        found["probe/logistic_mean_per_class"] = 100 * mean_per_class(*hits)
        found["probe/logistic_penalty"] = tuned.penalty
    for count in config.few_shot:
        stop_if_requested(runtime)
        options = {"num_draws": config.few_shot_draws, "per_class": config.mean_per_class}
        try:
            shot = few_shot(rows, test, count, config.seed, **options)
        except DataError as error:  # the other metrics remain valid
            log_once(runtime, "left out: %s", error)
            continue
        found[f"probe/few_shot_{count}"] = 100 * shot.top1
        found[f"probe/few_shot_{count}_interval"] = 100 * shot.interval
    return found


def corrupted_top1(
    probe: LinearProbes,
    features_of: Callable[..., FeatureTable],
    test_set: ImageSet,
    seed: int,
    runtime: Runtime,
) -> dict[str, list[float]]:
    """The accuracy on corrupted test images, in [0, 1], by kind and from the weakest strength to the strongest.

    Args:
        probe: the chosen classifier.
        features_of: image set, `corrupt` -> features and labels.
        test_set: the clean images.
        seed: seed of the noise.
        runtime: this worker's runtime.

    Raises:
        Stopped: a stop was requested between two corruptions.
    """
    log_once(runtime, "measuring the probe on corrupted test images")
    found: dict[str, list[float]] = {kind: [] for kind in STRENGTHS}
    for corruption in corruptions(seed):
        stop_if_requested(runtime)
        rows = features_of(test_set, corrupt=corruption)
        found[corruption.kind].append(top1(*hits_of(probe.parts(probe.learning_rates[0], rows))))
    return found


def corruption_metrics(accuracies: dict[str, list[float]]) -> dict[str, float]:
    """Percentages by metric name, with their mean; none without accuracies."""
    found = {
        f"probe/corruption/{kind}_{place + 1}_top1": 100 * value
        for kind, values in accuracies.items()
        for place, value in enumerate(values)
    }
    return {**found, "probe/corruption/mean_top1": sum(found.values()) / len(found)} if found else {}


class _Spaced:
    """Logs from time to time how many penalties were tried, and stops on request.

    Args:
        runtime: this worker's runtime.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._last = time.monotonic()

    def __call__(self, count: int) -> None:
        if time.monotonic() - self._last > _SPACE_S:
            log_once(self._runtime, "%d of %d penalties tried", count, len(PENALTIES))
            self._last = time.monotonic()
        stop_if_requested(self._runtime)
