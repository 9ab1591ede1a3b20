"""Linear evaluation from a config, on one worker of any runtime.

A tenth of the training set is held out. Probes of all learning rates are trained on the rest at once, one rate is
chosen by its accuracy on the held-out tenth, its probe is trained again on the whole training set, and the test set
is used once. With few labels the chosen probe is not trained again, so that it uses no more labels than stated.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ssl_sec.augment.config import AugmentConfig
from ssl_sec.collectives import gather_shares, own_rows, world_size
from ssl_sec.data.config import DataConfig
from ssl_sec.data.image_set import ImageSet, on_device, require_labels, subset
from ssl_sec.data.loading import batches
from ssl_sec.data.samplers import ShuffledBatches
from ssl_sec.data.shards.streamed import require_any_order
from ssl_sec.evaluation.classification.knn import shared_knn_top1
from ssl_sec.evaluation.classification.linear_probe import (
    LinearProbes,
    ProbeResult,
    divided_rows,
    evaluate_probe,
    select_learning_rate,
    shuffled,
    train_linear_probes,
)
from ssl_sec.evaluation.classification.scores import confusion_values
from ssl_sec.evaluation.config import ProbeConfig
from ssl_sec.evaluation.feature_table import FeatureTable, LabelledRows
from ssl_sec.evaluation.features import readable, readable_rows
from ssl_sec.evaluation.splits import opening_test_images, require_same_classes, with_test_images
from ssl_sec.networks.convolutions import lay_out
from ssl_sec.recipes.assembly import building_for, extractor
from ssl_sec.recipes.probing.adapting import Adapted
from ssl_sec.recipes.probing.config import ProbedRun, ProbeJobConfig
from ssl_sec.recipes.probing.measures import corrupted_top1, corruption_metrics, transfer_metrics
from ssl_sec.recipes.stopping import stop_if_requested, until_a_stop
from ssl_sec.seeding import derived_seed
from ssl_sec.training.recipe import Computation
from ssl_sec.training.step import Runtime, log_once

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeFindings:
    """The results of a probe.

    Attributes:
        probe: results of the linear classifier.
        knn_top1: accuracy of a kNN with the same training images, on the test set, in [0, 1].
        class_names: names of the data set's classes.
        corrupted_top1: accuracy of the linear classifier on corrupted test images, in [0, 1], by kind and strength.
        transfer: metrics of logistic regression and of few labels, by name.
    """

    probe: ProbeResult
    knn_top1: float
    class_names: tuple[str, ...]
    corrupted_top1: dict[str, list[float]] = field(default_factory=dict)
    transfer: Mapping[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Percentages by metric name."""
        held_out = {f"probe/held_out_top1_lr_{lr:g}": 100 * top1 for lr, top1 in self.probe.held_out_top1.items()}
        return {
            "probe/top1": 100 * self.probe.top1,
            **({} if self.probe.top5 is None else {"probe/top5": 100 * self.probe.top5}),
            "probe/knn_top1": 100 * self.knn_top1,
            "probe/mean_per_class": 100 * self.probe.mean_per_class,
            "probe/learning_rate": self.probe.learning_rate,
            "probe/ece": 100 * self.probe.calibration.ece,
            **self.transfer,
            **corruption_metrics(self.corrupted_top1),
            **held_out,
        }


@runtime_checkable
class ProbeStore(Protocol):
    """Holds the encoder, and stores the results of its probe.

    Attributes:
        encoder_path: file with the encoder's weights.
        confusion_path: file for the confusion matrix.
    """

    encoder_path: Path
    confusion_path: Path

    def probed(self) -> ProbedRun:
        """The run whose encoder is probed."""
        ...

    def describe_data(self, image_set: ImageSet) -> None:
        """Records the description of the test set."""
        ...


def run(config: ProbeJobConfig, runtime: Runtime, store: ProbeStore) -> None:
    """Probes the encoder in the store, and saves the results there.

    Args:
        config: the probe, the same on every worker.
        runtime: this worker's runtime.
        store: the probe's store, shared by all workers.
    """
    trained = store.probed()
    data = config.data or trained.data
    log_once(runtime, "loading %s and the encoder", data.name)
    train_set, test_set = open_splits(data, config.probe)
    if runtime.rank == 0:
        store.describe_data(test_set)
    channels, height, width = test_set.image_shape
    num_channels, size = config.probe.num_channels or channels, config.probe.image_size_px or min(height, width)
    weights = replace(trained.encoder, weights=str(store.encoder_path))
    remedy = "probe.image_size_px and probe.num_channels convert them"
    with building_for((num_channels, size, size), config.run, remedy):
        encoder: nn.Module = weights.build(num_channels, size)
    if config.probe.num_channels is not None or config.probe.image_size_px is not None:
        encoder = Adapted(encoder, config.probe.image_size_px, num_channels)
    encoder.to(runtime.device)
    computation = config.runtime.on(runtime.device)
    findings = linear_evaluation(encoder, train_set, test_set, config.probe, computation, runtime)
    runtime.report(config.length, findings.metrics())
    if runtime.rank == 0:
        confusion = {
            "confusion": confusion_values(findings.probe.confusion),
            "class_names": list(findings.class_names),
            "calibration": asdict(findings.probe.calibration),
            "clean_top1": findings.probe.top1,
            "corrupted_top1": findings.corrupted_top1,
        }
        store.confusion_path.write_text(json.dumps(confusion))


def linear_evaluation(
    encoder: nn.Module,
    train_set: ImageSet,
    test_set: ImageSet,
    config: ProbeConfig,
    computation: Computation,
    runtime: Runtime,
) -> ProbeFindings:
    """Probes a frozen encoder on the runtime's device; every worker gets the same findings.

    Args:
        encoder: images in [0, 1] -> features.
        train_set: the training images.
        test_set: the test images.
        config: how the probe is trained.
        computation: how the network computes.
        runtime: this worker's runtime.
    """
    encoder.eval()
    lay_out(encoder, runtime.device, computation.channels_last)
    train_set, test_set = (on_device(each, runtime.device) for each in (train_set, test_set))
    require_labels(test_set, "a linear probe")
    require_same_classes(train_set, test_set, "a probe")
    kept, held_out = divided_rows(train_set.labels, config, train_set.name)
    extract = extractor(encoder, computation, runtime, 512, config.resident_limit_mib)
    features_of = partial(readable_rows, until_a_stop(extract, runtime), runtime.device)
    everything = torch.cat([kept, held_out])
    few = "" if config.labels_per_class is None else f" (probe.labels_per_class={config.labels_per_class})"
    log_once(runtime, "computing the features of %s training images%s", f"{len(everything):,}", few)
    rows = features_of(train_set, everything)
    if rows.is_divided:
        log_once(runtime, "the features are divided among %d workers (probe.resident_limit_mib)", runtime.world_size)
    num_kept = int(readable(train_set, runtime.device, kept).sum())
    kept_rows, held_out_rows = rows.between(0, num_kept), rows.between(num_kept, len(rows))
    training = _Training(
        encoder=encoder,
        config=config,
        computation=computation,
        runtime=runtime,
        num_classes=len(train_set.class_names),
    )
    log_once(runtime, "training a linear probe at %d learning rates", len(config.learning_rates))
    probes = training(subset(train_set, kept), kept_rows, config.learning_rates, first_epoch=0)
    learning_rate, held_out_top1 = select_learning_rate(probes, held_out_rows)
    if runtime.rank == 0:
        _warn_of_an_end(learning_rate, held_out_top1)
    has_all_labels = config.labels_per_class is None
    if has_all_labels:
        log_once(runtime, "training the probe again on all labels, at the best rate")
        probes = training(subset(train_set, everything), rows, (learning_rate,), first_epoch=config.epochs)
    log_once(runtime, "measuring the probe and kNN on %s test images", f"{len(test_set):,}")
    test_rows = features_of(test_set)
    return ProbeFindings(
        probe=evaluate_probe(probes, learning_rate, held_out_top1, test_rows),
        knn_top1=shared_knn_top1(rows if has_all_labels else kept_rows, test_rows, len(train_set.class_names)),
        class_names=train_set.class_names,
        corrupted_top1=(
            corrupted_top1(probes.only(learning_rate), features_of, test_set, config.seed, runtime)
            if config.corruptions
            else {}
        ),
        transfer=transfer_metrics(config, rows, num_kept, test_rows, len(train_set.class_names), runtime),
    )


def _warn_of_an_end(best: float, top1: Mapping[float, float]) -> None:
    """Warns that the best learning rate alone is the best and the lowest or highest: one beyond it may be better."""
    is_alone = list(top1.values()).count(top1[best]) == 1 < len(top1)
    if is_alone and best in (ends := {min(top1): "lowest", max(top1): "highest"}):
        logger.warning(
            "the probe's best learning rate, %g, is the %s of probe.learning_rates; one beyond it may be better",
            *(best, ends[best]),
        )


def open_splits(data: DataConfig, config: ProbeConfig) -> tuple[ImageSet, ImageSet]:
    """All training images and the test images; these are held out of the training split if the set has no others."""
    train_set = data.open_all("train")
    require_labels(train_set, "a linear probe")  # before the test images, which unlabelled sets often lack
    if config.test_share is None:
        with opening_test_images("probe.test_share"):
            return train_set, data.open_all("test")
    return with_test_images(train_set, config.test_share, config.seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Training:
    """Trains probes on cached features or on freshly augmented images."""

    encoder: nn.Module
    config: ProbeConfig
    computation: Computation
    runtime: Runtime
    num_classes: int

    def __call__(
        self, image_set: ImageSet, rows: FeatureTable, rates: tuple[float, ...], first_epoch: int
    ) -> LinearProbes:
        config = self.config
        feature_batches = (
            self._augmented_batches(image_set)
            if config.augment
            else shuffled(rows, config.batch_size, derived_seed(config.seed, "probe"))
        )
        return train_linear_probes(
            feature_batches,
            config,
            rates,
            num_classes=self.num_classes,
            dim=rows.dim,
            device=self.runtime.device,
            on_epoch=lambda epoch, losses: self._report(first_epoch + epoch, losses),
        )

    def _report(self, epoch: int, losses: Tensor) -> None:
        self.runtime.report(epoch, {"probe/loss": float(losses.min()), "probe/epoch": epoch + 1})
        stop_if_requested(self.runtime)

    def _augmented_batches(self, image_set: ImageSet) -> Callable[[int], Iterator[LabelledRows]]:
        """Features of crops and flips, newly drawn in every epoch (SimCLR, appendix B.6)."""
        require_any_order(image_set, "probe.augment=true")
        channels, height, width = image_set.image_shape
        batch_size = min(self.config.batch_size, len(image_set))
        sampler = ShuffledBatches(num_images=len(image_set), global_batch_size=batch_size, seed=self.config.seed)
        augment = AugmentConfig(min_scale=self.config.min_scale, colour_strength=0.0).build(
            min(height, width), channels, self.config.seed, num_views=1, device=self.runtime.device
        )
        # Of fewer images than workers, every worker makes all features.
        is_shared = batch_size >= world_size()
        own = own_rows(batch_size) if is_shared else slice(0, batch_size)
        dtype = next((p.dtype for p in self.encoder.parameters()), torch.float32)

        def epoch_batches(epoch: int) -> Iterator[LabelledRows]:
            steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
            flow = batches(
                image_set,
                (sampler.indices(step)[own] for step in steps),
                self.runtime.device,
                self.computation.num_loader_workers,
            )
            for step, batch in zip(steps, flow, strict=True):
                views = augment(batch.images, step, own, batch_size)
                features, labels = self.encoder(views.to(dtype)), batch.labels
                if is_shared:
                    features, labels = gather_shares(features, batch_size), gather_shares(labels, batch_size)
                yield features, labels

        return epoch_batches
