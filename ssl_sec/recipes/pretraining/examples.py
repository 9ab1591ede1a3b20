"""Images that a run shows: some of its first step with their views, and the nearest neighbours of some others."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from ssl_sec.augment.views import Views, unit_range
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.samplers import Sampler
from ssl_sec.evaluation.retrieval import examples
from ssl_sec.files import replaced

logger = logging.getLogger(__name__)

# Random numbers of a step.
Draws = Callable[[int], Int64[Tensor, " batch"]]

NUM_EXAMPLES = 8
NUM_NEIGHBOURS = 6

# The longest side of a stored image: larger ones are shown smaller anyway.
_LONGEST_SIDE_PX = 256
# The brightest pixel of 14-bit images in files of 16 bits, of which the high byte is read.
_DARK = 63


def first_views(
    image_set: ImageSet,
    sampler: Sampler,
    views: Sequence[Views],
    device: torch.device,
    num_images: int = NUM_EXAMPLES,
    draws: Draws | None = None,
) -> dict[str, Any]:
    """The first images of step 0 and their views of that step; draws nothing from torch's generators.

    A warning says if all pixels of these images are dark.

    Args:
        image_set: the training images.
        sampler: draws the images of step 0.
        views: functions that augment the images, one for each size of view.
        device: device on which the views are made.
        num_images: how many images; at most a global batch.
        draws: random numbers for the crops of a step's images; None if they are not cropped when they are decoded.

    Returns:
        `images`, uint8 [images, channels, height, width], and `views`, a list of the same for each view: before the
        encoder's normalisation.
    """
    chosen = sampler.indices(0)[:num_images]
    images = image_set.read(chosen).to(device).images
    brightest = int(images.max())
    if brightest <= _DARK:
        logger.warning(
            "the brightest pixel of %d images of %s is %d of 255; of files with 16 bits the high byte is read: "
            "if yours have fewer, give the range of their values, of 12 bits data.value_ranges=[[0,4095]]",
            len(images),
            image_set.name,
            brightest,
        )
    cropped = images if draws is None else image_set.read(chosen, draws(0)[:num_images]).to(device).images
    made = [make(cropped, 0, slice(0, len(chosen)), sampler.global_batch_size) for make in views]
    each_view = [_stored(view) for of_a_size in made for view in of_a_size.split(len(chosen))]
    return {"images": _stored(unit_range(images)), "views": each_view}


def save_first_views(
    image_set: ImageSet,
    sampler: Sampler,
    views: Sequence[Views],
    device: torch.device,
    path: Path,
    draws: Draws | None = None,
) -> None:
    """Writes `first_views`, whole or not at all: it is read while the run trains. A resumed run keeps those it has."""
    if not path.exists():
        with replaced(path) as temporary:
            torch.save(first_views(image_set, sampler, views, device, draws=draws), temporary)


def neighbours(
    image_set: ImageSet, images: Int64[Tensor, " rows"], features: Float[Tensor, "rows dim"]
) -> Mapping[str, Tensor]:
    """Some images and those with the nearest features among the others, by cosine.

    Args:
        image_set: the images.
        images: positions in the set of the images that have features, two or more.
        features: features of these images.

    Returns:
        `queries`, uint8 [queries, channels, height, width]; `neighbours`, uint8 [queries, k, channels, height, width],
        nearest first; and, of images with labels, `correct`, bool [queries, k]: whether they have the query's class.
    """
    shown = examples(lambda rows: image_set.read(images[rows]), features, NUM_NEIGHBOURS)
    found = shown["neighbours"]
    shown["queries"] = _stored(unit_range(shown["queries"]))
    shown["neighbours"] = _stored(unit_range(found.flatten(0, 1))).unflatten(0, found.shape[:2])
    if not image_set.class_names:
        del shown["correct"]
    return shown


def _stored(
    pixels: Float[Tensor, "images channels height width"],
) -> UInt8[Tensor, "images channels stored_height stored_width"]:
    """Pixels in [0, 1] as bytes on the CPU, with a longest side of at most 256 pixels."""
    longest = max(pixels.shape[2:])
    if longest > _LONGEST_SIDE_PX:
        size = [max(1, round(side * _LONGEST_SIDE_PX / longest)) for side in pixels.shape[2:]]
        pixels = interpolate(pixels.float(), size, mode="bilinear", antialias=True)
    return (pixels.float() * 255).round().clamp(0, 255).to(torch.uint8).contiguous().cpu()
