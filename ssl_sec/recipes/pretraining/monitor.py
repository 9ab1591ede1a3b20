"""The metrics of an encoder while it trains: with labels the accuracy of kNN and of a probe; others need no labels."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from ssl_sec.collectives import gather_rows
from ssl_sec.data.config import DataConfig
from ssl_sec.data.image_set import ImageSet, on_device, require_labels
from ssl_sec.data.loading import batches
from ssl_sec.data.shards.streamed import StreamedImages
from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.classification.knn import knn_top1
from ssl_sec.evaluation.classification.linear_probe import HELD_OUT_SHARE, linear_probe
from ssl_sec.evaluation.classification.online_probe import OnlineProbe
from ssl_sec.evaluation.features import readable
from ssl_sec.evaluation.rank import alpha_req, rankme
from ssl_sec.evaluation.splits import stratified_sample, stratified_split
from ssl_sec.evaluation.uniformity import alignment, uniformity
from ssl_sec.modes import evaluating
from ssl_sec.networks import Encoder
from ssl_sec.recipes.assembly import extractor
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.seeding import derived_seed
from ssl_sec.training.divergence import SMALLER_STEPS
from ssl_sec.training.recipe import Recipe
from ssl_sec.training.step import Runtime, log_once

logger = logging.getLogger(__name__)

# With fewer queries, kNN's standard error may be above 5 points.
_FEW_QUERIES = 100
# Uniformity above which an encoder has collapsed: pairs of directions have a cosine of 0.987 or more on average.
_COLLAPSED = -0.05
# The images whose views are compared; their draws are made for this many at once.
_VIEWED_IMAGES = 1024
_CHUNK = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class MonitoredImages:
    """Some images of a set; with labels, a tenth of each class are the queries and the others the bank.

    Attributes:
        image_set: the set.
        indices: positions of the images in the set, ascending.
        bank: rows of `indices` that kNN and probes are trained on.
        queries: the other rows, on which they are measured.
    """

    image_set: ImageSet
    indices: Int64[Tensor, " images"]
    bank: Int64[Tensor, " bank"]
    queries: Int64[Tensor, " queries"]


def monitored_images(image_set: ImageSet, num_images: int) -> MonitoredImages:
    """About `num_images` images of a set, the same at every call."""
    if isinstance(image_set, StreamedImages):
        image_set, indices = image_set.apart(), image_set.sample_of_classes(num_images, seed=0)
    else:
        indices = stratified_sample(image_set.labels, num_images, seed=0)
    bank, queries = stratified_split(image_set.labels[indices], 0.1, seed=0)
    return MonitoredImages(image_set=image_set, indices=indices, bank=bank, queries=queries)


class Monitor:
    """Figures of the encoder and its head on images of the training set, and on labelled ones of another set.

    It uses the same images, and the same views of them, at every call.

    Args:
        config: the run's configuration.
        recipe: the network, its objective and its data.
        runtime: this worker's runtime.

    Attributes:
        online_probe: a probe of the features of each training step, on every worker, if the configuration asks for it.

    Raises:
        ConfigError: the images of the other set have another size, or other channels.
        DataError: the images of the other set have no labels, or each class has one of them.
    """

    online_probe: OnlineProbe | None = None

    def __init__(self, config: PretrainConfig, recipe: Recipe, runtime: Runtime) -> None:
        monitor, device = config.monitor, runtime.device
        self._own = monitored_images(recipe.image_set, monitor.max_images)
        # Where classes are learned from, no image of the training set is held out from the encoder.
        self._labelled = self._own if recipe.image_set.class_names and config.positives == "views" else None
        self._title = (monitor.data or config.data).title
        if monitor.data is not None:
            other = _open_labelled(monitor.data, recipe.image_set.image_shape, device)
            self._labelled = monitored_images(other, monitor.max_images)
            if not len(self._labelled.queries):
                found = f"found {other.name}, one image of each class, must have two or more of some"
                raise DataError(f"monitor.data: {found}: kNN needs images to classify and images to compare them with")
        elif self._labelled is not None and monitor.online_probe and len(self._own.queries):
            left_out = self._own.indices[self._own.queries].sort().values
            num_features = cast(Encoder, recipe.encoder).num_features
            probe = OnlineProbe(num_features, len(recipe.image_set.class_names), left_out)
            self.online_probe = probe.to(device, recipe.computation.dtype)
        self._probe = config.probe
        self._neighbours = monitor.neighbours
        self._extract = extractor(recipe.encoder, recipe.computation, runtime, batch_size=512)
        self._network = nn.Sequential(recipe.encoder, recipe.head)
        self._dtype = recipe.computation.dtype
        num_channels, height, width = recipe.image_set.image_shape
        seed = derived_seed(config.seed, "monitored views")
        self._views = config.augment.build(min(height, width), num_channels, seed, 2, device)
        order = torch.randperm(self.num_images, generator=torch.Generator().manual_seed(seed))
        num_viewed = min(len(order), _VIEWED_IMAGES)
        # Chunks of one size: each is a batch of its own for the draws.
        self._viewed = self._own.indices[order[: max(num_viewed // _CHUNK * _CHUNK, min(num_viewed, _CHUNK))]]
        self._draws = config.draws(seed, min(num_viewed, _CHUNK))
        self._total_steps = recipe.total_steps
        self._at_the_end: tuple[Tensor, Tensor] | None = None
        self._num_loaders = recipe.computation.num_loader_workers
        self._runtime = runtime

    @property
    def num_images(self) -> int:
        """How many images of the training set it measures."""
        return len(self._own.indices)

    @property
    def measured(self) -> tuple[ImageSet, Int64[Tensor, " images"]]:
        """The set that it reads, and the positions in that set of the images that it measures."""
        return self._own.image_set, self._own.indices

    @property
    def _knn_elsewhere(self) -> str:
        """For the log, the images of another set on which kNN is measured."""
        labelled = self._labelled
        if labelled is None or labelled is self._own:
            return ""
        queries, bank = (f"{len(rows):,}" for rows in (labelled.queries, labelled.bank))
        return f", and kNN of {queries} images of {self._title} among {bank}"

    def warn_of_few_queries(self) -> None:
        """Warns, on one worker, that kNN is coarse if it has few queries."""
        count = 0 if self._labelled is None else len(self._labelled.queries)
        if self._runtime.rank == 0 and self._labelled is not None and 0 < count < _FEW_QUERIES:
            logger.warning(
                "kNN is measured on %d images of %s: its standard error is up to %.0f points, and checkpoints that "
                "differ by less are not ranked by it; more labelled images make it smaller",
                count,
                self._title,
                50 / math.sqrt(count),
            )

    def __call__(self, steps_taken: int) -> Mapping[str, float]:
        """The metrics after some steps; every worker calls it."""
        what = "kNN and RankMe" if self._labelled is self._own else "RankMe and uniformity"
        log_once(self._runtime, "measuring %s on %s images%s", what, f"{self.num_images:,}", self._knn_elsewhere)
        features, labels = self._features()
        if steps_taken == self._total_steps:
            self._at_the_end = features, labels
        first, second = self._embedded_views()
        spread = uniformity(first)
        if steps_taken > 0 and spread > _COLLAPSED and self._runtime.rank == 0:
            logger.warning(
                "the embeddings of %s images have almost one direction (uniformity %.3f; 0 is the worst): the encoder "
                "has collapsed; %s",
                f"{len(first):,}",
                spread,
                SMALLER_STEPS,
            )
        return {
            **self._accuracies(features, labels, steps_taken),
            "val/rankme": rankme(features),
            "val/alpha_req": alpha_req(features),
            "val/alignment": alignment(first, second),
            "val/uniformity": spread,
        }

    def features_at_the_end(self) -> tuple[Tensor, Tensor]:
        """Features and labels of the images of the training set after the last step; every worker calls it."""
        if self._at_the_end is None:  # the run was resumed after its last step
            log_once(self._runtime, "computing the features of %s images for the plots", f"{self.num_images:,}")
            self._at_the_end = self._features()
        return self._at_the_end

    def _features(self) -> tuple[Tensor, Tensor]:
        return self._extract(self._own.image_set, self._own.indices).rows

    def _accuracies(self, features: Tensor, labels: Tensor, steps_taken: int) -> dict[str, float]:
        """Accuracies of kNN and a linear probe, in percent; none without labels, or if each image has its own class."""
        labelled = self._labelled
        if labelled is None:
            return {}
        if labelled is not self._own:
            features, labels = self._extract(labelled.image_set, labelled.indices).rows
        # An image that replaces an unreadable query may be in the bank.
        is_read = readable(labelled.image_set, self._runtime.device, labelled.indices).cpu()
        chosen = (rows[is_read[rows]] for rows in (labelled.bank, labelled.queries))
        bank, queries = ((features[rows], labels[rows]) for rows in chosen)
        num_classes = len(labelled.image_set.class_names)
        if len(bank[1]) == 0 or len(queries[1]) == 0:  # as where no class has two images
            return {}
        found = {"val/knn_top1": 100 * knn_top1(*bank, *queries, num_classes=num_classes, k=self._neighbours)}
        if labelled is not self._own:
            if len(stratified_split(bank[1], HELD_OUT_SHARE, seed=0)[1]) > 0:  # a probe holds out some of the bank
                found["val/probe_top1"] = 100 * linear_probe(bank, queries, self._probe).top1
        elif self.online_probe is not None and steps_taken > 0:
            found["val/probe_top1"] = 100 * self.online_probe.top1(*queries, others=bank[0])
        return found

    @torch.no_grad()
    def _embedded_views(self) -> tuple[Tensor, Tensor]:
        """Embeddings of two views of some images, on every worker; the workers take chunks of them in turn."""
        runtime = self._runtime
        chunks = list(self._viewed.split(_CHUNK))
        turns = -(-len(chunks) // runtime.world_size)
        own = [(turn * runtime.world_size + runtime.rank) % len(chunks) for turn in range(turns)]
        loaded = batches(
            self._own.image_set,
            [chunks[number] for number in own],
            runtime.device,
            self._num_loaders,
            draws=None if self._draws is None else map(self._draws, own),
        )
        embedded: list[Tensor] = []
        with evaluating(self._network):
            for number, batch in zip(own, loaded, strict=True):
                views = self._views(batch.images, number, slice(0, len(batch.images)), len(batch.images))
                embedded.append(self._network(views.to(self._dtype)))
        # Dimensions: worker, turn, both views of the images of a chunk.
        gathered = gather_rows(torch.stack(embedded)).unflatten(0, (runtime.world_size, turns))
        in_order = gathered.transpose(0, 1).flatten(0, 1)[: len(chunks)]
        first, second = in_order.unflatten(1, (2, -1)).unbind(1)
        return first.flatten(0, 1), second.flatten(0, 1)


def _open_labelled(data: DataConfig, image_shape: tuple[int, int, int], device: torch.device) -> ImageSet:
    """The training images of a labelled set, of the shape that the encoder is trained on."""
    image_set = on_device(data.open("train"), device)
    require_labels(image_set, "monitor.data", "monitor.data")
    if image_set.image_shape != image_shape:
        found, allowed = (" x ".join(map(str, shape)) for shape in (image_set.image_shape, image_shape))
        channels, height, width = image_shape
        converts = f"; monitor.data.image_size_px={height} monitor.data.num_channels={channels} converts them"
        raise ConfigError(
            f"monitor.data: found {image_set.name}, images of {found}, must have the shape of the run's own, {allowed}"
            + (converts if height == width and hasattr(data, "image_size_px") else "")
        )
    return image_set
