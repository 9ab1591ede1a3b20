"""The figures of an encoder while it trains, on training images: kNN with labels, and figures that need none."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ssl_sec.collectives import gather_rows
from ssl_sec.data.loading import batches
from ssl_sec.data.shards.streamed import StreamedImages
from ssl_sec.evaluation.knn import knn_top1
from ssl_sec.evaluation.rank import alpha_req, rankme
from ssl_sec.evaluation.splits import stratified_sample, stratified_split
from ssl_sec.evaluation.uniformity import alignment, uniformity
from ssl_sec.recipes.assembly import extractor
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.seeding import derived_seed
from ssl_sec.training.recipe import Recipe
from ssl_sec.training.step import Runtime, log_once

# The images whose views are compared; their draws are made for this many at once.
_VIEWED_IMAGES = 1024
_CHUNK = 256


class Monitor:
    """Figures of the encoder and its head on images of the training set.

    The same images at every call, and the same views of them. With labels, a tenth of the images are the queries of a
    kNN classifier of the others.

    Args:
        config: of the run.
        recipe: what is trained.
        runtime: this worker's.
    """

    def __init__(self, config: PretrainConfig, recipe: Recipe, runtime: Runtime) -> None:
        image_set, most = recipe.image_set, config.monitor.max_images
        if isinstance(image_set, StreamedImages):
            self._image_set, self._images = image_set.apart(), image_set.sample(most, seed=0)
        else:
            self._image_set, self._images = image_set, stratified_sample(image_set.labels, most, seed=0)
        self._bank, self._queries = stratified_split(image_set.labels[self._images], 0.1, seed=0)
        self._neighbours = config.monitor.neighbours
        self._extract = extractor(recipe.encoder, recipe.computation, runtime, batch_size=512)
        self._network = nn.Sequential(recipe.encoder, recipe.head)
        self._dtype = recipe.computation.dtype
        num_channels, height, width = self._image_set.image_shape
        seed = derived_seed(config.seed, "monitored views")
        self._views = config.augment.build(min(height, width), num_channels, seed, 2, runtime.device)
        order = torch.randperm(len(self._images), generator=torch.Generator().manual_seed(seed))
        num_viewed = min(len(order), _VIEWED_IMAGES)
        # Chunks of one size: each is a batch of its own for the draws.
        self._viewed = self._images[order[: max(num_viewed // _CHUNK * _CHUNK, min(num_viewed, _CHUNK))]]
        self._num_loaders = recipe.computation.num_loader_workers
        self._runtime = runtime

    @property
    def num_images(self) -> int:
        """How many images it measures."""
        return len(self._images)

    def __call__(self, steps_taken: int) -> Mapping[str, float]:
        """The figures after some steps; every worker calls it."""
        is_labelled = bool(self._image_set.class_names)
        what = "kNN and RankMe" if is_labelled else "RankMe and uniformity"
        log_once(self._runtime, "measuring %s on %s images", what, f"{self.num_images:,}")
        features, labels = self.features()
        figures = {"val/rankme": rankme(features), "val/alpha_req": alpha_req(features)}
        first, second = self._embedded_views()
        figures |= {"val/alignment": alignment(first, second), "val/uniformity": uniformity(first)}
        if not is_labelled:
            return figures
        bank, queries = self._bank.to(features.device), self._queries.to(features.device)
        accuracy = knn_top1(
            features[bank],
            labels[bank],
            features[queries],
            labels[queries],
            num_classes=len(self._image_set.class_names),
            k=self._neighbours,
        )
        return {"val/knn_top1": 100 * accuracy, **figures}

    def features(self) -> tuple[Tensor, Tensor]:
        """Features and labels of the images."""
        return self._extract(self._image_set, self._images)

    @torch.no_grad()
    def _embedded_views(self) -> tuple[Tensor, Tensor]:
        """Embeddings of two views of some images, on every worker; each takes chunks of them in turn."""
        runtime, was_training = self._runtime, self._network.training
        chunks = list(self._viewed.split(_CHUNK))
        turns = -(-len(chunks) // runtime.world_size)
        own = [(turn * runtime.world_size + runtime.rank) % len(chunks) for turn in range(turns)]
        loaded = batches(self._image_set, [chunks[number] for number in own], runtime.device, self._num_loaders)
        self._network.eval()
        embedded: list[Tensor] = []
        for number, batch in zip(own, loaded, strict=True):
            views = self._views(batch.images, number, slice(0, len(batch.images)), len(batch.images))
            embedded.append(self._network(views.to(self._dtype)))
        self._network.train(was_training)
        # Of each worker: its turns, two views, the images of a chunk.
        gathered = gather_rows(torch.stack(embedded)).unflatten(0, (runtime.world_size, turns))
        in_order = gathered.transpose(0, 1).flatten(0, 1)[: len(chunks)]
        first, second = in_order.unflatten(1, (2, -1)).unbind(1)
        return first.flatten(0, 1), second.flatten(0, 1)
