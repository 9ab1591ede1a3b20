"""The augmentations as values of a run; see `ssl_sec.settings`."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch

from ssl_sec.augment.views import (
    CutParts,
    FlipAugmentation,
    FusedSimCLRAugmentation,
    RetrievalAugmentation,
    SimCLRAugmentation,
    Views,
    already_cropped,
    why_not_fused,
)
from ssl_sec.data.crops import CentreCrop, RandomBox, RandomResizedCrop
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.stores import with_view_crops
from ssl_sec.rules import Positive, Probability, Range, Share, Side, check
from ssl_sec.seeding import derived_seed
from ssl_sec.settings import Settings, wherever_possible

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(Settings, key="augment"):
    """SimCLR's augmentation; see `ssl_sec.augment.views`.

    Attributes:
        num_views: views of each image, ≥ 2; the positives of a view are all others of its image.
        view_size_px: side of the views; null for that of the images.
        min_scale: smallest crop, as a share of the image's area, in (0, 1].
        from_original: whether the crops are cut out of the original images, which are then decoded anew in each epoch;
            otherwise out of their centred squares of data.image_size_px.
        flip_probability: probability of a horizontal flip, in [0, 1].
        vertical_flip_probability: probability of a vertical flip, in [0, 1]; for aerial or microscopic images.
        quarter_turn_probability: probability of a turn by 90 degrees, in [0, 1]; with 0.5 for it and both flips, all
            eight orientations are equally frequent.
        colour_strength: strength of the colour distortion, ≥ 0; SimCLR has 0.5 for CIFAR and 1 for ImageNet.
        saturation_strength: that of the saturation, ≥ 0; null for colour_strength; BYOL has half of it.
        grey_probability: probability that a colour image becomes grey, in [0, 1]; like saturation_strength without
            effect if colour_strength is 0.
        blur_probability: probability of a Gaussian blur, in [0, 1]; SimCLR has 0.5 for ImageNet and 0 for CIFAR.
        solarise_probability: probability that pixels above one half are inverted, in [0, 1].
        second_blur_probability: that of every second view; null for that of the others; BYOL has 1 and 0.1.
        second_solarise_probability: likewise; BYOL has 0 and 0.2.
        fused: whether one launch makes the views (Triton); null: where that is possible, for colour images in views of
            up to 64 pixels on a GPU, without blur, solarisation, vertical flips and turns.
        small_views: further views of each image, of a smaller size and from smaller crops, ≥ 0; SwAV has 6.
        small_view_size_px: side of the small views; null for 3/7 of that of the others, as SwAV's 96 of 224 pixels.
        small_view_min_scale: smallest crop of a small view, as a share of the image's area, in (0, 1].
        small_view_max_scale: largest crop of a small view, ≥ small_view_min_scale; min_scale at 0.14 separates the two
            kinds, as in SwAV.
    """

    num_views: Annotated[int, Range(ge=2, le=64)] = 2
    view_size_px: Side | None = None
    min_scale: Share = 0.08
    from_original: bool = False
    flip_probability: Probability = 0.5
    vertical_flip_probability: Probability = 0.0
    quarter_turn_probability: Probability = 0.0
    colour_strength: Annotated[float, Range(ge=0, le=2.5)] = 0.5  # its hue turns by 0.2 of it, at most by half a turn
    saturation_strength: Annotated[float, Range(ge=0, le=2.5)] | None = None
    grey_probability: Probability = 0.2
    blur_probability: Probability = 0.0
    solarise_probability: Probability = 0.0
    second_blur_probability: Probability | None = None
    second_solarise_probability: Probability | None = None
    fused: bool | None = None
    small_views: Annotated[int, Range(ge=0, le=64)] = 0
    small_view_size_px: Side | None = None
    small_view_min_scale: Share = 0.05
    small_view_max_scale: Share = 0.14

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least = f"≥ augment.small_view_min_scale = {self.small_view_min_scale:g}"
        in_order = self.small_view_max_scale >= self.small_view_min_scale
        check(in_order, "augment.small_view_max_scale", self.small_view_max_scale, at_least)

    def sizes_px(self, image_size_px: int) -> dict[str, int]:
        """Sides of the views that differ from the images' size, by the key that sets them."""
        size_px = self._size_px(image_size_px)
        small = {"augment.small_view_size_px": self._small_size_px(size_px)} if self.small_views else {}
        return ({} if self.view_size_px is None else {"augment.view_size_px": size_px}) | small

    def _size_px(self, image_size_px: int) -> int:
        return image_size_px if self.view_size_px is None else self.view_size_px

    def _small_size_px(self, size_px: int) -> int:
        return max(1, round(size_px * 3 / 7)) if self.small_view_size_px is None else self.small_view_size_px

    def crops(self, image_set: ImageSet) -> ImageSet:
        """The images, of which draws cut the crops of all views, large and small, if `from_original` is true."""
        if not self.from_original:
            return image_set
        size_px = self._size_px(min(image_set.image_shape[1:]))
        large = RandomBox(size_px=size_px, min_scale=self.min_scale)
        small = RandomBox(
            size_px=self._small_size_px(size_px),
            min_scale=self.small_view_min_scale,
            max_scale=self.small_view_max_scale,
        )
        return with_view_crops(image_set, (large,) * self.num_views + (small,) * self.small_views)

    def build(
        self,
        image_size_px: int,
        num_channels: int,
        seed: int,
        num_views: int | None = None,
        device: torch.device = _CPU,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> SimCLRAugmentation:
        """The augmentation for images of one size.

        Args:
            image_size_px: the short side of the images.
            num_channels: channels of the images.
            seed: the run's seed.
            num_views: views of each image; None takes the key `num_views`.
            device: device of the images.
            layout: memory layout of the views.

        Raises:
            ConfigError: `fused` is true where it is not possible.
        """
        return self._build(
            device,
            layout,
            first_part=0,
            image_size_px=self._size_px(image_size_px),
            num_channels=num_channels,
            seed=seed,
            num_views=self.num_views if num_views is None else num_views,
            min_scale=self.min_scale,
        )

    def build_small(
        self,
        image_size_px: int,
        num_channels: int,
        seed: int,
        device: torch.device = _CPU,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> tuple[SimCLRAugmentation, ...]:
        """The augmentation that makes the small views, if there are any; arguments as for `build`."""
        if not self.small_views:
            return ()
        size_px = self._size_px(image_size_px)
        small = self._build(
            device,
            layout,
            first_part=self.num_views * num_channels * size_px**2,
            image_size_px=self._small_size_px(size_px),
            num_channels=num_channels,
            seed=derived_seed(seed, "small views"),
            num_views=self.small_views,
            min_scale=self.small_view_min_scale,
            max_scale=self.small_view_max_scale,
        )
        return (small,)

    def _build(
        self,
        device: torch.device,
        layout: torch.memory_format,
        first_part: int,
        image_size_px: int,
        num_channels: int,
        **options: Any,
    ) -> SimCLRAugmentation:
        settings: dict[str, Any] = {
            **options,
            "image_size_px": image_size_px,
            "num_channels": num_channels,
            "flip_probability": self.flip_probability,
            "vertical_flip_probability": self.vertical_flip_probability,
            "quarter_turn_probability": self.quarter_turn_probability,
            "colour_strength": self.colour_strength,
            "saturation_strength": self.saturation_strength,
            "grey_probability": self.grey_probability,
            "blur_probability": self.blur_probability,
            "solarise_probability": self.solarise_probability,
            "second_blur_probability": self.second_blur_probability,
            "second_solarise_probability": self.second_solarise_probability,
        }
        if self.from_original:
            settings["parts"] = CutParts(first=first_part, num_channels=num_channels, size_px=image_size_px)
        reason = why_not_fused(image_size_px, num_channels, device)
        lacking = (
            self.vertical_flip_probability,
            self.quarter_turn_probability,
            self.blur_probability,
            self.solarise_probability,
            self.second_blur_probability or 0,
            self.second_solarise_probability or 0,
        )
        if max(lacking) > 0:
            reason = reason or "the kernel makes neither vertical flips and turns nor blur and solarisation"
        if self.from_original:
            reason = reason or "augment.from_original has the images cropped when they are decoded"
        if wherever_possible("augment.fused", self.fused, reason):
            return FusedSimCLRAugmentation(layout, **settings)
        return SimCLRAugmentation(**settings)


@dataclass(frozen=True, kw_only=True)
class CropConfig(Settings, key="augment"):
    """Random crops in training, the centre in evaluation (SEC, appendix B.1); see `ssl_sec.data.crops`.

    Images that have one size already, as digits have, are cropped to that size, and evaluated whole.

    Attributes:
        short_side_px: pixels that the short side of an image is resized to before it is cropped.
        keep_aspect: whether the long side is resized alike; otherwise it gets short_side_px pixels, too.
        size_px: side of the crops, pixels.
        min_scale: smallest crop, as a share of the image's area, in (0, 1].
        max_scale: largest crop, likewise, ≥ min_scale. Crops of a fixed size are those of a square image with both at
            (size_px / short_side_px)² and an aspect of 1.
        min_aspect: smallest width / height of a crop, > 0.
        max_aspect: largest width / height of a crop, ≥ min_aspect.
        flip_probability: probability of a horizontal flip, in [0, 1].
    """

    short_side_px: Side = RandomResizedCrop.short_side_px
    keep_aspect: bool = RandomResizedCrop.keep_aspect
    size_px: Side = RandomResizedCrop.size_px
    min_scale: Share = RandomResizedCrop.min_scale
    max_scale: Share = RandomResizedCrop.max_scale
    min_aspect: Positive = RandomResizedCrop.min_aspect
    max_aspect: Positive = RandomResizedCrop.max_aspect
    flip_probability: Probability = RandomResizedCrop.flip_probability

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least = f"≥ augment.size_px = {self.size_px}"
        check(self.short_side_px >= self.size_px, "augment.short_side_px", self.short_side_px, at_least)
        at_least = f"≥ augment.min_scale = {self.min_scale:g}"
        check(self.max_scale >= self.min_scale, "augment.max_scale", self.max_scale, at_least)
        at_least = f"≥ augment.min_aspect = {self.min_aspect:g}"
        check(self.max_aspect >= self.min_aspect, "augment.max_aspect", self.max_aspect, at_least)

    def random_crop(self) -> RandomResizedCrop:
        """The crop of training."""
        return RandomResizedCrop(**{each.name: getattr(self, each.name) for each in fields(RandomResizedCrop)})

    def centre_crop(self) -> CentreCrop:
        """The crop of evaluation."""
        return CentreCrop(short_side_px=self.short_side_px, keep_aspect=self.keep_aspect, size_px=self.size_px)

    def views_for(self, image_set: ImageSet, seed: int) -> Views:
        """The views of the images: of those that are cropped at random when they are read, the images themselves."""
        if isinstance(image_set, EncodedImages) and isinstance(image_set.crop, RandomResizedCrop):
            return already_cropped
        _, height, width = image_set.image_shape
        return self.on_device(min(height, width), seed)

    def on_device(self, image_size_px: int, seed: int) -> RetrievalAugmentation:
        """The augmentation of images that have one size already."""
        return RetrievalAugmentation(image_size_px=image_size_px, crop=self.random_crop(), seed=seed)


@dataclass(frozen=True, kw_only=True)
class FlipConfig(Settings, key="augment"):
    """A random horizontal flip, the only augmentation of the papers.

    Attributes:
        flip_probability: probability of the flip, in [0, 1].
    """

    flip_probability: Probability = 0.5

    def build(self, seed: int) -> Views:
        """The augmentation."""
        return FlipAugmentation(seed=seed, flip_probability=self.flip_probability)
