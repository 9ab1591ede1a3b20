"""kornia's transforms, as the augmentations put them together; imported late, since a config needs no kornia."""

from collections.abc import Iterator

from kornia.augmentation import (
    AugmentationSequential,
    ColorJitter,
    RandomGaussianBlur,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation90,
    RandomSolarize,
    RandomVerticalFlip,
)
from torch import nn


def crop(image_size_px: int, scales: tuple[float, float], aspects: tuple[float, float]) -> Iterator[nn.Module]:
    """A random crop, resized to the side of the views."""
    # The corner pixels of the crop become those of the view; torchvision's lie up to half a pixel of the view further
    # in. Resampling is twice as fast as slicing.
    yield RandomResizedCrop(
        (image_size_px, image_size_px),
        scale=scales,
        ratio=aspects,
        cropping_mode="resample",
        align_corners=False,
    )


def flip(probability: float) -> Iterator[nn.Module]:
    """A random horizontal flip."""
    if probability > 0:
        yield RandomHorizontalFlip(p=probability)


def orientations(vertical_flip_probability: float, quarter_turn_probability: float) -> Iterator[nn.Module]:
    """A random vertical flip and a random turn by 90 degrees."""
    if vertical_flip_probability > 0:
        yield RandomVerticalFlip(p=vertical_flip_probability)
    if quarter_turn_probability > 0:
        yield RandomRotation90(times=(1, 1), p=quarter_turn_probability)


def colours(
    num_channels: int, strength: float, saturation_strength: float, grey_probability: float
) -> Iterator[nn.Module]:
    """SimCLR's colour distortion; of other images than those of 3 channels, brightness and contrast."""
    if strength == 0:
        return
    strong, weak = 0.8 * strength, 0.2 * strength
    if num_channels == 3:
        yield ColorJitter(strong, strong, 0.8 * saturation_strength, weak, p=0.8)
        yield RandomGrayscale(p=grey_probability)
    else:
        yield ColorJitter(strong, strong, p=0.8)


def blur_and_solarise(image_size_px: int, blur_probability: float, solarise_probability: float) -> Iterator[nn.Module]:
    """A Gaussian blur, and the inversion of pixels above one half."""
    if blur_probability > 0:
        kernel_px = max(image_size_px // 20 * 2 + 1, 3)  # odd, a tenth of the side
        yield RandomGaussianBlur((kernel_px, kernel_px), (0.1, 2.0), p=blur_probability)
    if solarise_probability > 0:
        yield RandomSolarize(thresholds=0.0, additions=0.0, p=solarise_probability)


def sequence(transforms: list[nn.Module]) -> AugmentationSequential:
    """The transforms of an image, one after the other."""
    return AugmentationSequential(*transforms, data_keys=["input"])  # pyright: ignore[reportArgumentType]
