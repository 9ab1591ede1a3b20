"""Crops of images that have no common size, taken when they are decoded.

The crops of deep metric learning (SEC, appendix B.1) are cut out of the image resized so that its short side has 256
pixels, and the random ones are resized a second time, to 227 x 227. Both steps are bilinear with antialiasing, and both
are done, but only the pixels of the crop are resized: as Pillow's filter also uses the pixels around a box, this equals
the crop of the resized image to one grey level, without a huge intermediate image if the original is a thin strip. It
takes 0.9 instead of 1.4 ms on one core for an image of 500 x 375 pixels, whose JPEG is decoded in 1.2 ms. A single
resize would take 0.6 ms but differ from the papers' images: on scikit-learn's two photographs by 3 grey levels in the
mean, with gradients 40 % larger.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from PIL import Image
from torch import Tensor

from ssl_sec.seeding import derived_seed, mix, uniform

# Left, top, right and bottom, in pixels.
Box = tuple[int, int, int, int]

# Side of an image that is decoded at a part of its size, as a multiple of the side of the result, at least.
_KEPT = 4

# Boxes that are tried before the centre is taken instead, as in torchvision's RandomResizedCrop.
NUM_TRIES = 10
NUMBERS_PER_BOX = 2 + 2 * NUM_TRIES


def row_draws(seed: int, step: int, global_batch_size: int) -> Int64[Tensor, " global_batch"]:
    """The random numbers for the crops of a global step, one for each row: a function of (seed, step, row) alone.

    Args:
        seed: the run's seed.
        step: 0-based global step.
        global_batch_size: rows of all workers; each worker takes its own.
    """
    return mix(derived_seed(seed, "crops", step) + torch.arange(global_batch_size))


@runtime_checkable
class Crop(Protocol):
    """A function from an image of any size to a square of a fixed size."""

    @property
    def size_px(self) -> int:
        """Side of the square."""
        ...

    def __call__(self, image: Image.Image, draw: int | None) -> Image.Image:
        """The square of `size_px` x `size_px` pixels, in the mode of the image.

        Args:
            image: RGB or grey, upright.
            draw: any int64, from which all random numbers are derived; None if nothing may be random.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class CentreSquare:
    """The largest centred square, resized: how pretraining brings images to one size.

    Attributes:
        size_px: side of the result, ≥ 1.
        scaled_decoding: whether a JPEG may be decoded at a half, a quarter or an eighth of its size.
    """

    size_px: int
    scaled_decoding: bool = False

    def __call__(self, image: Image.Image, draw: int | None = None) -> Image.Image:
        """The square, whatever the draw."""
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        square = image.crop((left, top, left + side, top + side))
        return square.resize((self.size_px, self.size_px), Image.Resampling.BILINEAR)

    def reduction(self, size: tuple[int, int]) -> int:
        """The number by which a decoder may divide the sides of an image of that size: 1, 2, 4 or 8."""
        fitting = (factor for factor in (8, 4, 2) if min(size) >= factor * _KEPT * self.size_px)
        return next(fitting, 1) if self.scaled_decoding else 1

    def of_reduced(
        self, image: Image.Image, size: tuple[int, int], is_mirrored: tuple[bool, bool] = (False, False)
    ) -> Image.Image:
        """The square of an image that was decoded at a part of its size.

        Args:
            image: the image as it is stored, its sides divided by `reduction` and rounded up.
            size: width and height as they are stored.
            is_mirrored: whether the upright image has them in the other direction: the middle of an odd number of
                pixels is rounded down in that of the upright one.
        """
        side, factor = min(size), self.reduction(size)
        starts = [
            -(-(length - side) // 2) if end else (length - side) // 2
            for length, end in zip(size, is_mirrored, strict=True)
        ]
        left, top = (start / factor for start in starts)
        box = (left, top, left + side / factor, top + side / factor)
        return image.resize((self.size_px, self.size_px), Image.Resampling.BILINEAR, box=box)


@dataclass(frozen=True, kw_only=True)
class RandomBox:
    """A random part of an image.

    The share of the area is uniform, the logarithm of the aspect ratio too, and a box that does not fit into the image
    is drawn again, as in torchvision's RandomResizedCrop. After ten such boxes it is the centre of the image, cut to
    the nearest aspect ratio allowed.

    Attributes:
        size_px: side that the part is resized to, ≥ 1.
        min_scale: smallest part, as a share of the image's area, in (0, 1].
        max_scale: largest part, likewise, ≥ min_scale.
        min_aspect: smallest width / height of a part, > 0.
        max_aspect: largest width / height of a part, ≥ min_aspect.
    """

    size_px: int = 227
    min_scale: float = 0.16
    max_scale: float = 1.0
    min_aspect: float = 3 / 4
    max_aspect: float = 4 / 3

    def box(self, width: int, height: int, numbers: list[float]) -> Box:
        """A part of an image of width x height pixels, from NUMBERS_PER_BOX independent uniform numbers in [0, 1)."""
        x, y, *numbers = numbers
        lowest, highest = math.log(self.min_aspect), math.log(self.max_aspect)
        for scale, aspect in zip(numbers[::2], numbers[1::2], strict=True):
            area = width * height * (self.min_scale + (self.max_scale - self.min_scale) * scale)
            ratio = math.exp(lowest + (highest - lowest) * aspect)
            part_width, part_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 1 <= part_width <= width and 1 <= part_height <= height:
                left, top = int(x * (width - part_width + 1)), int(y * (height - part_height + 1))
                return left, top, left + part_width, top + part_height
        part_width = min(width, round(height * self.max_aspect))
        part_height = min(height, round(width / self.min_aspect))
        left, top = (width - part_width) // 2, (height - part_height) // 2
        return left, top, left + part_width, top + part_height


@dataclass(frozen=True, kw_only=True)
class ViewCrops(CentreSquare):
    """The parts of an image that its views show, cut out of the original: SimCLR's crop (Chen et al. 2020, appendix A).

    With a draw it cuts the parts, which differ in size; without one it is the centred square, as in evaluation.

    Attributes:
        views: the part that each view shows.
    """

    views: tuple[RandomBox, ...]

    def num_values(self, num_channels: int) -> int:
        """The number of bytes of all parts of one image."""
        return sum(num_channels * view.size_px**2 for view in self.views)

    def parts(self, image: Image.Image, draw: int) -> list[Image.Image]:
        """The parts of an upright image, each resized to its `size_px`."""
        numbers = uniform(draw, NUMBERS_PER_BOX * len(self.views))
        found: list[Image.Image] = []
        for number, view in enumerate(self.views):
            first = NUMBERS_PER_BOX * number
            part = image.crop(view.box(*image.size, numbers[first : first + NUMBERS_PER_BOX]))
            found.append(part.resize((view.size_px, view.size_px), Image.Resampling.BILINEAR))
        return found


@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop(RandomBox):
    """A random part of the resized image, resized again and perhaps mirrored (SEC, appendix B.1).

    Attributes:
        short_side_px: short side of the resized image, ≥ 1.
        keep_aspect: whether the resized image has the aspect of the original; otherwise it is a square.
        flip_probability: probability of a horizontal flip, in [0, 1].
    """

    short_side_px: int = 256
    keep_aspect: bool = True
    flip_probability: float = 0.5

    def __call__(self, image: Image.Image, draw: int | None) -> Image.Image:
        """The crop that the draw determines; without a draw all images would have the same crop, which is a bug."""
        assert draw is not None, "a random crop needs the draw of its row"
        flip, *numbers = uniform(draw, 1 + NUMBERS_PER_BOX)
        resized = _resized_size(image.size, self.short_side_px, self.keep_aspect)
        part = _cut(image, resized, self.box(*resized, numbers))
        part = part.resize((self.size_px, self.size_px), Image.Resampling.BILINEAR)
        return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip < self.flip_probability else part


@dataclass(frozen=True, kw_only=True)
class CentreCrop:
    """The centre of the resized image: how the papers evaluate (SEC, appendix B.1).

    Attributes:
        short_side_px: short side of the resized image.
        keep_aspect: whether the resized image has the aspect of the original; otherwise it is a square.
        size_px: side of the result, 1 ≤ size_px ≤ short_side_px.
    """

    short_side_px: int = RandomResizedCrop.short_side_px
    keep_aspect: bool = RandomResizedCrop.keep_aspect
    size_px: int = RandomResizedCrop.size_px

    def __call__(self, image: Image.Image, draw: int | None = None) -> Image.Image:
        """The centre, whatever the draw."""
        width, height = _resized_size(image.size, self.short_side_px, self.keep_aspect)
        left, top = round((width - self.size_px) / 2), round((height - self.size_px) / 2)
        return _cut(image, (width, height), (left, top, left + self.size_px, top + self.size_px))


def _resized_size(size: tuple[int, int], short_side_px: int, keep_aspect: bool) -> tuple[int, int]:
    """Width and height of an image of that size once its short side is resized; the long one is rounded down."""
    width, height = size if keep_aspect else (1, 1)
    short = min(width, height)
    return short_side_px * width // short, short_side_px * height // short


def _cut(image: Image.Image, resized: tuple[int, int], box: Box) -> Image.Image:
    """The box of the image resized to that width and height, computed without the rest of it."""
    width, height = resized
    left, top, right, bottom = box
    stored = (
        left * image.width / width,
        top * image.height / height,
        right * image.width / width,
        bottom * image.height / height,
    )
    return image.resize((right - left, bottom - top), Image.Resampling.BILINEAR, box=stored)
