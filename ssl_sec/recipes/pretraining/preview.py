"""The images and the views of a pretraining, without a network and without decoding the whole set."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from ssl_sec.data.config import ParquetConfig, WebDatasetConfig
from ssl_sec.data.decode import Decoding
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.samplers import Sampler, ShuffledBatches
from ssl_sec.data.shards.streamed import StreamedImages
from ssl_sec.errors import counted
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.pretraining.examples import first_views
from ssl_sec.recipes.pretraining.opening import open_encoded

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The images that a pretraining starts with.

    Attributes:
        image_set: the training set, of which only the shown images were decoded.
        pictures: the result of `first_views`.
    """

    image_set: ImageSet
    pictures: dict[str, Any]


def preview(config: PretrainConfig, num_images: int) -> Preview:
    """The first images of step 0 and their views.

    They are those that the run shows, unless it drops unreadable images when it loads the set into memory.

    Args:
        config: the run's configuration; its network, runtime and length have no effect.
        num_images: how many images; of a smaller set, or with a smaller global batch, as many as there are.

    Raises:
        DataError: the data set cannot be opened, or one of the shown images cannot be read.
    """
    image_set = config.augment.crops(open_encoded(config.data) or config.data.open("train"))
    num_channels, height, width = image_set.image_shape
    # If one kernel launch would make the views, they differ by rounding only; here the CPU makes them.
    augment, size_px = replace(config.augment, fused=None), min(height, width)
    views = augment.build(size_px, num_channels, config.seed), *augment.build_small(size_px, num_channels, config.seed)
    batch_size = min(config.global_batch_size, len(image_set))
    if batch_size < config.global_batch_size:
        logger.warning(
            "found %s, fewer than global_batch_size = %d: a pretraining needs global_batch_size ≤ %d",
            *(counted(len(image_set), "image"), config.global_batch_size, len(image_set)),
        )
    sampler = _sampler(config, image_set, batch_size)
    shown, draws = min(num_images, batch_size), config.draws(config.seed, batch_size)
    pictures = first_views(image_set, sampler, views, torch.device("cpu"), shown, draws)
    return Preview(image_set=image_set, pictures=pictures)


def _sampler(config: PretrainConfig, image_set: ImageSet, batch_size: int) -> Sampler:
    """The sampler of the run, which reads by blocks only what does not fit into memory, and only if configured so."""
    data = config.trained_data
    if isinstance(data, ParquetConfig | WebDatasetConfig) and isinstance(image_set, StreamedImages):
        num_stored = int(image_set.reader.blocks.sizes.sum())
        fits = Decoding(resident_limit_mib=data.resident_limit_mib).is_resident(num_stored, image_set.image_shape)
        if data.shuffle_window is not None and not fits:
            return image_set.batches(batch_size, config.seed)
    return ShuffledBatches(num_images=len(image_set), global_batch_size=batch_size, seed=config.seed)
