"""The configuration of jobs.tune."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ssl_sec.rules import Count, Range
from ssl_sec.settings import Settings


@dataclass(frozen=True, kw_only=True)
class TuneConfig(Settings):
    """A search over any keys of a training; the keys themselves are given as Hydra's sweeps.

    Attributes:
        trials: number of trainings in total.
        searcher: optuna suggests values from the trials so far (its tree-structured Parzen estimator); random draws
            them independently.
        scheduler: asha stops trials that are behind the others after the same epochs (Li et al. 2020, "A System for
            Massively Parallel Hyperparameter Tuning"); none runs all to their end.
        metric: the metric to compare, one of the monitor's metrics on training images; null takes the score of the
            training on held-out ones: val/knn_top1 of a pretraining, val/recall_at_1 of metric learning,
            val/verification_accuracy of faces.
        mode: whether the largest or the smallest metric is best; null for the usual one, min for alignment and
            uniformity.
        measurements: number of measurements of a trial, evenly over its epochs or steps, unless monitor.every_epochs or
            monitor.every_steps is given.
        grace_epochs: epochs in which no trial is stopped; null for an eighth of all.
        grace_steps: likewise, for a training whose length is in steps.
        reduction_factor: one of this many trials continues after each rung of asha.
        max_concurrent: number of trials at once; null for as many as the cluster has room for.
        cpus_per_trial: processor cores of a trial; null for an equal share for each GPU, or 1 without GPUs.
        gpus_per_trial: GPUs of a trial, 0.5 for two trials on one; null for 1 if there are any.
        job: the training, pretrain, metric_learning or face; null for that of the experiment, or pretrain.
    """

    trials: Count = 20
    searcher: Literal["optuna", "random"] = "optuna"
    scheduler: Literal["asha", "none"] = "asha"
    metric: str | None = None
    mode: Literal["max", "min"] | None = None
    measurements: Count = 8
    grace_epochs: Count | None = None
    grace_steps: Count | None = None
    reduction_factor: Annotated[int, Range(ge=2)] = 3
    max_concurrent: Count | None = None
    cpus_per_trial: Annotated[float, Range(gt=0)] | None = None
    gpus_per_trial: Annotated[float, Range(ge=0)] | None = None
    job: str | None = None
